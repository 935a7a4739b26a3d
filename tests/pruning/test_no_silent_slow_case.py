"""Where speed may be expected, each kernel is on live blocks, or it is told why it is not."""

import itertools
import warnings

import keras
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError, LayoutError
from keras_sparse_ortho.pruning import _holding
from tests.helpers import slow_on_tensorflow

L = keras.layers
pytestmark = pytest.mark.core

STRUCTURES = {
    "none": None,
    **{f"blocks {k}": kso.Block(k, k) for k in (16, 32, 64)},
    **{f"regular {k}": kso.Block(k, k, regular=True) for k in (16, 64)},
    "N:M": kso.NByM(2, 4),
}
# Inputs, outputs and density.
SHAPES = {
    "divisible": (128, 128, 0.5),
    "padded": (128, 100, 0.5),
    "prime": (127, 131, 0.5),
    "small": (128, 3, 0.5),
    "too sparse": (32, 32, 0.1),
    "nearly dense": (64, 64, 0.95),
}


@pytest.fixture(autouse=True)
def all_are_wide(monkeypatch):
    monkeypatch.setattr(_holding, "_WIDE", 1)


def told_by(verb, model, *args, **options):
    """The sparse model, and what was warned of the storage of its kernels."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sparse = verb(model, *args, **options)
    texts = [str(w.message) for w in caught if issubclass(w.category, UserWarning)]
    return sparse, [text for text in texts if "live blocks" in text]


@slow_on_tensorflow
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("storage", ["masked", "compact", "auto", "blocks"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("verb", [kso.sparsify, kso.prune])
def test_a_dense_layer_is_fast_or_that_is_told(verb, structure, storage, shape):
    inputs, outputs, density = SHAPES[shape]
    model = keras.Sequential([keras.Input((inputs,)), L.Dense(outputs, name="a")])
    given = STRUCTURES[structure]
    options = {"structure": given, "storage": storage}
    try:
        sparse, told = told_by(verb, model, density, **options)
    except (LayoutError, BudgetError, ValueError) as error:
        assert "Received: " in str(error)  # noqa: PT017
        # A structure that this layer, at this density, cannot have in any storage.
        assert given is not None
        return
    (row,) = kso.report(sparse, orthogonality=False).rows
    if row.block is not None:
        assert not any("'a/kernel'" in text for text in told)
        assert storage in ("auto", "blocks")
        return
    # Nothing suggests speed where neither storage nor structure speak of blocks.
    asked = storage in ("auto", "blocks") or isinstance(given, kso.Block)
    assert len(told) == asked
    if asked:
        assert "'a/kernel'" in told[0]
        assert "None" not in told[0]  # there is a reason
    if shape == "divisible":
        assert storage != "blocks"


# By name the layer, the shape of its input, and whether its kernels can be on blocks.
LAYERS = {
    "EinsumDense": (lambda: L.EinsumDense("ab,bc->ac", 128), (128,), True),
    "Conv1D": (lambda: L.Conv1D(128, 3), (4, 128), True),
    "Conv2D": (lambda: L.Conv2D(128, 1), (2, 2, 128), True),
    "Conv3D": (lambda: L.Conv3D(128, 1), (2, 2, 2, 128), True),
    "TimeDistributed": (lambda: L.TimeDistributed(L.Dense(128)), (2, 128), True),
    "MultiHeadAttention": (lambda: L.MultiHeadAttention(4, 32), (2, 128), True),
    "GroupQueryAttention": (lambda: L.GroupQueryAttention(32, 4, 2), (2, 128), True),
    "grouped": (lambda: L.Conv1D(128, 3, groups=2), (4, 128), False),
    "transposed": (lambda: L.Conv1DTranspose(128, 3), (4, 128), False),
    "depthwise": (lambda: L.DepthwiseConv1D(3, depth_multiplier=64), (4, 128), False),
    "separable": (lambda: L.SeparableConv1D(128, 3), (4, 128), False),
    "LSTM": (lambda: L.LSTM(128), (2, 128), True),
    "GRU": (lambda: L.Bidirectional(L.GRU(128)), (2, 128), True),
    "SimpleRNN": (lambda: L.SimpleRNN(128), (2, 128), False),
    "cell": (lambda: L.RNN(L.LSTMCell(128)), (2, 128), False),
    "Embedding": (lambda: L.Embedding(128, 128), (2,), False),
    "batch": (lambda: L.EinsumDense("abc,bcd->abd", (2, 128)), (2, 128), False),
}


def network(kind):
    """A layer, and beside it one that can always be on blocks."""
    make, shape, _ = LAYERS[kind]
    inputs = keras.Input(shape, dtype="int32" if kind == "Embedding" else None)
    layer = make()
    x = layer(inputs, inputs) if "Attention" in kind else layer(inputs)
    x = L.Flatten()(x)
    x = L.Dense(128, name="first")(x)
    return keras.Model(inputs, L.Dense(128, name="second")(x))


@slow_on_tensorflow
@pytest.mark.parametrize("kind", LAYERS)
def test_kernels_of_every_layer_are_on_blocks_or_named(kind):
    model = network(kind)
    sparse, told = told_by(kso.sparsify, model, 0.5, "uniform", storage="blocks", seed=0)
    assert len(told) <= 1
    rows = kso.report(sparse, orthogonality=False).rows
    expected = LAYERS[kind][2]
    for row in rows:
        if expected or row.path in ("first/kernel", "second/kernel"):
            assert row.block is not None, row.path
            continue
        assert row.block is None
        assert row.not_on_blocks
        if row.state == "sparse":
            assert f"'{row.path}' is not on live blocks ({row.not_on_blocks})" in told[0]
    assert {row.path for row in rows if row.block} == {
        w.path for w in kso.prunable_weights(sparse) if w.storage and w.storage.in_blocks
    }


@pytest.mark.parametrize("kind", ["SimpleRNN", "grouped", "Embedding"])
def test_regular_blocks_of_layers_without_a_form_are_told(kind):
    options = {"structure": kso.Block(16, 16, regular=True), "storage": "auto", "seed": 0}
    sparse, told = told_by(kso.sparsify, network(kind), 0.5, "uniform", **options)
    (text,) = told
    for row in kso.report(sparse, orthogonality=False).rows:
        assert (f"'{row.path}' ({row.not_on_blocks})" in text) == (row.block is None)


def test_a_size_that_does_not_divide_a_kernel_is_told_with_its_reason():
    sizes = (128, 128, 96, 128)
    layers = [L.Dense(n, name=f"d{k}") for k, n in enumerate(sizes[1:])]
    model = keras.Sequential([keras.Input((128,)), *layers])
    options = {"structure": kso.Block(64, 64), "storage": "blocks", "seed": 0}
    _, (text,) = told_by(kso.sparsify, model, 0.5, "uniform", **options)
    for path, size in itertools.zip_longest(("d1/kernel", "d2/kernel"), ("128 x 96", "96 x 128")):
        reason = f"{size} cannot be divided into blocks of 64 x 64"
        assert f"'{path}' is not on live blocks ({reason})" in text
    assert "'d0/kernel'" not in text


def test_pruning_to_single_entries_with_auto_is_told():
    model = keras.Sequential([keras.Input((64,)), L.Dense(64, name="a")])
    _, (text,) = told_by(kso.prune, model, 0.25, storage="auto")
    assert "Received: storage='auto', for 'a/kernel' with single live entries" in text
    assert told_by(kso.prune, model, 0.25, storage="masked")[1] == []
