"""`WidthTable`: the error of a model by the widths of its groups of channels, and a search."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from keras_sparse_ortho._checks import as_float, as_text, check_integer, is_integer
from keras_sparse_ortho._foreign_names import Answering
from keras_sparse_ortho.calibration._width_costs import COSTS, WidthCosts
from keras_sparse_ortho.calibration._width_search import Costs, Ladder, WidthSearch
from keras_sparse_ortho.errors import BudgetError, UnknownWeightError
from keras_sparse_ortho.models import ChannelGroup, ChannelGroups

_LEAST_SHARE = 1 / 32  # of a group's width
_RUNGS = 24  # at most, on a ladder
_NARROW = 8  # steps of a group that is narrower than two multiples
_LEAST_ERROR = 1e-12  # whose logarithm is interpolated
_BISECTIONS = 12  # of the cost, for a limit on the error
_PRINTED = (0.875, 0.75, 0.5, 0.25, 0.125)
_NAME_LENGTH = 32


def ladder_of(group: ChannelGroup, multiple_of: int) -> list[int]:
    """The widths that a group may have, from its full width.

    They are multiples of `multiple_of`. A group of fewer than two multiples, such as the heads of
    an attention, has steps of an eighth of its width.

    Args:
        group: ChannelGroup.
        multiple_of: int.
    """
    step = math.lcm(group.unit, multiple_of)
    if group.width < 2 * multiple_of:
        step = group.unit * max(group.steps // _NARROW, 1)
    least = step * math.ceil(_LEAST_SHARE * group.width / step)
    wanted = np.geomspace(group.width, least, _RUNGS)
    if group.width <= _RUNGS * step:
        wanted = np.arange(least, group.width, step)
    narrower = {max(step * round(width / step), least) for width in wanted}
    return [group.width, *sorted((w for w in narrower if w < group.width), reverse=True)]


@dataclasses.dataclass(frozen=True, repr=False)
class WidthTable(Answering):
    """Table of the errors of a trained model by the widths of its groups of channels.

    It prints as a table, predicts the error of a choice of widths, and finds the widths of least
    predicted error within a cost. `kso.narrow` makes the narrower model from it.

    Args:
        errors: dict from the name of a group to the relative squared errors of the model's outputs
            by width, with this group alone narrowed.
        groups: ChannelGroups. The groups of the model, of which `errors` has some or all.
        order: dict from the name of a group to an int array: its steps, the first to go first.
        costs: The sizes of the model's weights by the widths of groups.
    """

    errors: dict[str, dict[int, float]]
    groups: ChannelGroups
    order: dict[str, np.ndarray]
    costs: WidthCosts

    def __str__(self) -> str:
        shares = "".join(f"{share:>9.3g}" for share in _PRINTED)
        lines = [f"{'error at a share of the width':<{_NAME_LENGTH}}{'width':>7}{shares}"]
        for name in self.errors:
            label = name
            if len(name) > _NAME_LENGTH:
                label = f"{name[: _NAME_LENGTH - 3]}..."
            full = self.groups[name].width
            errors = [self._error(name, share * full) for share in _PRINTED]
            columns = "".join(f"{error:>9.2g}" for error in errors)
            lines.append(f"{label:<{_NAME_LENGTH}}{full:>7}{columns}")
        return "\n".join(lines)

    __repr__ = __str__

    def plot(self) -> Any:
        """Plots the error of the model over each group's width; returns a Matplotlib figure."""
        from matplotlib.figure import Figure

        figure = Figure(layout="constrained")
        axes = figure.subplots()
        for name, errors in self.errors.items():
            full = self.groups[name].width
            narrower = [width for width in sorted(errors) if width < full]
            shares = [width / full for width in narrower]
            values = [errors[width] for width in narrower]
            axes.plot(shares, values, marker="o", label=f"{name} ({full})")
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="share of the group's width",
            ylabel="relative squared error of the model",
        )
        axes.legend()
        return figure

    def predicted(self, widths: Mapping[str, int]) -> float:
        """The relative squared error of the model at these widths: the sum of the groups' errors.

        Args:
            widths: dict from the name of a group to its width. Other groups have their full width.

        Raises UnknownWeightError for other names, ValueError for widths that a group cannot have.

        Limits: errors add up to about 0.1; beyond it the sum is often too large.
        """
        checked = checked_widths(self.groups, widths)
        return sum(self._error(name, width) for name, width in checked.items())

    def cost(
        self, widths: Mapping[str, int] | None = None, cost: str | Costs = "parameters"
    ) -> float:
        """The cost of a model with these widths; without widths that of the dense model.

        Args:
            widths: dict from the name of a group to its width.
            cost: As for `search`.
        """
        checked = checked_widths(self.groups, widths or {})
        return self._cost_of(cost)({**self._full(), **checked})

    def search(
        self,
        target: float | None = None,
        *,
        at_most: float | None = None,
        error: float | None = None,
        cost: str | Costs = "parameters",
        multiple_of: int = 8,
    ) -> dict[str, int]:
        """Finds the widths of least predicted error within a cost.

        The widths fall greedily, always by the step of least error for its cost; then groups
        exchange widths as long as that helps. Uniform widths are a second start, so the result is
        never worse than these in predicted error.

        Args:
            target: float in (0, 1]. The cost as a share of the dense model's; or
            at_most: float. The cost itself; or
            error: float. The predicted error: the cost is then as low as that allows.
            cost: `"parameters"`, `"flops"` (multiply-adds of a sample), `"bytes"` (of the weights
                in a `dynamic_int8` file, without the graph), or a callable from a dict of widths
                to a number, such as measured milliseconds.
            multiple_of: int. Widths are multiples of it. Runtimes compute 8 or 16 channels
                together, so other widths save no time. Groups of fewer than two multiples, such as
                heads of attention, have steps of an eighth of their width.

        Returns:
            dict from the name of each group to its width.

        Raises:
            BudgetError: None or several of `target`, `at_most` and `error` are set; no widths cost
                so little.
            ValueError: An unknown cost.
        """
        search = WidthSearch(self._ladders(multiple_of), self._cost_of(cost))
        limit = self._limit(target, at_most, error, self._cost_of(cost))
        if error is not None:
            return self._cheapest(search, self._cost_of(cost), error)
        widths = search.within(limit)
        if widths is None:
            narrowest = {ladder.name: ladder.widths[-1] for ladder in self._ladders(multiple_of)}
            least = self._cost_of(cost)({**self._full(), **narrowest})
            raise BudgetError(
                f"No widths of the table cost {limit:g} or less; the narrowest cost {least:g}, "
                f"{least / self.cost(cost=cost):.3g} of the dense model. Take a larger target, or "
                f"a smaller `multiple_of`. Received: target={target}, at_most={at_most}"
            )
        return widths

    def uniform(
        self,
        target: float,
        *,
        cost: str | Costs = "parameters",
        multiple_of: int = 8,
    ) -> dict[str, int]:
        """The widths of the largest common share of all groups within a cost, to compare with.

        Args:
            target: float in (0, 1]. The cost as a share of the dense model's.
            cost: As for `search`.
            multiple_of: As for `search`.
        """
        function = self._cost_of(cost)
        limit = self._limit(target, None, None, function)
        return WidthSearch(self._ladders(multiple_of), function).uniform(limit)

    def _full(self) -> dict[str, int]:
        return {name: self.groups[name].width for name in self.errors}

    def _ladders(self, multiple_of: int) -> list[Ladder]:
        check_integer("multiple_of", multiple_of)
        ladders = []
        for name in self.errors:
            widths = ladder_of(self.groups[name], multiple_of)
            ladders.append(Ladder(name, widths, [self._error(name, width) for width in widths]))
        return ladders

    def _cost_of(self, cost: str | Costs) -> Callable[[Mapping[str, int]], float]:
        if callable(cost):
            return cost
        if cost not in COSTS:
            raise ValueError(
                f"`cost` must be one of {', '.join(map(repr, COSTS))}, or a callable from widths "
                f"to a number. Received: cost={as_text(cost)}"
            )
        return lambda widths: self.costs.cost(cost, widths)

    def _limit(
        self, target: float | None, at_most: float | None, error: float | None, cost: Costs
    ) -> float:
        """The highest cost; raises unless exactly one limit is given, and that is a number."""
        limits = {"target": target, "at_most": at_most, "error": error}
        numbers = {name: as_float(value) for name, value in limits.items() if value is not None}
        listed = ", ".join(f"{name}={as_text(limits[name])}" for name in numbers) or "none"
        if len(numbers) != 1:
            raise BudgetError(
                "Give one of `target` (a share of the dense model's cost), `at_most` (the cost) "
                f"and `error` (the predicted error). Received: {listed}"
            )
        ((name, number),) = numbers.items()
        if not number > 0.0 or (name == "target" and number > 1.0):
            allowed = "in (0, 1]" if name == "target" else "a number above 0"
            raise BudgetError(f"`{name}` must be {allowed}. Received: {listed}")
        return number * cost(self._full()) if name == "target" else number

    def _cheapest(self, search: WidthSearch, cost: Costs, error: float) -> dict[str, int]:
        """The cheapest widths of at most an error, by bisection of the cost."""
        best = self._full()
        low, high = 0.0, cost(best)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            widths = search.within(middle)
            if widths is None or self.predicted(widths) > error:
                low = middle
            else:
                best, high = widths, cost(widths)
        return best

    def _error(self, name: str, width: float) -> float:
        """The error of a group at a width: between measured ones, of interpolated logarithms."""
        full = self.groups[name].width
        if width in self.errors[name]:
            return self.errors[name][int(width)]
        widths = [measured for measured in sorted(self.errors[name]) if measured < full]
        errors = [self.errors[name][measured] for measured in widths]
        if width > widths[-1] or len(widths) == 1:
            # The error is 0 at the full width, which has no logarithm.
            return errors[-1] * (full - width) / (full - widths[-1])
        logarithms = np.log(np.maximum(errors, _LEAST_ERROR))
        places = np.log(widths)
        if width < widths[0]:
            slope = (logarithms[1] - logarithms[0]) / (places[1] - places[0])
            return float(np.exp(logarithms[0] + slope * (np.log(width) - places[0])))
        return float(np.exp(np.interp(np.log(width), places, logarithms)))


def checked_widths(groups: ChannelGroups, widths: Mapping[str, int]) -> dict[str, int]:
    """Widths as a dict of ints; raises for unknown groups, and widths that a group cannot have.

    Args:
        groups: ChannelGroups.
        widths: dict from the name of a group to its width.
    """
    names = [group.name for group in groups]
    unknown = [name for name in widths if name not in names]
    if unknown:
        raise UnknownWeightError(
            f"`widths` must name groups of `kso.channel_groups(model)`: {', '.join(names)}. "
            f"Received: {', '.join(map(as_text, unknown))}"
        )
    for name, width in widths.items():
        group = groups[name]
        is_width = is_integer(width) and 1 <= width <= group.width
        if not is_width or width % group.unit:
            units = "" if group.unit == 1 else f", a multiple of {group.unit}"
            raise ValueError(
                f"The width of the group {name!r} must be an integer from 1 to {group.width}"
                f"{units}. Received: {as_text(width)}"
            )
    return {name: int(width) for name, width in widths.items()}
