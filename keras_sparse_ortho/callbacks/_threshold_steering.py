"""`ThresholdSteering`: learnt thresholds steered to a density, in Keras or in tf_keras."""

import warnings
from collections.abc import Sequence
from typing import Any

from keras_sparse_ortho._checks import check_density, check_integer
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.callbacks._offset_search import cut, entries_of
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.orthogonal import live_count
from keras_sparse_ortho.schedules import Cubic, Schedule


class ThresholdSteering:
    """Sets the common offset of the thresholds of a model to the density of a schedule.

    For `round(d(t) * size)` live entries in step `t` the offset is put between the critical
    offsets of this rank and of the next, over all thresholds; at the end of the schedule exactly
    as many entries are frozen. It needs no optimizer or callback: call `begin` first (or `take`,
    and `resolve` once the length of the run is known), then `steer` before each step that
    `is_due`, and once more after the last one. A threshold has the attributes `counted`, `offset`,
    `weight`, `frozen` and `steered`, and the methods `critical_offsets` and `freeze` of
    `parametrizations.LearntThreshold`. The arguments are those of `TargetDensity`.
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
        self._thresholds: list[Any] = []
        self._all_frozen = False
        self._warned_of_unreachable = False
        self._warned_of: set[str] = set()

    def begin(self, thresholds: Sequence[Any], epochs: int | None, steps: int | None) -> None:
        """`take`, and `resolve` for this many epochs and steps of an epoch, if they are known."""
        self.take(thresholds)
        self.resolve(None if not epochs or not steps else epochs * steps)

    def take(self, thresholds: Sequence[Any]) -> None:
        """Takes the thresholds of a model; NotPrunableError for some on entries, some on ranks."""
        counted = sorted({threshold.counted for threshold in thresholds})
        if len(counted) > 1:
            raise NotPrunableError(
                "TargetDensity steers one density: that of entries, or that of ranks. "
                f"Received: a model with thresholds on both, {counted}"
            )
        self._thresholds = list(thresholds)

    def resolve(self, steps: int | None, start: int = 0) -> None:
        """Resolves the schedule for a run, which may have been interrupted, as `Schedule.resolved`.

        Raises:
            ValueError: No schedule, or one in fractions of the run, and an unknown length.
        """
        if self.schedule is None and steps is None:
            raise ValueError(
                "TargetDensity needs a `schedule` if the number of steps is not known before "
                f"training. Received: schedule=None, {steps=}"
            )
        schedule = self.schedule or Cubic(self.final_density, frequency=self.frequency)
        self._plan = schedule.resolved(steps, start)
        # Kept, as `is_due` is called in every step, when JAX' variables may not be up to date.
        self._all_frozen = not self.thresholds

    @property
    def end_step(self) -> int | None:
        """The step at which the schedule ends, in this run."""
        end = self._resolved().end_step
        return None if end is None else int(end)

    @property
    def thresholds(self) -> list[Any]:
        """Those that are not frozen."""
        return [threshold for threshold in self._thresholds if not threshold.frozen]

    def is_due(self, step: int, executed: int) -> bool:
        """Whether to `steer` before this step, `executed` updates after the last call."""
        plan = self._resolved()
        if plan.due(step, executed):
            return True
        if not self.has_ended(step):
            return False
        # A run that was resumed after the end freezes now; without `freeze` updates go on.
        return not self._all_frozen if self.freeze else step % (plan.frequency or 1) < executed

    def is_due_at_end(self, step: int, executed: int) -> bool:
        """Whether to `steer` after the last step; the arguments are those of `is_due`."""
        plan = self._resolved()
        endless = plan.end_step is None and step >= plan.begin_step
        return endless or self.has_ended(step) or plan.due(step, executed)

    def steer(self, step: int) -> list[tuple[Any, Any]]:
        """Sets the offset for the density at a step, and freezes if the schedule has ended.

        Returns:
            Each threshold that was frozen now, with the mask of its live entries.
        """
        thresholds = self.thresholds
        if not thresholds:
            return []
        entries = [entries_of(threshold) for threshold in thresholds]
        count = live_count(self._resolved().density(step), sum(one.size for one in entries))
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

    def _resolved(self) -> Schedule:
        assert self._plan is not None, "call `begin` first"
        return self._plan

    def has_ended(self, step: int) -> bool:
        """Whether the schedule has come to its end."""
        end = self._resolved().end_step
        return end is not None and step >= end

    def _warn_of_unreachable(self, unreachable: int, count: int) -> None:
        if unreachable > count and not self._warned_of_unreachable:
            self._warned_of_unreachable = True
            warnings.warn(
                "More entries than may stay live are larger than any threshold of this `g`; use "
                f"g='exp' or 'softplus'. Received: {unreachable} such entries, {count} to keep",
                stacklevel=2,
            )

    def _warn_of_collapse(self, paths: list[str]) -> None:
        fresh = [path for path in paths if path not in self._warned_of]
        self._warned_of.update(fresh)
        if fresh:
            warnings.warn(
                "TargetDensity leaves weights without a live entry: their magnitudes are small "
                "compared with the other weights. `exclude` them from `parametrize`, or ask for "
                f"a higher density. Received: {fresh}",
                stacklevel=2,
            )
