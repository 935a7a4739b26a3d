"""The loss that saliencies are derivatives of, and its derivatives over several batches."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import hessian_vector_product
from keras_sparse_ortho._data import Batch, samples
from keras_sparse_ortho._keras_internals import compiled_loss_waits
from keras_sparse_ortho._values import placed, to_numpy
from keras_sparse_ortho._workers import digest_of, workers_of
from keras_sparse_ortho.models import Objective, StatelessLoss

L = keras.losses
_ON_CLASSES = (L.CategoricalCrossentropy, L.SparseCategoricalCrossentropy)
_ON_BITS = (L.BinaryCrossentropy,)
_NAMES = {
    "categorical_crossentropy": "classes",
    "sparse_categorical_crossentropy": "classes",
    "binary_crossentropy": "bits",
}


class DataLoss:
    """`objective(model, x, y, sample_weight, training)` for `StatelessLoss`.

    The compiled loss with its `add_loss` terms, but without the regularizers of weights, whose
    gradient depends on the size of a weight alone, not on the data.

    Args:
        temperature: What the logits are divided by. Probabilities `p` are those of the logits
            `log p`, so they become `p^(1/T)`, normalized.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = float(temperature)

    def __call__(self, model: Any, x: Any, y: Any, sample_weight: Any, training: bool) -> Any:
        y_pred = model(x, training=training)
        if self.temperature != 1:
            y_pred = self._tempered(model, y_pred)
        loss = model.compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
        )
        for variable in model.trainable_weights:
            if variable.regularizer is not None:
                loss = loss - keras.ops.cast(variable.regularizer(variable.value), loss.dtype)
        return loss

    def _tempered(self, model: Any, y_pred: Any) -> Any:
        loss = model.loss
        if isinstance(loss, dict) and not isinstance(y_pred, dict):
            loss = [loss[name] for name in model.output_names]
        losses = keras.tree.flatten(loss)
        outputs = keras.tree.flatten(y_pred)
        if len(losses) == 1:
            losses = losses * len(outputs)
        if len(losses) != len(outputs):
            raise ValueError(
                "The temperature needs to know the loss of every output. "
                f"Received: {len(losses)} losses for {len(outputs)} outputs, "
                f"temperature={self.temperature}"
            )
        cooled = [self._cool(*pair) for pair in zip(outputs, losses, strict=True)]
        return keras.tree.pack_sequence_as(y_pred, cooled)

    def _cool(self, output: Any, loss: Any) -> Any:
        kind = kind_of(loss)
        if kind is None:
            raise ValueError(
                "A temperature acts on logits: the loss must be a cross-entropy; else give "
                f"`temperature=1`. Received: loss={loss!r}, temperature={self.temperature}"
            )
        what, logits = kind
        if logits:
            return output / self.temperature
        # As cross-entropies of Keras clip them, so that log is finite.
        p = keras.ops.clip(output, keras.config.epsilon(), 1 - keras.config.epsilon())
        if what == "classes":
            return keras.ops.softmax(keras.ops.log(p) / self.temperature, axis=-1)
        return keras.ops.sigmoid((keras.ops.log(p) - keras.ops.log(1 - p)) / self.temperature)


def kind_of(loss: Any) -> tuple[str, bool] | None:
    """Whether a loss is on classes or bits, and on logits; `None` if it is no cross-entropy."""
    if isinstance(loss, _ON_CLASSES + _ON_BITS):
        what = "classes" if isinstance(loss, _ON_CLASSES) else "bits"
        return what, bool(loss.get_config().get("from_logits", False))
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", None)
    return (_NAMES[name], False) if name in _NAMES else None


def default_temperature(model: Any) -> float:
    """200, as in the paper, where every loss is a cross-entropy; else 1."""
    losses = [loss for loss in keras.tree.flatten(getattr(model, "loss", None)) if loss is not None]
    return 200.0 if losses and all(kind_of(loss) for loss in losses) else 1.0


class Derivatives:
    """Gradient and Hessian-vector products of the mean loss over batches, at a model's weights.

    Batches count by their number of samples, so that for a loss that is a mean over samples the
    result is that of all samples together; of all workers, where several train the model.

    Args:
        model: The model.
        variables: The variables to differentiate with respect to.
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
        self._workers = workers_of(model)
        if self._workers.count > 1:
            values = {f"{n}, {v.path}": digest_of(to_numpy(v)) for n, v in enumerate(variables)}
            self._workers.compare("where weights are scored", values)
        self._total = sum(samples(batch) for batch in batches)
        self._batches = self._workers.batches(batches)
        self._progress = progress
        if compiled_loss_waits(model):
            # What a loss creates at its first call may not be created while tracing.
            self._loss.loss([v.value for v in variables], *self._batches[0])

    def gradient(self) -> list[np.ndarray]:
        """The gradient for each variable, in float64."""
        return self._mean(lambda batch: self._loss.gradients(None, *batch))

    def hessian_times(self, vectors: list[np.ndarray]) -> list[np.ndarray]:
        """`H u` for each variable, with `H` the Hessian over all of them and `u = vectors`."""
        run = self._loss.compiled(lambda loss, values, u: _product(loss, values, u))
        pairs = zip(vectors, self._loss.variables, strict=True)
        u = [placed(vector, v) for vector, v in pairs]
        return self._mean(lambda batch: run(None, *batch, u))

    def _mean(self, of: Callable[[Batch], list[Any]]) -> list[np.ndarray]:
        mean = self._workers.together(lambda: self._own_mean(of))
        return self._workers.mean(mean, self._total)

    def _own_mean(self, of: Callable[[Batch], list[Any]]) -> list[np.ndarray]:
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
        try:
            return jax.jvp(jax.grad(loss), (values,), (vectors,))[1]
        except TypeError:  # a function without a rule for forward mode, as layers of live blocks
            pass
    return hessian_vector_product(loss, values, vectors)


def _float64(value: Any) -> np.ndarray:
    return (value if isinstance(value, np.ndarray) else to_numpy(value)).astype("float64")


def progress_bar(steps: int, verbose: int) -> Any:
    """A bar of Keras for so many steps; it prints nothing with `verbose=0`."""
    return keras.utils.Progbar(steps, verbose=verbose, unit_name="batch")
