"""Training around the wrapper: state, losses, precision, devices, resuming, threads."""

import contextlib
import threading

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import FixedMask, MagnitudeMask, PrunableLayer
from keras_sparse_ortho.initializers import ExactOrthogonal, KernelLayout
from keras_sparse_ortho.layers import BlockSparseDense
from keras_sparse_ortho.parametrizations import CompactMask, LowRankSoftThreshold
from tests.helpers import (
    array,
    classifier_loss,
    data,
    jit,
    on_two_devices,
    part_of_a_run,
    slow_on_tensorflow,
)

L = keras.layers


def network(dtype=None, dropout=0.2):
    """Convolution, normalization, dropout, activity loss and dense layers, all sparse."""
    inputs = keras.Input((8, 8, 3))
    # In plain Keras, too, a bfloat16 activity loss does not add up with a float32 one.
    activity = keras.regularizers.L2(0.1) if dtype is None else None
    x = L.Conv2D(8, 3, activity_regularizer=activity, dtype=dtype)(inputs)
    x = L.BatchNormalization(dtype=dtype)(x)
    x = L.Dropout(dropout, seed=4)(L.ReLU()(x))
    x = L.Dense(16, kernel_regularizer="l2", activation="relu", dtype=dtype)(L.Flatten()(x))
    dense = keras.Model(inputs, L.Dense(3, name="head", dtype=dtype)(x))
    return kso.sparsify(dense, 0.2, seed=0)


def check_masks(model):
    for weight in kso.prunable_weights(model):
        mask = weight.parametrization.mask_value()
        assert not weight.raw_value()[~mask].any()
        assert not weight.value[~mask].any()
    return kso.Budget.from_model(model).live


@pytest.mark.core
def test_normalization_statistics_move_and_losses_count():
    model = network()
    x, y = data(model, 3)
    norm = next(la for la in model.layers if isinstance(la, L.BatchNormalization))
    before = array(norm.moving_mean)
    model.compile("sgd", classifier_loss(), jit_compile=jit())
    model.fit(x, y, verbose=0)
    assert np.abs(array(norm.moving_mean) - before).max() > 1e-4

    # Activity and weight losses count as they do in the plain model.
    plain = kso.strip(model)
    plain.compile("sgd", classifier_loss())
    total, expected = (m.evaluate(x, y, batch_size=len(x), verbose=0) for m in (model, plain))
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


@pytest.mark.core
@pytest.mark.parametrize("optimizer", ["adamw", pytest.param("sgd", marks=pytest.mark.slow)])
@slow_on_tensorflow
def test_resumed_training_equals_training_in_one_go(optimizer, tmp_path):
    def compiled():
        keras.utils.clear_session()
        keras.utils.set_random_seed(5)
        model = network(dropout=0.0)  # Keras does not save the seed state of Dropout
        algorithm = {
            "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.05),
            "sgd": lambda: keras.optimizers.SGD(1e-2, momentum=0.9),
        }[optimizer]()
        model.compile(algorithm, classifier_loss(), jit_compile=jit())
        return model

    whole = compiled()
    x, y = data(whole, 3)
    options = {"batch_size": 8, "shuffle": False, "verbose": 0}
    whole.fit(x, y, epochs=4, **options)

    half = compiled()
    half.fit(x, y, epochs=2, **options)
    half.save(tmp_path / "half.keras")
    resumed = keras.models.load_model(tmp_path / "half.keras")
    resumed.fit(x, y, initial_epoch=2, epochs=4, **options)
    for a, b in zip(whole.weights, resumed.weights, strict=True):
        np.testing.assert_array_equal(array(a), array(b))
    for a, b in zip(whole.optimizer.variables, resumed.optimizer.variables, strict=True):
        np.testing.assert_array_equal(array(a), array(b))


@pytest.mark.parametrize(
    "policy", [pytest.param("mixed_bfloat16", marks=pytest.mark.slow), "mixed_float16"]
)
def test_mixed_precision(policy):
    model = network(policy)
    x, y = data(model, 3)
    model.compile(keras.optimizers.AdamW(1e-2), classifier_loss(), jit_compile=jit())
    live = check_masks(model)
    before = model.get_weights()
    losses = model.fit(x, y, epochs=8, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    assert check_masks(model) == live
    assert any((a != b).any() for a, b in zip(before, model.get_weights(), strict=True))
    kernel = kso.prunable_weights(model)[0]
    assert kernel.variable.dtype == "float32"
    # The layer computes in the short type, as it does without a wrapper.
    assert keras.backend.standardize_dtype(model.layers[1](x).dtype) == policy[6:]


def test_float16_and_bfloat16_layers():
    for dtype in ("float16", "bfloat16"):
        layer = PrunableLayer(
            L.Dense(32, kernel_initializer=ExactOrthogonal(0.2, seed=1), dtype=dtype)
        )
        model = keras.Sequential([keras.Input((16,)), layer])
        [weight] = layer.prunable_weights
        assert keras.backend.standardize_dtype(weight.variable.dtype) == dtype
        assert weight.live == round(0.2 * 16 * 32)
        gram = weight.value.astype("float64")
        assert np.abs(gram @ gram.T - np.eye(16)).max() < 2e-2
        model.compile("sgd", "mse")
        model.fit(np.ones((8, 16)), np.zeros((8, 32)), verbose=0)
        assert not weight.raw_value()[~weight.parametrization.mask_value()].any()


STORAGES = pytest.mark.parametrize(
    "storage", ["masked", pytest.param("compact", marks=pytest.mark.slow)]
)


def two_device_network(storage):
    inputs = keras.Input((12,))
    x = L.Dense(16, activation="tanh")(inputs)
    dense = keras.Model(inputs, L.Dense(3, name="head")(x))
    keras.utils.set_random_seed(3)
    return kso.sparsify(dense, 0.3, seed=0, storage=storage)


def train_for_devices(model):
    x, y = data(model, 3)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), classifier_loss(), jit_compile=False)
    losses = model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0).history["loss"]
    check_masks(model)
    return losses, [array(v) for v in model.weights]


@STORAGES
def test_two_devices_agree_with_one(storage):
    found = []
    for scope in (contextlib.nullcontext, on_two_devices):
        keras.utils.clear_session()
        keras.utils.set_random_seed(3)
        with scope():
            found.append(train_for_devices(two_device_network(storage)))
    (losses, weights), (others, two) = found
    np.testing.assert_allclose(losses, others, rtol=1e-5)
    for a, b in zip(weights, two, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.core
def test_threads_may_call_one_model():
    model = network()
    x, _ = data(model, 3, count=8)
    expected = array(model(x))
    wrong = []

    def call():
        for _ in range(20):
            if not np.array_equal(array(model(x)), expected):
                wrong.append(1)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.core
def test_mask_aware_layers_get_their_mask():
    inputs = keras.Input((6,), dtype="int32")
    embedded = L.Embedding(9, 8, mask_zero=True)(inputs)
    lstm = L.LSTM(
        7,
        kernel_initializer=ExactOrthogonal(0.4, seed=1, layout=KernelLayout.recurrent(4)),
        recurrent_initializer=ExactOrthogonal(0.4, seed=2, layout=KernelLayout.recurrent(4)),
    )
    plain = keras.Model(inputs, lstm(embedded))
    sparse = kso.apply_masks(plain)
    tokens = np.array([[3, 4, 5, 0, 0, 0], [1, 2, 3, 4, 5, 6]])
    np.testing.assert_allclose(array(sparse(tokens)), array(plain(tokens)), atol=1e-6)
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
    masked, compact, *_, blocks = (weight.live for weight in kso.prunable_weights(model))
    assert masked == compact == blocks == 128
