"""Kernels in integers: how many bits one needs, and the largest value of each channel."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from ai_edge_quantizer.utils import tfl_flatbuffer_utils as files

from keras_sparse_ortho.export._flatbuffer import (
    ModelT,
    OperatorT,
    SubGraphT,
    name_of,
)
from keras_sparse_ortho.export._graph_changes import aeq_operations

_EXACT = 1e-3  # of a step, by which a rounded weight may differ from a multiple of it
_LEAST_CERTAIN = 256  # entries: smaller kernels may be whole steps by chance
# Entries of a kernel of fewer than 8 bits, by the kind of a file.
LEAST_OF_FEW_BITS = {"dynamic": 1024, "static": 256}
_LARGEST = 127  # of 8 bits
_LARGEST_OF_4_BITS = 7
_TINY = 1e-9  # of a kernel: weight decay leaves rows of 1e-37, in whose steps no bias fits
_COLUMNS_TRIED_FIRST = 64


@dataclasses.dataclass
class IntegerKernel:
    """A kernel that a file will have in integers.

    Attributes:
        graph: The graph of the operation that reads it.
        operator: That operation.
        is_dense: bool. Whether that is a FULLY_CONNECTED.
        name: str. The name of its tensor.
        values: Array. The values.
        axis: int. The axis of the channels, each with a scale.
        steps: Array `(channels,)`, see `steps_of`.
        bits: int. The bits of an integer.
        bounds: Array that broadcasts. The values that the largest integer stands for.
    """

    graph: SubGraphT
    operator: OperatorT
    is_dense: bool
    name: str
    values: np.ndarray
    axis: int
    steps: np.ndarray
    bits: int = 8
    bounds: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(()))

    @property
    def largest_integer(self) -> int:
        return 2 ** (self.bits - 1) - 1


def integer_kernels(
    model: ModelT, kind: str, widths: Sequence[int]
) -> list[IntegerKernel]:
    """The kernels that AEQ quantizes, with the bits that they need and their bounds.

    Args:
        model: The file.
        kind: str. "static" or "dynamic".
        widths: Bits that large kernels of Dense layers may have, besides 8, in ascending order.
    """
    kernels = _kernels(model)
    large = [
        kernel for kernel in kernels if kernel.values.size >= _LEAST_CERTAIN
    ]
    are_trained = any(kernel.steps.min() >= 0 for kernel in large)
    for kernel in kernels:
        largest = _LARGEST if are_trained else _LARGEST_OF_4_BITS
        if kernel.steps.min() >= 0:
            largest = int(kernel.steps.max())
        if kernel.is_dense and kernel.values.size >= LEAST_OF_FEW_BITS[kind]:
            fitting = [bits for bits in widths if largest < 2 ** (bits - 1)]
            kernel.bits = min(fitting, default=8)
        kernel.bounds = _bounds(kernel)
    return kernels


def _kernels(model: ModelT) -> list[IntegerKernel]:
    """The constants of floats that AEQ knows as kernels."""
    kernels = []
    for graph, operator, kind in aeq_operations(model):
        axis = files.TFL_OP_TO_WEIGHT_QUANTIZED_DIM.get(kind)
        if axis is None:
            continue
        tensor = graph.tensors[operator.inputs[1]]
        values = files.get_tensor_data(tensor, model.buffers)
        if values is None or values.dtype != np.float32:
            continue
        kernel = IntegerKernel(
            graph=graph,
            operator=operator,
            is_dense=kind == "FULLY_CONNECTED",
            name=name_of(tensor),
            values=values,
            axis=axis,
            steps=steps_of(magnitudes(values, axis)),
        )
        kernels.append(kernel)
    return kernels


def magnitudes(values: np.ndarray, axis: int) -> np.ndarray:
    """The sizes of entries, with a row for each place on an axis."""
    rows = np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
    return np.abs(rows)


def _bounds(kernel: IntegerKernel) -> np.ndarray:
    """The value of each channel that the largest integer stands for, in a shape that broadcasts.

    Trained channels get the finest step of whole integers, in which biases are rounded, those of
    zeros the widest bound: in AEQ's, 1e-9, no bias fits 32 bits.
    """
    values = kernel.values
    steps = kernel.steps
    largest = kernel.largest_integer
    peaks = (
        magnitudes(values, kernel.axis)
        .max(axis=1, initial=0)
        .astype(np.float64)
    )
    peaks = np.where(peaks < _TINY * peaks.max(initial=0), 0, peaks)
    is_trained = (steps > 0) & (steps <= largest)
    whole_steps = largest // np.maximum(steps, 1) * steps
    integers_of_peaks = np.where(is_trained, whole_steps, largest)
    widest = peaks.max() or 1.0
    bounds = np.where(peaks > 0, peaks * largest / integers_of_peaks, widest)
    shape = [1] * values.ndim
    shape[kernel.axis] = -1
    return bounds.astype(np.float32).reshape(shape)


def steps_of(rows: np.ndarray) -> np.ndarray:
    """The least `m <= 127` with multiples of `max|row| / m` by row; 0 for zeros, -1 for none."""
    rows = np.abs(rows).astype(np.float64)
    peaks = rows.max(axis=1, keepdims=True, initial=0)
    parts = rows / np.where(peaks > 0, peaks, 1)
    stride = -(-parts.shape[1] // _COLUMNS_TRIED_FIRST)
    samples = parts[:, ::stride]
    steps = np.where(peaks[:, 0] > 0, -1, 0)
    likely = range(1, _LARGEST_OF_4_BITS + 1)
    for count in (
        *likely,
        _LARGEST,
        *range(_LARGEST_OF_4_BITS + 1, _LARGEST),
    ):
        open_rows = np.flatnonzero(steps < 0)
        for columns in (samples, parts):
            multiples = columns[open_rows] * count
            errors = np.abs(multiples - np.rint(multiples))
            open_rows = open_rows[np.all(errors <= _EXACT, axis=1)]
        steps[open_rows] = count
    return steps
