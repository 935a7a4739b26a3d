"""The time of a table of widths: estimated by the parts that are done, and shared out."""

import math
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import keras
import numpy as np

from keras_sparse_ortho._checks import check_number
from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.calibration._readers import ReaderMoments
from keras_sparse_ortho.models import ChannelGroup

_REFERENCE_SHARE = 0.2  # of the time, for the first passes of held-out rows
_SWEEP_SHARE = 0.3  # of the time, for the moments of inputs
_INVERTED = 384  # inputs of the matrix that says how fast the machine inverts
_ELIMINATION = 3.0  # times an inversion
_UPDATE = 3e-4  # seconds of each step of an elimination, whatever its size
_MOST_UPDATES = 160
_FEWEST_WIDTHS = 2  # of a group, between which errors are interpolated
_WIDTHS = 3  # of a group, for which rows are left out
_FEWEST_ROWS = 32  # that are held out
FEWEST_BATCHES = 2  # that these are taken of
_SHORTEST = 1e-6  # seconds that a clock tells apart
_PASSES_AT_LEAST = 2.0  # of these rows, in the time of the shortest table

Value = TypeVar("Value")


class WidthClock:
    """Shares out the time of a table of widths.

    A group takes an elimination, about `c k^3` for each kernel of `k` inputs that reads it, and
    a pass of the held-out rows for each width. Both are estimated by those before.

    Args:
        minutes: float. How long the table may take; `None` for as long as it needs.
    """

    def __init__(self, minutes: float | None = None) -> None:
        self._minutes = minutes
        self._seconds = math.inf
        if minutes is not None:
            self._seconds = 60.0 * _checked(minutes)
        self._start = time.monotonic()
        self._pass_seconds = 0.0
        self._reserve = 0.0  # for the work after the groups
        self._planned = 0.0  # seconds of eliminations that were done
        self._needed = 0.0
        self._inversion = 0.0
        self._costs_seconds = 0.0
        self._has_few_rows = False
        self._shortages: list[str] = []

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit."""
        return self._minutes is not None

    @property
    def left(self) -> float:
        """The seconds that are left for groups."""
        spent = time.monotonic() - self._start
        return self._seconds - spent - self._reserve

    def check(self) -> None:
        """Raises ValueError if not even a short table ends in time."""
        if self.left < _PASSES_AT_LEAST * self._pass_seconds:
            self.refuse()

    def refuse(self) -> None:
        """Raises ValueError, with the time of a pass."""
        spent = time.monotonic() - self._start
        raise ValueError(
            "`minutes` is too short for a table of widths: give more minutes, or fewer rows. "
            f"Received: minutes={self._minutes:g}, of which {spent / 60.0:.2g} have passed; the "
            f"held-out rows take {self._pass_seconds:.2g} seconds for each width"
        )

    def timed_pass(self, function: Callable[[], Value]) -> Value:
        """Runs a pass of the held-out rows, and notes how long it took."""
        start = time.monotonic()
        value = function()
        self._pass_seconds = max(time.monotonic() - start, _SHORTEST)
        return value

    def batches_of_references(self, count: int, all_batches: int) -> int:
        """The number of batches whose held-out rows are compared.

        Args:
            count: int. The number in the last pass.
            all_batches: int.
        """
        spent = time.monotonic() - self._start
        spare = _REFERENCE_SHARE * self._seconds - spent
        batches = int(spare / self._pass_seconds * count)
        self._has_few_rows = max(batches, count) < all_batches
        return min(batches, all_batches)

    def note_shortage(self, text: str) -> None:
        """Notes a part of the table for which there was no time."""
        self._shortages.append(text)

    def warn_of_shortages(self) -> None:
        """Warns of all that there was no time for."""
        if self._shortages:
            warn_user(
                "The table of widths is coarser than with more time: give `widths` more minutes. "
                f"Received: minutes={self._minutes:g}, {'; '.join(self._shortages)}"
            )

    def reserve_for_costs(self, seconds: float) -> None:
        """Keeps time for the sizes of the weights, after the groups: so much for each of these."""
        self._costs_seconds = seconds
        self._reserve = seconds

    def has_time_to_sweep(self, batch_seconds: float) -> bool:
        """Whether another batch may be measured, that takes as long as the last one."""
        spent = time.monotonic() - self._start
        return spent + batch_seconds <= _SWEEP_SHARE * self._seconds

    def by_worth(
        self,
        model: keras.Model,
        groups: Sequence[ChannelGroup],
        moments: ReaderMoments,
    ) -> list[ChannelGroup]:
        """The groups in the order in which they are measured: most weights for their time first."""
        if not self.is_limited:
            return list(groups)
        self._inversion = _inversion_seconds()

        def worth(group: ChannelGroup) -> float:
            entries = 0
            for path, rows in group.rows.items():
                entries += rows.size * moments.kernel(path).shape[1]
            for maker in group.makers:
                entries += model.get_layer(maker).count_params()
            seconds = self._elimination(group, moments) + self._pass_seconds
            return entries / seconds

        return sorted(groups, key=worth, reverse=True)

    def rows_in_time(
        self,
        groups: Sequence[ChannelGroup],
        moments: ReaderMoments,
        count: int,
    ) -> int:
        """On how many of the held-out rows errors are measured."""
        if not self.is_limited:
            return count
        seconds = [self._elimination(group, moments) for group in groups]
        spare = self.left - sum(seconds)
        passes = spare / (_WIDTHS * len(groups) * self._pass_seconds)
        rows = min(max(round(passes * count), _FEWEST_ROWS), count)
        self._pass_seconds *= rows / count
        if self._has_few_rows or rows < count:
            self.note_shortage(f"errors on {rows} held-out rows")
        return rows

    def widths_in_time(
        self,
        groups: Sequence[ChannelGroup],
        moments: ReaderMoments,
        count: int,
    ) -> int:
        """How many widths of the first of the groups can be measured, at most `count`; or 0.

        Args:
            groups: The groups that are not measured yet.
            moments: The moments of their readers.
            count: int.
        """
        if not self.is_limited:
            return count
        seconds = [self._elimination(group, moments) for group in groups]
        spare = self.left - sum(seconds)
        shared_count = spare / (len(groups) * self._pass_seconds)
        if shared_count >= _FEWEST_WIDTHS:
            return min(int(shared_count), count)
        count = min(_FEWEST_WIDTHS, count)
        if seconds[0] + count * self._pass_seconds <= self.left:
            return count
        return 0

    def timed_group(
        self,
        group: ChannelGroup,
        moments: ReaderMoments,
        seconds: float,
    ) -> None:
        """Notes how long the elimination of a group took."""
        if self.is_limited:
            self._planned += self._unscaled_elimination(group, moments)
            self._needed += seconds
            self._reserve += self._costs_seconds

    def _elimination(
        self, group: ChannelGroup, moments: ReaderMoments
    ) -> float:
        """The estimated seconds of the elimination of a group, and of its sizes afterwards."""
        factor = 1.0
        if self._planned > 0.0:
            factor = self._needed / self._planned
        seconds = factor * self._unscaled_elimination(group, moments)
        return seconds + self._costs_seconds

    def _unscaled_elimination(
        self, group: ChannelGroup, moments: ReaderMoments
    ) -> float:
        updates = min(group.steps, _MOST_UPDATES)
        seconds = 0.0
        for path in group.rows:
            size = len(moments.grams[path])
            inversion = self._inversion * (size / _INVERTED) ** 3
            seconds += _UPDATE * updates + _ELIMINATION * inversion
        return seconds


def _checked(minutes: float) -> float:
    number = check_number("minutes", minutes)
    if number <= 0.0:
        raise ValueError(
            f"`minutes` must be a number above 0. Received: minutes={minutes!r}"
        )
    return number


def _inversion_seconds() -> float:
    """The time in which this machine inverts a matrix, as busy as it is."""
    matrix = np.eye(_INVERTED)
    np.linalg.inv(matrix)
    start = time.monotonic()
    np.linalg.inv(matrix)
    return time.monotonic() - start
