"""The rows of a layer's inputs, which its kernel multiplies."""

import functools
import math
from collections.abc import Callable, Mapping

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight
from keras_sparse_ortho.orthogonal import einsum_axes

L = keras.layers

_DIGIT = 256  # float32 holds such digits exactly
_DIGITS = 4


class Rows:
    """From a layer's inputs to the rows that its kernel multiplies.

    A kernel of `M` matrices `(k, n)` adds `X_m K_m` to its layer's outputs, where `X_m` has a row
    for each sample and position. Subclasses implement `__call__`; those whose rows can be chosen,
    as the pixels of a convolution, `positions` and `growth` as well.
    """

    reads = "inputs"
    """`"inputs"` of the layer; `"tokens"`, which stand for one-hot rows; or `"steps"`: a cell's
    inputs and states at each step of the recurrent layer around it."""

    def __call__(
        self,
        x: np.ndarray,
        chosen: np.ndarray | None = None,
    ) -> np.ndarray:
        """Returns the rows at all positions, or at chosen ones, float64 `(M, rows, k)`.

        `k` is taps times inputs of one matrix, and `M` batch times parts of the canonical shape, or
        1 where all matrices multiply the same rows.

        Args:
            x: array `(samples, ...)`. Inputs of the layer.
            chosen: int array `(samples, count)`. Positions of each sample, of `positions(x)`.
        """
        raise NotImplementedError

    def positions(self, x: np.ndarray) -> int | None:
        """How many positions a sample has; `None` where rows cannot be chosen."""
        return None

    def growth(self) -> int:
        """How many entries of rows there are for an entry of the inputs, at most."""
        return 1


MakeRows = Callable[[keras.layers.Layer], Rows | None]
"""Makes the rows of one kernel of a layer."""
RowsRule = Callable[[keras.layers.Layer, PrunableWeight], Rows | None]
"""Makes the rows of any kernel of a layer, `None` where they are unknown."""


@functools.singledispatch
def kernel_rows(
    layer: keras.layers.Layer,
    weight: PrunableWeight,
) -> Rows | None:
    """The rows of a layer's inputs that one of its kernels multiplies; `None` if unknown.

    Kernels with rows can be pruned and refitted on data (`prune(score="obs")`, `widths`,
    `narrow`). Dispatches on the class of `layer`. A subclass with another `call` than the class
    that is registered is unknown. Register a layer of your own, by `register_layer` or here:

    >>> class Scores(keras.layers.Dense):
    ...     def call(self, inputs):
    ...         return keras.ops.softmax(super().call(inputs))
    >>> _ = kernel_rows.register(Scores, lambda layer, weight: LastAxisRows())

    Args:
        layer: Layer. Plain and built.
        weight: PrunableWeight. The kernel; `weight.name` is its name in the layer.
    """
    return None


def rows_of(weight: PrunableWeight) -> Rows | None:
    """The rows of a kernel of a plain layer; `None` if it is unknown how it is applied."""
    layer = weight.owner
    kinds = type(layer).__mro__
    registered = next(kind for kind in kinds if kind in kernel_rows.registry)
    if registered is not object and _has_other_call(layer, registered):
        return None
    return kernel_rows(layer, weight)


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


def _has_other_call(layer: keras.layers.Layer, kind: type) -> bool:
    """Whether a class derived from Keras' own computes its outputs in another way."""
    for name in ("call", "convolution_op"):
        method = getattr(type(layer), name, None)
        if method is not getattr(kind, name, None):
            return True
    return False


class LastAxisRows(Rows):
    """The last axis of a layer's inputs, whose parts go to one matrix each.

    Args:
        inputs: int. Inputs `k` of one matrix; `None` for all of the axis.
    """

    def __init__(self, inputs: int | None = None) -> None:
        self._inputs = inputs

    def __call__(
        self,
        x: np.ndarray,
        chosen: np.ndarray | None = None,
    ) -> np.ndarray:
        features = x.shape[-1]
        inputs = self._inputs or features
        if features % inputs:
            raise LayoutError(
                "A kernel on the last axis of its layer's inputs must divide it into parts, one "
                f"for each matrix of {inputs} inputs. Received: an axis of {features}"
            )
        by_matrix = x.reshape(-1, features // inputs, inputs)
        return np.swapaxes(by_matrix.astype(np.float64), 0, 1)


class TokenRows(LastAxisRows):
    """Tokens, each of which chooses a row of a table."""

    reads = "tokens"


class StepRows(LastAxisRows):
    """The inputs of a cell at each step, or the states before them."""

    reads = "steps"


class EinsumRows(Rows):
    """The inputs with their batch axes first, and the summed ones last."""

    def __init__(self, layer: keras.layers.Layer) -> None:
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


class ConvolutionRows(Rows):
    """The inputs of the kernel at each position: `(groups, positions, taps * channels)`."""

    def __init__(self, layer: keras.layers.Layer) -> None:
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
    layer: keras.layers.Layer,
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


class PointwiseRows(ConvolutionRows):
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


def last_axis_rows(
    layer: keras.layers.Layer, weight: PrunableWeight
) -> LastAxisRows:
    """The rows of a kernel on the last axis of its layer's inputs, a part for each matrix."""
    *_, inputs, _ = canonical_shape(weight)
    return LastAxisRows(inputs)


def rows_by_name(makers: Mapping[str, MakeRows]) -> RowsRule:
    """The rule of a class whose kernels of these names have these rows, and others unknown ones."""

    def rows(layer: keras.layers.Layer, weight: PrunableWeight) -> Rows | None:
        make = makers.get(weight.name)
        return None if make is None else make(layer)

    return rows


def _einsum(layer: keras.layers.Layer) -> Rows | None:
    data, kernel, output = einsum_axes(layer.equation)
    if any(name not in data and name not in output for name in kernel):
        return None  # the kernel alone is summed along an axis
    return EinsumRows(layer)


def _last_axis(layer: keras.layers.Layer) -> Rows:
    return LastAxisRows()


def _tokens(layer: keras.layers.Layer) -> Rows:
    return TokenRows()


def _inputs_of_steps(cell: keras.layers.Layer) -> Rows:
    return StepRows()


def _states(cell: keras.layers.Layer) -> Rows | None:
    """A GRU that resets states before its product multiplies other ones than those of its steps."""
    if getattr(cell, "reset_after", True):
        return StepRows()
    return None


_PLAIN = (L.Conv1D, L.Conv2D, L.Conv3D, L.DepthwiseConv1D, L.DepthwiseConv2D)
_SEPARABLE = (L.SeparableConv1D, L.SeparableConv2D)
_DEPTHWISE = (L.DepthwiseConv1D, L.DepthwiseConv2D, *_SEPARABLE)
_TRANSPOSED = (L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose)
_CELLS = (L.SimpleRNNCell, L.GRUCell, L.LSTMCell)
_KINDS: dict[tuple[type, ...], dict[str, MakeRows]] = {
    (L.Dense,): {"kernel": _last_axis},
    (L.EinsumDense,): {"kernel": _einsum},
    (*_PLAIN, *_TRANSPOSED): {"kernel": ConvolutionRows},
    _SEPARABLE: {
        "depthwise_kernel": ConvolutionRows,
        "pointwise_kernel": PointwiseRows,
    },
    _CELLS: {"kernel": _inputs_of_steps, "recurrent_kernel": _states},
    (L.Embedding,): {"embeddings": _tokens},
}
for _kinds, _makers in _KINDS.items():
    for _kind in _kinds:
        kernel_rows.register(_kind, rows_by_name(_makers))
