"""Training around the wrapper: state, losses, precision, devices, resuming, threads."""

from concurrent.futures import ThreadPoolExecutor

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import FixedMask, MagnitudeMask, PrunableLayer
from keras_sparse_ortho.initializers import ExactOrthogonal, KernelLayout
from keras_sparse_ortho.layers import BlockSparseDense
from keras_sparse_ortho.parametrizations import (
    CompactMask,
    LowRankSoftThreshold,
)
from tests.helpers import (
    array,
    classifier_loss,
    data,
    jit,
    jit_if_quicker,
    part_of_a_run,
    reloaded,
    slow_on_jax,
)
from tests.layers.test_block_training import small_network

L = keras.layers


def network(dtype=None):
    """Convolution, normalization, dropout, activity loss and dense layers, all sparse."""
    inputs = keras.Input((8, 8, 3))
    # In plain Keras, too, a bfloat16 activity loss does not add up with a float32 one.
    activity = keras.regularizers.L2(0.1) if dtype is None else None
    x = L.Conv2D(8, 3, activity_regularizer=activity, dtype=dtype)(inputs)
    x = L.BatchNormalization(dtype=dtype)(x)
    x = L.Dropout(0.2, seed=4)(L.ReLU()(x))
    x = L.Dense(16, kernel_regularizer="l2", activation="relu", dtype=dtype)(
        L.Flatten()(x)
    )
    dense = keras.Model(inputs, L.Dense(3, name="head", dtype=dtype)(x))
    return kso.sparsify(dense, 0.2, seed=0)


@pytest.mark.core
def test_normalization_statistics_move_and_losses_count():
    model = network()
    x, y = data(model, 3)
    norm = next(
        la for la in model.layers if isinstance(la, L.BatchNormalization)
    )
    before = array(norm.moving_mean)
    model.compile("sgd", classifier_loss(), jit_compile=jit())
    model.fit(x, y, verbose=0)
    assert np.abs(array(norm.moving_mean) - before).max() > 1e-4

    # Activity and weight losses count as they do in the plain model.
    plain = kso.strip(model)
    plain.compile("sgd", classifier_loss())
    total, expected = (
        m.evaluate(x, y, batch_size=len(x), verbose=0) for m in (model, plain)
    )
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    assert total > float(array(classifier_loss()(y, model(x)))) + 1e-3


@pytest.mark.core
def test_losses_and_statistics_of_a_normalized_block():
    eoi = ExactOrthogonal(0.5, seed=1)
    dense = L.Dense(8, kernel_initializer=eoi, activity_regularizer="l2")
    block = keras.Sequential([dense, L.BatchNormalization()])
    inputs = keras.Input((6,))
    model = keras.Model(inputs, PrunableLayer(block)(inputs))
    x = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
    model.compile("sgd", "mse", jit_compile=jit())
    mean = array(block.layers[1].moving_mean)
    model.fit(x, np.zeros((16, 8)), verbose=0)
    assert (array(block.layers[1].moving_mean) != mean).all()
    plain = kso.strip(model)
    model(x), plain(x)
    [loss], [expected] = model.losses, plain.losses
    np.testing.assert_allclose(array(loss), array(expected), rtol=1e-5)
    assert array(loss) > 1e-3


@pytest.mark.parametrize("make", [network, small_network])
@pytest.mark.parametrize(
    "policy",
    [pytest.param("mixed_bfloat16", marks=pytest.mark.slow), "mixed_float16"],
)
def test_mixed_precision(policy, make):
    model = make(policy)
    x, y = data(model, 3)
    model.compile(
        keras.optimizers.AdamW(1e-2), classifier_loss(), jit_compile=jit()
    )
    weights = [
        weight
        for weight in kso.prunable_weights(model)
        if weight.storage is not None
    ]
    masks = [weight.mask for weight in weights]
    before = model.get_weights()
    losses = model.fit(x, y, epochs=8, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert any(
        (a != b).any() for a, b in zip(before, model.get_weights(), strict=True)
    )
    for weight, mask in zip(weights, masks, strict=True):
        np.testing.assert_array_equal(weight.mask, mask)
        assert not weight.raw_value()[~mask].any()
        assert not weight.value[~mask].any()
        assert weight.variable.dtype == "float32"
    # The layer computes in the short type, as it does without a wrapper.
    assert (
        keras.backend.standardize_dtype(model.layers[1](x).dtype) == policy[6:]
    )


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_layers_of_short_floats(dtype):
    eoi = ExactOrthogonal(0.25, seed=1)
    for layer in (
        PrunableLayer(L.Dense(32, kernel_initializer=eoi, dtype=dtype)),
        BlockSparseDense(32, density=0.25, block=4, dtype=dtype, seed=0),
    ):
        model = keras.Sequential([keras.Input((16,)), layer])
        [weight] = kso.prunable_weights(model)
        assert keras.backend.standardize_dtype(weight.variable.dtype) == dtype
        assert weight.live == 128
        gram = weight.value.astype("float64")
        assert np.abs(gram @ gram.T - np.eye(16)).max() < 2e-2
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 16)), np.zeros((8, 32)), verbose=0)
        assert not weight.raw_value()[~weight.mask].any()
        assert kso.strip(model).layers[0].kernel.dtype == dtype


@pytest.mark.core
def test_threads_may_call_one_model():
    model = network()
    x, _ = data(model, 3, count=8)
    expected = array(model(x))
    with ThreadPoolExecutor(4) as pool:
        for outputs in pool.map(lambda _: array(model(x)), range(80)):
            np.testing.assert_array_equal(outputs, expected)


@pytest.mark.core
def test_mask_aware_layers_get_their_mask():
    inputs = keras.Input((6,), dtype="int32")
    embedded = L.Embedding(9, 8, mask_zero=True)(inputs)
    lstm = L.LSTM(
        7,
        kernel_initializer=ExactOrthogonal(
            0.4, seed=1, layout=KernelLayout.recurrent(4)
        ),
        recurrent_initializer=ExactOrthogonal(
            0.4, seed=2, layout=KernelLayout.recurrent(4)
        ),
    )
    plain = keras.Model(inputs, lstm(embedded))
    sparse = kso.apply_masks(plain)
    tokens = np.array([[3, 4, 5, 0, 0, 0], [1, 2, 3, 4, 5, 6]])
    np.testing.assert_allclose(
        array(sparse(tokens)), array(plain(tokens)), atol=1e-6
    )
    shorter = np.array([[3, 4, 5, 0, 0, 0], [1, 2, 3, 0, 0, 0]])
    assert np.abs(array(sparse(tokens)) - array(sparse(shorter))).max() > 1e-3


@pytest.mark.tensorflow_only
def test_fit_builds_a_model_that_does_not_know_its_inputs():
    """TensorFlow traces the training step of such a model, where no value can be read."""

    def dense(parametrization, **kwargs):
        return PrunableLayer(L.Dense(16, **kwargs), parametrization)

    drawn = {"kernel_initializer": ExactOrthogonal(0.5, seed=0)}
    model = keras.Sequential(
        [
            dense(FixedMask(), **drawn),
            dense(CompactMask(), **drawn),
            dense(LowRankSoftThreshold()),
            dense(MagnitudeMask(0.5)),
            BlockSparseDense(16, density=0.5, block=4),
        ]
    )
    model.compile("adam", "mse", jit_compile=jit())
    x = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
    with part_of_a_run():
        model.fit(x, x, verbose=0)
    masked, compact, *_, blocks = (
        weight.live for weight in kso.prunable_weights(model)
    )
    assert masked == compact == blocks == 128


# --- Muon mixes the entries of a matrix, so that dead raw entries move with the live ones ---------

RNG = np.random.default_rng(0)
X, Y = (
    RNG.normal(size=(32, 16)).astype("float32"),
    RNG.normal(size=(32, 4)).astype("float32"),
)


def by_muon(model, *callbacks):
    optimizer = keras.optimizers.Muon(0.01, exclude_layers=["head"])
    model.compile(optimizer, "mse", jit_compile=jit_if_quicker())
    model.fit(
        X, Y, batch_size=8, epochs=2, verbose=0, callbacks=list(callbacks)
    )
    return model


def two_layers():
    return keras.Sequential(
        [
            keras.Input((16,)),
            L.Dense(24, activation="relu", name="wide"),
            L.Dense(4, name="head"),
        ]
    )


def largest_dead(model, raw):
    """The largest magnitude of a dead entry."""
    [weight] = [
        w for w in kso.prunable_weights(model) if w.path == "wide/kernel"
    ]
    value = weight.raw_value() if raw else weight.value
    return np.abs(value[~weight.parametrization.mask_value()]).max()


@pytest.mark.core
def test_effective_weights_stay_zero_and_so_do_files(tmp_path):
    model = by_muon(kso.sparsify(two_layers(), 0.4, seed=0))
    # Muon's own doing, and of no consequence.
    assert largest_dead(model, raw=True) > 1e-3
    assert largest_dead(model, raw=False) == 0
    outputs = model.predict(X, verbose=0)
    loaded = reloaded(model, tmp_path)
    assert largest_dead(loaded, raw=True) == 0
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), outputs)
    np.testing.assert_array_equal(
        kso.strip(model).predict(X, verbose=0), outputs
    )


@pytest.mark.core
def test_masks_that_move_start_new_entries_at_zero():
    model = by_muon(kso.sparsify(two_layers(), 0.4, seed=0))
    [weight, _] = kso.prunable_weights(model)
    own = weight.parametrization
    other = np.zeros(weight.shape, bool)
    other.flat[: own.mask_value().sum()] = True
    grown = other & ~own.mask_value()
    kept = weight.raw_value()[other & ~grown]
    own.assign_mask(other)
    assert grown.any()
    assert not weight.raw_value()[~other | grown].any()
    np.testing.assert_array_equal(weight.raw_value()[other & ~grown], kept)


@pytest.mark.core
@slow_on_jax
def test_scheduled_masks_do_not_bring_dead_entries_back():
    schedule = kso.schedules.Constant(0.4, 0, frequency=4)
    model = kso.parametrize(
        two_layers(), kso.MagnitudeMask(schedule), include="wide"
    )
    by_muon(model, kso.callbacks.UpdateMasks())
    [weight, _] = kso.prunable_weights(model)
    first = weight.parametrization.mask_value()
    weight.parametrization.update(1000)
    np.testing.assert_array_equal(weight.parametrization.mask_value(), first)
