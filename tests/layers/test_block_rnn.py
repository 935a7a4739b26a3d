"""LSTM and GRU on live blocks: as with masks in training, files, moves of blocks, and strip."""

import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import LayoutError, NotPrunableError
from keras_sparse_ortho.layers import (
    BlockSparseGRUCell,
    BlockSparseLSTMCell,
    BlockSparseRNN,
)
from tests.helpers import (
    array,
    classifier_loss,
    data,
    jit_if_quicker,
    reloaded,
    slow_where_traced,
)

L = keras.layers
pytestmark = pytest.mark.core
BLOCK = kso.Block(8, 8, regular=True)
OPTIONS = {
    "budget": "uniform",
    "storage": "blocks",
    "structure": BLOCK,
    "exclude": "head",
}


def model_of(layer, features=32):
    keras.utils.set_random_seed(1)
    x = inputs = keras.Input((4, features))
    x = layer(x)
    return keras.Model(inputs, L.Dense(3, name="head")(x))


def fit(model, epochs=2, callbacks=()):
    if not model.compiled:
        model.compile("adam", classifier_loss(), jit_compile=jit_if_quicker())
    x, y = data(model, 3, count=16)
    options = {
        "batch_size": 8,
        "epochs": epochs,
        "shuffle": False,
        "verbose": 0,
    }
    return model.fit(x, y, callbacks=[*callbacks], **options).history["loss"]


def rigl(model):
    x, y = data(model, 3, count=16)
    return kso.callbacks.RigL((x, y), 8, frequency=1, end_step=40, fraction=0.6)


KINDS = {
    "LSTM": lambda: L.LSTM(16, name="rnn", bias_initializer="random_normal"),
    "GRU": lambda: L.GRU(
        16, name="rnn", bias_initializer="random_normal", go_backwards=True
    ),
    "both ways": lambda: L.Bidirectional(
        L.LSTM(16, name="rnn", use_bias=False, kernel_regularizer="l2")
    ),
}
# Both ways in one layer take twice as long to trace: the quick run has them on torch.
CASES = [
    pytest.param(kind, marks=slow_where_traced if kind == "both ways" else ())
    for kind in KINDS
]


@pytest.mark.parametrize("kind", CASES)
def test_it_equals_its_masked_twin(kind, tmp_path):
    blocks = kso.sparsify(model_of(KINDS[kind]()), 0.5, seed=0, **OPTIONS)
    held = [
        weight
        for weight in kso.prunable_weights(blocks)
        if weight.storage is not None
    ]
    gates = 3 if kind == "GRU" else 4
    for weight, row in zip(held, kso.report(blocks).rows, strict=False):
        assert type(weight.owner).__name__.endswith("Cell")
        assert row.block == (8, 8)
        assert row.orthogonality_error < 1e-6
        assert weight.live == weight.size // 2
        for gate in np.split(weight.mask, gates, axis=1):
            by_block = gate.reshape(len(gate) // 8, 8, 2, 8)
            assert (
                by_block.all(axis=(1, 3)) == by_block.any(axis=(1, 3))
            ).all()
            assert (
                by_block.any(axis=(1, 3)).sum(axis=0) == len(gate) // 16
            ).all()
    masked = kso.convert(blocks, "masked")
    assert [w.path for w in kso.prunable_weights(masked)] == [
        w.path for w in kso.prunable_weights(blocks)
    ]
    before = held[0].mask
    callbacks = [[rigl(model)] for model in (blocks, masked)]
    losses = [
        fit(m, callbacks=c)
        for m, c in zip((blocks, masked), callbacks, strict=True)
    ]
    np.testing.assert_allclose(*losses, atol=1e-5)
    assert (held[0].mask != before).any()
    twins = kso.prunable_weights(masked)
    for weight, twin in zip(kso.prunable_weights(blocks), twins, strict=True):
        np.testing.assert_array_equal(weight.mask, twin.mask)
        np.testing.assert_allclose(weight.value, twin.value, atol=1e-5)
    again = kso.convert(masked, "blocks")  # with the moments of the optimizer
    np.testing.assert_allclose(fit(again), fit(masked), atol=1e-5)
    x, _ = data(blocks, 3)
    expected = blocks.predict(x, verbose=0)
    loaded = reloaded(blocks, tmp_path)
    plain = kso.strip(blocks)
    # Keras itself loads the layers inside of Bidirectional without its name in their paths.
    inside = [
        v.path.removeprefix("bidirectional/")
        for v in blocks.trainable_variables
    ]
    assert inside == [v.path for v in loaded.trainable_variables]
    for model in (loaded, plain):
        np.testing.assert_allclose(
            model.predict(x, verbose=0), expected, atol=1e-6
        )
    np.testing.assert_allclose(fit(loaded), fit(blocks), atol=1e-6)
    assert not any(
        "keras_sparse_ortho" in type(one).__module__
        for one in plain._flatten_layers()
    )


def test_masks_dropout_and_states():
    inputs = keras.Input((6, 23))  # rows of 8 and 7
    hidden = L.LSTM(
        24,
        name="a",
        return_sequences=True,
        return_state=True,
        dropout=0.3,
        seed=2,
    )
    x, *states = hidden(L.Masking()(inputs))
    x = L.GRU(24, name="b", zero_output_for_mask=True)(
        x, initial_state=states[0]
    )
    dense = keras.Model(inputs, L.Dense(3, name="head")(x))
    blocks = kso.sparsify(dense, 2 / 3, seed=0, **OPTIONS)
    assert [type(layer).__name__ for layer in blocks.layers].count(
        "BlockSparseRNN"
    ) == 2
    masked = kso.convert(blocks, "masked")
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 6, 23)).astype("float32")
    x[:, 4:], x[3, 2:] = 0.0, 0.0
    outputs = []
    for model in (blocks, masked):
        keras.utils.set_random_seed(3)
        outputs.append(array(model(x, training=True)))
        outputs.append(array(model(x)))
    np.testing.assert_allclose(outputs[:2], outputs[2:], atol=1e-5)
    assert np.abs(outputs[0] - outputs[1]).max() > 1e-3


def test_a_small_kernel_stays_dense():
    model = model_of(L.LSTM(128, name="rnn"), features=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        blocks = kso.sparsify(model, 0.29, storage="blocks", seed=0)
    weights = {
        w.path.removeprefix("rnn/lstm_cell/"): w
        for w in kso.prunable_weights(blocks)
    }
    assert weights["kernel"].storage is None
    assert weights["recurrent_kernel"].storage.in_blocks
    flops = {row.path: row.flops for row in kso.report(blocks).rows}
    assert (
        flops["rnn/lstm_cell/recurrent_kernel"]
        == 4 * weights["recurrent_kernel"].size
    )
    masked = kso.convert(blocks, "masked")
    np.testing.assert_allclose(fit(blocks, 1), fit(masked, 1), atol=1e-5)


REFUSED = {
    "reset_after=False": lambda: L.GRU(32, reset_after=False, name="rnn"),
    "recurrent_dropout": lambda: L.LSTM(32, recurrent_dropout=0.1, name="rnn"),
    "without states": lambda: L.RNN(L.LSTMCell(32), name="rnn"),
    "both of whose kernels": lambda: L.LSTM(32, name="rnn"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_is_not_on_blocks_is_told(reason):
    features = 5 if "kernels" in reason else 32  # five rows have no blocks
    with pytest.warns(
        UserWarning, match=rf"'rnn/.*kernel' is not on live blocks \(.*{reason}"
    ):
        sparse = kso.sparsify(
            model_of(REFUSED[reason](), features), 0.5, seed=0, **OPTIONS
        )
    assert all(
        w.storage is None or not w.storage.in_blocks
        for w in kso.prunable_weights(sparse)
    )


def test_layers_that_keep_their_states_are_told_and_keep_them():
    keras.utils.set_random_seed(1)
    layers = [L.LSTM(32, stateful=True, name="rnn"), L.Dense(3, name="head")]
    model = keras.Sequential([keras.Input((4, 32), batch_size=2), *layers])
    with pytest.warns(
        UserWarning,
        match=r"'rnn/.*kernel' is not on live blocks \(.*without states",
    ):
        sparse = kso.sparsify(model, 0.5, seed=0, **OPTIONS)
    x = np.random.default_rng(0).normal(size=(2, 4, 32)).astype("float32")
    first, second = array(sparse(x)), array(sparse(x))
    # It went on from the states of the first batch.
    assert np.abs(first - second).max() > 1e-3
    plain = kso.strip(sparse)
    plain.layers[0].reset_states()
    np.testing.assert_allclose(array(plain(x)), first, atol=1e-6)
    np.testing.assert_allclose(array(plain(x)), second, atol=1e-6)


def test_errors():
    with pytest.raises(NotPrunableError, match="keep no state between batches"):
        BlockSparseRNN(BlockSparseGRUCell(8), stateful=True)
    with pytest.raises(NotPrunableError, match="cell of type LSTMCell"):
        BlockSparseRNN(L.LSTMCell(8))
    with pytest.raises(NotPrunableError, match="recurrent_dropout"):
        BlockSparseLSTMCell(8, recurrent_dropout=0.5)
    layer = BlockSparseRNN(
        BlockSparseLSTMCell(20, recurrent_density=0.5, recurrent_block=8)
    )
    with pytest.raises(
        LayoutError, match=r"a multiple of the 8 outputs.*Received: 20 units"
    ):
        layer.build((None, 4, 8))
