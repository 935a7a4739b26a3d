"""`snip`: connection sensitivity, the first-order change of the loss without an entry."""

import dataclasses
from typing import ClassVar

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._data import Batch
from keras_sparse_ortho.kernels import PrunableWeight, Selection
from keras_sparse_ortho.saliency._loss_derivatives import LossDerivatives
from keras_sparse_ortho.saliency._saliency import Saliency
from keras_sparse_ortho.saliency._score import LossScore, register_score


@register_score
@dataclasses.dataclass(frozen=True)
class Snip(LossScore):
    """The score `|w * dL/dw|`."""

    name: ClassVar[str] = "snip"
    label: ClassVar[str | None] = "SNIP"
    for_untrained: ClassVar[bool] = True
    refits: ClassVar[bool] = False

    def scores(
        self,
        model: keras.Model,
        weights: list[PrunableWeight],
        density: float,
        batches: list[Batch],
    ) -> list[np.ndarray]:
        gradient = LossDerivatives(model, weights, batches).gradient()
        return [
            np.abs(weight.raw_value() * slope)
            for weight, slope in zip(weights, gradient, strict=True)
        ]


@other_keywords
def snip(
    model: keras.Model,
    density: float,
    data: object,
    *,
    batch_size: int = 128,
    batches: int | None = 1,
    shuffle: bool = True,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
    on_collapse: str = "error",
) -> Saliency:
    """Score `|w * dL/dw|`: to first order, the change of the loss if the entry is removed.

    `L` is the compiled loss over all batches together, without weight regularizers, in training
    mode. The model is not changed.

    Args:
        model: Model. Built and compiled: Sequential, functional, nested or subclassed.
        density: float in (0, 1]. Global live fraction.
        data: As for `fit`: `(x, y)` or `(x, y, sample_weight)`, each an array or a list or dict of
            arrays; or batches: `PyDataset`, `tf.data`, `DataLoader`, a list, a generator, or a
            function that returns one.
        batch_size: int. Samples per batch of arrays.
        batches: int. How many batches to use; `None` for all, of data sets and generators at most
            100,000 rows.
        shuffle: bool. Whether samples of arrays are drawn; else the first ones are taken.
        seed: int. For drawing samples; `None` takes one from Python's `random`. Datasets and
            generators keep their order.
        include: Selection: paths, layers, regular expressions or a predicate. Default: all weights.
        exclude: Selection. Weights to leave out.
        on_collapse: `"error"` or `"ignore"`, for a weight without live entries.

    Raises:
        BudgetError: Layer collapse, if `on_collapse="error"`.
        NotPrunableError: Weights that are wrapped or not finite, scores that are not finite.
        WorkerError: On all processes that train one model, if their weights differ.
        ValueError: No data, no labels, data that the model cannot take or that are not finite, or a
            model that was not compiled.

    Limits: low densities may collapse a layer; `synflow` prevents that. Small gradients underflow
    in mixed_float16: score in float32. All processes that train one model must call this, and get
    derivatives of all data (docs/scale.md).

    Examples:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
        >>> model.compile(loss="mse")
        >>> model.layers[0].set_weights([np.array([[1.0], [3.0]]), np.zeros(1)])
        >>> saliency = snip(model, 0.5, (np.array([[1.0, 1.0]]), np.array([[2.0]])))
        >>> saliency.scores["a/kernel"].tolist()  # |w * 2 (x w - y) x|
        [[4.0], [12.0]]

    Reference: Lee, Ajanthan and Torr (ICLR 2019), arXiv 1810.02340.
    """
    return Snip(batch_size, batches, shuffle, seed).saliency(
        model,
        density,
        data,
        include=include,
        exclude=exclude,
        on_collapse=on_collapse,
    )
