"""The base of callbacks that do something at certain steps of training."""

from collections.abc import Callable
from typing import Any, TypeVar

import keras

from keras_sparse_ortho._keras_internals import applied_batches, length_of_data
from keras_sparse_ortho._workers import Workers, workers_of
from keras_sparse_ortho.models import mask_facts, structure_facts, value_facts

T = TypeVar("T")


class StepCallback(keras.callbacks.Callback):
    """Calls `on_step` before every step of training, with the number of steps before it.

    What happens at a step depends on that number and on the model alone, so that a run that is
    resumed from a checkpoint, which Keras saves at the end of a step, goes on as if it had not
    stopped. A step is an update of the optimizer: with gradient accumulation, several batches. The
    number is the optimizer's own, counted on from the start of the epoch: on JAX the optimizer's
    variables are not up to date while `fit` runs.

    What depends on the variables of the model is to be read in `on_run_begin`: when training
    begins, a callback that stands behind may have yet to restore them.

    Where several processes train one model, these must have the same model, callbacks and masks.
    That is compared before the first step, and again after whatever goes through `change_masks`.
    """

    def __init__(self) -> None:
        super().__init__()
        # On JAX `self.model` brings all variables up to date each time it is read.
        self._watched: Any = None
        self._workers: Workers | None = None
        self._run_begun = False
        self._epoch_start = 0
        self._accumulated = 1
        self._must_read = False
        # Of the run, before its first epoch: those that the optimizer does not count.
        self.lost_batches = 0

    @property
    def workers(self) -> Workers:
        """The processes that train the model, which all have this callback."""
        if self._workers is None:
            self._workers = workers_of(self._watched)
        return self._workers

    def prepare(self) -> None:
        """To be overridden: called when training begins; what it raises, it raises on all workers.

        What depends on the variables of the model comes in `on_run_begin`.
        """

    def settings(self) -> dict[str, Any]:
        """To be overridden: arguments that decide what is live, the same on all workers."""
        return {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Prepares, once it is known that all workers have such a model and callback."""
        if self.workers.count > 1:
            facts = {"callback": type(self).__name__, **structure_facts(self._watched)}
            self.workers.compare("when training begins", facts)
        self.workers.together(self.prepare)

    def change_masks(self, step: int, change: Callable[[], T]) -> T:
        """Does something that decides what is live, on all workers, and compares the masks.

        Raises:
            WorkerError: It has failed on another worker, or masks differ afterwards.
        """
        self.sync()
        result = self.workers.together(change)
        if self.workers.count > 1:
            self.workers.compare(f"after the update at step {step}", mask_facts(self._watched))
        return result

    def on_run_begin(self, start: int, steps: int | None) -> None:
        """To be overridden: called before the first epoch, when all state has been restored.

        Args:
            start: Updates of the optimizer when the run began, at its first epoch; for a resumed
                run the same as for one that was not interrupted.
            steps: Updates in the run, from its first epoch to its last; `None` if not known.
        """

    def on_step(self, step: int, executed: int) -> None:
        """To be implemented.

        Args:
            step: Updates of the optimizer so far.
            executed: Updates since the last call: 1, or the model's `steps_per_execution`.
        """
        raise NotImplementedError

    def set_model(self, model: Any) -> None:
        """Takes the model."""
        super().set_model(model)
        self._watched = model
        self._workers = None
        self._run_begun = False

    def length(self) -> tuple[int | None, int | None]:
        """Epochs of the run, and batches of an epoch; `None` for what is not known.

        Where Keras does not know the batches, it is the `len` of the data set.
        """
        params = self.params or {}
        return params.get("epochs"), params.get("steps") or length_of_data(self._watched)

    def sync(self) -> None:
        """Brings the model's variables up to date, which JAX keeps elsewhere during `fit`."""
        if keras.backend.backend() == "jax":
            self._watched.jax_state_sync()

    def synced_step(self) -> int:
        """Brings the model's variables up to date; returns the updates of the optimizer so far."""
        self.sync()
        seen, accumulated = applied_batches(self._watched.optimizer)
        return seen // accumulated

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads how many batches the optimizer has seen before the epoch."""
        self.sync()
        model = self._watched
        self._epoch_start, self._accumulated = applied_batches(model.optimizer)
        # With a loss scale or a `train_step` of one's own a batch may be no step, or several.
        self._must_read = hasattr(model.optimizer, "inner_optimizer") or (
            type(model).train_step is not keras.Model.train_step
        )
        self._begin_run(epoch)

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Calls `on_step` if the optimizer has made an update since the last call."""
        seen = self._epoch_start + batch
        if self._must_read:
            self.sync()
            seen, _ = applied_batches(self._watched.optimizer)
        executed = self._watched.steps_per_execution
        step, before = seen // self._accumulated, (seen - executed) // self._accumulated
        if step > before:
            self.on_step(step, step - before)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Begins a run that had no epoch left, as one that was killed after its last."""
        self.sync()
        self._begin_run((self.params or {}).get("epochs") or 0)

    def _begin_run(self, epoch: int) -> None:
        if self._run_begun:
            return
        self._run_begun = True
        epochs, batches = self.length()
        seen, accumulated = applied_batches(self._watched.optimizer)
        self.lost_batches = 0
        if not batches:
            self._on_run_begin(seen // accumulated, None)
            return
        # Whole epochs: with checkpoints of single batches Keras begins an epoch once more.
        start = (seen // batches - epoch) * batches
        self.lost_batches = max(0, -start)
        steps = None if not epochs else epochs * batches // accumulated
        self._on_run_begin(start // accumulated, steps)

    def _on_run_begin(self, start: int, steps: int | None) -> None:
        self.workers.together(lambda: self.on_run_begin(start, steps))
        if self.workers.count > 1:
            begin = {"callback": type(self).__name__, "start": start, "steps": steps}
            facts = {name: repr(value) for name, value in {**begin, **self.settings()}.items()}
            self.workers.compare("before training", {**facts, **value_facts(self._watched)})
