"""Which offset leaves exactly `count` entries of several weights live.

An entry is live while the common offset of all thresholds is below its critical offset. Thresholds
that compare magnitudes have the critical offset `g^-1(|w|) - s`, with one `s` for each group of
entries: these are compared by the bits of `|w|` as float32, so that `g^-1` is computed for few.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._ranking import (
    INFINITE,
    between,
    counts_at_least,
    neighbours,
    on_bounds,
    ranks_on_device,
)
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError

# Up to this many entries are all sorted; of more, those that a sample of this size leaves in doubt.
_FEW = 2**16
_SAMPLED = 2**17
# Offsets that are tried in one pass over the entries on a device.
_TRIED = 15


class HostEntries:
    """Entries of one weight by NumPy; keys are bits of magnitudes, or critical offsets."""

    on_device = False

    def __init__(
        self, keys: np.ndarray, s: Any = 0.0, inverse: Any = None, scales: Any = None
    ) -> None:
        self.s = np.asarray(s, np.float64)
        self.inverse = inverse
        self._scales = scales
        self.size = keys.size
        self._keys = keys
        self._above = 0
        self._sorted: np.ndarray | None = None

    def sample(self, count: int) -> np.ndarray:
        """Critical offsets of about `count` entries, at equal distances."""
        step = self.size // count | 1  # an odd number meets all columns of most matrices
        at = np.arange(step // 2, self.size, step)
        return self._critical(np.unravel_index(at, self._keys.shape))

    def narrow(self, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Sorts the entries between two bounds; how many are above them, and how many between."""
        above = self._keys >= high.reshape(self.s.shape)
        inside = (self._keys >= low.reshape(self.s.shape)) & ~above
        self._above = int(np.count_nonzero(above))
        self._sorted = np.sort(self._critical(inside))
        return np.array([self._above, self._sorted.size])

    def counts(self, offsets: np.ndarray) -> np.ndarray:
        """How many critical offsets are at least each of `offsets`, which were narrowed down to."""
        if self._sorted is None:
            self._sorted = np.sort(self._critical(np.ones(self._keys.shape, bool)))
        return self._above + self._sorted.size - np.searchsorted(self._sorted, offsets)

    def around(self, offset: float, whole: bool) -> tuple[float, float]:
        """The critical offsets next to an offset, of narrowed entries or of all; `nan` if none."""
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

    def beyond(self) -> "HostEntries":
        """The same entries, with their magnitudes for critical offsets where these are infinite."""
        if self.inverse is not None:
            return HostEntries(self._keys, np.zeros_like(self.s), _beyond(self.inverse))
        scales = 0.0 if self._scales is None else self._scales
        return HostEntries(np.where(np.isposinf(self._keys), scales, -np.inf))

    def reach(self, bounds: np.ndarray) -> int:
        """How many entries reach a bound, without a sort."""
        return int(np.count_nonzero(self._keys >= bounds.reshape(self.s.shape)))

    def _critical(self, at: Any) -> np.ndarray:
        """The critical offsets of the entries at an index."""
        if self.inverse is None:
            return np.asarray(self._keys[at], np.float64)
        s = np.broadcast_to(self.s, self._keys.shape)[at]
        return _critical_offsets(self._keys[at], s, self.inverse)


class DeviceEntries:
    """Entries of a tensor that stays where it is; methods as in `HostEntries`, on bounds."""

    on_device = True

    def __init__(self, value: Any, s: np.ndarray, inverse: Any) -> None:
        self.s = s.astype(np.float64).reshape(s.shape or (1,) * len(value.shape))
        self.inverse = inverse
        self.size = int(np.prod(value.shape, dtype=np.int64))
        self._value = value

    def counts(self, bounds: np.ndarray) -> np.ndarray:
        return to_numpy(self._on_bounds(counts_at_least, bounds)).astype(np.int64)

    def around(self, bounds: np.ndarray, whole: bool) -> tuple[float, float]:
        below, above = map(to_numpy, self._on_bounds(neighbours, bounds))
        s, there = self.s.reshape(-1), (below >= 0, above < INFINITE)
        ends = zip((below, above), there, strict=True)
        return _extremes(*(_critical_offsets(b[at], s[at], self.inverse) for b, at in ends))

    def mask(self, low: np.ndarray, high: np.ndarray, missing: int) -> Any:
        return self._on_bounds(between, low, high, missing)

    def beyond(self) -> "DeviceEntries":
        return DeviceEntries(self._value, np.zeros_like(self.s), _beyond(self.inverse))

    def reach(self, bounds: np.ndarray) -> int:
        return int(self.counts(bounds[None])[0])

    def _on_bounds(self, function: Callable[..., Any], *numbers: Any) -> Any:
        return on_bounds(function, self._value, *numbers, one=self.s.shape)


Entries = HostEntries | DeviceEntries


def entries_of(threshold: Any) -> Entries:
    """The entries of a threshold; those with `magnitudes` stay on an accelerator."""
    magnitudes = getattr(threshold, "magnitudes", lambda: None)()
    if magnitudes is None:
        scales = getattr(threshold, "scales", lambda: None)()
        critical = threshold.critical_offsets()
        wrong = np.isnan(critical)
        _check_finite(threshold, wrong if scales is None else wrong | ~np.isfinite(scales))
        return HostEntries(critical, scales=scales)
    weight, s, inverse = magnitudes
    _check_finite(threshold, ~np.isfinite(s))
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


def _check_finite(threshold: Any, wrong: np.ndarray) -> None:
    """Raises NotPrunableError if something is `wrong`: no offset leaves a number of NaN live."""
    if wrong.any():
        raise NotPrunableError(
            f"The weight '{threshold.weight.path}' is not finite, or its threshold is not. "
            f"Received: {np.count_nonzero(wrong)} infinite or NaN values"
        )


@dataclasses.dataclass(frozen=True)
class Cut:
    """The `count` entries of largest critical offset, ties to the first weight and flat index.

    These reach the offset `low`; all that reach `high` are live, and `missing` of those between.
    Entries beyond the reach of all offsets are ranked by magnitude: `beyond` is their cut.
    """

    entries: Sequence[Entries]
    count: int
    low: float
    high: float
    missing: int = 0
    beyond: "Cut | None" = None

    def shares(self) -> list[int]:
        """How many entries of each weight are live."""
        if self.beyond is not None:
            return self.beyond.shares()
        if self.low == -np.inf and not self.missing:  # all
            return [one.size for one in self.entries]
        return [above + ties for above, ties in self._above_and_ties()]

    def masks(self) -> list[Any]:
        """Bool masks of the live entries; tensors for those on a device."""
        if self.beyond is not None:
            return self.beyond.masks()
        found = self._above_and_ties() if self.missing else [(0, 0)] * len(self.entries)
        bounds = _bounds(self.entries, [self.low, self.high])
        rows = zip(self.entries, bounds, found, strict=True)
        return [one.mask(low, high, ties) for one, (low, high), (_, ties) in rows]

    def offset(self) -> float:
        """An offset between the live entries and the others, as nearly as there is one."""
        below = above = self.low
        if not self.missing:
            below, above = _around(self.entries, self.low)
        if np.isnan(below):  # all are live
            least = _around(self.entries, _offset(_code(-np.inf) + 1), whole=True)[1]
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

    def _above_and_ties(self) -> list[tuple[int, int]]:
        """For each weight how many entries reach `high`, and how many of the ties are live."""
        found, missing = [], self.missing
        for at_low, at_high in _counts(self.entries, [self.low, self.high]).tolist():
            ties = min(missing, at_low - at_high)
            found.append((at_high, ties))
            missing -= ties
        return found


def cut(entries: Sequence[Entries], count: int) -> Cut:
    """Finds the `count` entries, from 0 to all, that the largest of all floats leaves live."""
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
        counts = _counts(entries, [_offset(code) for code in codes]).sum(axis=0).tolist()
        if count in counts:
            offset = _offset(codes[counts.index(count)])
            return Cut(entries, count, offset, offset)
        more = [code for code, found in zip(codes, counts, strict=True) if found > count]
        least = max(more, default=least)
        beyond = min((code for code in codes if code > least), default=beyond)
    low, high = _offset(least), _offset(beyond)
    above = int(_counts(entries, [high]).sum())
    ranked = cut([one.beyond() for one in entries], count) if low == np.inf else None
    return Cut(entries, count, low, high, missing=count - above, beyond=ranked)


def can_live(entry: Entries) -> int:
    """How many entries of a weight some offset leaves live: those that are not 0."""
    return entry.reach(_bounds([entry], [_offset(_code(-np.inf) + 1)])[0][0])


def _narrow(entries: Sequence[Entries], count: int) -> tuple[int, int]:
    """By a sample two codes: at least `count` entries reach the first, fewer the second."""
    whole = _code(-np.inf), _code(np.inf) + 1
    own = [one for one in entries if isinstance(one, HostEntries)]
    size = sum(one.size for one in own)
    if len(own) == len(entries) and size > _FEW:
        # A share of each weight, so that every sample stands for as many entries.
        parts = [one.sample(max(one.size * _SAMPLED // size, 1)) for one in own]
        sample = np.sort(np.concatenate(parts))
        at = sample.size * (1 - count / size)
        # Five standard deviations of the rank, and some more for weights with periodic patterns.
        margin = 5 * np.sqrt(at * (1 - at / sample.size)) + sample.size / 500 + 10
        low = _code(sample[int(at - margin)]) if at >= margin else whole[0]
        high = _code(sample[int(at + margin)]) if at + margin < sample.size else whole[1]
        above, inside = _sort_between(own, low, high)
        if above < count < above + inside:
            return low, high
    if own:
        _sort_between(own, *whole)
    return whole


def _sort_between(entries: Sequence[HostEntries], low: int, high: int) -> np.ndarray:
    """Sorts the entries between two codes; how many are above them, and how many between."""
    bounds = _bounds(entries, [_offset(low), _offset(high)])
    return np.sum([one.narrow(*ends) for one, ends in zip(entries, bounds, strict=True)], axis=0)


def _levels(entries: Sequence[Entries], offsets: Sequence[float]) -> list[np.ndarray]:
    """Offsets as the methods of the entries take them: bounds for those on a device."""
    bounds = iter(_bounds([one for one in entries if one.on_device], offsets))
    return [next(bounds) if one.on_device else np.array(offsets) for one in entries]


def _counts(entries: Sequence[Entries], offsets: Sequence[float]) -> np.ndarray:
    """How many entries reach each of several offsets, (weights, m)."""
    pairs = zip(entries, _levels(entries, offsets), strict=True)
    return np.array([one.counts(levels) for one, levels in pairs])


def _around(entries: Sequence[Entries], offset: float, whole: bool = False) -> tuple[float, float]:
    """The critical offsets next to an offset; `nan` below, `inf` above if there is none."""
    pairs = zip(entries, _levels(entries, [offset]), strict=True)
    ends = np.array([one.around(levels[0], whole) for one, levels in pairs])
    below, above = (column[~np.isnan(column)] for column in ends.T)
    return float(below.max()) if below.size else np.nan, float(above.min(initial=np.inf))


def _bounds(entries: Sequence[Entries], offsets: Sequence[float]) -> list[np.ndarray]:
    """For each weight the least keys whose critical offset reaches an offset, (m, groups)."""
    found = [np.array(offsets, np.float64)[:, None]] * len(entries)
    by_function: dict[int, list[int]] = {}
    for k, one in enumerate(entries):
        if one.inverse is not None:
            by_function.setdefault(id(one.inverse), []).append(k)
    for same in by_function.values():
        s = [entries[k].s.reshape(-1) for k in same]
        rows = _least_bits(np.array(offsets), np.concatenate(s), entries[same[0]].inverse)
        ends = np.cumsum([part.size for part in s])[:-1]
        for k, part in zip(same, np.split(rows, ends, axis=1), strict=True):
            found[k] = part
    return found


def _least_bits(
    offsets: np.ndarray, s: np.ndarray, inverse: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    """By bisection the least bits that reach an offset, (m, groups); INFINITE for `nan`."""
    wanted = offsets[:, None]
    low = np.zeros((offsets.size, s.size), np.int64)
    low[np.isnan(offsets)] = INFINITE
    high = np.full(low.shape, INFINITE)
    while (low < high).any():
        middle = (low + high) // 2
        # Where low and high have met, `middle` may not be finite.
        reached = _critical_offsets(np.minimum(middle, INFINITE - 1), s, inverse) >= wanted
        open_ = low < high
        high = np.where(open_ & reached, middle, high)
        low = np.where(open_ & ~reached, middle + 1, low)
    return low.astype(np.int32)


def _critical_offsets(bits: np.ndarray, s: np.ndarray, inverse: Any) -> np.ndarray:
    """`g^-1(|w|) - s` in float64, for the bits of `|w|` as float32."""
    magnitudes = np.ascontiguousarray(bits, np.int32).view(np.float32)
    with np.errstate(all="ignore"):
        return np.asarray(inverse(magnitudes.astype(np.float64)) - s, np.float64)


def _beyond(inverse: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Magnitudes as they are where `g^-1` is infinite, and `-inf` below."""
    return lambda magnitude: np.where(np.isposinf(inverse(magnitude)), magnitude, -np.inf)


def _extremes(below: np.ndarray, above: np.ndarray) -> tuple[float, float]:
    """The largest of the first, and the least of the second; `nan` if there is none."""
    return (below.max() if below.size else np.nan), (above.min() if above.size else np.nan)


def _finite(value: float) -> float:
    return value if np.isfinite(value) else 0.0


def _code(value: float) -> int:
    """The place of a float among all floats: neighbours differ by 1, and both zeros are 0."""
    bits = int(np.float64(abs(value)).view(np.int64))
    return bits if value >= 0 else -bits


def _offset(code: int) -> float:
    """The float of a place; the one after infinity is `nan`, which nothing reaches."""
    value = float(np.int64(abs(code)).view(np.float64))
    return value if code >= 0 else -value
