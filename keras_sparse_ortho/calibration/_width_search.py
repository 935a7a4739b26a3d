"""The widths of least predicted error within a cost: greedy descent, then exchanges."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from keras_sparse_ortho.calibration._width_ladder import thinned

_JUMPS = (1, 2, 3)  # steps on a ladder that one move may take
_EXCHANGES = 200
_LEAST_GAIN = 1e-12  # of the error, for an exchange
_LIKELY = 0.8  # of the cost that is missing, which a second move must save to be tried
_HALVINGS = 20  # of the range of the common share of uniform widths

Costs = Callable[[Mapping[str, int]], float]
"""From the width of each group to a cost."""


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The widths that a group may have, from the widest, and the predicted error of each."""

    name: str
    widths: Sequence[int]
    errors: Sequence[float]

    def error(self, width: int) -> float:
        """The predicted error of a width."""
        return self.errors[self.widths.index(width)]

    def thinned(self) -> "Ladder":
        """A ladder of some of the widths."""
        widths = thinned(self.widths)
        errors = [self.error(width) for width in widths]
        return Ladder(self.name, widths, errors)

    def between(self, highest: int, lowest: int) -> "Ladder":
        """A ladder of the widths from the highest to the lowest."""
        start = self.widths.index(highest)
        stop = self.widths.index(lowest) + 1
        return Ladder(
            self.name, self.widths[start:stop], self.errors[start:stop]
        )

    def neighbors(self, width: int) -> tuple[int, int]:
        """The next wider and the next narrower width; a width itself at the ends."""
        step = self.widths.index(width)
        last_step = len(self.widths) - 1
        wider = max(step - 1, 0)
        narrower = min(step + 1, last_step)
        return self.widths[wider], self.widths[narrower]


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


def least_error_within(
    ladders: Sequence[Ladder], cost: Costs, target: float
) -> dict[str, int] | None:
    """The widths of least total error within a target; `None` if no widths cost so little.

    A search on some widths of each ladder comes first, in about equal ratios; then all widths
    between neighbors of its result exchange.

    Args:
        ladders: list of Ladder, one for each group.
        cost: callable. As for `WidthSearch`.
        target: float.
    """
    rungs = [ladder.thinned() for ladder in ladders]
    coarse = WidthSearch(rungs, cost).within(target)
    if coarse is None:
        return None
    near = []
    for ladder, coarse_ladder in zip(ladders, rungs, strict=True):
        width = coarse[ladder.name]
        highest, lowest = coarse_ladder.neighbors(width)
        near.append(ladder.between(highest, lowest))
    refined = WidthSearch(near, cost).improved(coarse, target)
    uniform = WidthSearch(ladders, cost).uniform(target)
    assert uniform is not None  # the narrowest widths are within the target
    if _error_of(ladders, uniform) < _error_of(ladders, refined):
        return uniform
    return refined


def _error_of(ladders: Sequence[Ladder], widths: Mapping[str, int]) -> float:
    error = 0.0
    for ladder in ladders:
        error += ladder.error(widths[ladder.name])
    return error


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

    def uniform(self, target: float) -> dict[str, int] | None:
        """The widths of the largest common share of all groups that costs at most the target.

        `None` if no widths on the ladders cost so little.
        """
        if self.least_cost() > target:
            return None
        place = self._uniform(target)
        return self._widths(place)

    def improved(
        self, widths: Mapping[str, int], target: float
    ) -> dict[str, int]:
        """Widths on the ladders and within the target, after exchanges."""
        steps = []
        for ladder in self._ladders:
            step = ladder.widths.index(widths[ladder.name])
            steps.append(step)
        place = self._exchanged(tuple(steps), target)
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
        """The steps of the largest common share within the target, else the narrowest ones."""
        full_place = self._full_place()
        if self._cost(full_place) <= target:
            return full_place
        narrow = 0.0
        wide = 1.0
        for _ in range(_HALVINGS):
            middle = 0.5 * (narrow + wide)
            if self._cost(self._common(middle)) <= target:
                narrow = middle
            else:
                wide = middle
        place = self._common(narrow)
        return self._filled(place, target)

    def _filled(self, place: Place, target: float) -> Place:
        """A step wider for each group in turn, where the target allows it.

        The steps of equal groups come at the same share: at the next one all would be wider.
        """
        for group, step in enumerate(place):
            wider = Move(group, max(step - 1, 0), 0.0)
            after = wider.applied(place)
            if self._cost(after) <= target:
                place = after
        return place

    def _common(self, share: float) -> Place:
        """The steps of a common share."""
        steps = [_step_below(ladder, share) for ladder in self._ladders]
        return tuple(steps)

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
