"""The widths that a group of channels may have, and its error at widths between measured ones."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np

from keras_sparse_ortho.models import ChannelGroup

Array = np.ndarray

_LEAST_SHARE = 1 / 32  # of a group's width
_RUNGS = 24  # at most, on a ladder
_NARROW_STEPS = 8  # of a group that is narrower than two multiples
_STEEPEST = -4.0  # power of the width, below the narrowest one that is measured
_LEAST_ERROR = 1e-12  # whose logarithm is interpolated


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
        widest = max(self.errors)
        if width > widest or len(self.errors) == 1:
            # The error is 0 at the full width, which has no logarithm.
            missing = self.full_width - width
            share = missing / (self.full_width - widest)
            return self.errors[widest] * share
        logarithm = self._logarithm_at(width)
        error = float(np.exp(logarithm))
        if error < 2.0 * _LEAST_ERROR:  # dead channels cost nothing
            return 0.0
        return error

    def _logarithm_at(self, width: float) -> float:
        """The logarithm of the error, linear in that of the width."""
        places, logarithms = self._measured_logarithms
        place = math.log(width)
        if place >= places[0]:
            return float(np.interp(place, places, logarithms))
        rise = logarithms[1] - logarithms[0]
        run = places[1] - places[0]
        slope = max(rise / run, _STEEPEST)
        distance = place - places[0]
        return float(logarithms[0] + slope * distance)

    @functools.cached_property
    def _measured_logarithms(self) -> tuple[Array, Array]:
        """The logarithms of the measured widths, and of their errors."""
        widths = sorted(self.errors)
        errors = []
        for width in widths:
            error = self.errors[width]
            errors.append(max(error, _LEAST_ERROR))
        return np.log(widths), np.log(errors)
