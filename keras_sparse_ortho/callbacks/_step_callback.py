"""`StepCallback`, the base of callbacks that act at certain steps."""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from keras_sparse_ortho._checks import check_integer
from keras_sparse_ortho._keras_internals import (
    applied_batches,
    build_restored_optimizer,
    is_torch_optimizer,
    log_first,
    trains,
    warn_user,
)
from keras_sparse_ortho._types import Config, Optimizer
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho._workers import Workers, digest_of, workers_of
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import is_of_tf_keras, prunable_weights

T = TypeVar("T")

# Callbacks for tf_keras, by the name of the one for Keras 3.
_FOR_TF_KERAS = {
    "TargetDensity": "keras_sparse_ortho.tfmot.TargetDensity",
    "UpdateMasks": "TFMOT's UpdatePruningStep",
    "DensityLogger": "TFMOT's PruningSummaries",
}
_NO_TWIN = "a Keras 3 model of the same layers, as there is none of its kind"


class Logging(keras.callbacks.Callback):
    """Adds what `logged` returns to the logs of every epoch, before any callback gets them."""

    _logs_first = False

    def logged(self) -> dict[str, float]:
        return {}

    def set_model(self, model: keras.Model) -> None:
        if is_of_tf_keras(model):
            name = type(self).__name__
            raise NotPrunableError(
                f"{name} is for Keras 3 models. For a tf_keras model use "
                f"{_FOR_TF_KERAS.get(name, _NO_TWIN)}. "
                f"Received: model={model.name!r} of tf_keras"
            )
        super().set_model(model)

    def on_train_begin(self, logs: Config | None = None) -> None:
        self._logs_first = log_first(self, self._add_to)

    def on_epoch_end(self, epoch: int, logs: Config | None = None) -> None:
        if not self._logs_first:  # outside of `fit`
            self._add_to(logs)

    def _add_to(self, logs: Config | None) -> None:
        if logs is not None:
            logs.update(self.logged())


class StepCallback(Logging):
    """Calls `on_step` before the steps of training that `is_due` chooses.

    A step is an update of the optimizer; its number is read at the start of each epoch and counted
    on: on JAX its variables are stale in `fit`. Read variables in `on_run_begin`: after `prepare` a
    later callback may restore them. Processes that train one model compare kernels before the first
    step, and masks then and after every `change_masks`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reset(None)

    def set_model(self, model: keras.Model) -> None:
        super().set_model(model)
        self._reset(model)

    def _reset(self, model: keras.Model) -> None:
        self._watched = (
            model  # on JAX reading `self.model` brings all variables up to date
        )
        self._workers: Workers | None = None
        self._prepared = self._run_begun = False
        self._epoch_start, self._accumulated = 0, 1
        self._must_read = False
        self._one_epoch = False  # whether `fit` runs one epoch only
        # In a custom training loop: its last step, its optimizer, and what trained weights were.
        self._loop_step: int | None = None
        self._loop_optimizer: Any = None
        self._weights_before: Callable[[], Any] = lambda: None
        self._may_warn = True

    @property
    def workers(self) -> Workers:
        if self._workers is None:
            self._workers = workers_of(self._watched)
        return self._workers

    @property
    def optimizer(self) -> Any:
        """The optimizer passed to `update`, else that of the compiled model; `None` without one."""
        compiled = getattr(self._watched, "optimizer", None)
        return (
            compiled if self._loop_optimizer is None else self._loop_optimizer
        )

    def update(self, step: int, optimizer: Optimizer = None) -> bool:
        """Does what is due before a step of a custom training loop; returns whether anything was.

        Call `set_model(model)` first, then this before every step and after the last.

        Args:
            step: int. The steps made so far in all epochs: 0 before the first.
            optimizer: A Keras optimizer or one of `torch.optim`, whose moments of moved entries are
                reset. Default: that of the last call, or `model.optimizer`.

        Raises ValueError for a step before that of the last call and an optimizer of another model;
        TypeError for an optimizer of another kind.
        """
        return self._update(step, optimizer, lambda: None)

    def update_stateless(
        self, step: int, state: Sequence[Any], optimizer: Optimizer = None
    ) -> Sequence[Any]:
        """As `update`, for a stateless loop on JAX; returns the state for the next step.

        If something is due, `state` is written to the model and the optimizer, these are updated,
        and their values returned; else `state` itself.

        Args:
            step: int. As for `update`.
            state: list or tuple. The values of `model.trainable_variables`, `model.
                non_trainable_variables` and, with a Keras optimizer, `optimizer.variables`; or the
                variables. Further elements, such as metrics or the state of an optimizer of optax,
                are returned as they are.
            optimizer: The Keras optimizer of the third list. Default: as for `update`; none where
                `state` has two elements.

        Raises ValueError as `update`, and for a state that does not fit the model.
        """

        def kept() -> list[Any]:
            model, owner = self._watched, self.optimizer
            if len(state) == 2:  # the loop has an optimizer of its own
                owner = self._loop_optimizer
            lists = [model.trainable_variables, model.non_trainable_variables]
            return lists if owner is None else [*lists, owner.variables]

        def write() -> None:
            lists = kept()
            sizes = [
                [len(array) for array in arrays]
                for arrays in (lists, state[: len(lists)])
            ]
            if sizes[0] != sizes[1]:
                raise ValueError(
                    "`state` must hold the values of the model's trainable variables, of its other "
                    f"ones, and of the optimizer's. Received: {sizes[1]} values, for {sizes[0]}"
                )
            for variables, values in zip(lists, state, strict=False):
                for variable, value in zip(variables, values, strict=True):
                    if value is not variable:
                        assign(variable, value)

        begun = self.in_loop
        if not self._update(step, optimizer, write) and begun:
            return state
        values = [
            [variable.value for variable in variables] for variables in kept()
        ]
        return type(state)((*values, *state[len(values) :]))  # type: ignore[call-arg]

    def prepare(self) -> None:
        """Override. Called when training begins; an error is raised on all workers."""

    def on_train_begin(self, logs: Config | None = None) -> None:
        build_restored_optimizer(self._watched)
        self.workers.together(self.prepare)
        self._prepared = True
        super().on_train_begin(logs)

    def change_masks(self, step: int, change: Callable[[], T]) -> T:
        """Changes masks on all workers; WorkerError if that fails on one, or results differ."""
        self.sync()
        result = self.workers.together(change)
        if self.workers.count > 1:
            self.workers.compare(
                f"after the update at step {step}", self._mask_facts()
            )
        return result

    def _mask_facts(self) -> dict[str, str]:
        weights = prunable_weights(self._watched)
        return {
            weight.path: digest_of(np.packbits(weight.mask))
            for weight in weights
        }

    def on_run_begin(self, step: int, start: int, steps: int | None) -> None:
        """Override. Called before the first epoch, when all state has been restored."""
        # `step` is the optimizer's; `start` its updates before epoch 0, negative if these were
        # lost; `steps` those of the run, `None` if unknown.

    def is_due(self, step: int, executed: int) -> bool:
        """Override. Whether `on_step` acts; `executed` is the updates since the last call."""
        return False

    def on_step(self, step: int, executed: int) -> None:
        """Override. Called before a step that is due."""

    def _add_to(self, logs: Config | None) -> None:
        self.sync()
        super()._add_to(logs)

    def warn_of_single_epochs(self, found: str) -> None:
        """Warns that a `fit` of one epoch finds the schedule of the one before at its end."""
        if self._one_epoch:
            warn_user(
                f"{type(self).__name__} has nothing left to do: an earlier `fit` has ended its "
                "schedule, in fractions of a run. With one `fit` for each epoch give it in steps "
                f"of all of them: `begin_step=0, end_step=...`. Received: {found}"
            )

    @property
    def in_loop(self) -> bool:
        return self._loop_step is not None

    def length(self) -> tuple[int | None, int | None]:
        params = self.params or {}
        return params.get("epochs"), params.get("steps")

    def sync(self) -> None:
        """Brings the model's variables up to date, which are stale on JAX during `fit`."""
        if keras.backend.backend() == "jax" and isinstance(
            self._watched, keras.Model
        ):
            self._watched.jax_state_sync()

    def on_epoch_begin(self, epoch: int, logs: Config | None = None) -> None:
        if self.optimizer is None:
            raise ValueError(
                f"{type(self).__name__} follows the steps of `model.optimizer`: compile the model, "
                "or only call `update(step)` in a custom training loop. "
                f"Received: model={self._watched.name!r}, not compiled"
            )
        self.sync()
        model = self._watched
        self._epoch_start, self._accumulated = applied_batches(model.optimizer)
        # With a loss scale or a custom `train_step` a batch may be no step, or several.
        self._must_read = hasattr(model.optimizer, "inner_optimizer") or (
            type(model).train_step is not keras.Model.train_step
        )
        self._begin_run(epoch)

    def on_train_batch_begin(
        self, batch: int, logs: Config | None = None
    ) -> None:
        batches_seen = self._epoch_start + batch
        if self._must_read:
            self.sync()
            batches_seen, _ = applied_batches(self._watched.optimizer)
        executed = self._watched.steps_per_execution
        step, before = (
            batches_seen // self._accumulated,
            (batches_seen - executed) // self._accumulated,
        )
        if step > before and self.is_due(step, step - before):
            self.on_step(step, step - before)

    def on_train_end(self, logs: Config | None = None) -> None:
        """Begins a run that had no epoch left."""
        self.sync()
        if not self.in_loop:
            self._begin_run((self.params or {}).get("epochs") or 0)

    def restart_error(
        self, step: int, found: str, *, can_begin: bool = False
    ) -> ValueError:
        """The error for a run that resumes with an optimizer that counts from the start."""
        if self.in_loop:
            return ValueError(
                f"{type(self).__name__} follows the steps given to `update`: count on over all "
                f"epochs and after a restart. Received: step={step}, {found}"
            )
        restart = (
            "To start a new run call `fit` without `initial_epoch`. "
            if can_begin
            else ""
        )
        return ValueError(
            f"{type(self).__name__} follows the steps of the optimizer, and these were lost. Build "
            "it before weights are loaded, `model.optimizer.build(model.trainable_variables)`, or "
            f"load the whole model with `keras.models.load_model`. {restart}"
            f"Received: the optimizer at step {step}, {found}"
        )

    def _begin_run(self, epoch: int) -> None:
        if self._run_begun:
            return
        epochs, batches = self.length()
        self._one_epoch = epochs == epoch + 1
        batches_seen, accumulated = applied_batches(self._watched.optimizer)
        # Whole epochs: after a checkpoint of single batches Keras begins the epoch again.
        before = (
            (batches_seen // batches - epoch) * batches
            if batches
            else batches_seen
        )
        self._begin(
            batches_seen // accumulated, before // accumulated, accumulated
        )

    def _begin(self, step: int, start: int, accumulated: int = 1) -> None:
        """Begins a run, in all workers with the same state."""
        epochs, batches = self.length()
        steps = epochs * batches // accumulated if epochs and batches else None
        self._run_begun = True
        self.workers.together(lambda: self.on_run_begin(step, start, steps))
        if self.workers.count > 1:
            settings = {
                name: value
                for name, value in vars(self).items()
                if not name.startswith("_")
            }
            facts = {
                repr(k): repr(v)
                for k, v in settings.items()
                if isinstance(v, int | float)
            }
            for number, variable in enumerate(
                self._watched.trainable_variables
            ):
                facts[f"variable {number}, {variable.name}"] = digest_of(
                    to_numpy(variable)
                )
            self.workers.compare(
                "before training", {**facts, **self._mask_facts()}
            )

    def _update(
        self, step: int, optimizer: Optimizer, write: Callable[[], None]
    ) -> bool:
        """Updates masks in one step of a custom loop; returns whether they have changed."""
        step, last_step = check_integer("step", step, least=0), self._loop_step
        self._take(optimizer)
        if last_step is not None and step < last_step:
            raise ValueError(
                "`step` must count all steps of the run, also over epochs; call `set_model` before "
                f"another run. Received: step={step}, after step={last_step}"
            )
        executed = 1 if last_step is None else step - last_step
        if last_step is None:
            self._loop_step = step  # `on_run_begin` may ask
            try:
                write()
                if not self._prepared:
                    self.on_train_begin()
                self._begin(step, 0)
            except Exception:
                self._loop_step, self._run_begun = None, False
                raise
        if not executed or not self.is_due(step, executed):
            self._loop_step = step
            return False
        if last_step is not None:
            write()
            self._warn_if_untrained()
        self.on_step(step, executed)
        self._loop_step = step
        self._weights_before = self._first_weight()
        return True

    def _take(self, optimizer: Optimizer) -> None:
        """Notes the model and the optimizer of a custom loop."""
        if self._watched is None:
            raise ValueError(
                "First call `set_model(model)`. Received: no model"
            )
        if optimizer is None or optimizer is self._loop_optimizer:
            return
        if not isinstance(
            optimizer, keras.Optimizer
        ) and not is_torch_optimizer(optimizer):
            raise TypeError(
                "`optimizer` must be a Keras optimizer or, on the torch backend, one of "
                f"torch.optim; leave others out. Received: {optimizer=}"
            )
        if not any(
            trains(optimizer, variable)
            for variable in self._watched.trainable_variables
        ):
            raise ValueError(
                "`optimizer` must train this model: make it after `sparsify` or `parametrize`, "
                f"from the model that these return. Received: a {type(optimizer).__name__} that "
                f"trains no variable of model={self._watched.name!r}"
            )
        self._loop_optimizer = optimizer

    def _warn_if_untrained(self) -> None:
        """Warns of a stateless loop that leaves the model as it is; only JAX can tell."""
        before = self._weights_before()
        if (
            self._may_warn
            and before is not None
            and self._first_weight()() is before
        ):
            self._may_warn = False
            warn_user(
                f"{type(self).__name__} finds the model's weights as at the last update. In a "
                "stateless loop call `state = callback.update_stateless(step, state, optimizer)`. "
                f"Received: model={self._watched.name!r}, after step={self._loop_step}"
            )

    def _first_weight(self) -> Callable[[], Any]:
        """A weak reference to the array of the first trainable variable, on JAX."""
        if (
            keras.backend.backend() != "jax"
            or not self._watched.trainable_variables
        ):
            return lambda: None
        return weakref.ref(self._watched.trainable_variables[0].value)


def run_position(step: int, start: int, in_steps: bool) -> int:
    """The step at which a schedule begins; one in fractions makes up for updates that are lost."""
    return step if in_steps else step - min(start, 0)
