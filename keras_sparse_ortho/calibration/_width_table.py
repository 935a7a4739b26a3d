"""`WidthTable`: the error of a model by the widths of its groups of channels, and a search."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import keras
import numpy as np

from keras_sparse_ortho._checks import (
    as_float,
    as_text,
    check_integer,
    is_integer,
)
from keras_sparse_ortho._foreign_names import Answering
from keras_sparse_ortho._pictures import axes_or_new
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho._workers import digest_of
from keras_sparse_ortho.calibration._width_costs import WidthCosts, check_cost
from keras_sparse_ortho.calibration._width_ladder import WidthCurve, all_widths
from keras_sparse_ortho.calibration._width_search import (
    Costs,
    Ladder,
    WidthSearch,
    least_error_within,
)
from keras_sparse_ortho.errors import BudgetError, UnknownWeightError
from keras_sparse_ortho.models import ChannelGroups

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_BISECTIONS = 12  # of the cost, for a limit on the error
_PRINTED_SHARES = (0.875, 0.75, 0.5, 0.25, 0.125)
_NAME_LENGTH = 32


@dataclasses.dataclass(frozen=True, repr=False)
class WidthTable(Answering):
    """Table of the errors of a trained model by the widths of its groups of channels.

    It prints as a table, with the channels that stay and the reason, predicts the error of a choice
    of widths, and finds the widths of least predicted error within a cost. `kso.narrow` makes the
    narrower model from it.

    Args:
        errors: dict from the name of a group to the relative squared errors of the model's outputs
            by width, with this group alone narrowed.
        groups: ChannelGroups. The groups of the model, of which `errors` has some or all.
        order: dict from the name of a group to an int array: its steps, the first to go first.
        costs: The sizes of the model's weights by the widths of groups.
        grams: dict from the path of a kernel that reads channels to `X^T X` of its inputs `X` on
            all rows of data, `(k, k)`. `narrow` refits kernels with these.
        digest: str. That of the model's weights.
    """

    errors: dict[str, dict[int, float]]
    groups: ChannelGroups
    order: dict[str, np.ndarray]
    costs: WidthCosts
    grams: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)
    digest: str = ""

    def is_of(self, model: keras.Model) -> bool:
        """Whether the table was measured on a plain model with these weights."""
        return self.digest == digest_of_weights(model)

    def __str__(self) -> str:
        title = "Error of the model with one group at a share of its width"
        header = f"{'group of channels':<{_NAME_LENGTH}}{'width':>7}"
        for share in _PRINTED_SHARES:
            header += f"{share:>9.3g}"
        lines = [title, header]
        for name in self.errors:
            label = name
            if len(name) > _NAME_LENGTH:
                label = f"{name[: _NAME_LENGTH - 3]}..."
            full_width = self.groups[name].width
            line = f"{label:<{_NAME_LENGTH}}{full_width:>7}"
            for share in _PRINTED_SHARES:
                line += f"{self._cell(name, share * full_width):>9}"
            lines.append(line)
        lines += self._lines_of_stays()
        return "\n".join(lines)

    def _cell(self, name: str, width: float) -> str:
        """The error at a width, or a dash below the narrowest one that was measured."""
        if width < min(self.errors[name]):
            return "-"
        return f"{self._error(name, width):.2g}"

    def _lines_of_stays(self) -> list[str]:
        """The groups that were not measured, and the channels that stay for other reasons."""
        lines = []
        for group in self.groups:
            if group.name not in self.errors:
                text = f"{group.width} stay in {group.name}: not measured"
                lines.append(text)
        return lines + self.groups.lines_of_stays(of_layers=True)

    __repr__ = __str__

    def plot(self, ax: "Axes | None" = None) -> "Axes":
        """Plots the error of the model over each group's width.

        Args:
            ax: Matplotlib axes to draw on. Default: those of a new figure.

        Returns:
            The axes.
        """
        axes = axes_or_new(ax)
        for name, errors in self.errors.items():
            full_width = self.groups[name].width
            shares = []
            values = []
            for width in sorted(errors):
                if width < full_width:
                    shares.append(width / full_width)
                    values.append(errors[width])
            axes.plot(
                shares, values, marker="o", label=f"{name} ({full_width})"
            )
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="share of the group's width",
            ylabel="relative squared error of the model",
        )
        axes.legend()
        return axes

    def predicted(self, widths: Mapping[str, int]) -> float:
        """The relative squared error of the model at these widths: the sum of the groups' errors.

        Args:
            widths: dict from the name of a group to its width. Other groups have their full width.

        Raises UnknownWeightError for other names, ValueError for widths that a group cannot have.

        Limits: errors add up to about 0.1; beyond it the sum is often too large. Below the
        narrowest width of a group that was measured, a dash in the printed table, the error is
        continued, and often several times too large.
        """
        checked = checked_widths(self.groups, widths)
        return sum(self._error(name, width) for name, width in checked.items())

    def cost(
        self,
        widths: Mapping[str, int] | None = None,
        cost: str | Costs = "parameters",
    ) -> float:
        """The cost of a model with these widths; without widths that of the dense model.

        Args:
            widths: dict from the name of a group to its width.
            cost: As for `search`.
        """
        checked = checked_widths(self.groups, widths or {})
        return self._cost_of(cost)({**self._full_widths(), **checked})

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
        exchange widths as long as that helps, by long steps first. Uniform widths are a second
        start, so the result is never worse than these in predicted error.

        Args:
            target: float in (0, 1]. The cost as a share of the dense model's; or
            at_most: float. The cost itself; or
            error: float. The predicted error: the cost is then as low as that allows.
            cost: `"parameters"`; `"flops"`, multiply-adds of a sample; `"work"`, the same with the
                outputs of each kernel rounded up to 16, as runtimes compute them: closest to time;
                `"bytes"`, of the weights in a `dynamic_int8` file, without the graph; or a callable
                from a dict of widths to a number, such as measured milliseconds.
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
        cost_of = self._cost_of(cost)
        limit = self._limit(
            cost_of, target=target, at_most=at_most, error=error
        )
        ladders = self._ladders(multiple_of)
        if error is not None:
            return self._cheapest(ladders, cost_of, limit)
        widths = least_error_within(ladders, cost_of, limit)
        if widths is None:
            self._refuse(ladders, cost_of, target=target, at_most=at_most)
        return widths

    def uniform(
        self,
        target: float,
        *,
        cost: str | Costs = "parameters",
        multiple_of: int = 8,
    ) -> dict[str, int]:
        """The widths of the largest common share of all groups within a cost, to compare with.

        Some groups are a multiple wider, as far as the cost allows it.

        Args:
            target: float in (0, 1]. The cost as a share of the dense model's.
            cost: As for `search`.
            multiple_of: As for `search`.

        Raises BudgetError and ValueError as `search` does.
        """
        cost_of = self._cost_of(cost)
        limit = self._limit(cost_of, target=target)
        ladders = self._ladders(multiple_of)
        widths = WidthSearch(ladders, cost_of).uniform(limit)
        if widths is None:
            self._refuse(ladders, cost_of, target=target)
        return widths

    def _full_widths(self) -> dict[str, int]:
        return {name: self.groups[name].width for name in self.errors}

    def _ladders(self, multiple_of: int) -> list[Ladder]:
        check_integer("multiple_of", multiple_of)
        ladders = []
        for name in self.errors:
            widths = all_widths(self.groups[name], multiple_of)
            curve = self._curve(name)
            errors = [curve.at(width) for width in widths]
            ladders.append(Ladder(name, widths, errors))
        return ladders

    def _cost_of(self, cost: str | Costs) -> Costs:
        check_cost(cost)
        if callable(cost):
            return cost
        return lambda widths: self.costs.cost(cost, widths)

    def _limit(self, cost_of: Costs, **limits: float | None) -> float:
        """The highest cost, or the largest error; raises unless there is one limit, a number."""
        numbers = {}
        texts = []
        for name, value in limits.items():
            if value is not None:
                numbers[name] = as_float(value)
                texts.append(f"{name}={as_text(value)}")
        listed = ", ".join(texts) or "none"
        if len(numbers) != 1:
            raise BudgetError(
                "Give one of `target` (a share of the dense model's cost), `at_most` (the cost) "
                f"and `error` (the predicted error). Received: {listed}"
            )
        ((name, number),) = numbers.items()
        is_share = name == "target"
        if not number > 0.0 or (is_share and number > 1.0):
            allowed = "in (0, 1]" if is_share else "a number above 0"
            raise BudgetError(f"`{name}` must be {allowed}. Received: {listed}")
        if is_share:
            return number * cost_of(self._full_widths())
        return number

    def _cheapest(
        self, ladders: Sequence[Ladder], cost_of: Costs, error: float
    ) -> dict[str, int]:
        """The cheapest widths of at most an error, by bisection of the cost."""
        cheapest = self._full_widths()
        low = 0.0
        high = cost_of(cheapest)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            widths = least_error_within(ladders, cost_of, middle)
            if widths is None or self.predicted(widths) > error:
                low = middle
            else:
                cheapest = widths
                high = cost_of(widths)
        return cheapest

    def _refuse(
        self,
        ladders: Sequence[Ladder],
        cost_of: Costs,
        **targets: float | None,
    ) -> NoReturn:
        """Raises, with the cost of the narrowest widths."""
        least = WidthSearch(ladders, cost_of).least_cost()
        share = least / cost_of(self._full_widths())
        listed = ", ".join(f"{name}={value}" for name, value in targets.items())
        raise BudgetError(
            f"No widths of the table cost so little; the narrowest cost {least:g}, {share:.3g} of "
            "the dense model. Take a larger target or `at_most`, or a smaller `multiple_of`. "
            f"Received: {listed}"
        )

    def _error(self, name: str, width: float) -> float:
        """The error of a group at a width."""
        return self._curve(name).at(width)

    def _curve(self, name: str) -> WidthCurve:
        """The error of a group over its width."""
        full_width = self.groups[name].width
        narrower = {}
        for measured, error in self.errors[name].items():
            if measured < full_width:
                narrower[measured] = error
        return WidthCurve(full_width, narrower)


def digest_of_weights(model: keras.Model) -> str:
    """A digest of all weights of a model."""
    arrays = [to_numpy(weight.value, copy=False) for weight in model.weights]
    return digest_of(*arrays)


def checked_widths(
    groups: ChannelGroups, widths: Mapping[str, int]
) -> dict[str, int]:
    """Widths as a dict of ints; raises for unknown groups, and widths that a group cannot have.

    Args:
        groups: ChannelGroups.
        widths: dict from the name of a group to its width.
    """
    names = [group.name for group in groups]
    unknown = [as_text(name) for name in widths if name not in names]
    if unknown:
        raise UnknownWeightError(
            f"`widths` must name groups of `kso.channel_groups(model)`: {', '.join(names)}. "
            f"Received: {', '.join(unknown)}"
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
