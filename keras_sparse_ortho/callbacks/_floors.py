"""Floors: how many entries of each weight live, however small they are beside the others.

All layers share one offset of their thresholds. A layer that would keep fewer entries than its
floor has its own offset instead, which leaves exactly its floor; the others share what is left.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from keras_sparse_ortho.budgets import erk
from keras_sparse_ortho.callbacks._offset_search import Cut, Entries, can_live, cut
from keras_sparse_ortho.orthogonal import live_count


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


@dataclasses.dataclass(frozen=True)
class FlooredCut:
    """A cut through all weights that share an offset, and one through each that is held."""

    parts: Sequence[tuple[Sequence[int], Cut]]
    """The cuts, each with the places of its weights."""
    held: Sequence[int]
    """The places of the weights at their floor."""

    def shares(self) -> list[int]:
        """How many entries of each weight are live."""
        return self._in_order([(places, part.shares()) for places, part in self.parts])

    def masks(self) -> list[Any]:
        """Bool masks of the live entries; tensors for those on a device."""
        return self._in_order([(places, part.masks()) for places, part in self.parts])

    def offsets(self) -> list[float]:
        """The offset of each weight's threshold."""
        return self._in_order([(own, [part.offset()] * len(own)) for own, part in self.parts])

    def unreachable(self) -> int:
        """How many entries no offset kills, if these are more than may live; else 0."""
        return sum(part.unreachable() for _, part in self.parts)

    def _in_order(self, found: Sequence[tuple[Sequence[int], Sequence[Any]]]) -> list[Any]:
        by_place = {k: one for places, ones in found for k, one in zip(places, ones, strict=True)}
        return [by_place[k] for k in sorted(by_place)]


def floored_cut(entries: Sequence[Entries], count: int, floors: Sequence[int]) -> FlooredCut:
    """Finds the `count` entries of largest critical offset, with so many of each weight at least.

    As fewer remain for the others, more of them may come to their floor, and none leaves it. An
    entry that is 0 cannot live: a floor is at most the number of the others.
    """
    bounds, free = list(floors), list(range(len(entries)))
    held: list[int] = []
    while True:
        found = cut([entries[k] for k in free], count - sum(bounds[k] for k in held))
        shares = dict(zip(free, found.shares(), strict=True))
        for k in free:
            if shares[k] < bounds[k]:
                bounds[k] = min(bounds[k], can_live(entries[k]))
        low = [k for k in free if shares[k] < bounds[k]]
        if not low:
            own = [([k], cut([entries[k]], bounds[k])) for k in sorted(held)]
            return FlooredCut([(free, found), *own], sorted(held))
        held += low
        free = [k for k in free if k not in low]
