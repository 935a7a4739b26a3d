"""Layers of live blocks in the place of masked ones: equal outputs, state, and training."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.parametrizations import FixedMask
from tests.helpers import (
    assert_same,
    classifier_loss,
    data,
    jit_if_quicker,
    reloaded,
    slow_where_traced,
)
from tests.pruning.checks import assert_equal_kernels, fit

L = keras.layers
pytestmark = pytest.mark.core
REGULAR = kso.Block(4, 4, regular=True)


def network():
    """Three layers that can compute on live blocks, and one that cannot."""
    inputs = keras.Input((6, 6, 8))
    x = L.Conv2D(16, 3, activation="relu", name="conv")(inputs)
    x = L.Reshape((16, 16))(L.BatchNormalization(name="norm")(x))
    x = L.EinsumDense(
        "abc,cd->abd", (None, 16), bias_axes="d", activation="tanh", name="mix"
    )(x)
    x = L.SimpleRNN(16, name="rnn")(x)
    x = L.Dense(16, activation="gelu", name="hidden", kernel_regularizer="l2")(
        x
    )
    return keras.Model(inputs, L.Dense(3, name="head")(x))


def sparse(storage="masked"):
    keras.utils.set_random_seed(2)
    return kso.sparsify(
        network(),
        0.5,
        "uniform",
        structure=REGULAR,
        seed=0,
        exclude="head",
        storage=storage,
    )


def test_masks_that_do_not_tell_their_blocks():
    inputs = keras.Input((16,))
    mask = np.kron(np.eye(4, dtype=bool), np.ones((4, 2), dtype=bool))
    wrapped = kso.PrunableLayer(L.Dense(8, name="a"), FixedMask(mask=mask))
    model = keras.Model(inputs, wrapped(inputs))
    with pytest.raises(
        NotPrunableError, match=r"'a': its mask was not drawn with Block.*None"
    ):
        kso.convert(model, "blocks")
    with pytest.raises(NotPrunableError, match="blocks that are live in part"):
        kso.convert(model, "blocks", block=8)
    blocks = kso.convert(model, "blocks", block=(4, 2))
    np.testing.assert_array_equal(
        kso.prunable_weights(blocks)[0].storage.mask_value(), mask
    )


def test_what_cannot_be_converted():
    with pytest.raises(NotPrunableError, match="nothing to convert"):
        kso.convert(network(), "blocks")
    recurrent = keras.Sequential(
        [keras.Input((5, 8)), L.SimpleRNN(8, name="rnn")]
    )
    recurrent = kso.sparsify(
        recurrent, 0.5, "uniform", structure=REGULAR, seed=0
    )
    with pytest.raises(
        NotPrunableError, match=r"'rnn': only Dense, .* have such a form"
    ):
        kso.convert(recurrent, "blocks")
    model = sparse()
    model.compile("adafactor", classifier_loss(), jit_compile=jit_if_quicker())
    fit(model, epochs=1)
    with pytest.raises(ValueError, match="Adafactor keeps something"):
        kso.convert(model, "blocks")
    assert type(model.get_layer("hidden")) is kso.PrunableLayer


def uneven():
    """One layer of each kind that can compute on live blocks; some lines and blocks weigh more.

    With lines alone there would be no second pattern with the counts of the best one.
    """
    keras.utils.set_random_seed(2)
    inputs = keras.Input((6, 6, 8))
    x = L.Conv2D(16, 3, activation="relu", name="conv")(inputs)
    x = L.Reshape((16, 16))(x)
    x = L.EinsumDense(
        "abc,cd->abd", (None, 64), bias_axes="d", activation="tanh", name="mix"
    )(x)
    x = L.LSTM(16, name="rnn")(x)
    x = L.Dense(64, activation="gelu", name="hidden")(x)
    model = keras.Model(inputs, L.Dense(3, name="head")(x))
    rng = np.random.default_rng(0)
    for weight in kso.prunable_weights(model):
        rows, cols = weight.shape[-2:]
        blocks = (
            rng.normal(size=(rows // 4, -(-cols // 8)))
            .repeat(4, axis=0)
            .repeat(8, axis=1)
        )
        lines = rng.normal(size=(rows, 1)) + rng.normal(size=(1, cols))
        weight.variable.assign(
            weight.value * np.exp(lines + blocks[:, :cols]) / 3
        )
    return model


@slow_where_traced
def test_blocks_in_any_pattern_train_as_masks_do(tmp_path):
    model = kso.prune(
        uneven(), 0.4, structure=(4, 8), exclude="head", storage="masked"
    )
    pruned = kso.prunable_weights(model)[:-1]
    units = [288, 32, 32, 32, 32]  # a block at all taps
    assert not any(w.live % unit for w, unit in zip(pruned, units, strict=True))
    assert (
        0.9
        <= sum(w.live for w in pruned) / (0.4 * sum(w.size for w in pruned))
        <= 1.0
    )
    model.compile(
        keras.optimizers.Adam(1e-3),
        classifier_loss(),
        jit_compile=jit_if_quicker(),
    )
    fit(model)
    x, y = data(model, 3)
    blocks = kso.convert(model, "blocks", block=(4, 8))
    found = [w for w in kso.prunable_weights(blocks) if w.storage is not None]
    assert all(w.storage.in_blocks for w in found)
    grids = [w.storage._layer.grid for w in found]
    assert all(grid.counts for grid in grids)
    assert any(0 in counts for grid in grids for counts in grid.counts)
    expected = model.predict(x, verbose=0)
    np.testing.assert_allclose(
        blocks.predict(x, verbose=0), expected, atol=1e-6
    )
    assert_equal_kernels(model, blocks, rtol=0)
    again = reloaded(blocks, tmp_path)
    masked = kso.convert(blocks, "masked")
    assert_equal_kernels(masked, model, rtol=0)
    assert_same(masked.optimizer.variables, model.optimizer.variables)
    losses = fit(model)
    for other in (blocks, again, masked):
        np.testing.assert_allclose(fit(other), losses, rtol=1e-5)
    assert_equal_kernels(blocks, model, atol=1e-5)
    assert_equal_kernels(again, blocks, rtol=0)
    before = [w.mask for w in found]
    moving = kso.callbacks.RigL((x, y), len(x), frequency=1, end_step=100)
    blocks.fit(x, y, verbose=0, callbacks=[moving])
    for weight, mask in zip(found, before, strict=True):
        lines = mask.ndim - 1
        assert (weight.mask.sum(axis=lines) == mask.sum(axis=lines)).all()
    assert any(
        (w.mask != mask).any() for w, mask in zip(found, before, strict=True)
    )
