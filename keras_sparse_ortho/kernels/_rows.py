"""The rows of a layer's inputs, which its kernel multiplies."""

import functools
import math
from collections.abc import Callable, Mapping

import keras
import numpy as np

from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.kernels._storage import PrunableWeight
from keras_sparse_ortho.orthogonal import KernelLayout


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
        """Returns the rows at all positions, or at chosen ones, `(M, rows, k)`, as `x` in type.

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
    >>> _ = kernel_rows.register(Scores, kernel_rows.dispatch(keras.layers.Dense))

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
        return np.swapaxes(by_matrix, 0, 1)


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
