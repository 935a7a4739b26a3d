"""`ThresholdSteering`: learnt thresholds set to a density, whatever the framework they live in."""

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from keras_sparse_ortho._checks import check_density, check_integer
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.orthogonal import largest_masks, live_count
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
        critical = [threshold.critical_offsets() for threshold in thresholds]
        everything = np.concatenate([np.ravel(c) for c in critical])
        count = live_count(self._laid_out().density(step), everything.size)
        self._warn_of_unreachable(int(np.count_nonzero(np.isposinf(everything))), count)
        offset = offset_for(everything, count)
        freeze = self.freeze and self.has_ended(step)
        masks = exact_masks(critical, count) if freeze else [c > offset for c in critical]
        pairs = list(zip(thresholds, masks, strict=True))
        self._warn_of_collapse([t.weight.path for t, mask in pairs if not mask.any()])
        frozen = []
        for threshold, mask in pairs:
            assign(threshold.offset, offset)
            if freeze:
                frozen.append((threshold, threshold.freeze(mask)))
        self._all_frozen = self._all_frozen or freeze
        return frozen

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


def offset_for(critical: np.ndarray, count: int) -> float:
    """An offset that `count` critical offsets are above, as nearly as there is one.

    Example:

    >>> offset_for(np.array([1.0, 4.0, -np.inf, 2.0]), 2)
    1.5
    """
    if count == critical.size:
        return float(_finite(critical).min(initial=0.0)) - 1.0
    ranked = np.partition(critical, critical.size - count - 1)
    below = float(ranked[critical.size - count - 1])
    above = float(ranked[critical.size - count :].min(initial=np.inf))
    if not np.isfinite(below) and below > 0:  # no offset kills so many
        return float(_finite(critical).max(initial=0.0)) + 1.0
    if not np.isfinite(below):  # all below are exactly 0
        return (above if np.isfinite(above) else 0.0) - 1.0
    return (below + above) / 2 if np.isfinite(above) else below + 1.0


def _finite(values: np.ndarray) -> np.ndarray:
    return values[np.isfinite(values)]


def exact_masks(critical: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
    """Masks of the `count` largest critical offsets; ties to the first weight and index.

    Example:

    >>> masks = exact_masks([np.array([-np.inf, 2.0]), np.array([np.inf, 2.0])], 2)
    >>> [mask.tolist() for mask in masks]
    [[False, True], [True, False]]
    """
    # -inf (of a weight of 0) and inf (of one that no threshold reaches) keep their rank.
    dtype = np.result_type(*critical)
    low, high = np.finfo(dtype).min, np.finfo(dtype).max
    return largest_masks(
        [np.nan_to_num(c.astype(dtype), nan=low, neginf=low, posinf=high) for c in critical], count
    )
