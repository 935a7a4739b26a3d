"""Updates of low rank under fixed masks: frozen kernels, zeros that stay, files, refusals."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError
from tests.helpers import array, jit_if_quicker

pytestmark = pytest.mark.core
L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(32, 8, 8, 2)).astype("float32")
Y = RNG.normal(size=(32, 3)).astype("float32")


def network():
    inputs = keras.Input((8, 8, 2))
    x = L.Conv2D(6, 3, strides=2, activation="relu", name="conv")(inputs)
    x = L.EinsumDense("bhwc,cde->bhwde", (3, 3, 2, 4), name="einsum")(x)
    x = L.Dense(12, activation="relu", name="hidden")(L.Flatten()(x))
    return keras.Model(inputs, L.Dense(3, name="head")(x))


def pruned(density=0.25, **options):
    keras.utils.set_random_seed(3)
    return kso.prune(network(), density, **options)


def trained(model, epochs=2):
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=jit_if_quicker())
    past = model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return past.history["loss"]


def by_path(model):
    return {weight.path: weight for weight in kso.prunable_weights(model)}


def test_only_the_factors_are_trained_and_zeros_stay(tmp_path):
    sparse = pruned()
    model = kso.enable_lora(sparse, 2, alpha=3.0, seed=0)
    np.testing.assert_array_equal(array(model(X)), array(sparse(X)))
    raw = {path: weight.raw_value().copy() for path, weight in by_path(model).items()}
    masks = {path: weight.storage.mask_value() for path, weight in by_path(sparse).items()}
    losses = trained(model)
    assert losses[-1] < losses[0]
    for path, weight in by_path(model).items():
        own = weight.parametrization
        np.testing.assert_array_equal(weight.raw_value(), raw[path])  # frozen
        update = array(own.down) @ array(own.up) * 1.5
        assert np.abs(update).max() > 1e-3
        expected = np.where(masks[path], raw[path] + update.reshape(raw[path].shape), 0)
        np.testing.assert_allclose(weight.value, expected, atol=1e-6)

    expected = array(model(X, training=False))
    model.save(tmp_path / "lora.keras")
    loaded = keras.saving.load_model(tmp_path / "lora.keras")
    np.testing.assert_array_equal(array(loaded(X, training=False)), expected)
    assert {v.path for v in loaded.trainable_variables} == {
        v.path for v in model.trainable_variables
    }
    plain = kso.strip(model)
    np.testing.assert_allclose(array(plain(X, training=False)), expected, atol=1e-6)
    for path, weight in by_path(plain).items():
        assert weight.live == masks[path].sum()
        assert not weight.value[~masks[path]].any()
        assert weight.variable.trainable


def test_kernels_that_are_left_out_keep_their_masks_and_are_trained():
    sparse = pruned()
    model = kso.enable_lora(sparse, 2, include="hidden", seed=0)
    assert {v.path for v in model.trainable_variables} == {
        *(v.path for v in sparse.trainable_variables if v.path != "hidden/kernel"),
        "hidden/kernel_lora_a",
        "hidden/kernel_lora_b",
    }
    before = {path: weight.value for path, weight in by_path(model).items()}
    trained(model, epochs=1)
    for path, weight in by_path(model).items():
        assert not np.array_equal(weight.value, before[path])
        np.testing.assert_array_equal(
            weight.storage.mask_value(), by_path(sparse)[path].storage.mask_value()
        )


def test_one_of_several_kernels_of_a_layer():
    keras.utils.set_random_seed(0)
    dense = keras.Sequential([keras.Input((5, 4)), L.LSTM(6, name="lstm")])
    sparse = kso.prune(dense, 0.5)
    model = kso.enable_lora(sparse, 1, include=".*/recurrent_kernel", seed=0)
    kinds = [type(weight.storage).__name__ for weight in kso.prunable_weights(model)]
    assert kinds == ["FixedMask", "LowRankAdaptation"]
    for one, other in zip(kso.prunable_weights(model), kso.prunable_weights(sparse), strict=True):
        np.testing.assert_array_equal(one.storage.mask_value(), other.storage.mask_value())
        np.testing.assert_array_equal(one.value, other.value)


def test_a_seed_gives_every_kernel_factors_of_its_own():
    first, again, other = (kso.enable_lora(pruned(), 2, seed=seed) for seed in (0, 0, 1))
    drawn = [
        [array(weight.parametrization.down) for weight in kso.prunable_weights(model)]
        for model in (first, again, other)
    ]
    for one, same, different in zip(*drawn, strict=True):
        np.testing.assert_array_equal(one, same)
        assert not np.array_equal(one, different)
    clone = keras.models.clone_model(first)
    assert [w.parametrization.seed for w in kso.prunable_weights(clone)] == [
        w.parametrization.seed for w in kso.prunable_weights(first)
    ]


def test_materialized_updates_are_added_once():
    model = kso.enable_lora(pruned(), 2, seed=0)
    trained(model, epochs=1)
    expected = array(model(X, training=False))
    model.get_layer("hidden").materialize()
    np.testing.assert_allclose(array(model(X, training=False)), expected, atol=1e-6)


def test_refusals():
    dense = network()
    with pytest.raises(NotPrunableError, match=r"make the model sparse first.*Received: model="):
        kso.enable_lora(dense, 2)
    with pytest.raises(NotPrunableError, match=r"to_masked first.*'conv/kernel' with CompactMask"):
        kso.enable_lora(pruned(storage="compact"), 2)
    soft = kso.parametrize(dense, kso.SoftThreshold())
    with pytest.raises(NotPrunableError, match=r"Finish.*'conv/kernel' with SoftThreshold"):
        kso.enable_lora(soft, 2)
    sparse = pruned()
    expected = array(sparse(X))
    with pytest.raises(ValueError, match=r"at most 3 for 'head/kernel'.*Received: rank=4"):
        kso.enable_lora(sparse, 4)
    with pytest.raises(UnknownWeightError):
        kso.enable_lora(sparse, 2, include="heat")
    with pytest.raises(ValueError, match=r"`rank` must be a positive integer. Received: rank=0"):
        kso.enable_lora(sparse, 0)
    np.testing.assert_array_equal(array(sparse(X)), expected)
    twice = kso.enable_lora(sparse, 2)
    with pytest.raises(NotPrunableError, match=r"with LowRankAdaptation"):
        kso.enable_lora(twice, 2)


def test_a_subclassed_model():
    class Written(keras.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.head = L.Dense(12, name="hidden"), L.Dense(3, name="head")

        def call(self, x):
            return self.head(self.hidden(x))

    x = X.reshape(32, -1)
    model = Written()
    model(x)
    sparse = kso.prune(model, 0.25)
    expected = array(sparse(x))
    with pytest.raises(ValueError, match="at most 3"):
        kso.enable_lora(sparse, 4)
    np.testing.assert_array_equal(array(sparse(x)), expected)
    adapted = kso.enable_lora(sparse, 2, seed=0)
    np.testing.assert_array_equal(array(adapted(x)), expected)
    assert len(adapted.trainable_variables) == 6
    assert len(sparse.trainable_variables) == 4
