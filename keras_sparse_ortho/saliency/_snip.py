"""`snip`: connection sensitivity."""

from typing import Any

import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho._data import first_batches, refuse_separate_targets
from keras_sparse_ortho.kernels import Selection
from keras_sparse_ortho.models import Objective
from keras_sparse_ortho.saliency._derivatives import DataLoss, Derivatives, progress_bar
from keras_sparse_ortho.saliency._saliency import Saliency, scored_weights


def snip(
    model: Any,
    density: float,
    data: Any,
    *separate: Any,
    batch_size: int = 128,
    batches: int | None = 1,
    shuffle: bool = True,
    seed: int | None = None,
    objective: Objective | None = None,
    training: bool = True,
    include: Selection = None,
    exclude: Selection = None,
    on_collapse: str = "error",
    verbose: int = 0,
) -> Saliency:
    """Score `|w * dL/dw|`: how much the loss changes, to first order, if the entry goes.

    `L` is the loss that the model was compiled with, over the batches together, without the
    regularizers of weights. The model is not changed.

    Args:
        model: A built Keras model: Sequential, functional, nested, or written as a class; compiled
            unless there is an `objective`.
        density: Global live fraction over the selected weights, in (0, 1].
        data: What `fit` takes, as one argument: arrays `(x, y)` or `(x, y, sample_weight)`, each an
            array or a list or dict of arrays; or batches: `PyDataset`, `tf.data`, `DataLoader`, a
            list, a generator, or a function that returns one.
        *separate: Refused: inputs and targets are one argument.
        batch_size: Samples in a batch of arrays.
        batches: How many batches are used; `None` for all there are.
        shuffle: Whether samples of arrays are drawn at random; else the first ones are taken.
            Datasets and generators come in their own order.
        seed: For that; `None` draws one from Python's `random`.
        objective: `objective(model, x, y, sample_weight, training)`, another loss.
        training: Whether batch statistics and dropout are those of training.
        include: Which weights: paths, layers, regular expressions or a predicate. Default: all.
        exclude: Which weights not.
        on_collapse: `"error"`, `"warn"` or `"ignore"` if a weight is left without live entries.
        verbose: 1 for a progress bar over batches.

    Raises:
        BudgetError: Layer collapse, if `on_collapse="error"`.
        NotPrunableError: Weights that are wrapped or not finite, scores that are not finite.
        WorkerError: On all processes that train one model, if their weights differ.
        TypeError: Targets as an argument of their own, `x, y` in the place of `(x, y)`.
        ValueError: No data, or a model that was not compiled.

    Limits: at low densities a layer may be left with nothing; `synflow` prevents it. In
    mixed_float16 small gradients underflow: score the model in float32. Where several processes
    train one model (docs/scale.md) all of them must call this; gradients are those of all data.

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
    >>> model.compile(loss="mse")
    >>> model.layers[0].set_weights([np.array([[1.0], [3.0]]), np.zeros(1)])
    >>> saliency = snip(model, 0.5, (np.array([[1.0, 1.0]]), np.array([[2.0]])))
    >>> saliency.scores["a/kernel"].tolist()  # |w * 2 (x w - y) x|
    [[4.0], [12.0]]

    Reference:

    - Lee, Ajanthan and Torr, "SNIP: Single-shot Network Pruning based on Connection Sensitivity"
      (ICLR 2019), arXiv 1810.02340
    """
    refuse_separate_targets("snip(model, density, (x, y))", separate)
    check_density(density)
    weights = scored_weights(model, include, exclude, on_collapse)
    if objective is None and getattr(model, "compiled", False):
        objective = DataLoss()
    taken = first_batches(data, batch_size=batch_size, batches=batches, shuffle=shuffle, seed=seed)
    variables = [weight.variable for weight in weights]
    progress = progress_bar(len(taken), verbose)
    loss = Derivatives(model, variables, objective, taken, training, progress)
    pairs = zip(weights, loss.gradient(), strict=True)
    scores = [np.abs(weight.raw_value() * gradient) for weight, gradient in pairs]
    return Saliency("SNIP", density, weights, scores, on_collapse)
