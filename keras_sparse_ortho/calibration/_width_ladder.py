"""The widths that a group of channels may have, and its error at widths between measured ones."""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from keras_sparse_ortho.models import ChannelGroup

_LEAST_SHARE = 1 / 32  # of a group's width
_RUNGS = 24  # at most, on a ladder
_NARROW_STEPS = 8  # of a group that is narrower than two multiples
_STEEPEST = -4.0  # power of the width, below the narrowest one that is measured
_LEAST_ERROR = 2e-12  # smaller ones are those of dead channels
# Of errors of neighboring measured widths. At nearly 0 an error says only that the others begin
# below it: an MLP had 7e-5 at 816 of 1,024 units, between 13e-5 at 760 and 0 at 1,016.
_LEAST_RATIO = 0.01


def all_widths(group: ChannelGroup, multiple_of: int) -> list[int]:
    """The widths that a group may have, from its full width.

    They are multiples of `multiple_of`. A group of fewer than two multiples, such as the heads of
    an attention, has steps of an eighth of its width.

    Args:
        group: ChannelGroup.
        multiple_of: int.
    """
    step = math.lcm(group.unit, multiple_of)
    if group.width < 2 * multiple_of:
        units = group.steps // _NARROW_STEPS
        units = max(units, 1)
        step = group.unit * units
    least_width = _LEAST_SHARE * group.width
    least_steps = math.ceil(least_width / step)
    narrowest = step * least_steps
    widths = list(range(narrowest, group.width, step))
    widths.append(group.width)
    widths.reverse()
    return widths


def ladder_of(group: ChannelGroup, multiple_of: int) -> list[int]:
    """So many of the widths of a group that measuring them is fast, from the full width.

    Args:
        group: ChannelGroup.
        multiple_of: int. As for `all_widths`.
    """
    return thinned(all_widths(group, multiple_of))


def thinned(widths: Sequence[int]) -> list[int]:
    """At most 24 of the widths, in about equal ratios, with the widest and the narrowest.

    Args:
        widths: list of int, from the widest.
    """
    if len(widths) <= _RUNGS:
        return list(widths)
    full_width = widths[0]
    multiples = np.array(widths[1:])
    narrowest = multiples[-1]
    rungs = {full_width}
    for width in np.geomspace(narrowest, full_width, _RUNGS):
        distances = np.abs(multiples - width)
        nearest = np.argmin(distances)
        rung = int(multiples[nearest])
        rungs.add(rung)
    return sorted(rungs, reverse=True)


@dataclasses.dataclass(frozen=True)
class WidthCurve:
    """The error of a group over its width.

    Attributes:
        full_width: int. Where the error is 0.
        errors: mapping from narrower widths to measured errors, at least one.
    """

    full_width: int
    errors: Mapping[int, float]

    def at(self, width: float) -> float:
        """The error at a width: between measured ones, their logarithms are interpolated."""
        if width >= self.full_width:
            return 0.0
        if width in self.errors:
            return self.errors[int(width)]
        measured = sorted(self.errors)
        place = bisect.bisect(measured, width)
        if place == len(measured) or len(measured) == 1:
            return self._toward_full_width(width)
        if place > 0:
            return self._on_line(measured[place - 1], measured[place], width)
        return self._on_line(
            measured[0], measured[1], width, steepest=_STEEPEST
        )

    def _toward_full_width(self, width: float) -> float:
        """On the line from the widest measured width to 0: this error has no logarithm."""
        widest = max(self.errors)
        missing = self.full_width - width
        missing_at_widest = self.full_width - widest
        return self.errors[widest] * missing / missing_at_widest

    def _on_line(
        self,
        narrower: int,
        wider: int,
        width: float,
        steepest: float = -math.inf,
    ) -> float:
        """On a line of the logarithm of the error over that of the odds of the width.

        The odds are `width / (full_width - width)`: near the full width a power of the channels
        that are gone, near 0 one of the channels that are left.

        Args:
            narrower: int. A measured width.
            wider: int. Another one.
            width: float.
            steepest: float. The least slope.
        """
        error = self.errors[narrower]
        if error < _LEAST_ERROR:  # dead channels cost nothing
            return 0.0
        ratio = self.errors[wider] / error
        ratio = max(ratio, _LEAST_RATIO)
        start = self._log_odds(narrower)
        stop = self._log_odds(wider)
        slope = math.log(ratio) / (stop - start)
        slope = max(slope, steepest)
        place = self._log_odds(width)
        return error * math.exp(slope * (place - start))

    def _log_odds(self, width: float) -> float:
        missing = self.full_width - width
        odds = width / missing
        return math.log(odds)
