"""Magnitude and random scores: what every other saliency is to be compared with."""

import random as python_random
from typing import Any

import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho.kernels import Selection
from keras_sparse_ortho.saliency._saliency import Saliency, scored_weights


def magnitude(
    model: Any,
    density: float,
    *,
    include: Selection = None,
    exclude: Selection = None,
    on_collapse: str = "error",
) -> Saliency:
    """Score `|w|`, compared over all kernels together.

    Args:
        model: A built Keras model.
        density: Global live fraction over the selected weights, in (0, 1].
        include: Which weights: paths, layers, regular expressions or a predicate. Default: all.
        exclude: Which weights not.
        on_collapse: `"error"`, `"warn"` or `"ignore"` if a weight is left without live entries.

    Raises:
        BudgetError: Layer collapse, if `on_collapse="error"`.
        NotPrunableError: Weights that are wrapped or not finite.

    Limits: of a freshly initialized network this is the scale of its initializer: layers of large
    fan-in, whose weights are small, are pruned most. `erk` has no such bias.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(10, name="a")])
    >>> magnitude(model, 0.1)
    <Saliency by magnitude, density 0.1
      a/kernel  20 of 200>
    """
    check_density(density)
    weights = scored_weights(model, include, exclude, on_collapse)
    scores = [np.abs(weight.raw_value()) for weight in weights]
    return Saliency("magnitude", density, weights, scores, on_collapse)


def random(
    model: Any,
    density: float,
    *,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
    on_collapse: str = "error",
) -> Saliency:
    """Scores drawn uniformly from [0, 1): a uniformly random global mask of exact count.

    Args:
        model: A built Keras model.
        density: Global live fraction over the selected weights, in (0, 1].
        seed: Integer; the same one gives the same mask on every backend and machine. `None` draws
            one from Python's `random`.
        include: Which weights: paths, layers, regular expressions or a predicate. Default: all.
        exclude: Which weights not.
        on_collapse: `"error"`, `"warn"` or `"ignore"` if a weight is left without live entries.

    Raises:
        BudgetError: Layer collapse, if `on_collapse="error"`.

    Limits: small layers scatter about the density; `uniform` gives each exactly its share.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(10, name="a")])
    >>> random(model, 0.1, seed=0)
    <Saliency by random, density 0.1
      a/kernel  20 of 200>
    """
    check_density(density)
    weights = scored_weights(model, include, exclude, on_collapse)
    rng = np.random.default_rng(python_random.randrange(2**31) if seed is None else seed)
    scores = [rng.random(weight.shape) for weight in weights]
    return Saliency("random", density, weights, scores, on_collapse)
