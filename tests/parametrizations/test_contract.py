"""What holds for every learnt or scheduled parametrization, on every backend, under XLA."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.parametrizations import SoftThreshold
from tests.helpers import array, moments
from tests.parametrizations.models import METHODS, compiled, fit, network

pytestmark = pytest.mark.core

X = np.random.default_rng(1).normal(size=(5, 6, 6, 2)).astype("float32")


def assert_equal_weights(one, other):
    for a, b in zip(one.weights, other.weights, strict=True):
        np.testing.assert_array_equal(array(a), array(b), err_msg=a.path)
    for a, b in zip(one.optimizer.variables, other.optimizer.variables, strict=True):
        np.testing.assert_array_equal(array(a), array(b), err_msg=a.path)


@pytest.mark.parametrize("method", METHODS)
def test_counts_are_exact_in_the_end(method):
    model = compiled(method)
    fit(model, method, epochs=4)
    weights = kso.prunable_weights(model, flops=False)
    assert len(weights) == 3
    if method.startswith("soft"):
        assert sum(w.live for w in weights) == round(0.2 * sum(w.size for w in weights))
        assert all(w.parametrization.frozen == (method == "soft") for w in weights)
    else:
        assert [w.live for w in weights] == [round(0.2 * w.size) for w in weights]
    for weight in weights:
        dead = ~weight.parametrization.mask_value()
        assert not weight.value()[dead].any()
        if method in ("magnitude", "soft"):  # sparse gradients
            assert not weight.raw_value()[dead].any()
            assert not any(slot[dead].any() for slot in moments(model.optimizer, weight.variable))


@pytest.mark.parametrize("method", METHODS)
def test_strip_gives_equal_outputs_and_the_same_zeros(method):
    model = compiled(method)
    fit(model, method, epochs=3)
    counts = [w.live for w in kso.prunable_weights(model, flops=False)]
    expected = model.predict(X, verbose=0)
    plain = kso.strip(model)
    np.testing.assert_allclose(plain.predict(X, verbose=0), expected, atol=1e-6)
    assert [w.live for w in kso.prunable_weights(plain, flops=False)] == counts


@pytest.mark.parametrize("method", METHODS)
def test_saving_and_cloning(method, tmp_path):
    model = compiled(method)
    fit(model, method, epochs=2)
    expected = model.predict(X, verbose=0)
    model.save(tmp_path / "model.keras")
    model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    other = network(method)
    other.load_weights(tmp_path / "model.weights.h5")
    for twin in (loaded, clone, other):
        # Not compiled alike: XLA rounds otherwise.
        np.testing.assert_allclose(twin.predict(X, verbose=0), expected, rtol=1e-5, atol=1e-6)
        for ours, theirs in zip(
            kso.prunable_weights(model, flops=False),
            kso.prunable_weights(twin, flops=False),
            strict=True,
        ):
            assert ours.path == theirs.path
            assert ours.live == theirs.live
            np.testing.assert_array_equal(ours.raw_value(), theirs.raw_value())
            a, b = ours.parametrization, theirs.parametrization
            assert a.get_config() == b.get_config()
            if isinstance(a, SoftThreshold):
                np.testing.assert_array_equal(a.threshold_value(), b.threshold_value())


@pytest.mark.parametrize(
    ("method", "optimizer"), [(method, "adamw") for method in METHODS] + [("soft", "sgd")]
)
def test_resumed_training_equals_training_in_one_go(method, optimizer, tmp_path):
    whole = compiled(method, optimizer)
    # Four steps an epoch: the ramp is in its middle after two epochs, with its end to come.
    fit(whole, method, epochs=4)
    half = compiled(method, optimizer)
    fit(half, method, epochs=2)
    half.save(tmp_path / "half.keras")
    resumed = keras.models.load_model(tmp_path / "half.keras")
    fit(resumed, method, epochs=4, initial_epoch=2)
    assert_equal_weights(whole, resumed)


@pytest.mark.tensorflow_only
@pytest.mark.parametrize("killed_at", [1, 5, 6, 11])
@pytest.mark.parametrize("method", METHODS)
def test_a_run_killed_at_any_step_goes_on_as_if_it_had_not_stopped(method, killed_at, tmp_path):
    # Without XLA: this is about what happens when, and compiling is most of the time.
    whole = compiled(method, jit_compile=False)
    fit(whole, method, epochs=3)

    class Kill(keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            self.seen += 1
            if self.seen == killed_at:
                self.model.save(tmp_path / "killed.keras")
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(compiled(method, jit_compile=False), method, epochs=3, callbacks=[Kill()])
    resumed = keras.models.load_model(tmp_path / "killed.keras")
    # The rest of the broken epoch by itself: Keras resumes at the start of an epoch.
    done = killed_at % 4
    rest = _rest(resumed, method, done)
    fit(rest, method, epochs=3, initial_epoch=killed_at // 4 + (1 if done else 0))
    assert_equal_weights(whole, rest)


def _rest(model, method, done):
    if done:
        rng = np.random.default_rng(0)
        x = rng.normal(size=(32, 6, 6, 2)).astype("float32")[8 * done :]
        y = rng.integers(0, 3, 32).astype("int32")[8 * done :]
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, callbacks=[METHODS[method][1]()])
    return model


@pytest.mark.parametrize("method", METHODS)
def test_a_mask_change_does_not_recompile(method):
    traced = []

    class Counted(keras.layers.Layer):
        def call(self, inputs):
            traced.append(1)
            return inputs

    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, name="hidden")(Counted()(inputs))
    model = keras.Model(inputs, keras.layers.Dense(3, name="head")(hidden))
    model = kso.parametrize(model, METHODS[method][0]())
    model.compile("adam", "mse", jit_compile=keras.backend.backend() != "torch")
    x, y = np.ones((48, 6), "float32"), np.ones((48, 3), "float32")
    callback = METHODS[method][1]()
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=[callback])
    first = len(traced)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    compiled_once = keras.backend.backend() != "torch"
    assert not compiled_once or len(traced) == first
