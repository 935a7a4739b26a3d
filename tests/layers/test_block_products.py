"""Products with live blocks by token: equal to dense ones, whichever side is narrow."""

import dataclasses

import keras
import numpy as np
import pytest

from keras_sparse_ortho._backend import compiled, value_and_gradients
from keras_sparse_ortho._gathers import written_both_ways
from keras_sparse_ortho.layers import (
    BlockGrid,
    BlockOperands,
    BlockSparseDense,
    _block_products,
    _token_products,
    product_by_token,
)
from keras_sparse_ortho.orthogonal import clear_padding
from tests.helpers import array

pytestmark = pytest.mark.core
ops = keras.ops


@pytest.mark.parametrize(("most", "chunk"), [(0.0, 1), (0.0, 2**30), (1e9, 1)])
@pytest.mark.parametrize("pattern", ["regular", "outputs", "any"])
@pytest.mark.parametrize(
    ("inputs", "outputs", "rows", "cols", "density"),
    [
        (32, 64, 4, 16, 0.5),  # narrow inputs
        (64, 32, 16, 4, 0.5),  # narrow outputs
        (32, 32, 8, 8, 0.25),
        (31, 64, 4, 8, 0.5),  # the last block of inputs is padded
        (64, 31, 8, 4, 0.5),  # and of outputs
    ],
)
def test_outputs_and_gradients_are_those_of_the_dense_kernel(
    monkeypatch, inputs, outputs, rows, cols, density, most, chunk, pattern
):
    monkeypatch.setattr(_token_products, "_MOST_GATHERED", most)
    monkeypatch.setattr(_block_products, "_CHUNK_BYTES", chunk)
    grid = BlockGrid.for_density(inputs, outputs, (rows, cols), density)
    # With a line of inputs, and any with one of outputs, without blocks.
    if pattern != "regular":
        live = (
            np.random.default_rng(1).random((grid.in_blocks, grid.out_blocks))
            < 0.4
        )
        live[0] = live[:, 1] = False
        live[1, 2] = True
        if pattern == "outputs":  # equal counts on one side alone
            live[...] = (
                np.arange(1, grid.in_blocks + 1)[:, None] % grid.in_blocks < 2
            )
        counts = tuple(
            map(tuple, (live.sum(axis=0).tolist(), live.sum(axis=1).tolist()))
        )
        grid = dataclasses.replace(grid, fan_in=0, counts=counts)
    assert _token_products.gathers_little(grid) == (most > 0)
    rng = np.random.default_rng(0)
    pattern = grid.draw_pattern(0)
    slots = grid.slots_of(pattern)
    blocks = rng.normal(size=grid.blocks_shape).astype("float32")
    lines = grid.of_outputs.of_slots
    assert grid.check_pattern(pattern).size == grid.live_blocks
    clear_padding(
        blocks, pattern, lines.reshape(pattern.shape), inputs, outputs
    )
    assert grid.live == grid.mask(pattern).sum()
    x = rng.normal(size=(6, inputs)).astype("float32")
    weight = rng.normal(size=(6, outputs)).astype("float32")
    kernel = grid.kernel(blocks, pattern)
    found = np.zeros((grid.out_blocks, 2))
    chunks = _block_products._chunk_count(
        np.zeros((grid.in_blocks, rows, 6)), found
    )
    assert (chunks > 1) == (chunk == 1)
    of_kernel = np.where(grid.mask(pattern), x.T @ weight, 0)

    def run(x, blocks, pattern, slots):
        def inner(values):
            made = product_by_token(
                values[0], BlockOperands(grid, values[1], pattern, slots)
            )
            return ops.sum(made * ops.convert_to_tensor(weight))

        made = product_by_token(x, BlockOperands(grid, blocks, pattern, slots))
        return made, value_and_gradients(inner, [x, blocks])[1]

    made, (of_x, of_blocks) = compiled(run, xla=True)(
        *(ops.convert_to_tensor(v) for v in (x, blocks, pattern, slots))
    )
    np.testing.assert_allclose(array(made), x @ kernel, atol=1e-5)
    np.testing.assert_allclose(array(of_x), weight @ kernel.T, atol=1e-5)
    # The gradient of what pads a block is of no account.
    np.testing.assert_allclose(
        grid.kernel(array(of_blocks), pattern), of_kernel, atol=1e-5
    )


@pytest.mark.tensorflow_only
def test_a_kept_value_is_not_computed_inside_the_condition_that_keeps_it():
    import tensorflow as tf

    def product(x, gate, places):
        return written_both_ways(tf.multiply(x, gate), places)

    shapes = [
        tf.TensorSpec((None, 4)),
        tf.TensorSpec((None, 4)),
        tf.TensorSpec((2, 2), tf.int32),
    ]
    graph = tf.function(product).get_concrete_function(*shapes).graph
    (condition,) = (
        op for op in graph.get_operations() if op.type in ("If", "StatelessIf")
    )
    (multiplied,) = (
        op.outputs[0] for op in graph.get_operations() if op.type == "Mul"
    )
    # Grappler sinks what a branch alone needs, and XLA then computes it wherever it is read.
    assert len(multiplied.consumers()) > 1
    assert condition in multiplied.consumers()


@pytest.mark.torch_only
# Those that torch.compile raises on Keras' own code: caches, and autograd functions that it makes.
@pytest.mark.filterwarnings("ignore")
def test_torch_compile_takes_any_pattern_with_lines_without_blocks():
    import torch

    # In the third, torch takes counts for open sizes; each has an empty line at another place.
    all_counts = [
        ([2, 1, 3, 2, 0, 2, 2, 4], [2, 0, 1, 4, 1, 1, 3, 4]),
        ([2, 3, 2, 3, 1, 0, 4, 1], [2, 1, 3, 0, 5, 1, 2, 2]),
        ([0, 3, 2, 1, 5, 1, 2, 2], [1, 2, 3, 0, 1, 4, 2, 3]),
    ]
    layers = [
        BlockSparseDense(32, "tanh", density=0.25, block=4, counts=counts)
        for counts in all_counts
    ]
    x = torch.randn(8, 32)
    for layer in layers:
        layer.build((None, 32))
    blocks = [layer.blocks.value for layer in layers]

    def loss(x):
        for layer in layers:
            x = layer(x)
        return torch.sum(x**2)

    expected = torch.autograd.grad(loss(x), blocks)
    compiled_loss = torch.compile(loss, backend="eager")
    gradients = torch.autograd.grad(compiled_loss(x), blocks)
    for gradient, wanted in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
        assert wanted.abs().max() > 0
