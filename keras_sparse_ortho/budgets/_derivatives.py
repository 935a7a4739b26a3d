"""Derivatives of a model's loss over several batches."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import hessian_vector_product, to_numpy
from keras_sparse_ortho._keras_internals import compiled_loss_waits
from keras_sparse_ortho.budgets._batches import Batch, samples
from keras_sparse_ortho.models import Objective, StatelessLoss


class Derivatives:
    """Gradient and Hessian-vector products of the mean loss over batches, at a model's weights.

    Batches count by their number of samples, so that for a loss that is a mean over samples the
    result is that of all samples together.

    Args:
        model: The model.
        variables: The variables to differentiate for.
        objective: The loss; `None` for that of `compile`.
        batches: The batches.
        training: Whether dropout and batch statistics are those of training.
        progress: A bar that advances by one for every batch and derivative.
    """

    def __init__(
        self,
        model: Any,
        variables: list[Any],
        objective: Objective | None,
        batches: list[Batch],
        training: bool,
        progress: Any,
    ) -> None:
        self._loss = StatelessLoss(model, variables, objective=objective, training=training)
        self._batches = batches
        self._progress = progress
        if compiled_loss_waits(model):
            # What a loss creates at its first call may not be created while tracing.
            self._loss.loss([v.value for v in variables], *batches[0])

    def gradient(self) -> list[np.ndarray]:
        """The gradient for each variable, in float64."""
        return self._mean(lambda batch: self._loss.gradients(None, *batch))

    def hessian_times(self, vectors: list[np.ndarray]) -> list[np.ndarray]:
        """`H u` for each variable, with `H` the Hessian over all of them and `u = vectors`."""
        run = self._loss.compiled(lambda loss, values, u: _product(loss, values, u))
        pairs = zip(vectors, self._loss.variables, strict=True)
        u = [keras.ops.convert_to_tensor(vector, dtype=v.dtype) for vector, v in pairs]
        return self._mean(lambda batch: run(None, *batch, u))

    def _mean(self, of: Any) -> list[np.ndarray]:
        total = sum(samples(batch) for batch in self._batches)
        mean: list[np.ndarray] | None = None
        for batch in self._batches:
            share = samples(batch) / total
            parts = [share * _float64(part) for part in of(batch)]
            mean = parts if mean is None else [a + b for a, b in zip(mean, parts, strict=True)]
            self._progress.add(1)
        assert mean is not None
        return mean


def _product(loss: Any, values: list[Any], vectors: list[Any]) -> list[Any]:
    if keras.backend.backend() == "jax":
        import jax

        # Forward over reverse: a third of the memory of reverse over reverse.
        return jax.jvp(jax.grad(loss), (values,), (vectors,))[1]
    return hessian_vector_product(loss, values, vectors)


def _float64(value: Any) -> np.ndarray:
    return (value if isinstance(value, np.ndarray) else to_numpy(value)).astype("float64")


def progress_bar(steps: int, verbose: int) -> Any:
    """A bar of Keras for so many steps; it prints nothing with `verbose=0`."""
    return keras.utils.Progbar(steps, verbose=verbose, unit_name="batch")
