"""Kernels as matrices: which rows of numbers a layer multiplies by its kernel."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import float64_operations, on_cpu
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.calibration._solve import as_float64, diagonal, namespace
from keras_sparse_ortho.calibration._sweep import Stop
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight

L = keras.layers

# Entries of the rows that are in memory at once: half a gigabyte in float64.
_CHUNK = 2**26

AsGiven = Callable[[], contextlib.AbstractContextManager[Any]]
"""Makes a scope in which a model has the values that it came with."""


@dataclasses.dataclass(frozen=True)
class LinearKernel:
    """A kernel that its layer applies to its inputs as `M` matrices, `rows(x) @ matrices`.

    Args:
        weight: The kernel.
        rows: From the layer's inputs to a tensor of shape `(M, rows, k)`, where `k` is taps times
            inputs of one matrix, and `M` batch times parts of the canonical shape.
        taps: Of a convolution.
    """

    weight: PrunableWeight
    rows: Callable[[Any], Any]
    taps: int = 1

    def moments(
        self, inputs: Any, reference: Any = None, as_given: AsGiven = contextlib.nullcontext
    ) -> tuple[Any, Any]:
        """`X^T X` and `X^T (Y - X)`, `(M, k, k)` in float64, in pieces that fit into memory.

        To be called inside `float64_operations`. `X` are the rows of the layer's inputs, `Y` those
        of `reference`, its inputs in the given model; without one the second result is 0. Inside
        `as_given()` the layer has the values that it came with.
        """
        xp = namespace(inputs)
        samples = count = int(inputs.shape[0])
        if self.taps > 1:  # patches repeat an input for each tap, at most
            samples = max(1, _CHUNK * count // max(1, math.prod(inputs.shape) * self.taps))
        total: Any = 0.0
        across: Any = 0.0
        for start in range(0, count, samples):
            rows = self.rows(inputs[start : start + samples])
            if reference is not None:
                with as_given():
                    wanted = self.rows(reference[start : start + samples])
            matrices, length, k = (int(size) for size in rows.shape)
            step = max(1, _CHUNK // (matrices * k))
            for first in range(0, length, step):
                part = as_float64(rows[:, first : first + step])
                turned = xp.transpose(part, (0, 2, 1))
                total = total + xp.matmul(turned, part)
                if reference is not None:
                    left = as_float64(wanted[:, first : first + step]) - part
                    across = across + xp.matmul(turned, left)
        return total, across


@dataclasses.dataclass(frozen=True)
class Moments:
    """`X^T X` of a layer's inputs, and `X^T (Y - X)` where those of the given model are `Y`.

    `held` is `X^T X` of the rows that were held out, which `gram` lacks.
    """

    gram: Any
    across: Any = None
    held: Any = None


class GramStop(Stop):
    """Sums the moments over the batches at the layer of a kernel, then calls `solve` with them.

    One of `hold_out` rows of each batch is held out, to judge what the others give; 1: none.
    """

    def __init__(
        self,
        kernel: LinearKernel,
        solve: Callable[[Moments], None],
        as_given: AsGiven = contextlib.nullcontext,
        hold_out: int = 1,
    ) -> None:
        super().__init__(kernel.weight.owner, kernel.weight.path)
        self._kernel = kernel
        self._solve = solve
        self._as_given = as_given
        self._hold_out = hold_out
        self._sums: list[Any] = [0.0, 0.0, 0.0]  # the fields of `Moments`

    def add(self, inputs: Any, reference: Any = None, **options: Any) -> None:
        if on_cpu(inputs):
            inputs = to_numpy(inputs, copy=False)
            reference = None if reference is None else to_numpy(reference, copy=False)
        with float64_operations():
            own = [0.0]
            if self._hold_out > 1 and len(inputs) >= self._hold_out:
                held = np.arange(len(inputs)) % self._hold_out == self._hold_out - 1
                own = [self._kernel.moments(inputs[held])[0]]
                inputs = inputs[~held]
            own = [*self._kernel.moments(inputs, reference, self._as_given), *own]
            self._sums = [a + b for a, b in zip(self._sums, own, strict=True)]

    def finish(self) -> None:
        sums, self._sums = self._sums, []  # freed once they are solved for
        gram, across, held = (None if isinstance(x, float) else x for x in sums)
        with float64_operations():
            squares = float(namespace(gram).sum(diagonal(gram)))
        if not np.isfinite(squares):
            raise NotPrunableError(
                f"The inputs of the layer that owns '{self.path}' must be finite on the "
                f"calibration data. Received: a sum of squares of {squares}"
            )
        self._solve(Moments(gram, across, held))


def as_matrices(kernel: np.ndarray, layout: KernelLayout | None) -> np.ndarray:
    """A kernel as `(batch * parts, taps * inputs, outputs)`."""
    canonical = (layout or KernelLayout.convolution()).to_canonical(kernel)
    batch, parts, *taps, inputs, outputs = canonical.shape
    return canonical.reshape(batch * parts, math.prod(taps) * inputs, outputs)


def from_matrices(
    matrices: np.ndarray, shape: tuple[int, ...], layout: KernelLayout | None
) -> np.ndarray:
    """The inverse of `as_matrices`, for a kernel of shape `shape`."""
    layout = layout or KernelLayout.convolution()
    return layout.from_canonical(matrices.reshape(layout.canonical_shape(shape)), shape)


def linear_kernel(weight: PrunableWeight, owner: Any) -> LinearKernel | None:
    """How a plain layer applies one of its kernels; `None` where that is not known."""
    for kinds, name, rows in _KINDS:
        kind = next((kind for kind in kinds if isinstance(owner, kind)), None)
        if kind is None or weight.path.rpartition("/")[2] != name:
            continue
        calls = ("call", "convolution_op")
        if all(getattr(type(owner), c, None) is getattr(kind, c, None) for c in calls):
            found = rows(owner)
            taps = math.prod(getattr(owner, "kernel_size", ()))
            return None if found is None else LinearKernel(weight, found, taps)
    return None


def _dense(layer: Any) -> Callable[[Any], Any]:
    return lambda x: namespace(x).reshape(x, (1, -1, x.shape[-1]))


def _einsum_dense(layer: Any) -> Callable[[Any], Any] | None:
    """The inputs with their batch axes first, and those that are summed over last."""
    operands, output = layer.equation.replace(" ", "").split("->")
    data, kernel = operands.split(",")
    if any(name not in data and name not in output for name in kernel):
        return None  # the kernel alone is summed along an axis
    batch = "".join(name for name in kernel if name in data and name in output)
    summed = "".join(name for name in kernel if name in data and name not in output)

    def rows(x: Any) -> Any:
        more = len(x.shape) - len(data.replace("...", ""))
        unused = [letter for letter in "abcdefghijklmnopqrstuvwxyz" if letter not in layer.equation]
        own = data.replace("...", "".join(unused[:more]))
        free = "".join(n for n in own if n not in kernel and (n in output or n not in data))
        xp = namespace(x)
        x = xp.einsum(f"{own}->{batch}{free}{summed}", x)
        shape = [int(size) for size in x.shape]
        matrices = math.prod(shape[: len(batch)])
        return xp.reshape(x, (matrices, -1, math.prod(shape[len(shape) - len(summed) :])))

    return rows


def _convolution(layer: Any) -> Callable[[Any], Any]:
    return functools.partial(_patches, layer, groups=layer.groups)


def _depthwise(layer: Any) -> Callable[[Any], Any]:
    return functools.partial(_patches, layer, groups=None)


def _pointwise(layer: Any) -> Callable[[Any], Any]:
    """What the depthwise kernel, which comes first, makes of the inputs."""

    def rows(x: Any) -> Any:
        xp = namespace(x)
        kernel = layer.depthwise_kernel
        kernel = to_numpy(kernel) if xp is np else keras.ops.convert_to_tensor(kernel)
        channels, multiplier = kernel.shape[-2:]
        kernel = xp.transpose(xp.reshape(kernel, (-1, channels, multiplier)), (1, 0, 2))
        found = xp.matmul(as_float64(_patches(layer, x, groups=None)), as_float64(kernel))
        return xp.reshape(xp.transpose(found, (1, 0, 2)), (1, -1, channels * multiplier))

    return rows


def _patches(layer: Any, x: Any, groups: int | None) -> Any:
    """`(groups, positions, taps * channels)`: what the kernel meets at each position.

    With `groups=None` every channel is its own group.
    """
    xp = namespace(x)
    if layer.data_format == "channels_first":
        x = xp.moveaxis(x, 1, -1)
    sizes = [int(size) for size in x.shape[1:-1]]
    steps = list(zip(sizes, layer.kernel_size, layer.strides, layer.dilation_rate, strict=True))
    padding = [_padding(layer.padding, *step) for step in steps]
    x = xp.pad(x, ((0, 0), *padding, (0, 0)))
    counts = [
        (size + sum(pad) - d * (k - 1) - 1) // s + 1
        for (size, k, s, d), pad in zip(steps, padding, strict=True)
    ]
    taps = []
    for tap in np.ndindex(*layer.kernel_size):
        starts = [t * d for t, d in zip(tap, layer.dilation_rate, strict=True)]
        index = [
            slice(start, start + (count - 1) * s + 1, s)
            for start, count, s in zip(starts, counts, layer.strides, strict=True)
        ]
        taps.append(x[(slice(None), *index)])
    channels = int(x.shape[-1])
    groups = channels if groups is None else groups
    patches = xp.reshape(xp.stack(taps, axis=-2), (-1, len(taps), groups, channels // groups))
    return xp.reshape(
        xp.transpose(patches, (2, 0, 1, 3)), (groups, -1, len(taps) * channels // groups)
    )


def _padding(kind: str, size: int, taps: int, stride: int, dilation: int) -> tuple[int, int]:
    """Zeros before and after, as all backends of Keras pad."""
    span = dilation * (taps - 1) + 1
    if kind == "causal":
        return span - 1, 0
    if kind == "valid":
        return 0, 0
    missing = max((-(-size // stride) - 1) * stride + span - size, 0)
    return missing // 2, missing - missing // 2


_KINDS: tuple[tuple[tuple[Any, ...], str, Callable[[Any], Callable[[Any], Any] | None]], ...] = (
    ((L.Dense,), "kernel", _dense),
    ((L.EinsumDense,), "kernel", _einsum_dense),
    ((L.Conv1D, L.Conv2D, L.Conv3D), "kernel", _convolution),
    ((L.DepthwiseConv1D, L.DepthwiseConv2D), "kernel", _depthwise),
    ((L.SeparableConv1D, L.SeparableConv2D), "depthwise_kernel", _depthwise),
    ((L.SeparableConv1D, L.SeparableConv2D), "pointwise_kernel", _pointwise),
)
