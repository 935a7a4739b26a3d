"""Products with live blocks by kernels for a GPU: equal to gathered ones, by interpreters."""

import dataclasses
import importlib.util

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho._backend import (
    compiled,
    hessian_vector_product,
    value_and_gradients,
)
from keras_sparse_ortho.layers import (
    BlockGrid,
    BlockOperands,
    BlockSparseDense,
    BlockSparseEinsumDense,
    BlockSparseRNN,
    block_products,
    block_tile,
    line_tile,
    product_by_token,
    set_block_products,
)
from keras_sparse_ortho.orthogonal import clear_padding
from tests.helpers import array, on_two_devices

ops = keras.ops
L = keras.layers
SIZES = [
    (32, 64, 4, 16, 0.5),  # narrow inputs
    (64, 32, 16, 4, 0.5),  # narrow outputs
    (32, 32, 8, 8, 0.25),
    (31, 64, 4, 8, 0.5),  # the last block of inputs is padded
    (64, 31, 8, 4, 0.5),  # and of outputs
    (96, 48, 24, 12, 0.5),  # no powers of two
    (128, 128, 32, 32, 0.5),
    (256, 256, 64, 64, 0.5),
    (512, 512, 128, 128, 0.5),
]


@pytest.fixture(autouse=True)
def _gathered_afterwards():
    yield
    set_block_products("gathered")


def grid_of(inputs, outputs, rows, cols, density, pattern):
    """A grid of a regular pattern, or of one with lines without blocks on both sides."""
    grid = BlockGrid.for_density(inputs, outputs, (rows, cols), density)
    if pattern == "regular":
        return grid
    live = (
        np.random.default_rng(1).random((grid.in_blocks, grid.out_blocks)) < 0.4
    )
    live[0] = live[:, 1] = False
    live[1, 2] = True
    counts = tuple(tuple(live.sum(axis=axis).tolist()) for axis in (0, 1))
    return dataclasses.replace(grid, fan_in=0, counts=counts)


def operands_of(grid, dtype="float32"):
    """Places, slots and values of live blocks."""
    pattern = grid.draw_pattern(0)
    blocks = np.random.default_rng(0).normal(size=grid.blocks_shape)
    blocks = blocks.astype("float32")
    lines = grid.of_outputs.of_slots.reshape(pattern.shape)
    clear_padding(blocks, pattern, lines, grid.inputs, grid.outputs)
    tensors = [
        ops.convert_to_tensor(v) for v in (pattern, grid.slots_of(pattern))
    ]
    return [ops.cast(ops.convert_to_tensor(blocks), dtype), *tensors]


def outputs_and_gradients(grid, x, weight, blocks, places, slots):
    """`x K`, and the gradients of `sum(weight * x K)`."""

    def run(x, blocks, places, slots):
        def weighted_sum(values):
            operands = BlockOperands(grid, values[1], places, slots)
            product = product_by_token(values[0], operands)
            return ops.sum(ops.cast(product, "float32") * weight)

        operands = BlockOperands(grid, blocks, places, slots)
        outputs = product_by_token(x, operands)
        return outputs, value_and_gradients(weighted_sum, [x, blocks])[1]

    outputs, gradients = compiled(run, xla=True)(x, blocks, places, slots)
    return [array(ops.cast(v, "float32")) for v in (outputs, *gradients)]


@pytest.mark.not_tensorflow
@pytest.mark.needs_kernels
@pytest.mark.parametrize("pattern", ["regular", "any"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_kernels_equal_gathers(sizes, pattern):
    batch = 37  # no multiple of a tile
    grid = grid_of(*sizes, pattern)
    rng = np.random.default_rng(0)
    x, weight = (
        ops.convert_to_tensor(rng.normal(size=(batch, n)).astype("float32"))
        for n in sizes[:2]
    )
    operands = operands_of(grid)
    expected = outputs_and_gradients(grid, x, weight, *operands)
    set_block_products("interpreted")
    values = outputs_and_gradients(grid, x, weight, *operands)
    for value, wanted in zip(values, expected, strict=True):
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(value, wanted, atol=1e-6 * scale)
        assert scale > 0


@pytest.mark.not_tensorflow
@pytest.mark.needs_kernels
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_halves_are_summed_in_float32(dtype):
    grid = grid_of(256, 64, 32, 32, 0.5, "regular")
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(size=(16, n)).astype("float32") for n in (256, 64))
    blocks, places, slots = operands_of(grid, dtype)
    x = ops.cast(ops.convert_to_tensor(x), dtype)
    set_block_products("interpreted")
    outputs, *_ = outputs_and_gradients(
        grid, x, ops.convert_to_tensor(weight), blocks, places, slots
    )
    exact_x = array(ops.cast(x, "float32")).astype("float64")
    exact_blocks = array(ops.cast(blocks, "float32"))
    exact = exact_x @ grid.kernel(exact_blocks, array(places))
    # One rounding of the sum, and none of its parts.
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-11}[dtype]
    np.testing.assert_allclose(outputs, exact, rtol=rounding, atol=1e-5)


@pytest.mark.not_tensorflow
@pytest.mark.needs_kernels
def test_second_derivatives_equal_those_of_gathers():
    grid = grid_of(32, 32, 8, 8, 0.5, "regular")
    blocks, places, slots = operands_of(grid)
    rng = np.random.default_rng(0)
    x, *vectors = (
        ops.convert_to_tensor(rng.normal(size=shape).astype("float32"))
        for shape in ((5, 32), (5, 32), grid.blocks_shape)
    )

    def loss(values):
        operands = BlockOperands(grid, values[1], places, slots)
        return ops.sum(ops.tanh(product_by_token(values[0], operands)))

    def products():
        values = hessian_vector_product(loss, [x, blocks], vectors)
        return [array(value) for value in values]

    expected = products()
    set_block_products("interpreted")
    for value, wanted in zip(products(), expected, strict=True):
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(value, wanted, atol=5e-6 * scale)


@pytest.mark.jax_only
@pytest.mark.needs_kernels
def test_kernels_take_jit_vmap_and_grad():
    import jax

    grid = grid_of(32, 32, 8, 8, 0.5, "any")
    operands = BlockOperands(grid, *operands_of(grid))
    x = np.random.default_rng(0).normal(size=(3, 5, 32)).astype("float32")
    single = lambda x: ops.sum(ops.tanh(product_by_token(x, operands)))  # noqa: E731
    expected = np.stack([array(jax.grad(single)(part)) for part in x])
    set_block_products("interpreted")
    many = jax.jit(jax.vmap(jax.grad(single)))(x)
    scale = np.abs(expected).max()
    np.testing.assert_allclose(array(many), expected, atol=5e-6 * scale)


@pytest.mark.jax_only
@pytest.mark.needs_kernels
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("side", [12, 32, 64, 128])
def test_a_step_for_a_gpu_is_three_kernels_of_triton_without_gathers(
    monkeypatch, dtype, side
):
    import jax

    monkeypatch.setattr(kso._backend, "device_kind", lambda: "gpu")
    set_block_products("fused")
    grid = grid_of(8 * side, 8 * side, side, side, 0.25, "any")
    blocks, places, slots = operands_of(grid, dtype)
    x = jax.ShapeDtypeStruct((100, 8 * side), dtype)

    def loss(x, blocks):
        operands = BlockOperands(grid, blocks, places, slots)
        return ops.sum(product_by_token(x, operands) ** 2)

    traced = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).trace(x, blocks)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton") == 3
    # The only gather is of the output block of each slot, a few integers.
    assert "scatter" not in text
    gathers = [line for line in text.splitlines() if "stablehlo.gather" in line]
    assert all("xi32>)" in line for line in gathers)
    with pytest.raises(ValueError, match="interpret mode"):
        traced.lower(lowering_platforms=("cpu",))


def network():
    """Vectors, tokens, attention's products and gates on blocks."""
    options = {"density": 0.5, "block": 8, "seed": 0}
    inputs = keras.Input((4, 32))
    x = BlockSparseDense(32, "gelu", name="tokens", **options)(inputs)
    x = BlockSparseEinsumDense(
        "abc,cde->abde", (None, 2, 16), name="heads", **options
    )(x)
    cell = kso.layers.BlockSparseLSTMCell(
        16, density=0.5, block=8, recurrent_density=0.5, recurrent_block=8
    )
    x = BlockSparseRNN(cell, name="gates")(L.Reshape((4, 32))(x))
    padded = {**options, "block": (8, 4)}
    x = L.Dense(64, "tanh", name="wide")(x)
    x = BlockSparseDense(31, "relu", name="padded", **padded)(x)
    return keras.Model(inputs, L.Dense(2, name="head")(x))


@pytest.mark.not_tensorflow
@pytest.mark.needs_kernels
def test_training_equals_that_with_gathers():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(24, 4, 32)).astype("float32")
    y = rng.normal(size=(24, 2)).astype("float32")
    weights = []
    for products in ("gathered", "interpreted"):
        keras.utils.clear_session()
        keras.utils.set_random_seed(0)
        model = network()
        start = [array(v) for v in model.trainable_variables]
        set_block_products(products)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=False)
        model.fit(x, y, batch_size=12, epochs=2, shuffle=False, verbose=0)
        weights.append([array(v) for v in model.trainable_variables])
        set_block_products("gathered")
    for before, one, other in zip(start, *weights, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        assert (before != other).any()


@pytest.mark.torch_only
@pytest.mark.needs_kernels
def test_torch_compile_keeps_the_kernels():
    import torch

    grid = grid_of(32, 32, 8, 8, 0.5, "any")
    blocks, places, slots = operands_of(grid)
    x = torch.randn(5, 32)
    set_block_products("interpreted")

    def loss(x, blocks):
        operands = BlockOperands(grid, blocks, places, slots)
        return torch.tanh(product_by_token(x, operands)).sum()

    leaves = [value.clone().requires_grad_() for value in (x, blocks)]
    expected = torch.autograd.grad(loss(*leaves), leaves)
    traced = torch.compile(loss, backend="aot_eager", fullgraph=True)
    values = torch.autograd.grad(traced(*leaves), leaves)
    for value, wanted in zip(values, expected, strict=True):
        torch.testing.assert_close(value, wanted)
    counts = [list(grid.of_outputs.counts), list(grid.of_inputs.counts)]
    padded = torch.randn(5, 32, requires_grad=True)
    torch.library.opcheck(
        torch.ops.keras_sparse_ortho.block_product.default,
        (padded, blocks, places.reshape(-1), slots.reshape(-1), *counts, True),
    )


@pytest.mark.torch_only
@pytest.mark.needs_kernels
@pytest.mark.slow
@pytest.mark.parametrize("item_size", [2, 4])
@pytest.mark.parametrize("side", [12, 32, 128])
def test_triton_compiles_the_kernels_for_an_h100(side, item_size):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    set_block_products("interpreted")
    BlockSparseDense(8, density=0.5, block=4)(np.ones((2, 8), "float32"))
    kernels = kso.layers._triton_kernels
    line = line_tile(1024, side, side, 64, item_size)
    block = block_tile(1024, side, side, 512, item_size)
    strides = {"ROW_STRIDE": side, "COL_STRIDE": 1}
    floats = {2: "*bf16", 4: "*fp32"}[item_size]
    cases = [
        (kernels._line_program, line, strides, {0, 1, 5}),
        (kernels._block_program, block, {}, {0, 1, 4}),
    ]
    for kernel, tile, sizes, float_places in cases:
        function = triton.jit(kernel)
        constants = {"HEIGHT": side, "WIDTH": side, **sizes}
        constants |= {"ROWS": tile.rows, "DEPTH": tile.depth}
        constants |= {"COLS": tile.cols, "TF32": True}
        signature = {}
        for place, name in enumerate(function.arg_names):
            pointer = floats if place in float_places else "*i32"
            kind = pointer if name.endswith("_ptr") else "i32"
            signature[name] = "constexpr" if name in constants else kind
        source = ASTSource(function, signature, constexprs=constants)
        options = {"num_warps": tile.warps, "num_stages": 3}
        compiled_kernel = triton.compile(
            source, target=GPUTarget("cuda", 90, 32), options=options
        )
        assert compiled_kernel.metadata.shared <= 227 * 1024
        ptx = compiled_kernel.asm["ptx"]
        assert "wgmma.mma_async" in ptx or "mma.sync" in ptx


# --- the choice -----------------------------------------------------------------------------------


def test_gathers_are_the_default_and_other_names_are_refused():
    assert block_products() == "gathered"
    with pytest.raises(ValueError, match=r"'interpreted'\. Received: 'pallas'"):
        set_block_products("pallas")
    assert block_products() == "gathered"


@pytest.mark.tensorflow_only
def test_tensorflow_has_no_kernels():
    with pytest.raises(
        ValueError, match=r"KERAS_BACKEND to jax or torch.*on T"
    ):
        set_block_products("fused")


@pytest.mark.not_tensorflow
@pytest.mark.needs_kernels
def test_without_a_gpu_fused_names_the_interpreter(monkeypatch):
    with pytest.raises(
        ValueError, match=r"'interpreted' to test.*'fused' on a CPU"
    ):
        set_block_products("fused")
    assert block_products() == "gathered"
    monkeypatch.setattr(kso._backend, "device_kind", lambda: "gpu")
    set_block_products("fused")
    assert block_products() == "fused"


@pytest.mark.torch_only
def test_torch_without_triton_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install triton.*Received"):
        set_block_products("interpreted")


@pytest.mark.jax_only
@pytest.mark.needs_kernels
def test_an_older_jax_is_told_apart(monkeypatch):
    from jax.experimental.pallas import triton

    monkeypatch.delattr(triton, "load")
    with pytest.raises(ImportError, match=r"newer JAX.*Received"):
        set_block_products("interpreted")


@pytest.mark.jax_only
@pytest.mark.needs_kernels
def test_kernels_are_refused_under_a_distribution():
    set_block_products("interpreted")
    layer = BlockSparseDense(32, density=0.5, block=8, seed=0)
    with (
        on_two_devices(),
        pytest.raises(ValueError, match=r"one device.*under a distribution"),
    ):
        layer(np.ones((4, 32), "float32"))


# --- tiles ----------------------------------------------------------------------------------------


@pytest.mark.numpy_only
@pytest.mark.parametrize("item_size", [2, 4])
@pytest.mark.parametrize("side", [4, 12, 32, 64, 128, 300])
@pytest.mark.parametrize("batch", [1, 37, 128, 4096])
def test_tiles_fit_tensor_cores_and_memory(batch, side, item_size):
    for tile in (
        line_tile(batch, side, side, 128, item_size),
        block_tile(batch, side, side, 1024, item_size),
    ):
        for length in (tile.rows, tile.depth, tile.cols):
            assert 16 <= length <= 128
            assert length & (length - 1) == 0
        # Three tiles of each operand are read ahead; a processor of an H100 has 227 KiB.
        operands = tile.depth * (tile.rows + tile.cols) * item_size
        assert 3 * operands <= 227 * 1024


@pytest.mark.numpy_only
def test_small_products_get_more_programs():
    wide = line_tile(4096, 128, 128, 32, 2)
    assert (wide.rows, wide.warps) == (128, 8)
    narrow = line_tile(128, 128, 128, 32, 2)
    assert (narrow.rows, narrow.warps) == (32, 4)
