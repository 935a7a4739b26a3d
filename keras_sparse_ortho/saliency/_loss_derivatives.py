"""`snip` and `grasp`: scores from derivatives of the loss; all scores by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import hessian_vector_product
from keras_sparse_ortho._checked_data import check_batches, warn_of_equal_rows
from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._data import Batch, first_batches, samples
from keras_sparse_ortho._foreign_names import for_value
from keras_sparse_ortho._keras_internals import from_zero_states
from keras_sparse_ortho._values import digest_of, placed, to_numpy, workers_of
from keras_sparse_ortho.kernels import PrunableWeight, Selection
from keras_sparse_ortho.models import StatelessLoss, check_labels
from keras_sparse_ortho.saliency._saliency import Saliency, magnitude, random, scored_weights
from keras_sparse_ortho.saliency._synflow import synflow

_TEMPERATURE = 200.0  # of GraSP's logits
_LABELS = {  # of cross-entropies, by the names of their functions
    "categorical_crossentropy": "classes",
    "sparse_categorical_crossentropy": "classes",
    "binary_crossentropy": "bits",
}


@other_keywords
def snip(
    model: Any,
    density: float,
    data: Any,
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
    weights = scored_weights(model, density, include, exclude, on_collapse)
    taken = first_batches(data, batch_size=batch_size, batches=batches, shuffle=shuffle, seed=seed)
    check_batches(model, taken)
    warn_of_equal_rows(taken)
    gradient = _Derivatives(model, weights, taken).gradient()
    scores = [np.abs(w.raw_value() * slope) for w, slope in zip(weights, gradient, strict=True)]
    return Saliency("SNIP", density, weights, scores, on_collapse)


@other_keywords
def grasp(
    model: Any,
    density: float,
    data: Any,
    *,
    batch_size: int = 128,
    batches: int | None = 1,
    shuffle: bool = True,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
    on_collapse: str = "error",
) -> Saliency:
    """Score `w * (H g)`, with gradient `g` and Hessian `H` of the loss: the highest are kept.

    Removing `w` changes the squared norm of the gradient by about `-2 w (H g)`, so the highest `w
    (H g)` preserve the gradient flow best. `g` and `H` are over all selected weights and all
    batches together. If all losses are cross-entropies, logits (of probabilities, too) are divided
    by 200 as in the paper: the softmax does not saturate. Arguments and errors are those of `snip`.

    Limits: second derivatives take about three times the memory of a training step; use a smaller
    `batch_size` and more `batches`. With piecewise linear activations, the Hessian comes from the
    loss and from products of weights only.

    Examples:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
        >>> model.compile(loss="mse")
        >>> model.layers[0].set_weights([np.array([[1.0], [3.0]]), np.zeros(1)])
        >>> saliency = grasp(model, 0.5, (np.array([[1.0, 1.0]]), np.array([[2.0]])))
        >>> saliency.scores["a/kernel"].tolist()  # g = [4, 4], H = [[2, 2], [2, 2]]
        [[16.0], [48.0]]

    Reference: Wang, Zhang and Grosse (ICLR 2020), arXiv 2002.07376.
    """
    weights = scored_weights(model, density, include, exclude, on_collapse)
    taken = first_batches(data, batch_size=batch_size, batches=batches, shuffle=shuffle, seed=seed)
    check_batches(model, taken)
    warn_of_equal_rows(taken)
    losses = [loss for loss in keras.tree.flatten(getattr(model, "loss", None)) if loss is not None]
    softened = bool(losses) and all(map(_cross_entropy, losses))
    loss = _Derivatives(model, weights, taken, softened)
    products = loss.hessian_times(loss.gradient())
    scores = [w.raw_value() * product for w, product in zip(weights, products, strict=True)]
    return Saliency("GraSP", density, weights, scores, on_collapse)


def _data_loss(
    softened: bool, model: Any, x: Any, y: Any, sample_weight: Any, training: bool
) -> Any:
    """The compiled loss and `add_loss` terms, without regularizers, which do not depend on data."""
    check_labels(model, y)
    y_pred = model(x, training=training)
    if softened:
        y_pred = _softened(model, y_pred)
    loss = model.compute_loss(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )
    for variable in model.trainable_weights:
        if variable.regularizer is not None:
            loss = loss - keras.ops.cast(variable.regularizer(variable.value), loss.dtype)
    return loss


def _softened(model: Any, y_pred: Any) -> Any:
    loss = model.loss
    if isinstance(loss, dict) and not isinstance(y_pred, dict):
        loss = [loss[name] for name in model.output_names]
    losses, outputs = keras.tree.flatten(loss), keras.tree.flatten(y_pred)
    if len(losses) == 1:
        losses = losses * len(outputs)
    if len(losses) != len(outputs):
        raise ValueError(
            "GraSP needs the loss of every output. "
            f"Received: {len(losses)} losses for {len(outputs)} outputs"
        )
    scaled = [_scaled(*pair) for pair in zip(outputs, losses, strict=True)]
    return keras.tree.pack_sequence_as(y_pred, scaled)


def _scaled(output: Any, loss: Any) -> Any:
    """Probabilities `p` count as the logits `log p`, so they become `p^(1/T)`, normalized."""
    kind = _cross_entropy(loss)
    assert kind is not None
    labels, logits = kind
    if logits:
        return output / _TEMPERATURE
    # Clipped as in the cross-entropies of Keras, so that log is finite.
    p = keras.ops.clip(output, keras.config.epsilon(), 1 - keras.config.epsilon())
    if labels == "classes":
        return keras.ops.softmax(keras.ops.log(p) / _TEMPERATURE, axis=-1)
    return keras.ops.sigmoid((keras.ops.log(p) - keras.ops.log(1 - p)) / _TEMPERATURE)


def _cross_entropy(loss: Any) -> tuple[str, bool] | None:
    """`"classes"` or `"bits"`, and whether of logits; `None` for a loss of another kind."""
    function = getattr(loss, "fn", loss)  # an instance wraps one
    name = function if isinstance(function, str) else getattr(function, "__name__", None)
    config = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
    return (_LABELS[name], bool(config.get("from_logits"))) if name in _LABELS else None


class _Derivatives:
    """Gradient and Hessian-vector products of the mean loss over the samples of all workers."""

    def __init__(
        self,
        model: Any,
        weights: list[PrunableWeight],
        batches: list[Batch],
        softened: bool = False,
    ) -> None:
        variables = [weight.variable for weight in weights]
        compiled = getattr(model, "compiled", False)
        objective = functools.partial(_data_loss, softened) if compiled else None
        self._loss = StatelessLoss(model, variables, objective=objective)
        self._workers = workers_of(model)
        if self._workers.count > 1:
            values = {f"{n}, {v.path}": digest_of(to_numpy(v)) for n, v in enumerate(variables)}
            self._workers.compare("where weights are scored", values)
        self._total = sum(samples(batch) for batch in batches)
        self._batches = self._workers.batches(batches)

    def gradient(self) -> list[np.ndarray]:
        return self._mean(lambda batch: self._loss.gradients(None, *batch))

    def hessian_times(self, vectors: list[np.ndarray]) -> list[np.ndarray]:
        """`H u` for each variable, with `H` the Hessian over all of them and `u = vectors`."""
        run = self._loss.compiled(hessian_vector_product)
        u = [placed(u, v) for u, v in zip(vectors, self._loss.variables, strict=True)]
        return self._mean(lambda batch: run(None, *batch, u))

    def _mean(self, of: Callable[[Batch], list[Any]]) -> list[np.ndarray]:
        def own_mean() -> list[Any]:
            total = sum(samples(batch) for batch in self._batches)
            mean: list[Any] = [0.0] * len(self._loss.variables)
            for batch in self._batches:
                share = samples(batch) / total
                found = [p if isinstance(p, np.ndarray) else to_numpy(p) for p in of(batch)]
                mean = [a + share * b.astype("float64") for a, b in zip(mean, found, strict=True)]
            return mean

        with from_zero_states(self._loss.model):
            mean = self._workers.together(own_mean)
        return self._workers.mean(mean, self._total)


SALIENCIES = {one.__name__: one for one in (magnitude, random, snip, grasp, synflow)}
_OF_DATA = ("snip", "grasp")


def saliency_by_name(
    name: str, model: Any, density: float, data: Any = None, **options: Any
) -> Saliency:
    """The saliency of this name; refuses missing data, and data for a method that uses none."""
    if name not in SALIENCIES:
        names = ", ".join(f'"{known}"' for known in (*SALIENCIES, "obs", "wanda"))
        raise ValueError(
            f"`score` must be one of {names}.{for_value('score', name)} Received: score={name!r}"
        )
    if name in _OF_DATA and data is None:
        raise ValueError(
            f"The score of {name} is a derivative of the loss: give `data`, such as (x, y). "
            f"Received: score={name!r}, data=None"
        )
    if name not in _OF_DATA and data is not None:
        raise ValueError(
            f"{name} uses the weights alone: leave `data` out. "
            f"Received: score={name!r}, data of type {type(data).__name__}"
        )
    return SALIENCIES[name](model, density, *([] if data is None else [data]), **options)
