"""Which offset leaves exactly `count` entries of several weights live.

An entry is live while the common offset of all thresholds is below its critical offset. Thresholds
that compare magnitudes have the critical offset `g^-1(|w|) - s`, with one `s` for each group of
entries; these are compared by the bits of `|w|` as float32, so that `g^-1` is evaluated for few.
"""

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._ranking import (
    INFINITE,
    between,
    counts_at_least,
    neighbours,
    ranks_on_device,
)

# Up to this many entries are sorted at once; of more a sample tells which ones to sort.
_FEW = 2**16
_SAMPLED = 2**17
# Offsets that are tried in one pass over the entries of a device.
_TRIED = 15


class HostEntries:
    """Entries of one weight, ranked by NumPy.

    Args:
        keys: Bits of magnitudes, int32; or critical offsets, if there is no `inverse`.
        s: The `s` of each entry, of a shape that broadcasts to that of `keys`.
        inverse: `g^-1`, an increasing function on NumPy arrays.
    """

    def __init__(self, keys: np.ndarray, s: Any = 0.0, inverse: Any = None) -> None:
        self.s = np.asarray(s, np.float64)
        self.inverse = inverse
        self.size = keys.size
        self._keys = keys
        self._above = 0
        self._sorted: np.ndarray | None = None

    def sample(self, count: int) -> np.ndarray:
        """Critical offsets of about `count` entries, at equal distances."""
        step = self.size // count | 1  # an odd number meets all columns of most matrices
        at = np.arange(step // 2, self.size, step)
        return self._critical(np.unravel_index(at, self._keys.shape))

    def narrow(self, low: np.ndarray, high: np.ndarray) -> tuple[int, int]:
        """Sorts the entries between two bounds; `counts` and `around` are right between them.

        Returns:
            How many entries are above the bounds, and how many between them.
        """
        above = self._keys >= high.reshape(self.s.shape)
        inside = (self._keys >= low.reshape(self.s.shape)) & ~above
        self._above = int(np.count_nonzero(above))
        self._sorted = np.sort(self._critical(inside))
        return self._above, self._sorted.size

    def counts(self, offsets: np.ndarray) -> np.ndarray:
        """How many critical offsets are at least each of `offsets`."""
        if self._sorted is None:
            self._sorted = np.sort(self._critical(np.ones(self._keys.shape, bool)))
        return self._above + self._sorted.size - np.searchsorted(self._sorted, offsets)

    def around(self, offset: float, whole: bool = False) -> tuple[float, float]:
        """The largest critical offset below an offset, and the least that is not; `nan` if none.

        Only narrowed entries are looked at, unless the `whole` weight is asked for.
        """
        critical = self._sorted
        if critical is None or whole:
            critical = self._critical(np.ones(self._keys.shape, bool))
        above = critical >= offset
        return _extremes(critical[~above], critical[above])

    def mask(self, low: np.ndarray, high: np.ndarray, missing: int) -> np.ndarray:
        """The entries from the bound `high` on, and the first `missing` from `low` on."""
        mask = np.asarray(self._keys >= high.reshape(self.s.shape))
        if missing:
            ties = (self._keys >= low.reshape(self.s.shape)) & ~mask
            mask.reshape(-1)[np.flatnonzero(ties)[:missing]] = True
        return mask

    def _critical(self, at: Any) -> np.ndarray:
        """The critical offsets of the entries at an index."""
        if self.inverse is None:
            return np.asarray(self._keys[at], np.float64)
        s = np.broadcast_to(self.s, self._keys.shape)[at]
        return _critical_offsets(self._keys[at], s, self.inverse)


class DeviceEntries:
    """Entries of a tensor that stay where they are; the methods are those of `HostEntries`."""

    def __init__(self, value: Any, s: np.ndarray, inverse: Any) -> None:
        shape = s.shape or (1,) * len(value.shape)
        self.s = s.astype(np.float64).reshape(shape)
        self.inverse = inverse
        self.size = int(np.prod(value.shape, dtype=np.int64))
        self._value = value

    def counts(self, bounds: np.ndarray) -> np.ndarray:
        """How many entries reach each of several bounds, (m, groups)."""
        return counts_at_least(self._value, bounds, self.s.shape).astype(np.int64)

    def around(self, bounds: np.ndarray, whole: bool = False) -> tuple[float, float]:
        below, above = neighbours(self._value, bounds, self.s.shape)
        ends = []
        for bits, there in ((below, below >= 0), (above, above < INFINITE)):
            ends.append(_critical_offsets(bits[there], self.s.reshape(-1)[there], self.inverse))
        return _extremes(*ends)

    def mask(self, low: np.ndarray, high: np.ndarray, missing: int) -> Any:
        return between(self._value, low, high, missing, self.s.shape)


Entries = HostEntries | DeviceEntries


def entries_of(threshold: Any) -> Entries:
    """The entries of a threshold, where they are ranked fastest.

    Magnitudes (`LearntThreshold.magnitudes`) stay on an accelerator; the critical offsets of other
    thresholds are computed by NumPy.
    """
    magnitudes = getattr(threshold, "magnitudes", lambda: None)()
    if magnitudes is None:
        return HostEntries(threshold.critical_offsets())
    weight, s, inverse = magnitudes
    if ranks_on_device(weight.variable):
        made: Entries = DeviceEntries(weight.variable.value, s, inverse)
        finite = not made.counts(np.full((1, s.size), INFINITE, np.int32))[0]
    else:
        raw = np.ascontiguousarray(weight.raw_value(), np.float32)
        bits = raw.view(np.int32) & np.int32(0x7FFFFFFF)
        made = HostEntries(bits, s, inverse)
        finite = bits.max(initial=0) < INFINITE
    if not finite:
        weight.finite_raw_value()  # raises
    return made


@dataclasses.dataclass(frozen=True)
class Cut:
    """The `count` entries of largest critical offset, ties to the first weight and flat index.

    Args:
        entries: Those of each weight.
        count: How many are live.
        low: An offset that the critical offsets of all live entries reach.
        high: An offset from which on all entries are live.
        missing: How many of the entries between the two, all at the offset `low`, are live.
    """

    entries: Sequence[Entries]
    count: int
    low: float
    high: float
    missing: int = 0

    def shares(self) -> list[int]:
        """How many entries of each weight are live."""
        if self.low == -np.inf and not self.missing:  # all
            return [one.size for one in self.entries]
        counts = _counts(self.entries, [self.low, self.high])
        return (counts[:, 1] + self._ties(counts)).tolist()

    def masks(self) -> list[Any]:
        """Bool masks of the live entries; tensors for those on a device."""
        ties = [0] * len(self.entries)
        if self.missing:
            ties = self._ties(_counts(self.entries, [self.low, self.high])).tolist()
        bounds = _bounds(self.entries, [self.low, self.high])
        rows = zip(self.entries, bounds, ties, strict=True)
        return [one.mask(low, high, tied) for one, (low, high), tied in rows]

    def offset(self) -> float:
        """An offset between the live entries and the others, as nearly as there is one."""
        below = above = self.low
        if not self.missing:
            below, above = _around(self.entries, self.low)
        if np.isnan(below):  # all are live
            least = _around(self.entries, _after(-np.inf), whole=True)[1]
            return min(_finite(least), 0.0) - 1.0
        if below == np.inf:  # no offset kills this many
            largest = _around(self.entries, np.inf, whole=True)[0]
            return max(_finite(largest), 0.0) + 1.0
        if below == -np.inf:  # all others are exactly 0
            return _finite(above) - 1.0
        return (below + above) / 2 if np.isfinite(above) else below + 1.0

    def unreachable(self) -> int:
        """How many entries no offset kills, if these are more than `count`; else 0."""
        if self.low < np.inf:
            return 0
        found = int(_counts(self.entries, [np.inf]).sum())
        return found if found > self.count else 0

    def _ties(self, counts: np.ndarray) -> np.ndarray:
        """How many of the tied entries of each weight are live: those of the first weights."""
        tied = counts[:, 0] - counts[:, 1]
        return np.clip(self.missing - (np.cumsum(tied) - tied), 0, tied)


def cut(entries: Sequence[Entries], count: int) -> Cut:
    """Finds the `count` entries that the largest offset leaves live.

    The offset is found among all floats, as integers in their order, with several candidates in
    each pass over the entries.

    Args:
        entries: Those of each weight.
        count: How many, from 0 to all of them.
    """
    size = sum(one.size for one in entries)
    if not 0 <= count <= size:
        raise ValueError(f"`count` must be in [0, {size}]. Received: count={count}")
    if count in (0, size):
        offset = -np.inf if count else np.nan
        return Cut(entries, count, offset, offset)
    least, beyond = _narrow(entries, count)
    while beyond - least > 1:  # at least `count` entries reach the first, fewer the second
        parts = [(beyond - least) * j // (_TRIED + 1) for j in range(1, _TRIED + 1)]
        codes = [least + max(part, 1) for part in parts]
        offsets = [_offset(code) for code in codes]
        counts = _counts(entries, offsets).sum(axis=0).tolist()
        if count in counts:
            offset = offsets[counts.index(count)]
            return Cut(entries, count, offset, offset)
        reached = [code for code, found in zip(codes, counts, strict=True) if found > count]
        least = max(reached, default=least)
        beyond = min((code for code in codes if code > least), default=beyond)
    low, high = _offset(least), _offset(beyond)
    above = int(_counts(entries, [high]).sum())
    return Cut(entries, count, low, high, missing=count - above)


def _narrow(entries: Sequence[Entries], count: int) -> tuple[int, int]:
    """Two codes of offsets: at least `count` entries reach the first, fewer the second.

    Entries in NumPy between the two are sorted. The codes are guessed by a sample of the entries.
    """
    least, beyond = _code(-np.inf), _code(np.inf) + 1
    own = [one for one in entries if isinstance(one, HostEntries)]
    size = sum(one.size for one in own)
    if len(own) == len(entries) and size > _FEW:
        # From each weight a share, so that one sample stands for as many entries as another.
        parts = [one.sample(max(one.size * _SAMPLED // size, 1)) for one in own]
        sample = np.sort(np.concatenate(parts))
        at = sample.size * (1 - count / size)
        # Five standard deviations of the rank, and some more for weights that the steps meet badly.
        margin = 5 * np.sqrt(at * (1 - at / sample.size)) + sample.size / 500 + 10
        low = _code(sample[int(at - margin)]) if at >= margin else least
        high = _code(sample[int(at + margin)]) if at + margin < sample.size else beyond
        above, inside = _sort_between(own, low, high)
        if above < count < above + inside:
            return low, high
    _sort_between(own, least, beyond)
    return least, beyond


def _sort_between(entries: Sequence[HostEntries], low: int, high: int) -> tuple[int, int]:
    """Sorts the entries between two codes; how many are above them, and how many between."""
    bounds = _bounds(entries, [_offset(low), _offset(high)])
    found = [one.narrow(*ends) for one, ends in zip(entries, bounds, strict=True)]
    return sum(above for above, _ in found), sum(inside for _, inside in found)


def _levels(entries: Sequence[Entries], offsets: Sequence[float]) -> list[np.ndarray]:
    """Offsets as the methods of the entries take them: bounds for those on a device."""
    on_device = [isinstance(one, DeviceEntries) for one in entries]
    bounds = iter(_bounds(list(itertools.compress(entries, on_device)), offsets))
    return [next(bounds) if there else np.array(offsets) for there in on_device]


def _counts(entries: Sequence[Entries], offsets: Sequence[float]) -> np.ndarray:
    """How many entries reach each of several offsets, (weights, m)."""
    pairs = zip(entries, _levels(entries, offsets), strict=True)
    return np.array([one.counts(levels) for one, levels in pairs])


def _around(entries: Sequence[Entries], offset: float, whole: bool = False) -> tuple[float, float]:
    """The critical offsets on both sides of an offset; `nan` below, `inf` above where none is."""
    pairs = zip(entries, _levels(entries, [offset]), strict=True)
    below, above = zip(*(one.around(levels[0], whole) for one, levels in pairs), strict=True)
    least = [end for end in above if not np.isnan(end)]
    return max([end for end in below if not np.isnan(end)], default=np.nan), min(
        least, default=np.inf
    )


def _bounds(entries: Sequence[Entries], offsets: Sequence[float]) -> list[np.ndarray]:
    """For each weight the least keys whose critical offset is at least so much, (m, groups).

    Weights with the same `g` are done together.
    """
    found: dict[int, np.ndarray] = {}
    by_function: dict[Any, list[int]] = {}
    for k, one in enumerate(entries):
        if one.inverse is None:
            found[k] = np.array(offsets, np.float64)[:, None]
        else:
            by_function.setdefault(one.inverse, []).append(k)
    for inverse, same in by_function.items():
        s = [entries[k].s.reshape(-1) for k in same]
        rows = _least_bits(np.array(offsets), np.concatenate(s), inverse)
        ends = np.cumsum([part.size for part in s])[:-1]
        found.update(zip(same, np.split(rows, ends, axis=1), strict=True))
    return [found[k] for k in range(len(entries))]


def _least_bits(
    offsets: np.ndarray, s: np.ndarray, inverse: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """The least bits whose critical offset is at least so much, (m, groups), by bisection.

    `nan` is above all of them.
    """
    wanted = offsets[:, None]
    never = np.broadcast_to(np.isnan(wanted), (offsets.size, s.size))
    low = np.where(never, INFINITE, 0)
    high = np.full(low.shape, INFINITE)
    while (low < high).any():
        middle = (low + high) // 2
        # Where nothing is left to find, `middle` may be one that is not finite.
        reached = _critical_offsets(np.minimum(middle, INFINITE - 1), s, inverse) >= wanted
        open_ = low < high
        high = np.where(open_ & reached, middle, high)
        low = np.where(open_ & ~reached, middle + 1, low)
    return low.astype(np.int32)


def _critical_offsets(bits: np.ndarray, s: np.ndarray, inverse: Any) -> np.ndarray:
    """`g^-1(|w|) - s` in float64, for the bits of `|w|` as float32."""
    magnitudes = np.ascontiguousarray(bits, np.int32).view(np.float32)
    with np.errstate(all="ignore"):  # of any magnitude, whether or not there is one
        return np.asarray(inverse(magnitudes.astype(np.float64)) - s, np.float64)


def _extremes(below: np.ndarray, above: np.ndarray) -> tuple[float, float]:
    """The largest of the first, and the least of the second; `nan` where there is none."""
    largest = float(below.max()) if below.size else np.nan
    return largest, float(above.min()) if above.size else np.nan


def _finite(value: float) -> float:
    return value if np.isfinite(value) else 0.0


def _after(value: float) -> float:
    return _offset(_code(value) + 1)


def _code(value: float) -> int:
    """The place of a float among all floats: neighbours differ by 1, and both zeros are 0."""
    bits = int(np.float64(abs(value)).view(np.int64))
    return bits if value >= 0 else -bits


def _offset(code: int) -> float:
    """The float of a place; the one after infinity is `nan`, which nothing reaches."""
    value = float(np.int64(abs(code)).view(np.float64))
    return value if code >= 0 else -value
