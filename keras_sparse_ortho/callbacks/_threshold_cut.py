"""Which offset of the thresholds leaves exactly `count` entries of several weights live.

An entry is live while the common offset of all thresholds is below its critical offset. A weight
that would keep fewer entries than its floor gets its own offset, which leaves exactly its floor;
the others share what is left.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from keras_sparse_ortho.budgets import erk
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.orthogonal import largest_masks, live_count

_LARGEST = np.finfo(np.float64).max


class Entries(NamedTuple):
    """Critical offsets and scales of the entries of one weight, in one shape."""

    critical: np.ndarray
    scales: np.ndarray


def entries_of(threshold: Any) -> Entries:
    """The entries of a threshold; NotPrunableError if they are not finite."""
    found = Entries(threshold.critical_offsets(), threshold.scales())
    wrong = np.isnan(found.critical) | ~np.isfinite(found.scales)
    if wrong.any():
        raise NotPrunableError(
            f"The weight '{threshold.weight.path}' is not finite, or its threshold is not. "
            f"Received: {np.count_nonzero(wrong)} infinite or NaN values"
        )
    return found


def floors_of(
    thresholds: Sequence[Any], sizes: Sequence[int], density: float, share: float
) -> list[int]:
    """The floor of each weight: `share` of its ERK count, and what dies at once (an entry, say).

    Ranks have a share of `density * rank`, as ERK is about entries. Where the share leaves too
    little for all, the floor is what dies at once; where that does, there is none.
    """
    units = [getattr(threshold, "dies_at_once", 1) for threshold in thresholds]
    count = live_count(density, sum(sizes))
    if not share or sum(units) > count:
        return [0] * len(units)
    wanted = [density * size for size in sizes]
    if thresholds[0].counted == "entries":
        budget = erk([t.weight for t in thresholds], density, orthogonal=False)
        wanted = [float(budget.counts[t.weight.path]) for t in thresholds]
    pairs = zip(wanted, units, strict=True)
    floors = [max(math.ceil(share * one / unit - 1e-9), 1) * unit for one, unit in pairs]
    return floors if sum(floors) <= count else units


@dataclasses.dataclass
class Cut:
    """The live entries of several weights.

    Attributes:
        masks: Bool masks of the live entries.
        offsets: The offset of each weight's threshold.
        unreachable: How many entries no offset kills, if these are more than may live; else 0.
        held: The places of the weights at their floor.
    """

    masks: list[np.ndarray]
    offsets: list[float]
    unreachable: int
    held: list[int] = dataclasses.field(default_factory=list)


def floored_cut(entries: Sequence[Entries], count: int, floors: Sequence[int]) -> Cut:
    """Finds the `count` entries of largest critical offset, with so many of each weight at least.

    As fewer remain for the others, more of them may come to their floor, and none leaves it. An
    entry that is 0 cannot live: a floor is at most the number of the others.
    """
    can_live = [int(np.count_nonzero(one.critical > -np.inf)) for one in entries]
    bounds = [min(pair) for pair in zip(floors, can_live, strict=True)]
    free, held = list(range(len(entries))), list[int]()
    while True:
        found = cut([entries[k] for k in free], count - sum(bounds[k] for k in held))
        shares = zip(free, found.masks, strict=True)
        low = [k for k, mask in shares if np.count_nonzero(mask) < bounds[k]]
        if not low:
            break
        held += low
        free = [k for k in free if k not in low]
    held.sort()
    parts = [(free, found), *(([k], cut([entries[k]], bounds[k])) for k in held)]
    masks = {k: m for places, part in parts for k, m in zip(places, part.masks, strict=True)}
    offsets = {k: o for places, part in parts for k, o in zip(places, part.offsets, strict=True)}
    unreachable = sum(part.unreachable for _, part in parts)
    order = range(len(entries))
    return Cut([masks[k] for k in order], [offsets[k] for k in order], unreachable, held)


def cut(entries: Sequence[Entries], count: int) -> Cut:
    """The `count` entries of largest critical offset, ties to the first weight and flat index.

    Entries that no offset kills are ranked by their scale.
    """
    critical = [one.critical for one in entries]
    unreachable = sum(int(np.count_nonzero(np.isposinf(one))) for one in critical)
    unreachable = unreachable if unreachable > count else 0
    ranked = [np.clip(one, -_LARGEST, _LARGEST) for one in critical]
    if unreachable:
        ranked = [np.where(np.isposinf(one.critical), one.scales, -1.0) for one in entries]
    masks = largest_masks(ranked, count)
    pairs = list(zip(critical, masks, strict=True))
    below = max((one[~mask].max(initial=-np.inf) for one, mask in pairs), default=-np.inf)
    above = min((one[mask].min(initial=np.inf) for one, mask in pairs), default=np.inf)
    offset = _between(critical, float(below), float(above), all(mask.all() for mask in masks))
    return Cut(masks, [offset] * len(masks), unreachable)


def _between(critical: list[np.ndarray], below: float, above: float, all_live: bool) -> float:
    """An offset between those of the dead and of the live entries, as nearly as there is one."""
    if all_live:
        least = min((one[one > -np.inf].min(initial=np.inf) for one in critical), default=0.0)
        return min(_finite(least), 0.0) - 1.0
    if below == np.inf:  # no offset kills this many
        largest = max(one[one < np.inf].max(initial=-np.inf) for one in critical)
        return max(_finite(largest), 0.0) + 1.0
    if below == -np.inf:  # all others are exactly 0
        return _finite(above) - 1.0
    return (below + above) / 2 if np.isfinite(above) else below + 1.0


def _finite(value: float) -> float:
    return float(value) if np.isfinite(value) else 0.0
