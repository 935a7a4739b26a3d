"""`DensityLogger`, `UpdateMasks`, and `DensityRun`, their common base with `TargetDensity`."""

import abc
from typing import Any

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._keras_internals import (
    after_fit,
    applied_batches,
    warn_user,
)
from keras_sparse_ortho._optimizer_slots import zero_slots
from keras_sparse_ortho._types import Config
from keras_sparse_ortho.callbacks._step_callback import (
    Logging,
    StepCallback,
    run_position,
)
from keras_sparse_ortho.errors import DensityWarning, NotPrunableError
from keras_sparse_ortho.models import (
    DensityGap,
    density_gap,
    prunable_weights,
    warn_of_gap,
    watch_saving,
)
from keras_sparse_ortho.parametrizations import (
    Parametrization,
    ScheduledMask,
    StraightThroughTopK,
)
from keras_sparse_ortho.schedules import Schedule


class DensityLogger(Logging):
    """Adds density and thresholds of the kernels to the logs of every epoch.

    `density = sum(live) / sum(size)` over all kernels and `threshold`, the mean over kernels with
    learnt ones, reach all callbacks of the list. `TargetDensity` and `UpdateMasks` add the same.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> model = kso.sparsify(keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]), 0.25)
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0,
        ...                     callbacks=[kso.callbacks.DensityLogger()])
        >>> history.history["density"]
        [0.25]
    """

    @other_keywords
    def __init__(self) -> None:
        super().__init__()

    def logged(self) -> dict[str, float]:
        return _density_and_threshold(self.model)


def _density_and_threshold(model: Any) -> dict[str, float]:
    weights = prunable_weights(model)
    entries = {
        "density": sum(w.live for w in weights) / sum(w.size for w in weights)
    }
    parametrizations = [
        w.parametrization
        for w in weights
        if isinstance(w.parametrization, Parametrization)
    ]
    thresholds = [
        parametrization.threshold_value()
        for parametrization in parametrizations
    ]
    means = [
        float(threshold.mean())
        for threshold in thresholds
        if threshold is not None
    ]
    return (
        {**entries, "threshold": sum(means) / len(means)} if means else entries
    )


def warn_not_finite(callback: str, error: NotPrunableError) -> None:
    warn_user(
        f"{callback} could not bring the weights to their density after the last step, as the run "
        "has left infinite or NaN ones. Train again, with a lower learning rate or other data. "
        f"Received: {error}",
        DensityWarning,
    )


class DensityRun(StepCallback):
    """Brings parametrizations of a `_kind` to a density, and warns when the run ends without it."""

    _kind: type[Parametrization]
    _names: str

    def __init__(self) -> None:
        super().__init__()
        self._own: list[Any] = []
        self._at_epoch_end: list[Any] | None = None
        self._last_step = 0
        self._not_finite: NotPrunableError | None = (
            None  # why the last step was not done
        )

    def logged(self) -> dict[str, float]:
        return _density_and_threshold(self._watched)

    @abc.abstractmethod
    def state(self) -> list[Any]:
        """Values that this callback has set in the model; they differ once weights are restored."""

    @abc.abstractmethod
    def end_step(self) -> int | None:
        """The step at which the last schedule ends."""

    def is_due_at_end(self, step: int, executed: int) -> bool:
        return self.is_due(step, executed)

    def prepare(self) -> None:
        parametrizations = [
            weight.parametrization for weight in prunable_weights(self._watched)
        ]
        self._own = [
            parametrization
            for parametrization in parametrizations
            if isinstance(parametrization, self._kind)
        ]
        if not self._own:
            raise NotPrunableError(
                f"{type(self).__name__} needs weights with {self._names}: see keras_sparse_ortho."
                f"parametrize. Received: model={self._watched.name!r} without any"
            )
        self._at_epoch_end = self._not_finite = None
        watch_saving(self._watched, False)

    def on_epoch_end(self, epoch: int, logs: Config | None = None) -> None:
        super().on_epoch_end(epoch, logs)
        self.sync()
        self._at_epoch_end = self.state()

    def on_train_end(self, logs: Config | None = None) -> None:
        super().on_train_end(logs)
        self._last_step = self._loop_step or 0
        if not self.in_loop:
            batches_seen, accumulated = applied_batches(self._watched.optimizer)
            step, executed = (
                batches_seen // accumulated,
                self._watched.steps_per_execution,
            )
            self._last_step = step
            if not self._were_restored():  # no training would follow a cut
                try:
                    if self.is_due_at_end(step, executed):
                        self.on_step(step, executed)
                # An error here would cost `fit` its History.
                except NotPrunableError as error:
                    self._not_finite = error
                self._at_epoch_end = self.state()
        after_fit(self._watched, self._check_density)

    def _were_restored(self) -> bool:
        return (
            self._at_epoch_end is not None
            and self._at_epoch_end != self.state()
        )

    def _check_density(self) -> None:
        if self._not_finite is not None:
            warn_not_finite(type(self).__name__, self._not_finite)
            return
        gap = density_gap(self._own)
        watch_saving(self._watched, gap is not None)
        if gap is not None:
            warn_of_gap(gap, self._reason(gap))

    def _reason(self, gap: DensityGap) -> str:
        end, step = self.end_step(), self._last_step
        if self._were_restored():
            return (
                "weights of an earlier epoch were restored. Wrap EarlyStopping and ModelCheckpoint "
                "in callbacks.BestAtDensity, so that only epochs at that density count"
            )
        if end is None or step >= end:
            if gap.live < gap.asked:
                return "more entries than that are already 0"
            return "the live entries were fixed before, by another run"
        if getattr(self._watched, "stop_training", False):
            return f"training was stopped at step {step}, before the schedule ends at step {end}"
        return (
            f"the schedule ends at step {end}, and the run at step {step}. Fractions of a run, as "
            "in schedules.Cubic(0.1, begin_step=0.0, end_step=0.7), follow its length"
        )


class UpdateMasks(DensityRun):
    """Updates masks of `MagnitudeMask`, `Feather` and `StraightThroughTopK` on their schedule.

    Before step `t` every weight whose schedule is due gets the mask of its `round(d(t) * size)`
    largest magnitudes. Raw weights that a `MagnitudeMask` drops become zero, like their moments and
    averages in the optimizer. Masks at their final density stay in later runs. The logs of `fit`
    get `density` and, if dead entries can come back, `moved`: the fraction of live entries that did
    in this epoch. In a custom training loop call `update(step)`: see docs/custom_loops.md.

    Args:
        stop: bool. Whether to end `fit` when the last schedule has ended, to go on in another
            storage: `convert(model, "blocks")`.

    Raises:
        NotPrunableError: When training begins, if no weight has a scheduled mask.
        WorkerError: On all processes that train one model, if their masks differ.
        ValueError: When training begins, if a schedule is in fractions of a run of unknown length;
            or if it would start again, because the optimizer has lost its steps.

    Warns:
        DensityWarning: When masks do not end at their final density; see `TargetDensity`.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        >>> model = kso.parametrize(dense, kso.parametrizations.MagnitudeMask(0.25, frequency=2))
        >>> model.compile("sgd", "mse")
        >>> masks = UpdateMasks()
        >>> history = model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0, callbacks=[masks])
        >>> round(kso.prunable_weights(model)[0].density, 3)
        0.25
    """

    _kind = ScheduledMask
    _names = "MagnitudeMask, Feather or StraightThroughTopK"

    @other_keywords
    def __init__(self, *, stop: bool = False) -> None:
        super().__init__()
        self.stop = stop
        self._plans: list[tuple[ScheduledMask, Schedule]] = []
        self._grown = 0

    def prepare(self) -> None:
        super().prepare()
        for mask in self._own:
            mask.watched = True

    def on_run_begin(self, step: int, start: int, steps: int | None) -> None:
        self.sync()
        plans = [
            (mask, mask.schedule.resolved(steps, start)) for mask in self._own
        ]
        over = [mask for mask, plan in plans if _is_over(mask, plan, step)]
        self._plans = [pair for pair in plans if pair[0] not in over]
        for mask, _ in self._plans:
            if mask.last_updated > run_position(
                step, start, mask.schedule.is_resolved
            ):
                found = f"and the mask of {mask.weight.path!r} updated at step {mask.last_updated}"
                raise self.restart_error(step, found)
        if over and not all(mask.schedule.is_resolved for mask in over):
            self.warn_of_single_epochs(
                f"{len(over)} masks at their final density"
            )

    def on_epoch_begin(self, epoch: int, logs: Config | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._grown = 0

    def is_due(self, step: int, executed: int) -> bool:
        return any(plan.due(step, executed) for _, plan in self._plans)

    def on_step(self, step: int, executed: int) -> None:
        def update() -> None:
            for mask, plan in self._plans:
                if plan.due(step, executed):
                    reset, grown = mask.update(step, plan.at(step))
                    self._grown += grown
                    zero_slots(self.optimizer, mask.weight.variable, reset)

        self.change_masks(step, update)
        end = self.end_step()
        if self.stop and end is not None and step >= end:
            self._watched.stop_training = True

    def state(self) -> list[Any]:
        return [mask.last_updated for mask in self._own]

    def logged(self) -> dict[str, float]:
        entries = super().logged()
        if any(isinstance(mask, StraightThroughTopK) for mask in self._own):
            live = sum(mask.counts()[0] for mask in self._own)
            entries["moved"] = self._grown / max(live, 1)
        return entries

    def end_step(self) -> int | None:
        ends = [
            int(plan.end_step)
            for _, plan in self._plans
            if plan.end_step is not None
        ]
        return max(ends, default=None)


def _is_over(mask: ScheduledMask, plan: Schedule, step: int) -> bool:
    """Whether an earlier run left the mask at its final density, which this plan would undo."""
    live, final = mask.counts()
    last = mask.last_updated
    if live != final or last < 0:
        return False
    return last > step or mask.live_at(plan.at(last)) != live
