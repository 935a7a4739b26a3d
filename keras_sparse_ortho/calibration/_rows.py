"""The rows of a layer's inputs, which its kernel multiplies."""

import math
from collections.abc import Callable
from typing import Any, Protocol

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight
from keras_sparse_ortho.orthogonal import einsum_axes

L = keras.layers

_DIGIT = 256  # float32 holds such digits exactly
_DIGITS = 4


class Rows(Protocol):
    """From a layer's inputs to the rows that its kernel multiplies, float64 `(M, rows, k)`.

    `k` is taps times inputs of one matrix, and `M` batch times parts of the canonical shape, or 1
    where all matrices multiply the same rows.
    """

    def __call__(
        self,
        x: np.ndarray,
        chosen: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns the rows at all positions, or at chosen ones.

        Args:
            x: array `(samples, ...)`. Inputs of the layer.
            chosen: int array `(samples, count)`. Positions of each sample, of `positions(x)`.
        """

    def positions(self, x: np.ndarray) -> int | None:
        """How many positions a sample has; `None` where rows cannot be chosen."""

    def growth(self) -> int:
        """How many entries of rows there are for an entry of the inputs, at most."""


def rows_of(
    layer: Any,
    kernel: str,
) -> Rows | None:
    """The rows of a kernel of a plain layer; `None` if it is unknown how it is applied.

    Args:
        layer: Layer or cell that owns the kernel.
        kernel: str. The last part of the kernel's path.
    """
    for kinds, rows_by_kernel in _KINDS.items():
        for kind in kinds:
            if not isinstance(layer, kind):
                continue
            make = rows_by_kernel.get(kernel)
            if make is None or _has_other_call(layer, kind):
                return None
            return make(layer)
    return None


def is_cell(layer: Any) -> bool:
    """Whether a recurrent layer around this one gives it its inputs."""
    return isinstance(layer, _CELLS)


def canonical_shape(weight: PrunableWeight) -> tuple[int, ...]:
    """`(batch, parts, *taps, inputs, outputs)`."""
    layout = weight.layout or KernelLayout.convolution()
    return layout.canonical_shape(weight.shape)


def as_matrices(
    kernel: np.ndarray,
    layout: KernelLayout | None,
) -> np.ndarray:
    """A kernel as `(batch * parts, taps * inputs, outputs)`."""
    layout = layout or KernelLayout.convolution()
    canonical = layout.to_canonical(kernel)
    batch, parts, *taps, inputs, outputs = canonical.shape
    return canonical.reshape(batch * parts, math.prod(taps) * inputs, outputs)


def from_matrices(
    matrices: np.ndarray,
    shape: tuple[int, ...],
    layout: KernelLayout | None,
) -> np.ndarray:
    """The kernel of a shape that `as_matrices` gives these matrices for."""
    layout = layout or KernelLayout.convolution()
    return layout.from_canonical(
        matrices.reshape(layout.canonical_shape(shape)), shape
    )


def _has_other_call(
    layer: Any,
    kind: type,
) -> bool:
    """Whether a class derived from Keras' own computes its outputs in another way."""
    for name in ("call", "convolution_op"):
        method = getattr(type(layer), name, None)
        if method is not getattr(kind, name, None):
            return True
    return False


class _AllRows:
    """Rows of layers that are not convolutions: none can be chosen."""

    def positions(self, x: np.ndarray) -> int | None:
        return None

    def growth(self) -> int:
        return 1


class _LastAxis(_AllRows):
    """The inputs of a dense layer: their last axis is summed."""

    def __call__(
        self,
        x: np.ndarray,
        chosen: np.ndarray | None = None,
    ) -> np.ndarray:
        rows = x.astype(np.float64)
        return rows.reshape(1, -1, x.shape[-1])


class _EinsumDense(_AllRows):
    """The inputs with their batch axes first, and the summed ones last."""

    def __init__(self, layer: Any) -> None:
        self._equation = layer.equation

    def __call__(
        self,
        x: np.ndarray,
        chosen: np.ndarray | None = None,
    ) -> np.ndarray:
        data, kernel, output = einsum_axes(self._equation, x.ndim)
        batch = [name for name in kernel if name in data and name in output]
        summed = [
            name for name in kernel if name in data and name not in output
        ]
        free = [name for name in data if name in output and name not in kernel]
        order = [data.index(name) for name in (*batch, *free, *summed)]
        ordered = np.einsum(x.astype(np.float64), range(x.ndim), order)
        matrices = ordered.shape[: len(batch)]
        inputs = ordered.shape[ordered.ndim - len(summed) :]
        return ordered.reshape(math.prod(matrices), -1, math.prod(inputs))


class _Convolution:
    """The inputs of the kernel at each position: `(groups, positions, taps * channels)`."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self._inputs_by_sizes: dict[tuple[int, ...], np.ndarray] = {}

    def __call__(
        self,
        x: np.ndarray,
        chosen: np.ndarray | None = None,
    ) -> np.ndarray:
        """The patches of the inputs, a matrix for each group, at chosen positions."""
        x = self._channels_last(x)
        samples = len(x)
        channels = x.shape[-1]
        inputs = self._inputs_of_taps(x)
        # Input 0 is a zero of the padding.
        flat = x.reshape(samples, -1, channels)
        flat = np.pad(flat, ((0, 0), (1, 0), (0, 0)))
        if chosen is None:
            patches = flat[:, inputs]
        else:
            of_sample = np.arange(samples)[:, None, None]
            patches = flat[of_sample, inputs[chosen]]
        groups = self._groups(channels)
        by_group = patches.reshape(
            -1,
            inputs.shape[1],
            groups,
            channels // groups,
        )
        rows = np.moveaxis(by_group.astype(np.float64), 2, 0)
        return rows.reshape(groups, len(by_group), -1)

    def positions(self, x: np.ndarray) -> int | None:
        return len(self._inputs_of_taps(self._channels_last(x[:1])))

    def growth(self) -> int:
        taps = math.prod(self._layer.kernel_size)
        if isinstance(self._layer, _TRANSPOSED):
            return taps * math.prod(self._layer.strides)
        return taps

    def _groups(self, channels: int) -> int:
        if isinstance(self._layer, _DEPTHWISE):
            return channels
        return getattr(self._layer, "groups", 1)

    def _channels_last(self, x: np.ndarray) -> np.ndarray:
        """The inputs with channels last, and the padding that the convolution itself lacks."""
        if self._layer.data_format == "channels_first":
            x = np.moveaxis(x, 1, -1)
        if self._layer.padding == "causal":
            span = self._layer.dilation_rate[0] * (
                self._layer.kernel_size[0] - 1
            )
            x = np.pad(x, ((0, 0), (span, 0), (0, 0)))
        return x

    def _inputs_of_taps(self, x: np.ndarray) -> np.ndarray:
        """Which input each tap meets at each position, from 1; 0 for none. `(positions, taps)`."""
        sizes = x.shape[1:-1]
        if sizes not in self._inputs_by_sizes:
            self._inputs_by_sizes[sizes] = _inputs_of_taps(self._layer, sizes)
        return self._inputs_by_sizes[sizes]


def _inputs_of_taps(
    layer: Any,
    sizes: tuple[int, ...],
) -> np.ndarray:
    """The numbers of inputs, moved by a convolution with a channel for each tap."""
    numbers = np.arange(1, math.prod(sizes) + 1)
    digits = [numbers // _DIGIT**power % _DIGIT for power in range(_DIGITS)]
    images = np.stack(digits).reshape(_DIGITS, *sizes, 1).astype("float32")
    taps = math.prod(layer.kernel_size)
    each_tap = np.eye(taps, dtype="float32")
    settings = {
        "strides": layer.strides,
        "dilation_rate": layer.dilation_rate,
        "padding": "valid" if layer.padding == "causal" else layer.padding,
        "data_format": "channels_last",
    }
    if isinstance(layer, _TRANSPOSED):
        kernel = each_tap.reshape(*layer.kernel_size, taps, 1)
        settings["output_padding"] = layer.output_padding
        moved = keras.ops.conv_transpose(images, kernel, **settings)
    else:
        kernel = each_tap.reshape(*layer.kernel_size, 1, taps)
        moved = keras.ops.conv(images, kernel, **settings)
    moved_digits = np.rint(to_numpy(moved)).astype(np.int64)
    powers = _DIGIT ** np.arange(_DIGITS)
    return np.tensordot(powers, moved_digits.reshape(_DIGITS, -1, taps), 1)


class _Pointwise(_Convolution):
    """The output of the depthwise part of a separable convolution at each position."""

    def __call__(
        self,
        x: np.ndarray,
        chosen: np.ndarray | None = None,
    ) -> np.ndarray:
        kernel = to_numpy(self._layer.depthwise_kernel).astype(np.float64)
        matrices = as_matrices(kernel, KernelLayout.depthwise())
        patches = super().__call__(x, chosen)
        by_channel = patches @ matrices
        by_position = np.moveaxis(by_channel, 0, 1)
        return by_position.reshape(1, len(by_position), -1)


def _last_axis(layer: Any) -> Rows:
    return _LastAxis()


def _states(cell: Any) -> Rows | None:
    """A GRU that resets states before its product multiplies other ones than those of its steps."""
    return _LastAxis() if getattr(cell, "reset_after", True) else None


def _einsum(layer: Any) -> Rows | None:
    data, kernel, output = einsum_axes(layer.equation)
    if any(name not in data and name not in output for name in kernel):
        return None  # the kernel alone is summed along an axis
    return _EinsumDense(layer)


_PLAIN = (L.Conv1D, L.Conv2D, L.Conv3D, L.DepthwiseConv1D, L.DepthwiseConv2D)
_SEPARABLE = (L.SeparableConv1D, L.SeparableConv2D)
_DEPTHWISE = (L.DepthwiseConv1D, L.DepthwiseConv2D, *_SEPARABLE)
_TRANSPOSED = (L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose)
_CELLS = (L.SimpleRNNCell, L.GRUCell, L.LSTMCell)

RowsByKernel = dict[str, Callable[[Any], Rows | None]]
_KINDS: dict[tuple[type, ...], RowsByKernel] = {
    (L.Dense,): {"kernel": _last_axis},
    (L.EinsumDense,): {"kernel": _einsum},
    (*_PLAIN, *_TRANSPOSED): {"kernel": _Convolution},
    _SEPARABLE: {
        "depthwise_kernel": _Convolution,
        "pointwise_kernel": _Pointwise,
    },
    _CELLS: {"kernel": _last_axis, "recurrent_kernel": _states},
    (L.Embedding,): {"embeddings": _last_axis},
}
"""How to make the rows, by the classes of layers and the name of a kernel."""
