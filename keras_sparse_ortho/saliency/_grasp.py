"""`grasp`: gradient signal preservation."""

from typing import Any

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho._data import first_batches, refuse_separate_targets
from keras_sparse_ortho.kernels import Selection
from keras_sparse_ortho.models import Objective
from keras_sparse_ortho.saliency._derivatives import (
    DataLoss,
    Derivatives,
    default_temperature,
    progress_bar,
)
from keras_sparse_ortho.saliency._saliency import Saliency, scored_weights


def grasp(
    model: Any,
    density: float,
    data: Any,
    *separate: Any,
    temperature: float | None = None,
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
    """Score `w * (H g)`, with gradient `g` and Hessian `H` of the loss: the highest are kept.

    Removing `w` changes the squared norm of the gradient by about `-2 w (H g)`, so what has the
    highest `-w (H g)` is removed: the gradient flow of what is left is as large as can be. (The
    paper calls `-w (H g)` the score; here, as everywhere, a high score is kept.) `g` and `H` are
    those of all selected weights together, over all batches together. The model is not changed.

    Args:
        model: A built Keras model: Sequential, functional, nested, or written as a class; compiled
            unless there is an `objective`.
        density: Global live fraction over the selected weights, in (0, 1].
        data: What `fit` takes, as one argument: arrays `(x, y)` or `(x, y, sample_weight)`, each an
            array or a list or dict of arrays; or batches: `PyDataset`, `tf.data`, `DataLoader`, a
            list, a generator, or a function that returns one.
        *separate: Refused: inputs and targets are one argument.
        temperature: What logits are divided by, so that the softmax is not saturated. `None` is
            200 where all losses are cross-entropies, of logits or of probabilities, and 1 else.
        batch_size: Samples in a batch of arrays.
        batches: How many batches are used; `None` for all there are.
        shuffle: Whether samples of arrays are drawn at random; else the first ones are taken.
            Datasets and generators come in their own order.
        seed: For that; `None` draws one from Python's `random`.
        objective: `objective(model, x, y, sample_weight, training)`, another loss, which no
            temperature is applied to.
        training: Whether batch statistics and dropout are those of training.
        include: Which weights: paths, layers, regular expressions or a predicate. Default: all.
        exclude: Which weights not.
        on_collapse: `"error"`, `"warn"` or `"ignore"` if a weight is left without live entries.
        verbose: 1 for a progress bar over batches and derivatives.

    Raises:
        BudgetError: Layer collapse, if `on_collapse="error"`.
        NotPrunableError: Weights that are wrapped or not finite, scores that are not finite.
        WorkerError: On all processes that train one model, if their weights differ.
        TypeError: Targets as an argument of their own, `x, y` in the place of `(x, y)`.
        ValueError: No data, a model that was not compiled, or a temperature for a loss that is no
            cross-entropy.

    Limits: second derivatives are computed, which take about three times the memory of a training
    step; use a smaller `batch_size` and more `batches`. Networks of piecewise linear activations
    have a Hessian through the loss and through products of weights only. Where several processes
    train one model (docs/scale.md) all of them must call this; derivatives are those of all data.

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
    >>> model.compile(loss="mse")
    >>> model.layers[0].set_weights([np.array([[1.0], [3.0]]), np.zeros(1)])
    >>> saliency = grasp(model, 0.5, (np.array([[1.0, 1.0]]), np.array([[2.0]])))
    >>> saliency.scores["a/kernel"].tolist()  # g = [4, 4], H = [[2, 2], [2, 2]]
    [[16.0], [48.0]]

    Reference:

    - Wang, Zhang and Grosse, "Picking Winning Tickets Before Training by Preserving Gradient Flow"
      (ICLR 2020), arXiv 2002.07376
    """
    refuse_separate_targets("grasp(model, density, (x, y))", separate)
    check_density(density)
    weights = scored_weights(model, include, exclude, on_collapse)
    if objective is None and getattr(model, "compiled", False):
        temperature = default_temperature(model) if temperature is None else float(temperature)
        if not temperature > 0:
            raise ValueError(
                f"`temperature` must be positive. Received: temperature={temperature!r}"
            )
        objective = DataLoss(temperature)
    taken = first_batches(data, batch_size=batch_size, batches=batches, shuffle=shuffle, seed=seed)
    variables = [weight.variable for weight in weights]
    progress = progress_bar(2 * len(taken), verbose)
    loss = Derivatives(model, variables, objective, taken, training, progress)
    products = loss.hessian_times(loss.gradient())
    scores = [w.raw_value() * product for w, product in zip(weights, products, strict=True)]
    return Saliency("GraSP", density, weights, scores, on_collapse)
