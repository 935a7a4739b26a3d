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
_LEAST_ERROR = 1e-12  # whose logarithm is interpolated


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
        units = max(group.steps // _NARROW_STEPS, 1)
        step = group.unit * units
    widths: Sequence[int]
    narrowest = step * math.ceil(_LEAST_SHARE * group.width / step)
    widths = range(narrowest, group.width, step)
    if len(widths) > _RUNGS:
        factors = np.geomspace(narrowest, group.width, _RUNGS) / step
        rungs = sorted({step * round(factor) for factor in factors})
        widths = [width for width in rungs if narrowest <= width < group.width]
    return sorted([group.width, *widths], reverse=True)


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
        widths = sorted(self.errors)
        widest = widths[-1]
        if width > widest or len(widths) == 1:
            # The error is 0 at the full width, which has no logarithm.
            share = (self.full_width - width) / (self.full_width - widest)
            return self.errors[widest] * share
        errors = [self.errors[measured] for measured in widths]
        logarithms = np.log(np.maximum(errors, _LEAST_ERROR))
        places = np.log(widths)
        place = np.log(width)
        if place < places[0]:
            slope = (logarithms[1] - logarithms[0]) / (places[1] - places[0])
            slope = max(slope, _STEEPEST)
            logarithm = logarithms[0] + slope * (place - places[0])
        else:
            logarithm = np.interp(place, places, logarithms)
        error = float(np.exp(logarithm))
        if error < 2.0 * _LEAST_ERROR:  # dead channels cost nothing
            return 0.0
        return error
