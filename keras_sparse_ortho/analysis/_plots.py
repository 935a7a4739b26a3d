"""`plot_masks`: pictures of the masks of a model."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose
from keras_sparse_ortho.models import prunable_weights

# Pixels of a mask along each axis; larger kernels are shown by the densities of their parts.
_PIXELS = 256


def plot_masks(model: Any, *, include: Selection = None, exclude: Selection = None) -> Any:
    """Draws the mask of every kernel as a matrix: live entries dark, dead ones white.

    Rows are all axes but the last, which for Keras' kernels are taps and inputs; columns are the
    last, the outputs. In kernels with more than 256 rows or columns each pixel shows the density of
    a part.

    Args:
        model: A built Keras model; wrapped, stripped or dense.
        include: Which kernels, as for `sparsify`. Default: all with zeros or a mask.
        exclude: Which kernels not.

    Returns:
        A `matplotlib.figure.Figure`; its `savefig(path)` writes it.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(48, name="hidden")])
    >>> figure = plot_masks(kso.sparsify(model, 0.25, structure=kso.Block(8, 8), seed=0))
    >>> figure.axes[0].get_title()
    'hidden/kernel, density 0.25'
    """
    weights = choose(prunable_weights(model), include, exclude)
    if include is None:
        weights = [w for w in weights if w.storage is not None or w.live < w.size]
    columns = max(1, math.ceil(math.sqrt(len(weights))))
    rows = max(1, math.ceil(len(weights) / columns))
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError(
            "Pictures need matplotlib: pip install 'keras-sparse-ortho[plot]'"
        ) from error
    figure = pyplot.figure(figsize=(4 * columns, 4 * rows), layout="constrained")
    for place, weight in enumerate(weights, start=1):
        axes = figure.add_subplot(rows, columns, place)
        axes.imshow(_pixels(weight), cmap="Greys", vmin=0.0, vmax=1.0, interpolation="nearest")
        axes.set_title(f"{weight.path}, density {weight.density:.4g}", fontsize="small")
        axes.set_xlabel("outputs")
        axes.set_ylabel("inputs")
        axes.set_xticks([])
        axes.set_yticks([])
    return figure


def _pixels(weight: PrunableWeight) -> np.ndarray:
    """The mask as a matrix, or the densities of its parts."""
    mask: np.ndarray = weight.mask.reshape(-1, weight.shape[-1]).astype(np.float32)
    for axis in (0, 1):
        size = mask.shape[axis]
        if size > _PIXELS:
            edges = np.linspace(0, size, _PIXELS, endpoint=False).astype(int)
            lengths = np.diff(edges, append=size)
            sums = np.add.reduceat(mask, edges, axis=axis)
            mask = sums / (lengths[:, None] if axis == 0 else lengths)
    return mask
