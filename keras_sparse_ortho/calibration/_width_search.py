"""The widths of least predicted error within a cost: greedy descent, then exchanges."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

_JUMPS = (1, 2, 3)  # steps on a ladder that one move may take
_EXCHANGES = 200
_LEAST_GAIN = 1e-12  # of the error, for an exchange
_LIKELY = 0.8  # of the cost that is missing, which a second move must save to be tried
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


class Move(NamedTuple):
    """One group goes to another step of its ladder.

    Attributes:
        group: int. Its number.
        step: int. Where it goes.
        change: float. By how much the error changes.
    """

    group: int
    step: int
    change: float

    def applied(self, place: Place) -> Place:
        """The place after the move."""
        return (*place[: self.group], self.step, *place[self.group + 1 :])


class Exchange(NamedTuple):
    """One group gets wider, another one narrower; or only one gets wider.

    Attributes:
        change: float. By how much the error changes.
        moves: tuple of Move.
    """

    change: float
    moves: tuple[Move, ...]


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
        if self.least_cost() > target:
            return None
        starts = [self._descended(target), self._uniform(target)]
        places = [self._exchanged(start, target) for start in starts]
        place = min(places, key=self._error)
        return self._widths(place)

    def uniform(self, target: float) -> dict[str, int]:
        """The widths of the largest common share of all groups that costs at most the target."""
        place = self._uniform(target)
        return self._widths(place)

    def least_cost(self) -> float:
        """The cost of the narrowest widths."""
        last_steps = [len(ladder.widths) - 1 for ladder in self._ladders]
        return self._cost(tuple(last_steps))

    def _widths(self, place: Place) -> dict[str, int]:
        widths = {}
        for ladder, step in zip(self._ladders, place, strict=True):
            widths[ladder.name] = ladder.widths[step]
        return widths

    def _error(self, place: Place) -> float:
        error = 0.0
        for ladder, step in zip(self._ladders, place, strict=True):
            error += ladder.errors[step]
        return error

    def _cost(self, place: Place) -> float:
        if place not in self._costs:
            widths = self._widths(place)
            self._costs[place] = self._cost_of_widths(widths)
        return self._costs[place]

    def _moves(self, place: Place, direction: int) -> Iterator[Move]:
        """All moves of one group: narrower for the direction 1, wider for -1."""
        for group, ladder in enumerate(self._ladders):
            for jump in _JUMPS:
                step = place[group]
                error = ladder.errors[step]
                step += direction * jump
                if 0 <= step < len(ladder.widths):
                    change = ladder.errors[step] - error
                    yield Move(group, step, change)

    def _descended(self, target: float) -> Place:
        """From full widths, always the move that saves most cost for its error."""
        place = self._full_place()
        while self._cost(place) > target:
            cost = self._cost(place)
            # Where single moves save nothing, as below a step of 16, all groups get narrower.
            narrower = self._narrower(place)
            lowest_price = math.inf
            for move in self._moves(place, 1):
                after = move.applied(place)
                # Savings below the target do not count.
                saving = cost - max(self._cost(after), target)
                if saving <= 0.0:
                    continue
                price = move.change / saving
                if price < lowest_price:
                    narrower = after
                    lowest_price = price
            place = narrower
        return place

    def _full_place(self) -> Place:
        return (0,) * len(self._ladders)

    def _narrower(self, place: Place) -> Place:
        steps = []
        for ladder, step in zip(self._ladders, place, strict=True):
            last_step = len(ladder.widths) - 1
            steps.append(min(step + 1, last_step))
        return tuple(steps)

    def _uniform(self, target: float) -> Place:
        """The steps of the largest common share within the target."""
        place = self._full_place()
        for share in np.linspace(1.0, 0.0, _SHARES):
            steps = [
                _step_below(ladder, float(share)) for ladder in self._ladders
            ]
            place = tuple(steps)
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
        """The place after the exchange of least error that is within the target."""
        exchanges = self._exchanges(place, target)
        exchanges.sort()
        for exchange in exchanges:
            after = place
            for move in exchange.moves:
                after = move.applied(after)
            if self._cost(after) <= target:
                return after
        return None

    def _exchanges(self, place: Place, target: float) -> list[Exchange]:
        """Exchanges that lower the error, and that may be within the target."""
        cost = self._cost(place)
        savings = {}
        for move in self._moves(place, 1):
            after = move.applied(place)
            savings[move] = cost - self._cost(after)
        exchanges = []
        for wider in self._moves(place, -1):
            after = wider.applied(place)
            excess = self._cost(after) - target
            if excess <= 0.0:
                exchanges.append(Exchange(wider.change, (wider,)))
            for narrower, saving in savings.items():
                if narrower.group == wider.group:
                    continue
                if saving >= _LIKELY * excess:
                    change = wider.change + narrower.change
                    exchanges.append(Exchange(change, (wider, narrower)))
        return [
            exchange for exchange in exchanges if exchange.change < -_LEAST_GAIN
        ]


def _step_below(ladder: Ladder, share: float) -> int:
    """The widest step of at most a share of the full width, else the narrowest one."""
    limit = share * ladder.widths[0]
    for step, width in enumerate(ladder.widths):
        if width <= limit:
            return step
    return len(ladder.widths) - 1
