"""The rows of a layer's inputs, which its kernel multiplies, and their moments."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._interception import stand_in
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight, walk
from keras_sparse_ortho.orthogonal import einsum_axes

L = keras.layers

_CHUNK = 2**26  # entries of rows in memory at once: half a gigabyte in float64
HOLD_OUT = 4  # one of so many rows judges what is made of the others

Rows = Callable[[np.ndarray], np.ndarray]
"""From a layer's inputs to the rows that its kernel multiplies, `(M, rows, k)`.

`k` is taps times inputs of one matrix, and `M` batch times parts of the canonical shape, or 1
where all matrices multiply the same rows.
"""


@dataclasses.dataclass
class Moments:
    """`X^T X`, and `X^T (Y - X)` with the rows `Y` in the given model, in float64: `(M, k, k)`."""

    gram: Any = 0.0  # of tokens, which are one-hot rows, its diagonal alone, `(M, k)`
    across: Any = 0.0
    rows: int = 0

    def __add__(self, other: "Moments") -> "Moments":
        gram, across = self.gram + other.gram, self.across + other.across
        return Moments(gram, across, self.rows + other.rows)


class GramStop:
    """Sums the moments of rows of a layer for `solve(used, held)`; a quarter is held out."""

    def __init__(
        self, weight: PrunableWeight, layer: Any, rows: Rows, solve: Callable[..., None]
    ) -> None:
        self.layer, self.path, self.size = layer, weight.path, weight.shape[0]
        self._rows, self._solve = rows, solve
        self._sums = [Moments(), Moments()]

    def add(self, inputs: Any, reference: Any = None, **options: Any) -> None:
        x = to_numpy(inputs, copy=False)
        y = None if reference is None else to_numpy(reference, copy=False)
        held = np.arange(len(x)) % HOLD_OUT == HOLD_OUT - 1
        taps = math.prod(getattr(self.layer, "kernel_size", ()))
        if isinstance(self.layer, _TRANSPOSED):
            taps *= math.prod(self.layer.strides)
        size = max(1, _CHUNK * len(x) // max(1, x.size * taps))  # in pieces that fit into memory
        for start in range(0, len(x), size):
            piece = slice(start, start + size)
            for which, own in enumerate((~held[piece], held[piece])):
                if own.any():
                    given = None if y is None else y[piece][own]
                    self._sums[which] += self._moments(x[piece][own], given)

    def _moments(self, x: np.ndarray, y: np.ndarray | None) -> Moments:
        rows = self._rows(x.astype(np.float64))
        turned = np.swapaxes(rows, -1, -2)
        across = 0.0 if y is None else turned @ (self._rows(y.astype(np.float64)) - rows)
        return Moments(turned @ rows, across, rows.shape[1])

    def finish(self) -> None:
        sums, self._sums = self._sums, []  # freed once they are solved for
        gram = (sums[0] + sums[1]).gram
        squares = np.trace(gram, axis1=-2, axis2=-1).sum() if gram.ndim == 3 else gram.sum()
        if not np.isfinite(squares):
            raise NotPrunableError(
                f"The inputs of the layer that owns {self.path!r} must be finite on the "
                f"calibration data. Received: a sum of squares of {squares}"
            )
        self._solve(*sums)


class _TokenStop(GramStop):
    """For an embedding: its rows are one-hot, and their moments the counts of the tokens."""

    def _moments(self, x: np.ndarray, y: np.ndarray | None) -> Moments:
        counts = np.bincount(x.astype(np.int64).ravel(), minlength=self.size)
        return Moments(counts[None].astype(np.float64), rows=x.size)


class _CellStop(GramStop):
    """For a recurrent layer: unmasked inputs, or the states before them."""

    def add(self, inputs: Any, reference: Any = None, **options: Any) -> None:
        kept = options.get("mask")
        kept = None if kept is None else to_numpy(kept)[..., None]
        if self.path.endswith("recurrent_kernel"):
            layer = stand_in(self.layer, return_sequences=True, stateful=False)
            outputs = keras.tree.flatten(layer.call(inputs, **options))
            states = to_numpy(outputs[0], copy=False)
            initial = keras.tree.flatten(options.get("initial_state"))[0]
            first = np.zeros_like(states[:, 0]) if initial is None else to_numpy(initial)
            inputs, reference = np.concatenate([first[:, None], states[:, :-1]], axis=1), None
            if kept is not None and self.layer.go_backwards:
                kept = kept[:, ::-1]
        if kept is not None:
            inputs = to_numpy(inputs) * kept
            reference = None if reference is None else to_numpy(reference) * kept
        super().add(inputs, reference)


def stop_of(model: Any, weight: PrunableWeight, solve: Callable[..., None]) -> GramStop | None:
    """The stop for a kernel of a plain layer; `None` if it is unknown how it is applied."""
    owner, name = weight.owner, weight.path.rpartition("/")[2]
    known = [(k, rows) for kinds, rows in _KINDS.items() for k in kinds if isinstance(owner, k)]
    if not known or name not in known[0][1]:
        return None
    kind, calls = known[0][0], ("call", "convolution_op")
    if any(getattr(type(owner), c, None) is not getattr(kind, c, None) for c in calls):
        return None
    rows = known[0][1][name](owner)
    if not isinstance(owner, _CELLS):
        stop = _TokenStop if isinstance(owner, L.Embedding) else GramStop
        return stop(weight, owner, rows, solve) if rows else None
    around = [x for x, _ in walk(model, "") if isinstance(x, L.RNN) and x.cell is owner]
    return _CellStop(weight, around[0], rows, solve) if len(around) == 1 and rows else None


def as_matrices(kernel: np.ndarray, layout: KernelLayout | None) -> np.ndarray:
    """A kernel as `(batch * parts, taps * inputs, outputs)`."""
    canonical = (layout or KernelLayout.convolution()).to_canonical(kernel)
    batch, parts, *taps, inputs, outputs = canonical.shape
    return canonical.reshape(batch * parts, math.prod(taps) * inputs, outputs)


def from_matrices(
    matrices: np.ndarray, shape: tuple[int, ...], layout: KernelLayout | None
) -> np.ndarray:
    layout = layout or KernelLayout.convolution()
    return layout.from_canonical(matrices.reshape(layout.canonical_shape(shape)), shape)


def _dense(layer: Any) -> Rows:
    return lambda x: x.reshape(1, -1, x.shape[-1])


def _states(cell: Any) -> Rows | None:
    """A GRU that resets states before its product multiplies other ones than those of its steps."""
    return _dense(cell) if getattr(cell, "reset_after", True) else None


def _einsum_dense(layer: Any) -> Rows | None:
    """The inputs with their batch axes first, and the summed ones last."""
    data, kernel, output = einsum_axes(layer.equation)
    if any(name not in data and name not in output for name in kernel):
        return None  # the kernel alone is summed along an axis

    def rows(x: np.ndarray) -> np.ndarray:
        data, kernel, output = einsum_axes(layer.equation, x.ndim)
        batch = [name for name in kernel if name in data and name in output]
        summed = [name for name in kernel if name in data and name not in output]
        free = [name for name in data if name in output and name not in kernel]
        x = np.einsum(x, range(x.ndim), [data.index(name) for name in (*batch, *free, *summed)])
        matrices, k = x.shape[: len(batch)], x.shape[x.ndim - len(summed) :]
        return x.reshape(math.prod(matrices), -1, math.prod(k))

    return rows


def _convolution(layer: Any) -> Rows:
    """`(groups, positions, taps * channels)`: the inputs of the kernel at each position."""
    depthwise = isinstance(layer, _DEPTHWISE)

    def rows(x: np.ndarray) -> np.ndarray:
        if layer.data_format == "channels_first":
            x = np.moveaxis(x, 1, -1)
        if layer.padding == "causal":
            span = layer.dilation_rate[0] * (layer.kernel_size[0] - 1)
            x = np.pad(x, ((0, 0), (span, 0), (0, 0)))
        *sizes, channels = x.shape[1:]
        places = _places(layer, tuple(sizes))
        flat = np.pad(x.reshape(len(x), -1, channels), ((0, 0), (1, 0), (0, 0)))
        groups = channels if depthwise else getattr(layer, "groups", 1)
        patches = flat[:, places].reshape(-1, places.shape[1], groups, channels // groups)
        return np.moveaxis(patches, 2, 0).reshape(groups, len(patches), -1)

    return rows


def _places(layer: Any, sizes: Sequence[int]) -> np.ndarray:
    """Which input each tap meets at each position, from 1; 0 for none. `(positions, taps)`."""
    # A convolution with a channel for each tap moves the numbers, in digits that are exact.
    numbers = np.arange(1, math.prod(sizes) + 1)
    digits = np.stack([numbers >> shift & 255 for shift in (0, 8, 16, 24)])
    taps = math.prod(layer.kernel_size)
    settings = {"strides": layer.strides, "dilation_rate": layer.dilation_rate}
    settings["padding"] = "valid" if layer.padding == "causal" else layer.padding
    settings["data_format"] = "channels_last"
    channels, function = (1, taps), keras.ops.conv
    if isinstance(layer, _TRANSPOSED):
        channels, function = (taps, 1), keras.ops.conv_transpose
        settings["output_padding"] = layer.output_padding
    kernel = np.eye(taps).reshape(*layer.kernel_size, *channels).astype("float32")
    found = function(digits.reshape(4, *sizes, 1).astype("float32"), kernel, **settings)
    met = np.rint(to_numpy(found)).astype(np.int64).reshape(4, -1, taps)
    return np.tensordot(256 ** np.arange(4), met, 1)


def _pointwise(layer: Any) -> Rows:
    """The output of the depthwise part of a separable convolution at each position."""

    def rows(x: np.ndarray) -> np.ndarray:
        kernel = to_numpy(layer.depthwise_kernel).astype(np.float64)
        found = _convolution(layer)(x) @ as_matrices(kernel, KernelLayout.depthwise())
        return np.moveaxis(found, 0, 1).reshape(1, found.shape[1], -1)

    return rows


_DEPTHWISE = (L.DepthwiseConv1D, L.DepthwiseConv2D, L.SeparableConv1D, L.SeparableConv2D)
_TRANSPOSED = (L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose)
_CELLS = (L.SimpleRNNCell, L.GRUCell, L.LSTMCell)
# By the classes of layers, and the name of a kernel.
_KINDS: dict[tuple[Any, ...], dict[str, Callable[[Any], Rows | None]]] = {
    (L.Dense,): {"kernel": _dense},
    (L.EinsumDense,): {"kernel": _einsum_dense},
    (L.Conv1D, L.Conv2D, L.Conv3D, *_DEPTHWISE[:2], *_TRANSPOSED): {"kernel": _convolution},
    _DEPTHWISE[2:]: {"depthwise_kernel": _convolution, "pointwise_kernel": _pointwise},
    _CELLS: {"kernel": _dense, "recurrent_kernel": _states},
    (L.Embedding,): {"embeddings": _dense},
}
