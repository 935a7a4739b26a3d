"""The widths of least predicted error within a cost: greedy descent, then exchanges."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

_JUMPS = (1, 2, 3)  # steps on a ladder that one move may take
_EXCHANGES = 200
_LEAST_GAIN = 1e-12  # of the error, for an exchange
_LIKELY = 0.5  # of the cost that is missing, which a second move must save to be tried
_SHARES = 128  # common shares that are tried for uniform widths

Costs = Callable[[Mapping[str, int]], float]
"""From the width of each group to a cost."""


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The widths that a group may have, from the widest, and the predicted error of each."""

    name: str
    widths: Sequence[int]
    errors: Sequence[float]


Place = tuple[int, ...]
"""A step on each ladder; 0 is the full width."""


class WidthSearch:
    """Looks for the widths of least total error whose cost is at most a target.

    Args:
        ladders: list of Ladder, one for each group.
        cost: callable. It falls, or stays, where a width falls.
    """

    def __init__(self, ladders: Sequence[Ladder], cost: Costs) -> None:
        self._ladders = ladders
        self._cost_of_widths = cost
        self._costs: dict[Place, float] = {}

    def within(self, target: float) -> dict[str, int] | None:
        """The widths; `None` if no widths on the ladders cost so little.

        Both the greedy and the uniform widths are improved by exchanges, so the result is never
        worse than uniform widths.
        """
        narrowest = tuple(len(ladder.widths) - 1 for ladder in self._ladders)
        if self._cost(narrowest) > target:
            return None
        starts = [self._descended(target), self._uniform(target)]
        places = [self._exchanged(start, target) for start in starts]
        return self._widths(min(places, key=self._error))

    def uniform(self, target: float) -> dict[str, int]:
        """The widths of the largest common share of all groups that costs at most the target."""
        return self._widths(self._uniform(target))

    def _widths(self, place: Place) -> dict[str, int]:
        pairs = zip(self._ladders, place, strict=True)
        return {ladder.name: ladder.widths[step] for ladder, step in pairs}

    def _error(self, place: Place) -> float:
        pairs = zip(self._ladders, place, strict=True)
        return sum(ladder.errors[step] for ladder, step in pairs)

    def _cost(self, place: Place) -> float:
        if place not in self._costs:
            self._costs[place] = self._cost_of_widths(self._widths(place))
        return self._costs[place]

    def _moved(self, place: Place, group: int, steps: int) -> Place | None:
        step = place[group] + steps
        if not 0 <= step < len(self._ladders[group].widths):
            return None
        return (*place[:group], step, *place[group + 1 :])

    def _moves(self, place: Place, direction: int) -> Iterator[tuple[int, Place]]:
        """All moves of one group, as the group and where the move leads."""
        for group in range(len(place)):
            for jump in _JUMPS:
                after = self._moved(place, group, direction * jump)
                if after is not None:
                    yield group, after

    def _descended(self, target: float) -> Place:
        """From full widths, always the move that saves most cost for its error."""
        place: Place = (0,) * len(self._ladders)
        while self._cost(place) > target:
            before, error = self._cost(place), self._error(place)
            prices = {}
            for _, after in self._moves(place, 1):
                # Nothing is gained by what a move saves below the target.
                saved = before - max(self._cost(after), target)
                if saved > 0.0:
                    prices[after] = (self._error(after) - error) / saved
            if not prices:
                # Where single moves save nothing, as steps of 16 may not, all groups go on.
                place = self._narrower(place)
                continue
            place = min(prices, key=prices.__getitem__)
        return place

    def _narrower(self, place: Place) -> Place:
        pairs = zip(self._ladders, place, strict=True)
        return tuple(min(step + 1, len(ladder.widths) - 1) for ladder, step in pairs)

    def _uniform(self, target: float) -> Place:
        place: Place = (0,) * len(self._ladders)
        for share in np.linspace(1.0, 0.0, _SHARES):
            place = tuple(_step_below(ladder, float(share)) for ladder in self._ladders)
            if self._cost(place) <= target:
                break
        return place

    def _exchanged(self, place: Place, target: float) -> Place:
        """Widens one group while another one pays for it, as long as the error falls."""
        for _ in range(_EXCHANGES):
            better = self._better(place, target)
            if better is None:
                break
            place = better
        return place

    def _better(self, place: Place, target: float) -> Place | None:
        """The first exchange within the target, in the order of the errors after it."""
        error, cost = self._error(place), self._cost(place)
        savings = [
            (group, after, cost - self._cost(after)) for group, after in self._moves(place, 1)
        ]
        exchanges = []
        for group, wider in self._moves(place, -1):
            missing = self._cost(wider) - target
            if missing <= 0.0:
                exchanges.append(wider)
            for other, narrower, saved in savings:
                if other != group and saved >= _LIKELY * missing:
                    step = narrower[other]
                    exchanges.append((*wider[:other], step, *wider[other + 1 :]))
        errors = {after: self._error(after) for after in exchanges}
        for after in sorted(errors, key=errors.__getitem__):
            if errors[after] >= error - _LEAST_GAIN:
                break
            if self._cost(after) <= target:
                return after
        return None


def _step_below(ladder: Ladder, share: float) -> int:
    """The widest step of at most a share of the full width, else the narrowest one."""
    most = share * ladder.widths[0]
    steps = [step for step, width in enumerate(ladder.widths) if width <= most]
    return steps[0] if steps else len(ladder.widths) - 1
