"""What layers of live blocks refuse, and that they are as they were afterwards."""

import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import (
    DensityError,
    LayoutError,
    NotPrunableError,
)
from keras_sparse_ortho.layers import (
    BlockSparseConv1D,
    BlockSparseDense,
    BlockSparseEinsumDense,
    block_layer_like,
)
from tests.helpers import array, assert_same

L = keras.layers
SIZES = {"density": {"kernel": 0.5}, "block": {"kernel": 8}}


def built(**kwargs):
    layer = BlockSparseDense(
        32, **{"density": 0.5, "block": 8, "seed": 0, "name": "d", **kwargs}
    )
    layer.build((None, 32))
    return layer


def test_sizes_and_densities():
    with pytest.raises(
        LayoutError, match=r"'d'.*8 divides: 96 and 104 are nearest.*2, 4, 5"
    ) as e:
        BlockSparseDense(32, density=0.5, block=8, name="d").build((None, 100))
    assert "Received: 100 inputs" in str(e.value)
    with pytest.raises(LayoutError, match="Received: 33 outputs"):
        BlockSparseDense(33, density=0.5, block=8).build((None, 32))
    with pytest.raises(
        DensityError, match=r"the nearest ones are 0.25 and 0.5"
    ):
        built(density=0.35)
    with pytest.raises(
        DensityError, match=r"the nearest one is 0.25.*density=0.1"
    ):
        built(density=0.1)
    assert built(density=0.3).density == 0.25
    with pytest.raises(DensityError, match=r"in \(0, 1\]"):
        BlockSparseDense(32, density=1.5)
    with pytest.raises(ValueError, match="`block` must be"):
        BlockSparseDense(32, density=0.5, block=(1, 2, 3))
    with pytest.raises(ValueError, match="`units` must be a positive integer"):
        BlockSparseDense(0, density=0.5)
    for kind in (kso.layers.BlockSparseLSTMCell, kso.layers.BlockSparseGRUCell):
        with pytest.raises(
            ValueError, match=r"`units` must be a positive integer.*units=inf"
        ):
            kind(float("inf"), density=0.5, block=4)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ([[0, 1], [1, 2], [2, 3]], "shape"),
        ([[0, 1], [1, 2], [2, 3], [3, 4]], "from 0 to 3"),
        ([[0, 1], [1, 1], [2, 3], [3, 0]], "at most once"),
        ([[0, 1], [0, 2], [0, 3], [0, 3]], r"its count, \[2, 2, 2, 2\]"),
    ],
)
def test_places(pattern, message):
    layer = built()
    before = layer.get_weights()
    with pytest.raises(ValueError, match=message):
        layer.set_blocks(array(layer.blocks), pattern)
    assert_same(before, layer.get_weights())


def test_kernel_functions():
    for initializer in ("orthogonal", kso.initializers.ExactOrthogonal(0.5)):
        with pytest.raises(ValueError, match='starts from "exact_orthogonal"'):
            built(kernel_initializer=initializer)
    other = {
        "kernel_regularizer": keras.regularizers.OrthogonalRegularizer(),
        "kernel_constraint": keras.constraints.UnitNorm(),
    }
    for name, value in other.items():
        with pytest.raises(
            NotPrunableError, match=rf"must be .*Received: {name}="
        ):
            built(**{name: value})
        plain = L.Dense(32, **{name: value})
        with pytest.raises(
            NotPrunableError, match=rf"must be .*Received: {name}="
        ):
            block_layer_like(plain, **SIZES)
    layer = built(kernel_constraint="non_neg")
    model = keras.Sequential([keras.Input((32,)), layer])
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 32)), np.ones((8, 32)), verbose=0)
    assert array(layer.blocks).min() == 0


def test_lora_quantization_and_wrapping():
    layer = built()
    model = keras.Sequential([keras.Input((32,)), layer])
    before = model.get_weights()
    with pytest.raises(NotPrunableError, match=r"LoRA.*dense kernel.*strip"):
        layer.enable_lora(4)
    with pytest.raises(
        NotImplementedError, match=r"'d' cannot be quantized.*[Ss]trip"
    ):
        layer.quantize("int8")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model.quantize("int8")
    assert any(
        "'d' cannot be quantized" in str(warning.message) for warning in told
    )
    with pytest.raises(NotPrunableError, match="cannot be quantized"):
        built(dtype="int8_from_float32")
    with pytest.raises(NotPrunableError, match="live blocks only"):
        kso.PrunableLayer(layer, kso.FixedMask(0.5))
    with pytest.raises(
        NotPrunableError, match=r"live entries only.*'d/kernel'"
    ):
        kso.sparsify(model, 0.1)
    assert_same(before, model.get_weights())


@pytest.mark.parametrize(
    ("equation", "reason"),
    [
        ("abc,bcd->abd", "a matrix of its own for each b"),
        ("abc,cd->ad", "sums over b"),
        ("abc,c->ab", "one of its own"),
        ("abc", "the form"),
    ],
)
def test_equations(equation, reason):
    with pytest.raises(NotPrunableError, match=reason):
        BlockSparseEinsumDense(equation, (None, 8), density=0.5)


def test_groups_and_other_layers():
    with pytest.raises(NotPrunableError, match=r"Leave `groups` out.*groups=2"):
        BlockSparseConv1D(8, 3, groups=2, density=0.5, block=4)
    grouped = L.Conv1D(8, 3, groups=2)
    with pytest.raises(NotPrunableError, match="groups=2"):
        block_layer_like(grouped, **SIZES)
    with pytest.raises(NotPrunableError, match="only Dense"):
        block_layer_like(L.SimpleRNN(8), **SIZES)


def test_counts_that_no_pattern_has():
    assert built(counts=([4, 0, 1, 3], [3, 2, 2, 1])).grid.live_blocks == 8
    for counts in (
        ([2, 2, 2], [2, 2, 2, 0]),  # of three output blocks
        ([2, 2, 2, 2], [2, 2, 2, 1]),
        ([4, 4, 0, 0], [3, 2, 2, 1]),  # an input block in three of two lines
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([5, 0, 0, 0], [2, 1, 1, 1]),
    ):
        with pytest.raises(
            LayoutError, match=r"'d': `counts` must say .*Received: "
        ):
            built(counts=counts)
    for counts in ([2, 2, 2, 2], ([2.5], [1]), ([-1, 3], [1, 1]), ("22", "22")):
        with pytest.raises(ValueError, match=r"`counts` must be .*Received: "):
            built(counts=counts)


def test_masks_that_are_none_of_blocks():
    layer = built()
    kernel, mask = layer.kernel_value(), layer.mask_value()
    single = mask.copy()
    single[np.nonzero(~mask)[0][0], np.nonzero(~mask)[1][0]] = True
    with pytest.raises(LayoutError, match="live in part"):
        layer.storages()["kernel"].set_kernel(kernel, single)
    fuller = mask.copy()
    fuller[:8, :8] = ~fuller[:8, :8]
    with pytest.raises(LayoutError, match="a mask of 9 blocks, for 8"):
        layer.storages()["kernel"].set_kernel(kernel * fuller, fuller)
    with pytest.raises(LayoutError, match="a mask of 16 blocks, for 8"):
        layer.storages()["kernel"].set_kernel(kernel, np.ones_like(mask))
    np.testing.assert_array_equal(layer.kernel_value(), kernel)
