"""`magnitude`: the absolute values of all kernels, compared together."""

import dataclasses
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
class Magnitude(ModelScore):
    """The score `|w|`."""

    name: ClassVar[str] = "magnitude"

    def scores(
        self,
        model: keras.Model,
        weights: list[PrunableWeight],
        density: float,
        batches: list[Batch],
    ) -> list[np.ndarray]:
        return [np.abs(weight.raw_value()) for weight in weights]


@other_keywords
def magnitude(
    model: keras.Model,
    density: float,
    *,
    include: Selection = None,
    exclude: Selection = None,
    on_collapse: str = "error",
) -> Saliency:
    """Score `|w|`, compared over all kernels together: global magnitude pruning.

    Arguments and errors are those of `snip`; the model need not be compiled.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(10, name="a")])
        >>> magnitude(model, 0.1)
        <Saliency by magnitude, density 0.1
          a/kernel  20 of 200>
    """
    return Magnitude().saliency(
        model,
        density,
        include=include,
        exclude=exclude,
        on_collapse=on_collapse,
    )
