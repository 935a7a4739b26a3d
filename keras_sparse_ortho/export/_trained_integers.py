"""Integers and scales of kernels in a file, as quantization-aware training has left them.

The converter finds the scale of a channel by its largest magnitude, and knows int8 alone: of int4
kernels and palettes it makes other integers. Here both are set to those that were trained.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho.export._litert_file import kernel_orders, read_model, write_model
from keras_sparse_ortho.quantization import TrainedIntegers

_STEPS = 0.51  # by which a rounded integer differs from what was rounded
_ROUNDING = 1e-5


class IntegersError(ValueError):
    """A kernel that no tensor of the file holds as it was trained."""


def with_trained_integers(content: bytes, kernels: Sequence[TrainedIntegers]) -> bytes:
    """The file with the trained integers and scales of kernels.

    A tensor `T` with scales `t` holds the kernel `K s` if, for some order of axes and up to the
    rounding of `T`,

        t T = g s K

    with `g = 1`, or a number for each channel (a batch normalization that was folded). Then `T`
    becomes `sign(g) K`, `t` becomes `|g| s`, and the integers of a bias get the new scale.

    Raises:
        IntegersError: A kernel for which there is no such tensor.
    """
    from ai_edge_litert import schema_py_generated as schema

    model = read_model(content)
    types = schema.TensorType
    free = [
        (graph, tensor)
        for graph in model.subgraphs
        for tensor in graph.tensors
        if tensor.type in (types.INT8, types.FLOAT32)
        and model.buffers[tensor.buffer].data is not None
        and tensor.shape is not None
        and len(tensor.shape) >= 2
        and tensor.sparsity is None
    ]
    for kernel in kernels:
        for place in free:
            graph, tensor = place
            data = model.buffers[tensor.buffer].data
            if tensor.type == types.FLOAT32:
                stored = np.asarray(data).view("<f4").reshape(tensor.shape)
                if _holds_floats(stored, kernel):
                    break
                continue
            stored = np.asarray(data).view("i1").reshape(tensor.shape)
            scales = np.asarray(tensor.quantization.scale, np.float32)
            axis = int(tensor.quantization.quantizedDimension)
            if stored.ndim == 2 or scales.size == 1:
                axis = 3 if _is_depthwise(model, graph, tensor, schema) else 0
            found = _found(stored, scales, axis, kernel)
            if found is not None:
                integers, new = found
                model.buffers[tensor.buffer].data = integers.reshape(-1).view("u1").copy()
                _set_scales(tensor, new, axis)
                _rescale_biases(model, graph, tensor, scales, new, types)
                break
        else:
            raise IntegersError(
                f"The file must hold the kernel '{kernel.path}' with the integers that were "
                f"trained. Received: none of {len(free)} tensors of the file agrees with it"
            )
        free = [one for one in free if one is not place]
    return write_model(model)


def _arrangements(
    kernel: TrainedIntegers, shape: Sequence[int]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Integers and scales with the kernel's axes in all orders that give a shape."""
    integers = kernel.integers.squeeze()
    if integers.size != np.prod(shape):
        return
    scales = np.broadcast_to(kernel.scales, kernel.integers.shape).squeeze()
    for order in kernel_orders(integers.shape, tuple(shape)):
        yield (
            integers.transpose(order).reshape(shape),
            scales.transpose(order).reshape(shape),
        )


def _found(
    stored: np.ndarray, scales: np.ndarray, axis: int, kernel: TrainedIntegers
) -> tuple[np.ndarray, np.ndarray] | None:
    """The kernel's integers as a tensor holds them, and one scale for each channel."""
    others = tuple(k for k in range(stored.ndim) if k != axis)
    shape = [1] * stored.ndim
    shape[axis] = -1
    step = scales.reshape(shape)
    for integers, trained in _arrangements(kernel, stored.shape):
        one = trained.max(others)
        if not np.array_equal(one, trained.min(others)):
            continue  # channels are along another axis
        if np.all(np.abs(stored * step - integers * trained) <= _STEPS * step):
            return integers, one
        most = np.abs(integers).max(others, keepdims=True).astype(np.float32)
        if scales.size == 1:
            continue
        wide = integers * (127 / np.maximum(most, 1))
        sign = np.sign(np.sum(stored * wide, others, keepdims=True))
        if np.all(np.abs(stored - sign * wide) <= _STEPS):
            new = scales * np.where(most > 0, 127 / np.maximum(most, 1), 1).reshape(-1)
            return (integers * sign).astype(np.int8), new.astype(np.float32)
    return None


def _holds_floats(stored: np.ndarray, kernel: TrainedIntegers) -> bool:
    """Whether a tensor of floats holds a kernel and its zeros, with a factor for each channel."""
    for integers, trained in _arrangements(kernel, stored.shape):
        value = integers * trained
        if stored[integers == 0].any():
            continue
        if np.allclose(stored, value, atol=_ROUNDING * np.abs(value).max(initial=0)):
            return True
        for axis in (0, stored.ndim - 1):
            others = tuple(k for k in range(stored.ndim) if k != axis)
            squares = np.sum(value * value, others, keepdims=True)
            factor = np.sum(stored * value, others, keepdims=True) / np.maximum(squares, 1e-30)
            most = np.abs(stored).max(initial=0)
            if np.allclose(stored, factor * value, atol=_ROUNDING * most):
                return True
    return False


def _is_depthwise(model: Any, graph: Any, tensor: Any, schema: Any) -> bool:
    kind = schema.BuiltinOperator.DEPTHWISE_CONV_2D
    codes = [code.builtinCode for code in model.operatorCodes]
    return any(
        codes[one.opcodeIndex] == kind and graph.tensors[one.inputs[1]] is tensor
        for one in graph.operators
    )


def _set_scales(tensor: Any, scales: np.ndarray, axis: int) -> None:
    about = tensor.quantization
    about.scale = scales.astype(np.float32)
    about.zeroPoint = np.zeros(scales.size, np.int64)
    about.quantizedDimension = axis
    about.min = about.max = None  # of the converter's own integers


def _rescale_biases(
    model: Any, graph: Any, tensor: Any, before: np.ndarray, now: np.ndarray, types: Any
) -> None:
    """Gives the biases beside a kernel the scales `s_input * now`."""
    for one in graph.operators:
        inputs = [graph.tensors[k] if k >= 0 else None for k in one.inputs]
        if not any(other is tensor for other in inputs):
            continue
        for bias in inputs:
            if bias is None or bias.type != types.INT32 or bias.quantization is None:
                continue
            if bias.quantization.scale is None or len(bias.shape) != 1:
                continue
            ratio = np.asarray(now / before, np.float64)
            data = np.asarray(model.buffers[bias.buffer].data).view("<i4")
            if data.size != ratio.size:
                continue
            new = np.rint(data / ratio).astype("<i4")
            # Another bias of equal values may share the buffer.
            model.buffers.append(type(model.buffers[0])())
            model.buffers[-1].data = new.view("u1").copy()
            bias.buffer = len(model.buffers) - 1
            scale = np.asarray(bias.quantization.scale, np.float64) * ratio
            bias.quantization.scale = scale.astype(np.float32)
            bias.quantization.zeroPoint = np.zeros(scale.size, np.int64)
