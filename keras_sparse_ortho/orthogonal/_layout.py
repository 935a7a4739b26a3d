"""Which axes of a kernel are inputs, outputs, taps, groups and gates; strides as phases."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho.errors import LayoutError


@dataclasses.dataclass(frozen=True)
class KernelLayout:
    """What the axes of a kernel mean: one matrix for each tap, group and gate.

    A kernel is moved to the canonical shape `(batch, groups * gates, *spatial, inputs, outputs)`,
    where every `(inputs, outputs)` slice is a matrix. Axes not named are spatial. Negative axes
    make one layout fit convolutions of every dimension.

    Args:
        inputs: Axes that are summed over, flattened in this order. Empty: one input (depthwise).
        outputs: Axes that number the outputs, flattened in this order.
        batch: Axes along which the kernel holds independent matrices (depthwise channels).
        groups: Number of convolution groups. The outputs split into as many equal parts, each
            connected to its own inputs; the input axis has length `in / groups`.
        gates: Number of gates of a recurrent kernel. The outputs split into as many equal parts,
            each with its own orthogonal matrix.
        strides: Strides of a convolution along its spatial axes, or one for all. `()` means 1.
            Only kernels with entries on several taps depend on them.
        transposed: Whether this is a transposed convolution, whose outputs have the phases.

    Raises:
        LayoutError: Axes, groups, gates or strides that do not fit the kernel.

    Example:

    >>> KernelLayout.convolution(groups=2).matrix_shape((3, 3, 8, 32))
    (8, 16)
    >>> KernelLayout.recurrent(gates=4).matrix_shape((64, 256))
    (64, 64)
    >>> KernelLayout.einsum("abc,cde->abde").matrix_shape((128, 8, 16))
    (128, 128)
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    batch: tuple[int, ...] = ()
    groups: int = 1
    gates: int = 1
    strides: tuple[int, ...] = ()
    transposed: bool = False

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "batch"):
            axes = getattr(self, name)
            if isinstance(axes, int):
                axes = (axes,)
            # JSON turns tuples into lists.
            object.__setattr__(self, name, tuple(int(axis) for axis in axes))
        for name in ("groups", "gates"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(f"`{name}` must be a positive integer. Received: {name}={value}")
        strides = _as_tuple(self.strides)
        if any(isinstance(s, bool) or not isinstance(s, int) or s < 1 for s in strides):
            raise LayoutError(
                f"`strides` must be positive integers. Received: strides={self.strides!r}"
            )
        object.__setattr__(self, "strides", strides if any(s > 1 for s in strides) else ())

    @classmethod
    def dense(cls) -> "KernelLayout":
        """`(in, out)`: Dense, SimpleRNN, and an Embedding's `(words, features)`."""
        return cls(inputs=(-2,), outputs=(-1,))

    @classmethod
    def convolution(cls, groups: int = 1, strides: int | tuple[int, ...] = ()) -> "KernelLayout":
        """`(*spatial, in / groups, out)`: Conv1D, Conv2D, Conv3D."""
        return cls(inputs=(-2,), outputs=(-1,), groups=groups, strides=_as_tuple(strides))

    @classmethod
    def transposed_convolution(cls, strides: int | tuple[int, ...] = ()) -> "KernelLayout":
        """`(*spatial, out, in)`: Conv1DTranspose, Conv2DTranspose, Conv3DTranspose."""
        return cls(inputs=(-1,), outputs=(-2,), strides=_as_tuple(strides), transposed=True)

    @classmethod
    def depthwise(cls, strides: int | tuple[int, ...] = ()) -> "KernelLayout":
        """`(*spatial, channels, depth_multiplier)`: one matrix of one row for each channel."""
        return cls(inputs=(), outputs=(-1,), batch=(-2,), strides=_as_tuple(strides))

    @classmethod
    def recurrent(cls, gates: int) -> "KernelLayout":
        """`(in, gates * units)`: kernels and recurrent kernels of LSTM (4) and GRU (3)."""
        return cls(inputs=(-2,), outputs=(-1,), gates=gates)

    @classmethod
    def einsum(cls, equation: str) -> "KernelLayout":
        """The layout of an EinsumDense kernel: its inputs are the axes that are summed over."""
        try:
            operands, output = equation.replace("...", "").replace(" ", "").split("->")
            data, kernel = operands.split(",")
        except ValueError:
            raise LayoutError(
                "An einsum equation must have the form 'input,kernel->output'. "
                f"Received: equation={equation!r}"
            ) from None
        axes = list(enumerate(kernel))
        return cls(
            inputs=tuple(k for k, name in axes if name in data and name not in output),
            outputs=tuple(k for k, name in axes if name not in data),
            batch=tuple(k for k, name in axes if name in data and name in output),
        )

    def get_config(self) -> dict[str, Any]:
        config = dataclasses.asdict(self)
        return {name: list(v) if isinstance(v, tuple) else v for name, v in config.items()}

    @property
    def parts(self) -> int:
        """`groups * gates`."""
        return self.groups * self.gates

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Inputs and outputs of one matrix: the last two axes of `canonical_shape`."""
        *_, inputs, outputs = self.canonical_shape(shape)
        return inputs, outputs

    def tap_strides(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The stride along each spatial axis of a kernel of shape `shape`."""
        axes = len(self.canonical_shape(shape)) - 4
        if len(self.strides) in (0, 1):
            return (self.strides or (1,)) * axes
        if len(self.strides) != axes:
            raise LayoutError(
                f"`strides` must have one value for each of the {axes} spatial axes of a kernel of "
                f"shape {tuple(shape)}, or one for all. Received: strides={self.strides}"
            )
        return self.strides

    def polyphase_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Inputs and outputs of one matrix of a strided convolution, phases included.

        A convolution of stride `s` reads `s` interleaved phases of its input along each axis; a
        transposed one writes as many. Phases that the window does not reach do not count.
        """
        inputs, outputs = self.matrix_shape(shape)
        taps = self.canonical_shape(shape)[2:-2]
        phases = math.prod(map(min, taps, self.tap_strides(shape)))
        return (inputs, phases * outputs) if self.transposed else (phases * inputs, outputs)

    def matrices(self, shape: Sequence[int]) -> int:
        """Number of matrices at one tap: batch times groups times gates."""
        batch, parts, *_ = self.canonical_shape(shape)
        return batch * parts

    def canonical_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape `(batch, parts, *spatial, inputs, outputs)` of a kernel of shape `shape`."""
        shape = tuple(int(size) for size in shape)
        batch, spatial, inputs, outputs = (
            [shape[axis] for axis in axes] for axes in self._resolved(shape)
        )
        total = math.prod(outputs)
        if total % self.parts:
            raise LayoutError(
                f"The {total} outputs of a kernel of shape {shape} cannot be divided into "
                f"{self.groups} groups of {self.gates} gates. Received: layout={self}"
            )
        return (math.prod(batch), self.parts, *spatial, math.prod(inputs), total // self.parts)

    def to_canonical(self, kernel: np.ndarray) -> np.ndarray:
        """Moves a kernel to `(batch, parts, *spatial, inputs, outputs)`; a view where possible."""
        batch, spatial, inputs, outputs = self._resolved(kernel.shape)
        _, parts, *taps, rows, columns = canonical = self.canonical_shape(kernel.shape)
        moved = kernel.transpose(*batch, *spatial, *inputs, *outputs)
        moved = moved.reshape(canonical[0], *taps, rows, parts, columns)
        return np.moveaxis(moved, -2, 1)

    def from_canonical(self, canonical: np.ndarray, shape: Sequence[int]) -> np.ndarray:
        """The inverse of `to_canonical`, for a kernel of shape `shape`."""
        order = [axis for axes in self._resolved(shape) for axis in axes]
        moved = np.moveaxis(canonical, 1, -2).reshape([shape[axis] for axis in order])
        return moved.transpose(np.argsort(order))

    def _resolved(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Non-negative batch, spatial, input and output axes for a kernel of this shape."""
        rank = len(shape)
        named = [self.batch, self.inputs, self.outputs]
        flat = [axis + rank if axis < 0 else axis for axes in named for axis in axes]
        if len(set(flat)) < len(flat) or any(not 0 <= axis < rank for axis in flat):
            raise LayoutError(
                f"The layout's axes must be distinct axes of the kernel of shape {tuple(shape)}. "
                f"Received: layout={self}"
            )
        if any(size < 1 for size in shape):
            raise LayoutError(
                f"All dimensions of a kernel must be positive. Received: shape={tuple(shape)}"
            )
        batch = tuple(flat[: len(self.batch)])
        inputs = tuple(flat[len(self.batch) : len(self.batch) + len(self.inputs)])
        outputs = tuple(flat[len(self.batch) + len(self.inputs) :])
        spatial = tuple(axis for axis in range(rank) if axis not in flat)
        return batch, spatial, inputs, outputs


def _as_tuple(strides: Any) -> tuple[Any, ...]:
    return tuple(strides) if isinstance(strides, tuple | list) else (strides,)


def to_polyphase(kernel: np.ndarray, layout: KernelLayout) -> np.ndarray:
    """A strided convolution as one of stride 1 between phases.

    A convolution with stride `s`, `y[p] = sum_u K[u] x[s p + u]`, reads its input as `s`
    interleaved phases `x_f[p] = x[s p + f]`. With `u = s v + f` it is one of stride 1,
    `y[p] = sum_f sum_v K[s v + f] x_f[p + v]`, with `s` times as many inputs `(phase, input)`. A
    transposed convolution is the adjoint. Returns `A` of shape
    `(batch, groups * gates, *places, inputs, outputs)` with the sides of `layout.polyphase_shape`,
    phase 0 first. Under circular padding the convolution is an isometry if `sum_v A[v] A[v + w]^T`
    is the identity for `w = 0` and zero for all other `w`.

    >>> kernel = np.arange(3.0).reshape(3, 1, 1)
    >>> to_polyphase(kernel, KernelLayout.convolution(strides=2))[0, 0, :, :, 0].tolist()
    [[0.0, 1.0], [2.0, 0.0]]
    """
    canonical = layout.to_canonical(kernel)
    if layout.transposed:
        canonical = np.swapaxes(canonical, -1, -2)
    *matrices, channels, columns = canonical.shape
    taps, strides = matrices[2:], layout.tap_strides(kernel.shape)
    places = [-(-k // s) for k, s in zip(taps, strides, strict=True)]
    reached = [min(k, s) for k, s in zip(taps, strides, strict=True)]
    parts = np.zeros((math.prod(reached), *matrices[:2], *places, channels, columns))
    for part, phase in zip(parts, np.ndindex(*reached), strict=True):
        index = tuple(slice(f, None, s) for f, s in zip(phase, strides, strict=True))
        found = canonical[(slice(None), slice(None), *index)]
        part[tuple(slice(0, size) for size in found.shape)] = found
    rows = np.moveaxis(parts, 0, -3)
    rows = rows.reshape(*rows.shape[:-3], len(parts) * channels, columns)
    return np.swapaxes(rows, -1, -2) if layout.transposed else rows
