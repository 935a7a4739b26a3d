"""The kernels of Triton as operators of torch, which `torch.compile` keeps as they are.

Each operator has a rule for shapes and one for gradients, made of the three operators themselves,
so that there are derivatives of any order. Triton is loaded when one of them first runs.
"""

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import torch

from keras_sparse_ortho.layers._block_grid import Lines

# Live blocks of each line of outputs and of inputs; `list[int]` is what torch's schemas know.
_CountList = list[int]

_Context: TypeAlias = "torch.autograd.function.FunctionCtx"
_Gradients: TypeAlias = tuple[torch.Tensor | None, ...]


@torch.library.custom_op("keras_sparse_ortho::block_product", mutates_args=())
def block_product(
    x: torch.Tensor,
    blocks: torch.Tensor,
    inputs_of: torch.Tensor,
    slots_of: torch.Tensor,
    output_counts: _CountList,
    input_counts: _CountList,
    interpreted: bool,
) -> torch.Tensor:
    """`Y[j] = sum_l X[inputs_of[j, l]] W[j, l]`, with `x` `(n, inputs)` and blocks `(N, r, c)`."""
    tables = _tables(tuple(output_counts), x.device)
    return _kernels().line_products(
        x,
        blocks,
        inputs_of.contiguous(),
        tables.slots,
        tables.lines,
        transposed=False,
        interpreted=interpreted,
    )


@torch.library.custom_op(
    "keras_sparse_ortho::block_inputs_gradient", mutates_args=()
)
def block_inputs_gradient(
    upstream: torch.Tensor,
    blocks: torch.Tensor,
    inputs_of: torch.Tensor,
    slots_of: torch.Tensor,
    output_counts: _CountList,
    input_counts: _CountList,
    interpreted: bool,
) -> torch.Tensor:
    """`dX[i] = sum_s dY[j(s)] W[s]^T` over the slots `s` of each block of inputs."""
    of_outputs = _tables(tuple(output_counts), upstream.device)
    of_inputs = _tables(tuple(input_counts), upstream.device)
    return _kernels().line_products(
        upstream,
        blocks,
        of_outputs.line_of_slots[slots_of],
        slots_of.contiguous(),
        of_inputs.lines,
        transposed=True,
        interpreted=interpreted,
    )


@torch.library.custom_op("keras_sparse_ortho::block_gradients", mutates_args=())
def block_gradients(
    x: torch.Tensor,
    upstream: torch.Tensor,
    inputs_of: torch.Tensor,
    slots_of: torch.Tensor,
    output_counts: _CountList,
    input_counts: _CountList,
    interpreted: bool,
) -> torch.Tensor:
    """`dW[j, l] = X[inputs_of[j, l]]^T dY[j]`."""
    tables = _tables(tuple(output_counts), x.device)
    return _kernels().block_gradients(
        x,
        upstream,
        inputs_of.contiguous(),
        tables.line_of_slots,
        shape=_block_shape(x, upstream, output_counts, input_counts),
        interpreted=interpreted,
    )


@block_product.register_fake
def _product_shape(
    x: torch.Tensor,
    blocks: torch.Tensor,
    inputs_of: torch.Tensor,
    slots_of: torch.Tensor,
    output_counts: _CountList,
    input_counts: _CountList,
    interpreted: bool,
) -> torch.Tensor:
    return x.new_empty((x.shape[0], len(output_counts) * blocks.shape[2]))


@block_inputs_gradient.register_fake
def _inputs_gradient_shape(
    upstream: torch.Tensor,
    blocks: torch.Tensor,
    inputs_of: torch.Tensor,
    slots_of: torch.Tensor,
    output_counts: _CountList,
    input_counts: _CountList,
    interpreted: bool,
) -> torch.Tensor:
    width = len(input_counts) * blocks.shape[1]
    return upstream.new_empty((upstream.shape[0], width))


@block_gradients.register_fake
def _gradients_shape(
    x: torch.Tensor,
    upstream: torch.Tensor,
    inputs_of: torch.Tensor,
    slots_of: torch.Tensor,
    output_counts: _CountList,
    input_counts: _CountList,
    interpreted: bool,
) -> torch.Tensor:
    shape = _block_shape(x, upstream, output_counts, input_counts)
    return x.new_empty((inputs_of.shape[0], *shape))


def _block_shape(
    x: torch.Tensor,
    upstream: torch.Tensor,
    output_counts: Sequence[int],
    input_counts: Sequence[int],
) -> tuple[int, int]:
    """`(r, c)` of the blocks between two padded tensors."""
    rows = x.shape[1] // len(input_counts)
    cols = upstream.shape[1] // len(output_counts)
    return rows, cols


def _save(ctx: _Context, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    """Keeps the operands for the gradient: two floats, two tensors of places, and constants."""
    tensors, ctx.constants = inputs[:4], inputs[4:]  # torch names it `ctx`
    ctx.save_for_backward(*tensors)


def _gradients(first: torch.Tensor, second: torch.Tensor) -> _Gradients:
    """A gradient for each input of an operator: places and constants have none."""
    return (first, second, None, None, None, None, None)


def _product_gradient(context: _Context, upstream: torch.Tensor) -> _Gradients:
    x, blocks, *places = context.saved_tensors
    pattern = (*places, *context.constants)
    return _gradients(
        block_inputs_gradient(upstream, blocks, *pattern),
        block_gradients(x, upstream, *pattern),
    )


def _inputs_gradient_gradient(
    context: _Context, upstream: torch.Tensor
) -> _Gradients:
    outputs, blocks, *places = context.saved_tensors
    pattern = (*places, *context.constants)
    return _gradients(
        block_product(upstream, blocks, *pattern),
        block_gradients(upstream, outputs, *pattern),
    )


def _gradients_gradient(
    context: _Context, upstream: torch.Tensor
) -> _Gradients:
    x, outputs, *places = context.saved_tensors
    pattern = (*places, *context.constants)
    return _gradients(
        block_inputs_gradient(outputs, upstream, *pattern),
        block_product(x, upstream, *pattern),
    )


block_product.register_autograd(_product_gradient, setup_context=_save)
block_inputs_gradient.register_autograd(
    _inputs_gradient_gradient, setup_context=_save
)
block_gradients.register_autograd(_gradients_gradient, setup_context=_save)


class _Tables:
    """The tables of one side of a pattern that a kernel reads, on a device.

    Attributes:
        lines: Tensor `(lines, 2)`, the first slot of each line and their number.
        line_of_slots: Tensor `(N,)`, the line of each slot.
        slots: Tensor `(N,)`, `0 .. N - 1`.
    """

    def __init__(self, lines: Lines, device: torch.device) -> None:
        def tensor(values: np.ndarray) -> torch.Tensor:
            return torch.as_tensor(values.astype(np.int32), device=device)

        self.lines = tensor(lines.first_and_count)
        self.line_of_slots = tensor(lines.of_slots)
        self.slots = tensor(np.arange(len(lines.of_slots)))


@functools.lru_cache(maxsize=1024)
def _tables(counts: tuple[int, ...], device: torch.device) -> _Tables:
    """The tables of lines with so many live blocks, made once for a device."""
    return _Tables(Lines(counts), device)


def _kernels() -> ModuleType:
    """The file that needs Triton."""
    return importlib.import_module("keras_sparse_ortho.layers._triton_kernels")
