"""Budgets by name: uniform, ER, ERK, and those published with STR for ResNet-50."""

import math
from collections.abc import Sequence

import keras

from keras_sparse_ortho._checks import check_density, other_keywords
from keras_sparse_ortho.budgets._allocation import allocate
from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.budgets._needs import Orthogonal
from keras_sparse_ortho.budgets._tables import resnet50, sparsity_to_density
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.kernels import (
    KernelLayout,
    PrunableWeight,
    Selection,
    choose,
)
from keras_sparse_ortho.models import weights_of

_RIVALS_OF_STR = ("uniform", "erk", "snfs", "vd", "gs")  # in its tables


@other_keywords
def uniform(
    model: keras.Model | Sequence[PrunableWeight],
    density: float,
    *,
    include: Selection = None,
    exclude: Selection = None,
    orthogonal: Orthogonal = True,
) -> Budget:
    """Gives every weight the same density.

    Args:
        model: Model (built) or list of `PrunableWeight`.
        density: float in (0, 1]. Global live fraction; exactly `round(density * size)` entries.
        include: Selection: paths, layers, regular expressions or a predicate. Default: all weights.
        exclude: Selection. Weights to leave out.
        orthogonal: bool or initializer. Whether to `lift` weights to the needs of exactly
            orthogonal kernels without dead outputs; or what will draw the kernels. If `False`, only
            depthwise kernels are lifted, to one entry for each output, where the density allows.

    Raises BudgetError for a global density that the bounds do not allow.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(10, name="a"),
        ...                           keras.layers.Dense(10, name="b")])
        >>> uniform(model, 0.5)
        <Budget of 2 weights, density 0.5, 150 of 300 live
          a/kernel  0.5         100 of 200
          b/kernel  0.5         50 of 100>
    """
    weights = choose(weights_of(model), include, exclude)
    return allocate(
        weights, density, [1.0] * len(weights), orthogonal=orthogonal
    )


@other_keywords
def er(
    model: keras.Model | Sequence[PrunableWeight],
    density: float,
    *,
    include: Selection = None,
    exclude: Selection = None,
    orthogonal: Orthogonal = True,
) -> Budget:
    """Erdos-Renyi (ER): the density of a layer is proportional to `(in + out) / (in * out)`.

    Layers that would exceed density 1 are dense, and the rest is rescaled. Spatial dimensions do
    not count; see `erk`. Arguments and errors are those of `uniform`.

    Reference: Mocanu et al. (Nature Communications 2018), arXiv 1707.04780.
    """
    return _erdos_renyi(
        model, density, include, exclude, orthogonal, spatial=False
    )


@other_keywords
def erk(
    model: keras.Model | Sequence[PrunableWeight],
    density: float,
    *,
    include: Selection = None,
    exclude: Selection = None,
    orthogonal: Orthogonal = True,
) -> Budget:
    """Erdos-Renyi-Kernel (ERK): density proportional to `sum(dims) / prod(dims)` of the kernel.

    For a convolution `(in + out + k_1 + ... ) / (in * out * k_1 * ...)`. The rest is as in `er`.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((8, 8, 16)), keras.layers.Conv2D(32, 3, name="a"),
        ...                           keras.layers.Conv2D(32, 1, name="b")])
        >>> [round(d, 3) for d in erk(model, 0.2).values()]
        [0.11, 0.604]

    Reference: Evci et al. (ICML 2020), arXiv 1911.11134.
    """
    return _erdos_renyi(
        model, density, include, exclude, orthogonal, spatial=True
    )


def _erdos_renyi(
    model: keras.Model | Sequence[PrunableWeight],
    density: float,
    include: Selection,
    exclude: Selection,
    orthogonal: Orthogonal,
    *,
    spatial: bool,
) -> Budget:
    """ERK, or without the `spatial` dimensions ER."""
    weights = choose(weights_of(model), include, exclude)
    relative = []
    for weight in weights:
        dims = _dims(weight, spatial=spatial)
        relative.append(sum(dims) / math.prod(dims))
    return allocate(weights, density, relative, orthogonal=orthogonal)


def _dims(
    weight: PrunableWeight,
    *,
    spatial: bool,
) -> list[int]:
    """The dimensions of a kernel that ER and ERK count."""
    layout = weight.layout or KernelLayout.convolution()
    batch, parts, *taps, inputs, outputs = layout.canonical_shape(weight.shape)
    dims = [outputs * parts]
    if spatial:
        dims += taps
    if layout.inputs:
        dims.append(inputs)
    if layout.batch:
        dims.append(batch)
    return dims


@other_keywords
def str_resnet50(density: float | str = 0.0977) -> Budget:
    """Returns a published budget of soft threshold reparameterization (STR) for ResNet-50.

    For `keras.applications.ResNet50`: 16 budgets of STR, with global densities from 0.2045 to
    0.009, and those of five rivals at 0.1. The first 1x1 convolutions of stages 3, 4 and 5, which
    have the stride in Keras, cost a quarter of PyTorch's. `lift` lifts the layers that are too
    sparse for exactly orthogonal kernels.

    Args:
        density: float or str. Global live fraction of a budget of STR (0.0977: 90.23% sparsity,
            74.31% top-1 accuracy), or a rival: `"uniform"`, `"erk"`, `"snfs"` (sparse networks from
            scratch), `"vd"` (variational dropout) or `"gs"` (global magnitudes).

    Raises BudgetError for another density or name, with the available ones.

    Examples:
        >>> budget = str_resnet50(0.0977)
        >>> len(budget), round(budget["conv1_conv/kernel"], 4)
        (54, 0.402)
        >>> round(1 - budget.density, 4)
        0.9023
        >>> str_resnet50("vd")["conv1_conv/kernel"]
        0.6861

    Reference: Kusupati et al. (ICML 2020), arXiv 2002.03231; tables of RAIVNLab/STR, Keras' names.
    """
    overall, *layers = resnet50()
    columns = [name for name in overall if name.startswith("sparsity_")]
    published = {sparsity_to_density(overall[name]): name for name in columns}
    column = None
    if not isinstance(density, str):
        column = published.get(check_density(density))
    elif density in _RIVALS_OF_STR:
        column = density
    if column is None:
        raise BudgetError(
            f"STR's published densities for ResNet-50 are {sorted(published, reverse=True)}, and "
            f"its rivals at 0.1 {_RIVALS_OF_STR}. Received: density={density!r}"
        )
    densities = {
        row["layer"]: sparsity_to_density(row[column]) for row in layers
    }
    sizes = {row["layer"]: int(row["size"]) for row in layers}
    return Budget(densities, sizes)
