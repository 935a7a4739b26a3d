"""`StepCallback`, the base of callbacks that act at certain steps, and `CheckWorkers`."""

from collections.abc import Callable
from typing import Any, TypeVar

import keras

from keras_sparse_ortho._keras_internals import (
    applied_batches,
    build_restored_optimizer,
    counter_of_batches,
    length_of_data,
)
from keras_sparse_ortho._workers import Workers, workers_of
from keras_sparse_ortho.models import mask_facts, structure_facts, value_facts

T = TypeVar("T")


_WAYS = (
    "Build the optimizer before weights are loaded, "
    "`model.optimizer.build(model.trainable_variables)`, so that its state is loaded, too; load "
    "the whole model with `keras.models.load_model`; or, if it was compiled again on purpose, set "
    "the optimizer's step to that of the run"
)
_RESTART = "To start a new run call `fit` without `initial_epoch`. "


class StepCallback(keras.callbacks.Callback):
    """Calls `on_step` before every step of training, with the number of steps before it.

    A step is an update of the optimizer: with gradient accumulation, several batches. The number is
    the optimizer's own, so that a resumed run equals one that was not interrupted, counted on from
    the start of the epoch: on JAX the optimizer's variables are not up to date while `fit` runs.
    Read variables in `on_run_begin`: in `prepare` a later callback may have yet to restore them.

    Processes that train one model compare model, callbacks and masks before the first step, and
    after every change that goes through `change_masks`.
    """

    def __init__(self) -> None:
        super().__init__()
        # `self.model` itself: on JAX reading it brings all variables up to date.
        self._watched: Any = None
        self._workers: Workers | None = None
        self._run_begun = False
        self._epoch_start = 0
        self._accumulated = 1
        self._must_read = False
        # Batches of the run before its first epoch that the optimizer has not counted.
        self._lost_batches = 0

    @property
    def workers(self) -> Workers:
        """The processes that train the model, which all have this callback."""
        if self._workers is None:
            self._workers = workers_of(self._watched)
        return self._workers

    def prepare(self) -> None:
        """To be overridden: called when training begins; an error is raised on all workers."""

    def settings(self) -> dict[str, Any]:
        """To be overridden: arguments that must be the same on all workers."""
        return {}

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Compares model and callback with those of the other workers; then `prepare`."""
        if self.workers.count > 1:
            facts = {"callback": type(self).__name__, **structure_facts(self._watched)}
            self.workers.compare("when training begins", facts)
        build_restored_optimizer(self._watched)
        self.workers.together(self.prepare)

    def change_masks(self, step: int, change: Callable[[], T]) -> T:
        """Changes masks on all workers; WorkerError if that fails on one, or results differ."""
        self.sync()
        result = self.workers.together(change)
        if self.workers.count > 1:
            self.workers.compare(f"after the update at step {step}", mask_facts(self._watched))
        return result

    def on_run_begin(self, start: int, steps: int | None) -> None:
        """To be overridden: called before the first epoch, when all state has been restored.

        `start` counts the optimizer's updates before epoch 0 of the run; it is negative if the
        optimizer has lost updates of the run. `steps` are those of the run; `None` if not known.
        """

    def on_step(self, step: int, executed: int) -> None:
        """To be overridden: called before a step, `executed` updates after the last call."""

    def set_model(self, model: Any) -> None:
        """Takes the model."""
        super().set_model(model)
        self._watched = model
        self._workers = None
        self._run_begun = False

    def length(self) -> tuple[int | None, int | None]:
        """Epochs of the run, and batches of an epoch; `None` for what is not known."""
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
        # With a loss scale or a custom `train_step` a batch may be no step, or several.
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
        """Begins a run that had no epoch left, such as one killed after its last."""
        self.sync()
        self._begin_run((self.params or {}).get("epochs") or 0)

    def restart_error(self, step: int, found: str, *, can_begin: bool = False) -> ValueError:
        """The error for a run that goes on with an optimizer that counts from the start."""
        optimizer, lost = self._watched.optimizer, self._lost_batches
        seen, accumulated = applied_batches(optimizer)
        value = lost + seen if lost else ("step" if accumulated == 1 else "batches")
        way = f"`model.optimizer.{counter_of_batches(optimizer)}.assign({value})`"
        return ValueError(
            f"{type(self).__name__} follows the steps of the optimizer, and these were lost: its "
            f"schedule would start again. {_WAYS}, {way}. {_RESTART if can_begin else ''}"
            f"Received: the optimizer at step {step}, {found}"
        )

    def _begin_run(self, epoch: int) -> None:
        if self._run_begun:
            return
        self._run_begun = True
        epochs, batches = self.length()
        seen, accumulated = applied_batches(self._watched.optimizer)
        steps = epochs * batches // accumulated if epochs and batches else None
        if batches:
            # Whole epochs: with checkpoints of single batches Keras begins an epoch once more.
            seen = (seen // batches - epoch) * batches
        self._lost_batches = max(0, -seen)
        start = seen // accumulated
        self.workers.together(lambda: self.on_run_begin(start, steps))
        if self.workers.count > 1:
            begin = {"callback": type(self).__name__, "start": start, "steps": steps}
            facts = {name: repr(value) for name, value in {**begin, **self.settings()}.items()}
            self.workers.compare("before training", {**facts, **value_facts(self._watched)})


def run_position(step: int, start: int, in_steps: bool) -> int:
    """The step at which a schedule begins; one in fractions makes up for updates that are lost."""
    return step if in_steps else step - min(start, 0)


class CheckWorkers(StepCallback):
    """Compares the models of all processes that train together, at the start and every epoch.

    Each process of `tf.distribute.MultiWorkerMirroredStrategy`, of JAX under `keras.distribution`
    or of `torch.distributed` makes the model by itself. If one of them has other seeds, masks or
    weights, training silently gives a meaningless model. This callback compares digests of
    structure, masks, trained weights and layouts, and stops all processes where they differ.

    `RigL`, `SET`, `UpdateMasks` and `TargetDensity` do the same by themselves before the first
    step, and compare masks after every update. So this is for models with fixed masks, and for
    comparing the weights, too. With one process it does nothing.

    Raises:
        WorkerError: What differs, on every process.

    Limits: every process must have this callback: comparing waits for all. It reads all weights,
    once an epoch. Moving averages and the states of random generators are compared on JAX only:
    elsewhere each process may have its own.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> model = kso.sparsify(keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]), 0.25)
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0,
    ...                     callbacks=[kso.callbacks.CheckWorkers()])
    """

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Compares the models."""
        if self.workers.count > 1:
            self.sync()
            self.workers.compare(f"after epoch {epoch + 1}", value_facts(self._watched))
