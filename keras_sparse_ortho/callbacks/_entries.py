"""The entries of a weight in the order in which a rising offset takes them."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from keras_sparse_ortho._ranking import (
    INFINITE,
    between,
    counts_at_least,
    neighbours,
    ranks_on_device,
)

# Up to so many entries are sorted at once instead of being narrowed down first.
_FEW = 2**16


class Order(Protocol):
    """How numbers that are compared, a kind of them for each of several groups, become offsets."""

    def offsets(self, numbers: np.ndarray) -> np.ndarray:
        """The critical offsets, float64, of numbers (..., groups): of larger ones no smaller."""


class OrderOfOffsets:
    """Critical offsets themselves."""

    groups = 1

    def __init__(self, dtype: Any) -> None:
        self.dtype = np.dtype(dtype)

    def offsets(self, numbers: np.ndarray) -> np.ndarray:
        return numbers.astype(np.float64)

    def first(self, offsets: np.ndarray) -> np.ndarray:
        """The least numbers that are at least these offsets, (m, 1); NaN is above all of them."""
        with np.errstate(over="ignore"):
            near = offsets.astype(self.dtype)
            near = np.where(near < offsets, np.nextafter(near, self.dtype.type(np.inf)), near)
        return near[:, None]


class OrderOfMagnitudes:
    """Bits of magnitudes as float32; an entry dies at `g^-1(|w|) - s` of its group.

    Args:
        s: Of every group, (groups,).
        inverse: `g^-1`, an increasing function on NumPy arrays.
    """

    def __init__(self, s: np.ndarray, inverse: Callable[[np.ndarray], np.ndarray]) -> None:
        self.s = s.astype(np.float64)
        self.inverse = inverse
        self.groups = s.size

    def offsets(self, numbers: np.ndarray) -> np.ndarray:
        magnitudes = np.ascontiguousarray(numbers, np.int32).view(np.float32)
        with np.errstate(all="ignore"):  # of any magnitude, whether or not there is one
            inverse = self.inverse(magnitudes.astype(np.float64))
        return np.asarray(inverse - self.s, np.float64)

    def first(self, offsets: np.ndarray) -> np.ndarray:
        """The least bits whose critical offset is at least so much, (m, groups), by bisection."""
        wanted = offsets[:, None]
        low = np.zeros((len(offsets), self.groups), np.int64)
        high = np.where(np.isnan(wanted), low, INFINITE)
        low = np.where(np.isnan(wanted), INFINITE, low)
        high = np.maximum(low, high)
        while (low < high).any():
            middle = (low + high) // 2
            # Where nothing is left to find, `middle` may be one that is not finite.
            reached = self.offsets(np.minimum(middle, INFINITE - 1)) >= wanted
            open_ = low < high
            high = np.where(open_ & reached, middle, high)
            low = np.where(open_ & ~reached, middle + 1, low)
        return low.astype(np.int32)


class HostEntries:
    """Entries in NumPy.

    Args:
        numbers: What is compared, of the weight's shape.
        order: What it means.
        one: The shape of one number for each group, which broadcasts to that of `numbers`.
    """

    def __init__(self, numbers: np.ndarray, order: Any, one: tuple[int, ...] | None = None) -> None:
        self.order = order
        self.size = numbers.size
        self._numbers = np.ascontiguousarray(numbers)
        self._one = (1,) * numbers.ndim if one is None else one
        self._above: int | None = None
        self._keys = np.zeros(0)

    def sample(self, count: int) -> np.ndarray:
        """Critical offsets of about `count` entries, at equal distances."""
        # An odd number meets all columns of most matrices.
        step = self.size // count | 1
        at = np.arange(step // 2, self.size, step)
        numbers = self._numbers.reshape(-1)[at]
        if self.order.groups == 1:
            return np.asarray(self.order.offsets(numbers[:, None])[:, 0])
        groups = self._groups().reshape(-1)[at]
        made = OrderOfMagnitudes(self.order.s[groups], self.order.inverse)
        return made.offsets(numbers)

    def narrow(self, low: np.ndarray, high: np.ndarray) -> None:
        """From here on only bounds from `low` to `high`, each (groups,), are asked for."""
        above = self._numbers >= high.reshape(self._one)
        inside = (self._numbers >= low.reshape(self._one)) & ~above
        self._above = int(np.count_nonzero(above))
        keys = self._numbers[inside]
        if self.order.groups > 1:
            keys = self._key(self._groups()[inside], keys)
        self._keys = np.sort(keys)

    def sort(self) -> None:
        """As `narrow`, for any bounds."""
        self.narrow(*self.order.first(np.array([-np.inf, np.nan])))

    def counts(self, least: np.ndarray) -> np.ndarray:
        """How many entries are at least so much, (m,), for bounds (m, groups)."""
        if self._above is None:
            bounds = [row.reshape(self._one) for row in least]
            return np.array([np.count_nonzero(self._numbers >= bound) for bound in bounds])
        if self.order.groups == 1:
            return self._above + self._keys.size - np.searchsorted(self._keys, least[:, 0])
        groups = np.arange(self.order.groups)
        ends = np.searchsorted(self._keys, self._key(groups + 1, 0))
        starts = np.searchsorted(self._keys, self._key(groups, least))
        return np.asarray(self._above + (ends - starts).sum(axis=1))

    def around(self, least: np.ndarray, whole: bool = False) -> tuple[float, float]:
        """The critical offsets next to bounds (groups,): the largest below, the least not below.

        `nan` where there is none. Of narrowed entries it is those that are left, unless the `whole`
        is asked for.
        """
        if self._above is None or whole:
            return self._around(least)
        groups = np.arange(self.order.groups)
        keys = least if self.order.groups == 1 else self._key(groups, least)
        at = np.searchsorted(self._keys, keys)
        found = []
        for place in (at - 1, at):
            there = (place >= 0) & (place < self._keys.size)
            numbers: Any = self._keys[np.where(there, place, 0)] if self._keys.size else least
            if self.order.groups > 1:
                there &= numbers >> 32 == groups
                numbers = numbers & 0xFFFFFFFF
            found.append(np.where(there, self.order.offsets(numbers), np.nan))
        return _extremes(*found)

    def mask(self, low: np.ndarray, high: np.ndarray, missing: int) -> np.ndarray:
        """What is at least `high`, and the first `missing` that are at least `low`."""
        mask = self._numbers >= high.reshape(self._one)
        if missing:
            ties = (self._numbers >= low.reshape(self._one)) & ~mask
            mask.reshape(-1)[np.flatnonzero(ties)[:missing]] = True
        return np.asarray(mask)

    def check(self) -> bool:
        """Whether all entries are finite."""
        return isinstance(self.order, OrderOfOffsets) or self._numbers.max(initial=0) < INFINITE

    def _around(self, least: np.ndarray) -> tuple[float, float]:
        axes = tuple(k for k, size in enumerate(self._one) if size != self._numbers.shape[k])
        above = self._numbers >= least.reshape(self._one)
        ends = []
        sides: list[Any] = [(~above, np.max, -1), (above, np.min, INFINITE)]
        for inside, extreme, start in sides:
            there = inside.any(axis=axes).reshape(-1)
            if isinstance(self.order, OrderOfOffsets):
                start = -np.inf if start < 0 else np.inf
            dtype = self._numbers.dtype.type
            found = extreme(self._numbers, axis=axes, where=inside, initial=dtype(start))
            numbers = np.where(there, found.reshape(-1), 0)
            ends.append(np.where(there, self.order.offsets(numbers), np.nan))
        return _extremes(*ends)

    def _groups(self) -> np.ndarray:
        groups = np.arange(self.order.groups).reshape(self._one)
        return np.broadcast_to(groups, self._numbers.shape)

    def _key(self, group: Any, number: Any) -> np.ndarray:
        return (np.asarray(group, np.int64) << 32) + np.asarray(number, np.int64)


class DeviceEntries:
    """Entries of a tensor that stay where they are; for what its methods do see `HostEntries`.

    Args:
        value: The tensor.
        order: What its magnitudes mean.
        one: The shape of one number for each group, which broadcasts to that of the tensor.
    """

    def __init__(self, value: Any, order: OrderOfMagnitudes, one: tuple[int, ...]) -> None:
        self.order = order
        self.size = int(np.prod(value.shape, dtype=np.int64))
        self._value = value
        self._one = one

    def counts(self, least: np.ndarray) -> np.ndarray:
        return counts_at_least(self._value, least, self._one).astype(np.int64)

    def around(self, least: np.ndarray, whole: bool = False) -> tuple[float, float]:
        below, above = neighbours(self._value, least, self._one)
        offsets = self.order.offsets
        return _extremes(
            np.where(below >= 0, offsets(np.maximum(below, 0)), np.nan),
            np.where(above < INFINITE, offsets(np.minimum(above, INFINITE - 1)), np.nan),
        )

    def mask(self, low: np.ndarray, high: np.ndarray, missing: int) -> Any:
        return between(self._value, low, high, missing, self._one)

    def check(self) -> bool:
        return not self.counts(np.full((1, self.order.groups), INFINITE))[0]


Entries = HostEntries | DeviceEntries


def entries_of(threshold: Any) -> Entries:
    """The entries of a threshold, where they are ranked fastest.

    Those of one that compares magnitudes (see `LearntThreshold.magnitudes`) stay on an accelerator;
    of others critical offsets are computed by NumPy.
    """
    magnitudes = getattr(threshold, "magnitudes", lambda: None)()
    if magnitudes is None:
        critical = threshold.critical_offsets()
        return HostEntries(critical, OrderOfOffsets(critical.dtype))
    weight, s, inverse = magnitudes
    order = OrderOfMagnitudes(s.reshape(-1), inverse)
    one = s.shape if s.shape else (1,) * len(weight.shape)
    made: Entries
    if ranks_on_device(weight.variable):
        made = DeviceEntries(weight.variable.value, order, one)
    else:
        raw = np.ascontiguousarray(weight.raw_value(), np.float32)
        made = HostEntries(raw.view(np.int32) & np.int32(0x7FFFFFFF), order, one)
    if not made.check():
        weight.finite_raw_value()  # raises
    return made


def are_few(entries: Sequence[Entries]) -> bool:
    """Whether to sort all entries is as quick as anything."""
    return sum(one.size for one in entries) <= _FEW


def _extremes(below: np.ndarray, above: np.ndarray) -> tuple[float, float]:
    """The largest of the first, and the least of the second; `nan` where all are."""
    largest = np.max(below, initial=-np.inf, where=~np.isnan(below))
    least = np.min(above, initial=np.inf, where=~np.isnan(above))
    none_below, none_above = np.isnan(below).all(), np.isnan(above).all()
    return (np.nan if none_below else float(largest)), (np.nan if none_above else float(least))
