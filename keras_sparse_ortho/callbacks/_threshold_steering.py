"""`ThresholdSteering`: learnt thresholds set to a density, whatever the framework they live in."""

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from keras_sparse_ortho._checks import check_density, check_integer
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.callbacks._offset_search import cut, entries_of
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.orthogonal import live_count
from keras_sparse_ortho.schedules import Cubic, Schedule


class SteeredThreshold(Protocol):
    """A threshold `t = g(s + offset)`, as `parametrizations.LearntThreshold` is one."""

    counted: str
    offset: Any

    @property
    def weight(self) -> Any:
        """The weight that it prunes, with a `path`."""

    @property
    def frozen(self) -> bool:
        """Whether the threshold is 0 for good, and the live entries are fixed."""

    @property
    def steered(self) -> Any:
        """The variable whose entries the threshold takes."""

    def critical_offsets(self) -> np.ndarray:
        """For every entry of `steered` the offset at which it dies."""

    def freeze(self, mask: np.ndarray) -> np.ndarray:
        """Fixes which entries are live; returns which are."""


class ThresholdSteering:
    """Holds the thresholds of a model, and sets their common offset as a schedule asks for it.

    For `round(d(t) * size)` live entries in step `t` the offset is put between the critical
    offsets of this rank and of the next, over all thresholds; at the end of the schedule exactly
    so many entries are frozen. It knows nothing of optimizers, callbacks and frameworks: those who
    train call `begin` first (or `take`, and `lay_out` once the length of the run is known), then
    before each step `steer`, if the step `is_due`, and once more after the last one.

    Args:
        final_density: Global live fraction in the end, in (0, 1].
        schedule: A schedule; its final density is replaced. Default: `Cubic` over the first 70% of
            the training.
        frequency: Steps between two settings of the offset, if there is no schedule. Default: a
            hundredth of the steps over which the density falls, but 100 at most.
        freeze: Whether to fix the live entries at the end of the schedule.

    Raises:
        DensityError: A density outside (0, 1].
    """

    def __init__(
        self,
        final_density: float,
        schedule: Schedule | None = None,
        frequency: int | None = None,
        freeze: bool = True,
    ) -> None:
        self.final_density = check_density(final_density, "final_density")
        self.schedule = None if schedule is None else schedule.with_final(self.final_density)
        self.frequency = None if frequency is None else check_integer("frequency", frequency)
        self.freeze = freeze
        self._plan: Schedule | None = None
        self._thresholds: list[SteeredThreshold] = []
        self._all_frozen = False
        self._warned_of_unreachable = False
        self._warned_of: set[str] = set()

    def begin(
        self, thresholds: Sequence[SteeredThreshold], epochs: int | None, steps: int | None
    ) -> None:
        """Takes the thresholds of a model, and lays out the schedule.

        Args:
            thresholds: The thresholds.
            epochs: Epochs of the training, if that is known.
            steps: Steps of an epoch, if that is known.

        Raises:
            NotPrunableError: Thresholds on entries and thresholds on ranks.
            ValueError: No schedule, and a training whose length is not known.
        """
        self.take(thresholds)
        self.lay_out(None if not epochs or not steps else epochs * steps)

    def take(self, thresholds: Sequence[SteeredThreshold]) -> None:
        """Takes the thresholds of a model.

        Raises:
            NotPrunableError: Thresholds on entries and thresholds on ranks.
        """
        counted = sorted({threshold.counted for threshold in thresholds})
        if len(counted) > 1:
            raise NotPrunableError(
                "TargetDensity steers one density: that of entries, or that of ranks. "
                f"Received: a model with thresholds on both, {counted}"
            )
        self._thresholds = list(thresholds)

    def lay_out(self, steps: int | None, start: int = 0) -> None:
        """Lays out the schedule; the thresholds are as they were when the run was left.

        Args:
            steps: Updates of the optimizer in the run, if that is known.
            start: Updates before it.

        Raises:
            ValueError: No schedule, or one in parts of the run, and a length that is not known.
        """
        if self.schedule is None and steps is None:
            raise ValueError(
                "TargetDensity needs a `schedule` where the number of steps is not known before "
                f"training. Received: schedule=None, {steps=}"
            )
        schedule = self.schedule or Cubic(self.final_density, frequency=self.frequency)
        self._plan = schedule.laid_out(steps, start)
        # Kept, as `is_due` is asked in every step, when JAX' variables may not be up to date.
        self._all_frozen = not self.thresholds

    @property
    def end_step(self) -> int | None:
        """The step at which the schedule ends, in this run."""
        end = self._laid_out().end_step
        return None if end is None else int(end)

    @property
    def thresholds(self) -> list[SteeredThreshold]:
        """Those that are not frozen."""
        return [threshold for threshold in self._thresholds if not threshold.frozen]

    def is_due(self, step: int, executed: int) -> bool:
        """Whether to `steer` before this step.

        Args:
            step: Updates of the optimizer so far.
            executed: Updates since the last time that this was asked.
        """
        plan = self._laid_out()
        if plan.due(step, executed):
            return True
        if not self.has_ended(step):
            return False
        # Where it should have been frozen, at whatever step a run was resumed; or set again.
        return not self._all_frozen if self.freeze else step % (plan.frequency or 1) < executed

    def is_due_at_end(self, step: int, executed: int) -> bool:
        """Whether to `steer` after the last step; the arguments are those of `is_due`."""
        plan = self._laid_out()
        endless = plan.end_step is None and step >= plan.begin_step
        return endless or self.has_ended(step) or plan.due(step, executed)

    def steer(self, step: int) -> list[tuple[SteeredThreshold, np.ndarray]]:
        """Sets the offset for the density at a step, and freezes if the schedule has ended.

        Returns:
            Each threshold that was frozen now, with the mask of its live entries.
        """
        thresholds = self.thresholds
        if not thresholds:
            return []
        entries = [entries_of(threshold) for threshold in thresholds]
        count = live_count(self._laid_out().density(step), sum(one.size for one in entries))
        found = cut(entries, count)
        self._warn_of_unreachable(found.unreachable(), count)
        shares = zip(thresholds, found.shares(), strict=True)
        self._warn_of_collapse([t.weight.path for t, live in shares if not live])
        freeze = self.freeze and self.has_ended(step)
        masks = found.masks() if freeze else []
        offset = found.offset()
        for threshold in thresholds:
            assign(threshold.offset, offset)
        self._all_frozen = self._all_frozen or freeze
        pairs = zip(thresholds, masks, strict=freeze)
        return [(threshold, threshold.freeze(mask)) for threshold, mask in pairs]

    def _laid_out(self) -> Schedule:
        assert self._plan is not None, "`begin` comes first"
        return self._plan

    def has_ended(self, step: int) -> bool:
        """Whether the schedule has come to its end."""
        end = self._laid_out().end_step
        return end is not None and step >= end

    def _warn_of_unreachable(self, unreachable: int, count: int) -> None:
        if unreachable > count and not self._warned_of_unreachable:
            self._warned_of_unreachable = True
            warnings.warn(
                "More weights than may stay live are larger than any threshold of this `g`; take "
                f"g='exp' or 'softplus'. Received: {unreachable} such weights, {count} to keep",
                stacklevel=2,
            )

    def _warn_of_collapse(self, paths: list[str]) -> None:
        fresh = [path for path in paths if path not in self._warned_of]
        self._warned_of.update(fresh)
        if fresh:
            warnings.warn(
                "TargetDensity leaves weights without a live entry: their magnitudes are small "
                "against those of the others. `exclude` them from `parametrize`, or ask for a "
                f"higher density. Received: {fresh}",
                stacklevel=2,
            )
