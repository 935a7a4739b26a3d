"""`TargetDensity`, and `ThresholdSteering`, its part that tf_keras shares."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_sparse_ortho._checks import (
    check_density,
    check_integer,
    check_number,
    other_keywords,
)
from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho._optimizer_slots import zero_slots
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.budgets import erk
from keras_sparse_ortho.callbacks._density_run import DensityRun
from keras_sparse_ortho.callbacks._step_callback import run_position
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import density_gap
from keras_sparse_ortho.orthogonal import largest_masks, live_count
from keras_sparse_ortho.parametrizations import LearntThreshold
from keras_sparse_ortho.schedules import Cubic, Schedule

_LARGEST = np.finfo(np.float64).max
DEFAULT_FLOOR = 0.3
"""The least count of each layer, as a share of its ERK count."""


class ThresholdSteering:
    """`TargetDensity` without the callback: `take`, `resolve`, `steer` when due and at the end."""

    def __init__(
        self,
        density: float,
        schedule: Schedule | None = None,
        frequency: int | None = None,
        freeze: bool = True,
        floor: float = DEFAULT_FLOOR,
    ) -> None:
        self.floor = check_number("floor", floor)
        if not 0 <= self.floor <= 1:
            raise ValueError(
                f"`floor` must be in [0, 1]. Received: floor={floor!r}"
            )
        self.density = check_density(density)
        self.frequency = (
            None if frequency is None else check_integer("frequency", frequency)
        )
        self.freeze = freeze
        self._needs_length = schedule is None
        self.schedule = (
            schedule or Cubic(1.0, frequency=self.frequency)
        ).with_density(density)
        self._plan = self.schedule
        self._thresholds: list[Any] = []
        self._all_frozen = False
        self._warned_of: set[str] = set()

    def take(self, thresholds: Sequence[Any]) -> None:
        """Takes the thresholds of a model; NotPrunableError if some count entries, some ranks."""
        counted = sorted({threshold.counted for threshold in thresholds})
        if len(counted) > 1:
            raise NotPrunableError(
                "TargetDensity controls either the density of entries or that of ranks, not both. "
                f"Received: a model with thresholds on both, {counted}"
            )
        self._thresholds, self._warned_of = list(thresholds), set()

    def resolve(self, steps: int | None, start: int = 0) -> None:
        """Resolves the schedule for a run; ValueError for one of unknown length without steps."""
        if self._needs_length and steps is None:
            raise ValueError(
                "TargetDensity needs a `schedule` if the number of steps is not known before "
                "training, in steps, as schedules.Cubic(begin_step=0, end_step=...). "
                f"Received: schedule=None, {steps=}"
            )
        self._plan = self.schedule.resolved(steps, start)
        # Kept: `is_due` is called in every step, when JAX' variables may be stale.
        self._all_frozen = not self.thresholds

    def end_step(self) -> int | None:
        end = self._plan.end_step
        return None if end is None else int(end)

    @property
    def thresholds(self) -> list[Any]:
        return [
            threshold for threshold in self._thresholds if not threshold.frozen
        ]

    def is_due(self, step: int, executed: int) -> bool:
        """Whether to `steer` before this step, `executed` updates after the last call."""
        due = self._plan.due(step, executed)
        if due or not self.has_ended(step):
            return due
        # A run that was resumed after the end freezes now; without `freeze` updates go on.
        frequency = self._plan.frequency or 1
        return (
            not self._all_frozen if self.freeze else step % frequency < executed
        )

    def is_due_at_end(self, step: int, executed: int) -> bool:
        plan = self._plan
        endless = plan.end_step is None and step >= plan.begin_step
        return endless or self.has_ended(step) or plan.due(step, executed)

    def steer(self, step: int) -> list[tuple[Any, np.ndarray]]:
        """Sets the offset for a step; returns the thresholds it freezes, with their live masks."""
        freeze = self.freeze and self.has_ended(step)
        frozen = self.cut(self.thresholds, self._plan.at(step), freeze)
        self._all_frozen = self._all_frozen or freeze
        return frozen

    def cut(
        self, thresholds: Sequence[Any], density: float, freeze: bool
    ) -> list[tuple[Any, np.ndarray]]:
        """Sets offsets that leave the target density live; freezes masks if asked."""
        if not thresholds:
            return []
        entries = [entries_of(threshold) for threshold in thresholds]
        sizes = [of_weight.critical.size for of_weight in entries]
        count = live_count(density, sum(sizes))
        floors = floors_of(thresholds, sizes, self.density, self.floor)
        result = floored_cut(entries, count, floors)
        self._warn(result, thresholds, count)
        for threshold, offset in zip(thresholds, result.offsets, strict=True):
            assign(threshold.offset, offset)
        pairs = zip(thresholds, result.masks, strict=True)
        return (
            [(threshold, threshold.freeze(mask)) for threshold, mask in pairs]
            if freeze
            else []
        )

    def has_ended(self, step: int) -> bool:
        end = self.end_step()
        return end is not None and step >= end

    def _warn(
        self, result: "Cut", thresholds: Sequence[Any], count: int
    ) -> None:
        """Says which entries cannot be reached, or tie."""
        if result.unreachable > count:
            self._tell(
                ["unreachable"],
                "No threshold of this `g` gives the target density; use g='exp' or 'softplus'",
                f"{result.unreachable} such entries, {count} to keep",
            )
        self._tell(
            [thresholds[k].weight.path for k in result.at_floor],
            f"TargetDensity holds weights at their floor, {self.floor:g} of their ERK count: their "
            "magnitudes are small compared with the other weights. `floor` changes that",
        )
        pairs = zip(thresholds, result.masks, strict=True)
        self._tell(
            [
                threshold.weight.path
                for threshold, mask in pairs
                if not mask.any()
            ],
            "TargetDensity leaves weights without a live entry: their magnitudes are small "
            "compared with the other weights. A model that needs them may be at chance. `exclude` "
            "them from `parametrize`, or ask for a higher density",
        )

    def _tell(self, paths: list[str], what: str, received: str = "") -> None:
        """Warns of weights, unless it has warned of the same before."""
        new_paths = [path for path in paths if path not in self._warned_of]
        self._warned_of.update(paths)
        if new_paths:
            warn_user(f"{what}. Received: {received or new_paths}")


class TargetDensity(ThresholdSteering, DensityRun):
    """Steers all learnt thresholds of a model to a global density.

    All layers share an offset `o`: their thresholds are `t_l = g(s_l + o)`, and `s_l` go on
    learning. An entry `w` of layer `l` dies at its critical offset `g^-1(|w|) - s_l`, so an offset
    between the k-th and the next largest one leaves exactly `k` entries live. Every step of the
    schedule sets it for `k = round(d(t) * size)`. At the end the live entries are fixed (`freeze`):
    `w` becomes `w_e`, thresholds become 0, and a mask keeps dead entries at 0 and without gradient,
    whatever the optimizer does. The logs of `fit` get `density` and `threshold`. In a custom
    training loop call `update(step)`: see docs/custom_loops.md.

    Args:
        density: float in (0, 1]. Global live fraction in the end.
        schedule: Schedule, whose density may be left out. Default: `Cubic` over the first 70% of
            the run.
        frequency: int. Steps between updates of the offset, without a `schedule`. Default: a
            hundredth of the steps over which the density falls, but 100 at most.
        freeze: bool. Whether to fix the live entries at the end of the schedule. If not, the offset
            is still updated every `frequency` steps, and when the run ends.
        floor: float in [0, 1]. Least count of each layer, as a share of its count under
            `budgets.erk`; unless 0, one entry (or channel) at least. Layers below it get another
            offset, and the others share the rest: the total stays exact.

    Raises:
        NotPrunableError: When training begins, if no weight has a learnt threshold, or only some
            are on ranks.
        WorkerError: On all processes that train one model, if their live entries differ.
        ValueError: When training begins: no schedule for data of unknown length; a schedule that
            would start again, as the optimizer has lost its steps.

    Warns:
        DensityWarning: When the weights do not end at `density`: the run was shorter than the
            schedule, or weights of an earlier epoch were restored (`BestAtDensity`, `finish`).

    Limits: between updates the count drifts with the weights. With `ChannelSoftThreshold` it is
    exact to within a channel; with `LowRankSoftThreshold` ranks are counted. With `g="sigmoid"`
    entries of magnitude 1 and more cannot die before the end, which keeps the largest of them.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(34)])
        >>> model = kso.parametrize(dense, kso.parametrizations.SoftThreshold())
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((64, 64)), np.ones((64, 34)), verbose=0, batch_size=4,
        ...                     callbacks=[TargetDensity(0.125, frequency=4)])
        >>> kso.prunable_weights(model)[0].live  # 0.125 * 64 * 34
        272

    References: Kusupati et al. (ICML 2020), arXiv 2002.03231, for the thresholds; Zhu and Gupta
    (2017), arXiv 1710.01878, for the schedule
    """

    _kind = LearntThreshold
    _names = "SoftThreshold"

    @other_keywords
    def __init__(
        self,
        density: float,
        schedule: Schedule | None = None,
        *,
        frequency: int | None = None,
        freeze: bool = True,
        floor: float = DEFAULT_FLOOR,
    ) -> None:
        DensityRun.__init__(self)
        ThresholdSteering.__init__(
            self, density, schedule, frequency, freeze, floor
        )

    def prepare(self) -> None:
        super().prepare()
        self.take(self._own)

    def on_run_begin(self, step: int, start: int, steps: int | None) -> None:
        """Resolves the schedule; refuses a second run whose thresholds were steered."""
        self.sync()
        in_steps = self.schedule.is_resolved
        gap = density_gap(self._own)
        steered = any(
            to_numpy(threshold.offset).item() for threshold in self._own
        )
        if (
            gap is not None
            and steered
            and not run_position(step, start, in_steps)
        ):
            raise self.restart_error(
                step, f"and thresholds that were steered to {gap}"
            )
        self.resolve(steps, start)
        end = self.end_step()
        if (
            not in_steps
            and end is not None
            and step < end
            and not self.thresholds
        ):
            self.warn_of_single_epochs(
                "thresholds that were fixed by another run"
            )
        for threshold in self._own:
            threshold.aim(self.density, self.freeze and end is not None)

    def on_step(self, step: int, executed: int) -> None:
        def steer() -> None:
            for threshold, live in self.steer(step):
                zero_slots(
                    self.optimizer, threshold.steered, np.logical_not(live)
                )

        self.change_masks(step, steer)

    def state(self) -> list[Any]:
        offsets = [to_numpy(t.offset).item() for t in self._own]
        return [*offsets, *(threshold.frozen for threshold in self._own)]


# --- which offset leaves exactly `count` entries live ---------------------------------------------


class Entries(NamedTuple):
    """The entries of one weight: live while the common offset is below their critical one."""

    critical: np.ndarray
    scales: np.ndarray


def entries_of(threshold: Any) -> Entries:
    """The entries of the weight of a threshold; NotPrunableError if any is not finite."""
    entries = Entries(threshold.critical_offsets(), threshold.scales())
    wrong = np.isnan(entries.critical) | ~np.isfinite(entries.scales)
    if wrong.any():
        raise NotPrunableError(
            f"The weight {threshold.weight.path!r} is not finite, or its threshold is not. "
            f"Received: {np.count_nonzero(wrong)} infinite or NaN values"
        )
    return entries


def floors_of(
    thresholds: Sequence[Any],
    sizes: Sequence[int],
    density: float,
    share: float,
) -> list[int]:
    """The floor of each weight: `share` of its ERK count, or less if not all can have that."""
    units = [getattr(threshold, "dies_at_once", 1) for threshold in thresholds]
    count = live_count(density, sum(sizes))
    if not share or sum(units) > count:
        return [0] * len(units)
    counts = [density * size for size in sizes]
    if thresholds[0].counted == "entries":
        budget = erk([t.weight for t in thresholds], density, orthogonal=False)
        counts = [float(budget.counts[t.weight.path]) for t in thresholds]
    floors = []
    for weight_count, unit in zip(counts, units, strict=True):
        units_at_floor = math.ceil(share * weight_count / unit - 1e-9)
        floors.append(max(units_at_floor, 1) * unit)
    return floors if sum(floors) <= count else units


@dataclasses.dataclass
class Cut:
    """The live entries of several weights, and the offset of the threshold of each."""

    masks: list[np.ndarray]
    offsets: list[float]
    unreachable: int  # entries that no offset kills, if these are more than may live; else 0
    # Numbers of the weights at their floor.
    at_floor: list[int] = dataclasses.field(default_factory=list)


def floored_cut(
    entries: Sequence[Entries], count: int, floors: Sequence[int]
) -> Cut:
    """The `count` entries of largest critical offset, and at least `floors` of each weight."""
    bounds = []
    for floor, of_weight in zip(floors, entries, strict=True):
        can_live = int(np.count_nonzero(of_weight.critical > -np.inf))
        bounds.append(min(floor, can_live))
    free = list(range(len(entries)))
    at_floor: list[int] = []
    while True:
        free_count = count - sum(bounds[k] for k in at_floor)
        free_cut = cut([entries[k] for k in free], free_count)
        low = []
        for k, mask in zip(free, free_cut.masks, strict=True):
            if np.count_nonzero(mask) < bounds[k]:
                low.append(k)
        if not low:
            break
        at_floor += low
        free = [k for k in free if k not in low]
    at_floor.sort()
    cuts = [(free, free_cut)]
    for k in at_floor:
        cuts.append(([k], cut([entries[k]], bounds[k])))
    no_masks: list[Any] = [None] * len(entries)
    result = Cut(no_masks, [0.0] * len(entries), 0, at_floor)
    for numbers, cut_of_some in cuts:
        result.unreachable += cut_of_some.unreachable
        for k, mask, offset in zip(
            numbers, cut_of_some.masks, cut_of_some.offsets, strict=True
        ):
            result.masks[k] = mask
            result.offsets[k] = offset
    return result


def cut(entries: Sequence[Entries], count: int) -> Cut:
    """The `count` entries of largest critical offset, ties to the first weight and flat index."""
    # Entries that no offset kills are ranked by their scale.
    unreachable = 0
    for of_weight in entries:
        unreachable += int(np.count_nonzero(np.isposinf(of_weight.critical)))
    if unreachable <= count:
        unreachable = 0
    ranked = []
    for critical, scales in entries:
        if unreachable:
            ranked.append(np.where(np.isposinf(critical), scales, -1.0))
        else:
            ranked.append(np.clip(critical, -_LARGEST, _LARGEST))
    masks = largest_masks(ranked, count)
    offset = _offset_between(entries, masks)
    return Cut(masks, [offset] * len(masks), unreachable)


def _offset_between(
    entries: Sequence[Entries], masks: Sequence[np.ndarray]
) -> float:
    """The offset that kills the entries outside of the masks, and no others."""
    below = -np.inf
    above = np.inf
    for (critical, _), mask in zip(entries, masks, strict=True):
        below = max(below, critical[~mask].max(initial=-np.inf))
        alive = critical[mask & (critical > -np.inf)]
        above = min(above, alive.min(initial=np.inf))
    if below == np.inf:  # no offset kills this many
        largest = 0.0
        for critical, _ in entries:
            finite = critical[critical < np.inf]
            largest = max(largest, float(finite.max(initial=0.0)))
        return largest + 1.0
    if below == -np.inf:  # no others, or all of them are exactly 0
        return min(float(above), 0.0) - 1.0
    if np.isfinite(above):
        return float(below + above) / 2
    return float(below) + 1.0
