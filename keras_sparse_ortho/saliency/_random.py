"""`random`: scores that are drawn, the baseline of all others."""

import dataclasses
import random as python_random
from typing import ClassVar

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._data import Batch
from keras_sparse_ortho.kernels import PrunableWeight, Selection
from keras_sparse_ortho.saliency._saliency import Saliency
from keras_sparse_ortho.saliency._score import ModelScore, register_score


@register_score
@dataclasses.dataclass(frozen=True)
class Random(ModelScore):
    """Scores drawn uniformly from [0, 1).

    Args:
        seed: int, or `None` to take one from Python's `random` at each call.
    """

    name: ClassVar[str] = "random"
    refits: ClassVar[bool] = False

    seed: int | None = None

    def scores(
        self,
        model: keras.Model,
        weights: list[PrunableWeight],
        density: float,
        batches: list[Batch],
    ) -> list[np.ndarray]:
        seed = self.seed
        if seed is None:
            seed = python_random.randrange(2**31)
        rng = np.random.default_rng(seed)
        return [rng.random(weight.shape) for weight in weights]


@other_keywords
def random(
    model: keras.Model,
    density: float,
    *,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
    on_collapse: str = "error",
) -> Saliency:
    """Scores drawn uniformly from [0, 1): a uniformly random global mask of exact count.

    An integer `seed` gives the same mask everywhere; `None` takes one from Python's `random`. The
    other arguments and errors are those of `magnitude`.
    """
    return Random(seed).saliency(
        model,
        density,
        include=include,
        exclude=exclude,
        on_collapse=on_collapse,
    )
