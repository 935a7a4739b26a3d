"""The budgets that follow from shapes alone: uniform, ER and ERK."""

import math
from typing import Any

from keras_sparse_ortho._checks import explains_density
from keras_sparse_ortho.budgets._allocation import Orthogonal, allocate
from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight, Selection, choose
from keras_sparse_ortho.models import weights_of


@explains_density
def uniform(
    model: Any,
    density: float,
    *,
    dense_first: bool = False,
    dense_last: bool = False,
    include: Selection = None,
    exclude: Selection = None,
    orthogonal: Orthogonal = True,
) -> Budget:
    """Every weight has the same density `d`.

    With `dense_first` or `dense_last` those weights stay dense, and the others share what is
    left, so that the global density is still `density`.

    Args:
        model: A built Keras model, or a list of `PrunableWeight`.
        density: Global live fraction over the selected weights, in (0, 1]; the total is exactly
            `round(density * size)`.
        dense_first: Whether the first weight stays dense.
        dense_last: Whether the last weight stays dense.
        include: Which weights: paths, layers, regular expressions or a predicate. Default: all.
        exclude: Which weights not.
        orthogonal: Whether weights are lifted to what an exactly orthogonal kernel without dead
            outputs needs (see `lift`); or the initializer that is to draw the kernels.

    Raises:
        BudgetError: A global density that the bounds do not allow.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(10, name="a"),
    ...                           keras.layers.Dense(10, name="b")])
    >>> uniform(model, 0.5)
    <Budget of 2 weights, density 0.5, 150 of 300 live
      a/kernel  0.5         100 of 200
      b/kernel  0.5         50 of 100>
    """
    weights = choose(weights_of(model), include, exclude)
    ends = [*(weights[:1] if dense_first else []), *(weights[-1:] if dense_last else [])]
    dense = [weight.path for weight in ends]
    relative = [1.0] * len(weights)
    return allocate(weights, density, relative, orthogonal=orthogonal, dense=dense)


@explains_density
def er(
    model: Any,
    density: float,
    *,
    include: Selection = None,
    exclude: Selection = None,
    orthogonal: Orthogonal = True,
) -> Budget:
    """Erdos-Renyi: density of a layer in proportion to `(in + out) / (in * out)`.

    Layers that would pass density 1 are dense, and the rest is rescaled. Spatial dimensions of
    convolutions do not count; see `erk`.

    Args:
        model: A built Keras model, or a list of `PrunableWeight`.
        density: Global live fraction over the selected weights, in (0, 1]; the total is exactly
            `round(density * size)`.
        include: Which weights: paths, layers, regular expressions or a predicate. Default: all.
        exclude: Which weights not.
        orthogonal: Whether weights are lifted to what an exactly orthogonal kernel without dead
            outputs needs (see `lift`); or the initializer that is to draw the kernels.

    Raises:
        BudgetError: A global density that the bounds do not allow.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(100, name="a"),
    ...                           keras.layers.Dense(10, name="b")])
    >>> er(model, 0.1)
    <Budget of 2 weights, density 0.1, 1100 of 11000 live
      a/kernel  0.071       710 of 10000
      b/kernel  0.39        390 of 1000>

    Reference:

    - Mocanu et al., "Scalable training of artificial neural networks with adaptive sparse
      connectivity inspired by network science" (Nature Communications 2018), arXiv 1707.04780
    """
    return _erdos_renyi(model, density, include, exclude, orthogonal, spatial=False)


@explains_density
def erk(
    model: Any,
    density: float,
    *,
    include: Selection = None,
    exclude: Selection = None,
    orthogonal: Orthogonal = True,
) -> Budget:
    """Erdos-Renyi-Kernel: density in proportion to `sum(dims) / prod(dims)` of the kernel.

    For a convolution `(in + out + k_1 + ... ) / (in * out * k_1 * ...)`; for a matrix as `er`.
    Layers that would pass density 1 are dense, and the rest is rescaled.

    Args:
        model: A built Keras model, or a list of `PrunableWeight`.
        density: Global live fraction over the selected weights, in (0, 1]; the total is exactly
            `round(density * size)`.
        include: Which weights: paths, layers, regular expressions or a predicate. Default: all.
        exclude: Which weights not.
        orthogonal: Whether weights are lifted to what an exactly orthogonal kernel without dead
            outputs needs (see `lift`); or the initializer that is to draw the kernels.

    Raises:
        BudgetError: A global density that the bounds do not allow.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((8, 8, 16)), keras.layers.Conv2D(32, 3, name="a"),
    ...                           keras.layers.Conv2D(32, 1, name="b")])
    >>> [round(d, 3) for d in erk(model, 0.2).values()]
    [0.11, 0.604]

    Reference:

    - Evci et al., "Rigging the Lottery: Making All Tickets Winners" (ICML 2020), arXiv 1911.11134
    """
    return _erdos_renyi(model, density, include, exclude, orthogonal, spatial=True)


def _erdos_renyi(
    model: Any,
    density: float,
    include: Selection,
    exclude: Selection,
    orthogonal: Orthogonal,
    *,
    spatial: bool,
) -> Budget:
    weights = choose(weights_of(model), include, exclude)
    relative = []
    for weight in weights:
        dims = _dims(weight, spatial)
        relative.append(sum(dims) / math.prod(dims))
    return allocate(weights, density, relative, orthogonal=orthogonal)


def _dims(weight: PrunableWeight, spatial: bool) -> list[int]:
    """Sizes of the kernel's axes, with attention heads and the like flattened to in and out."""
    layout = weight.layout or KernelLayout.convolution()
    batch, parts, *taps, inputs, outputs = layout.canonical_shape(weight.shape)
    dims = [outputs * parts]
    if layout.inputs:
        dims.append(inputs)
    if layout.batch:
        dims.append(batch)
    return dims + taps if spatial else dims
