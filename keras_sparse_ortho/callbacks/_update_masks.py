"""`UpdateMasks`: masks by magnitude on a schedule."""

from typing import Any

from keras_sparse_ortho._optimizer_slots import zero_slots
from keras_sparse_ortho.callbacks._density_run import DensityRun
from keras_sparse_ortho.callbacks._step_callback import run_position
from keras_sparse_ortho.orthogonal import live_count
from keras_sparse_ortho.parametrizations import ScheduledMask, StraightThroughTopK
from keras_sparse_ortho.schedules import Schedule


class UpdateMasks(DensityRun):
    """Updates masks of `MagnitudeMask`, `Feather` and `StraightThroughTopK` on their schedule.

    Before step `t` every weight whose schedule is due gets the mask of its `round(d(t) * size)`
    largest magnitudes. Raw weights that a `MagnitudeMask` drops are set to zero, and so are their
    moments and averages in the optimizer. What is due at the last step of a run is done when it
    ends. A mask at its final density does not change in later runs, although its schedule would
    start dense.

    The callback holds no state, so a run that is resumed from a checkpoint equals one that was not
    interrupted. The logs of `fit` get `density`, and, if dead entries can come back, `moved`: the
    fraction of live entries that did in this epoch. A custom training loop calls `update(step)`
    before every step: see docs/custom_loops.md.

    Raises:
        NotPrunableError: When training begins, if no weight has a scheduled mask.
        WorkerError: On all processes that train one model, if their models differ before the first
            step, or their masks after an update.
        ValueError: When training begins, if a schedule is in fractions of a run of unknown length;
            or if it would start again, because the optimizer has lost its steps.

    Warns:
        DensityWarning: When training has ended, and masks are not at the final density of their
            schedules; the reasons and remedies are those of `TargetDensity`.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> model = kso.parametrize(dense, kso.parametrizations.MagnitudeMask(0.25, frequency=2))
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0, callbacks=[UpdateMasks()])
    >>> round(kso.prunable_weights(model)[0].density, 3)
    0.25
    """

    _kind = ScheduledMask
    _names = "MagnitudeMask, Feather or StraightThroughTopK"

    def __init__(self) -> None:
        super().__init__()
        self._plans: list[tuple[ScheduledMask, Schedule]] = []
        self._grown = 0

    def prepare(self) -> None:
        super().prepare()
        for mask in self._own:
            mask.watched = True

    def on_run_begin(self, step: int, start: int, steps: int | None) -> None:
        """Resolves the schedules, except for masks that another run left at their final density."""
        self.sync()
        plans = [(mask, mask.schedule.resolved(steps, start)) for mask in self._own]
        self._plans = [(mask, plan) for mask, plan in plans if not _is_over(mask, plan, step)]
        for mask, _ in self._plans:
            if mask.last_updated > run_position(step, start, mask.schedule.is_resolved):
                found = f"and the mask of '{mask.weight.path}' updated at step {mask.last_updated}"
                raise self.restart_error(step, found)
        over = [mask for mask, plan in plans if _is_over(mask, plan, step)]
        if over and not all(mask.schedule.is_resolved for mask in over):
            self.warn_of_single_epochs(f"{len(over)} masks at their final density")

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        super().on_epoch_begin(epoch, logs)
        self._grown = 0

    def is_due(self, step: int, executed: int) -> bool:
        return any(plan.due(step, executed) for _, plan in self._plans)

    def on_step(self, step: int, executed: int) -> None:
        due = [(mask, plan) for mask, plan in self._plans if plan.due(step, executed)]
        self.change_masks(step, lambda: self._set_masks(due, step))

    def _set_masks(self, due: list[tuple[ScheduledMask, Schedule]], step: int) -> None:
        for mask, plan in due:
            reset, grown = mask.update(step, plan.at(step))
            self._grown += grown
            zero_slots(self.optimizer, mask.weight.variable, reset)

    def finish_run(self, step: int) -> None:
        executed = self._watched.steps_per_execution
        if self.is_due(step, executed):
            self.on_step(step, executed)

    def state(self) -> list[Any]:
        return [mask.last_updated for mask in self._own]

    def logged(self) -> dict[str, float]:
        """The density; and if dead entries can come back, what fraction of the live ones did."""
        entries = super().logged()
        if any(isinstance(mask, StraightThroughTopK) for mask in self._own):
            live = sum(mask.counts()[0] for mask in self._own)
            entries["moved"] = self._grown / max(live, 1)
        return entries

    def end_step(self) -> int | None:
        ends = [int(plan.end_step) for _, plan in self._plans if plan.end_step is not None]
        return max(ends, default=None)


def _is_over(mask: ScheduledMask, plan: Schedule, step: int) -> bool:
    """Whether a second `fit` finds a mask at its final density, which this plan would undo."""
    live, final = mask.counts()
    last = mask.last_updated
    if live != final or last < 0:
        return False
    return last > step or live_count(plan.at(last), mask.weight.size) != live
