"""`LossDerivatives`: gradients and Hessian-vector products of a model's loss on batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import keras
import numpy as np

from keras_sparse_ortho._backend import (
    hessian_times_gradient,
    hessian_vector_product,
)
from keras_sparse_ortho._data import Batch, samples
from keras_sparse_ortho._keras_internals import from_zero_states
from keras_sparse_ortho._types import Nested, Tensor
from keras_sparse_ortho._values import placed, to_numpy
from keras_sparse_ortho._workers import digest_of, workers_of
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import StatelessLoss, check_labels

Array = np.ndarray
ChangeOutputs = Callable[[keras.Model, Nested], Nested]


class LossDerivatives:
    """Derivatives by some weights of the mean loss over the samples of all batches.

    The loss is the compiled one with `add_loss` terms, without weight regularizers, in training
    mode. Processes that train one model get the derivatives of the data of all of them.

    Args:
        model: Model, compiled. It does not change.
        weights: list of `PrunableWeight`.
        batches: list of `(x, y, sample_weight)`, as `LossScore.scores` gets them.
        change_outputs: callable, `(model, outputs) -> outputs` in front of the loss. `None`: the
            outputs as they are.

    Raises:
        ValueError: A model that was not compiled.
        WorkerError: On all processes, if their weights differ.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
        >>> model.compile(loss="mse")
        >>> model.layers[0].set_weights([np.array([[1.0], [3.0]]), np.zeros(1)])
        >>> batch = (np.array([[1.0, 1.0]]), np.array([[2.0]]), None)
        >>> loss = LossDerivatives(model, kso.prunable_weights(model), [batch])
        >>> loss.gradient()[0].tolist()  # 2 (x w - y) x
        [[4.0], [4.0]]
    """

    def __init__(
        self,
        model: keras.Model,
        weights: Sequence[PrunableWeight],
        batches: Sequence[Batch],
        change_outputs: ChangeOutputs | None = None,
    ) -> None:
        variables = [weight.variable for weight in weights]
        objective = None
        if getattr(model, "compiled", False):
            objective = functools.partial(_data_loss, change_outputs)
        self._loss = StatelessLoss(model, variables, objective=objective)
        self._workers = workers_of(model)
        if self._workers.count > 1:
            digests = {
                f"{number}, {variable.path}": digest_of(to_numpy(variable))
                for number, variable in enumerate(variables)
            }
            self._workers.compare("where weights are scored", digests)
        self._sample_count = sum(samples(batch) for batch in batches)
        self._batches = self._workers.batches(batches)

    def gradient(
        self, of_batch: Callable[[Array], Array] | None = None
    ) -> list[Array]:
        """Returns the gradient for each weight, or a mean of a function of each batch's gradient.

        Args:
            of_batch: callable, array to array of its shape, such as `np.square`. Batches count by
                their samples. `None`: the gradient itself.
        """

        def derivatives(batch: Batch) -> list[Array]:
            gradients = [
                to_numpy(tensor)
                for tensor in self._loss.gradients(None, *batch)
            ]
            if of_batch is None:
                return gradients
            return [of_batch(gradient) for gradient in gradients]

        return self._mean(derivatives)

    def hessian_times(self, vectors: Sequence[Array]) -> list[Array]:
        """Returns `H u` for each weight: `H` is the Hessian over all of them, `u = vectors`."""
        run = self._loss.compiled(hessian_vector_product)
        tensors = [
            placed(vector, variable)
            for vector, variable in zip(
                vectors, self._loss.variables, strict=True
            )
        ]

        def derivatives(batch: Batch) -> list[Array]:
            return [to_numpy(tensor) for tensor in run(None, *batch, tensors)]

        return self._mean(derivatives)

    def hessian_times_gradient(self) -> list[Array]:
        """Returns `H g` for each weight, with the gradient `g`; of a single batch in one pass."""
        if len(self._batches) > 1 or self._workers.count > 1:
            return self.hessian_times(self.gradient())
        run = self._loss.compiled(hessian_times_gradient)

        def derivatives(batch: Batch) -> list[Array]:
            return [to_numpy(tensor) for tensor in run(None, *batch)]

        return self._mean(derivatives)

    def _mean(self, derivatives: Callable[[Batch], list[Array]]) -> list[Array]:
        """The mean of derivatives over the samples of all batches and workers, in float64."""

        def mean_of_worker() -> list[Array]:
            total = sum(samples(batch) for batch in self._batches)
            mean = [
                np.zeros(variable.shape) for variable in self._loss.variables
            ]
            for batch in self._batches:
                share = samples(batch) / total
                for sum_of_shares, array in zip(
                    mean, derivatives(batch), strict=True
                ):
                    sum_of_shares += share * array.astype("float64")
            return mean

        with from_zero_states(self._loss.model):
            mean = self._workers.together(mean_of_worker)
        return self._workers.mean(mean, self._sample_count)


def _data_loss(
    change_outputs: ChangeOutputs | None,
    model: keras.Model,
    x: Nested,
    y: Nested,
    sample_weight: Nested,
    training: bool,
) -> Tensor:
    """The compiled loss and `add_loss` terms, without regularizers, which do not depend on data."""
    check_labels(model, y)
    y_pred = model(x, training=training)
    if change_outputs is not None:
        y_pred = change_outputs(model, y_pred)
    loss = model.compute_loss(
        x=x,
        y=y,
        y_pred=y_pred,
        sample_weight=sample_weight,
        training=training,
    )
    for variable in model.trainable_weights:
        if variable.regularizer is not None:
            penalty = variable.regularizer(variable.value)
            loss = loss - keras.ops.cast(penalty, loss.dtype)
    return loss
