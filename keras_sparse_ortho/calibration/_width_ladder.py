"""The widths that a group of channels may have, and its error at widths between measured ones."""

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
# below it: an MLP had .00007 at 816 of 1,024 units, between .00013 at 760 and 0 at 1,016.
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
        narrower = [measured for measured in self.errors if measured < width]
        wider = [measured for measured in self.errors if measured > width]
        if not wider or len(self.errors) == 1:
            return self._toward_full_width(width)
        if not narrower:
            return self._below_narrowest(width)
        return self._between(max(narrower), min(wider), width)

    def _toward_full_width(self, width: float) -> float:
        """On the line from the widest measured width to 0: this error has no logarithm."""
        widest = max(self.errors)
        missing = self.full_width - width
        return self.errors[widest] * missing / (self.full_width - widest)

    def _between(self, narrower: int, wider: int, width: float) -> float:
        """On a line of the logarithm of the error over that of the odds of the width.

        The odds, `width / (full_width - width)`, follow a power of the channels that are gone near
        the full width, and of those that are left near 0.
        """
        error = self.errors[narrower]
        if error < _LEAST_ERROR:  # dead channels cost nothing
            return 0.0
        ratio = max(self.errors[wider] / error, _LEAST_RATIO)
        start = self._log_odds(narrower)
        distance = self._log_odds(wider) - start
        share = (self._log_odds(width) - start) / distance
        return error * ratio**share

    def _below_narrowest(self, width: float) -> float:
        """On the line of the two narrowest measured widths, but no steeper than a power of -4."""
        narrowest, second = sorted(self.errors)[:2]
        error = self.errors[narrowest]
        if error < _LEAST_ERROR:
            return 0.0
        ratio = max(self.errors[second] / error, _LEAST_RATIO)
        run = self._log_odds(second) - self._log_odds(narrowest)
        slope = max(math.log(ratio) / run, _STEEPEST)
        distance = self._log_odds(width) - self._log_odds(narrowest)
        return error * math.exp(slope * distance)

    def _log_odds(self, width: float) -> float:
        return math.log(width / (self.full_width - width))
