"""`Feather`: its values and gradients, its threshold beside its mask, training and files."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.parametrizations import Feather
from tests.helpers import array, jit

KERNEL = np.random.default_rng(3).normal(size=(6, 5)).astype("float32")
X = np.random.default_rng(4).normal(size=(32, 6)).astype("float32")


def built(**options):
    """A dense layer with a Feather of density 0.4, whose mask and threshold are set."""
    dense = keras.layers.Dense(5, use_bias=False, name="a")
    model = keras.Sequential([keras.Input((6,)), dense])
    dense.kernel.assign(KERNEL)
    model = kso.parametrize(model, Feather(0.4, **options))
    return model, kso.prunable_weights(model)[0].parametrization


def by_hand(w, live, power):
    order = np.argsort(-np.abs(w), axis=None, kind="stable")
    mask = np.zeros(w.size, bool)
    mask[order[:live]] = True
    mask = mask.reshape(w.shape)
    threshold = np.abs(w[~mask]).max()
    smooth = np.sign(w) * (np.abs(w) ** power - threshold**power).clip(0) ** (1 / power)
    return np.where(mask, smooth, 0), mask, threshold


@pytest.mark.core
@pytest.mark.parametrize("power", [1.0, 3.0])
def test_values_are_those_of_the_paper(power):
    _, made = built(power=power)
    expected, mask, _ = by_hand(KERNEL.astype("float64"), 12, power)
    found = made.value()
    np.testing.assert_array_equal(found != 0, mask)
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("theta", [0.0, 0.3, 1.0])
def test_gradients_pass_with_a_share_for_dead_entries(theta):
    _, made = built(theta=theta)
    value = keras.Variable(KERNEL)
    slopes = np.random.default_rng(5).normal(size=KERNEL.shape).astype("float32")

    def loss(w):
        return keras.ops.sum(made.effective(w) * slopes)

    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape() as tape:
            result = loss(value.value)
        found = tape.gradient(result, value.value)
    elif keras.backend.backend() == "jax":
        import jax

        found = jax.grad(loss)(value.value)
    else:
        result = loss(value.value)
        result.backward()
        found = value.value.grad
    expected = np.where(made.mask_value(), slopes, np.float32(theta) * slopes)
    np.testing.assert_allclose(array(found), expected, rtol=1e-6)


def test_the_threshold_follows_the_mask():
    _, made = built()
    made.assign_raw(10 * KERNEL[::-1])
    made.update(5, 0.2)
    expected, _, _ = by_hand(10.0 * KERNEL[::-1].astype("float64"), 6, 3.0)
    np.testing.assert_allclose(made.value(), expected, atol=1e-4)
    made.assign_mask(np.ones_like(KERNEL, bool))  # none is dead: no threshold
    np.testing.assert_array_equal(made.value(), 10 * KERNEL[::-1])


@pytest.mark.core
def test_training_files_and_the_stripped_model(tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(1)]
    )
    template = Feather(kso.schedules.Cubic(begin_step=2, end_step=10, frequency=2), theta=0.5)
    model = kso.parametrize(model, template, 0.25)
    model.compile("adam", "mse", jit_compile=jit())
    target = X[:, :1] * X[:, 1:2]
    model.fit(X, target, batch_size=8, epochs=4, verbose=0, callbacks=[kso.callbacks.UpdateMasks()])
    weights = kso.prunable_weights(model)
    assert sum(weight.live for weight in weights) == 14  # of 48 + 8
    assert any(np.abs(w.parametrization._threshold) > 0 for w in weights)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    own = kso.prunable_weights(loaded)[0].parametrization
    assert (own.power, own.theta) == (3.0, 0.5)
    np.testing.assert_array_equal(array(loaded(X)), array(model(X)))
    stripped = kso.strip(model)
    np.testing.assert_allclose(array(stripped(X)), array(model(X)), atol=1e-6)
    assert [int(np.count_nonzero(v)) for v in stripped.get_weights()[::2]] == [
        weight.live for weight in weights
    ]


@pytest.mark.parametrize("options", [{"power": 0}, {"theta": -0.1}, {"theta": 1.1}, {"power": "3"}])
def test_what_is_refused(options):
    (name,) = options
    with pytest.raises(ValueError, match=rf"`{name}` must be .*Received: {name}="):
        Feather(0.5, **options)
    with pytest.raises(ValueError, match=r"holds .*`theta`.*Received: "):
        Feather.from_config({"schedule": None})
