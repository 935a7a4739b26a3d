"""Which offset leaves so many entries of several weights live, found by counting."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from keras_sparse_ortho.callbacks._entries import (
    Entries,
    HostEntries,
    OrderOfMagnitudes,
    are_few,
)

# Offsets that are tried in one pass over the entries.
_TRIED = 15
_SAMPLED = 2**17


@dataclasses.dataclass(frozen=True)
class Cut:
    """The `count` entries of largest critical offset, ties to the first weight and index.

    Args:
        entries: Those of each weight.
        count: How many are above.
        low: For each weight the numbers, (groups,), that all of those above reach.
        high: Numbers, (groups,), from which on all entries are above.
        missing: How many of those between are above, too; all of them have one critical offset.
        tie: That offset, if there are some.
    """

    entries: Sequence[Entries]
    count: int
    low: list[np.ndarray]
    high: list[np.ndarray]
    missing: int
    tie: float

    def shares(self) -> list[int]:
        """How many of the entries of each weight are above."""
        return [at_high + ties for at_high, ties in self._above_and_tied()]

    def masks(self) -> list[np.ndarray]:
        """Bool masks of the entries above; tensors for those on a device."""
        # Mostly nothing is tied, and nothing is to be counted.
        above = self._above_and_tied() if self.missing else [(0, 0)] * len(self.entries)
        parts = zip(self.entries, self.low, self.high, above, strict=True)
        return [one.mask(low, high, ties) for one, low, high, (_, ties) in parts]

    def _above_and_tied(self) -> list[tuple[int, int]]:
        """Of each weight how many entries reach `high`, and how many of the tied ones are above."""
        found, missing = [], self.missing
        for one, low, high in zip(self.entries, self.low, self.high, strict=True):
            at_low, at_high = one.counts(np.stack([low, high])).tolist()
            ties = min(missing, at_low - at_high)
            found.append((at_high, ties))
            missing -= ties
        return found

    def offset(self) -> float:
        """An offset between those above and the others, as nearly as there is one."""
        if self.missing:
            below = above = self.tie
        else:
            below, above = _around(self.entries, self.low)
        if np.isnan(below):  # all are above
            least = _around(self.entries, _first(self.entries, _after(-np.inf)), whole=True)[1]
            return min(_finite(least), 0.0) - 1.0
        if below == np.inf:  # no offset kills so many
            largest = _around(self.entries, _first(self.entries, np.inf), whole=True)[0]
            return max(_finite(largest), 0.0) + 1.0
        if below == -np.inf:  # all others are exactly 0
            return (above if np.isfinite(above) else 0.0) - 1.0
        return (below + above) / 2 if np.isfinite(above) else below + 1.0


def cut(entries: Sequence[Entries], count: int) -> Cut:
    """Finds the `count` entries that the largest offsets leave live.

    The offset is found among floats by their bits, several candidates in one pass, until the count
    is met, or two neighbours have it between them. What an entry is compared with is a number of
    its own kind, such as the bits of a magnitude: so the counts are integers, and the same wherever
    they are made.

    Args:
        entries: Those of each weight.
        count: How many, from 0 to all of them.
    """
    size = sum(one.size for one in entries)
    if not 0 <= count <= size:
        raise ValueError(f"`count` must be in [0, {size}]. Received: count={count}")
    if count in (0, size):
        bounds = _first(entries, np.nan if count == 0 else -np.inf)
        return Cut(entries, count, bounds, bounds, 0, 0.0)
    least, beyond = _narrow(entries, count)
    while beyond - least > 1:
        parts = [(beyond - least) * j // (_TRIED + 1) for j in range(1, _TRIED + 1)]
        codes = [least + max(part, 1) for part in parts]
        bounds = _firsts(entries, np.array([_offset(code) for code in codes]))
        counts = sum(one.counts(rows) for one, rows in zip(entries, bounds, strict=True))
        for at, found in enumerate(np.asarray(counts).tolist()):
            if found == count:
                here = [rows[at] for rows in bounds]
                return Cut(entries, count, here, here, 0, 0.0)
            if found > count:
                least = codes[at]
            else:
                beyond = codes[at]
                break
    tie = _offset(least)
    low, high = _first(entries, tie), _first(entries, _after(tie))
    above = _count(entries, high)
    return Cut(entries, count, low, high, count - above, tie)


def unreachable(entries: Sequence[Entries]) -> int:
    """How many entries no offset kills."""
    return _count(entries, _first(entries, np.inf))


def _narrow(entries: Sequence[Entries], count: int) -> tuple[int, int]:
    """Two codes of offsets: at least `count` entries reach the first, fewer the second.

    Of entries in NumPy those between are taken out, and sorted. The codes are guessed by a sample.
    """
    least, beyond = _code(-np.inf), _code(np.inf) + 1
    own = [one for one in entries if isinstance(one, HostEntries)]
    if len(own) < len(entries) or are_few(entries):
        for one in own:
            one.sort()
        return least, beyond
    size = sum(one.size for one in own)
    # So many of each that one stands for as many entries as another.
    sample = np.sort(
        np.concatenate([one.sample(max(one.size * _SAMPLED // size, 1)) for one in own])
    )
    at = sample.size * (1 - count / size)
    # Five standard deviations of the rank, and some more for weights that the steps meet badly.
    margin = 5 * np.sqrt(at * (1 - at / sample.size)) + sample.size / 500 + 10
    low, high = at - margin, at + margin
    if low >= 0:
        guess = float(sample[int(low)])
        least = _code(guess) if _count(own, _first(own, guess)) > count else least
    if high < sample.size:
        guess = float(sample[int(high)])
        beyond = _code(guess) if _count(own, _first(own, guess)) < count else beyond
    ends = _firsts(own, np.array([_offset(least), _offset(beyond)]))
    for one, (first, last) in zip(own, ends, strict=True):
        one.narrow(first, last)
    return least, beyond


def _first(entries: Sequence[Entries], offset: float) -> list[np.ndarray]:
    """The least numbers whose critical offset is at least so much, (groups,) for each weight."""
    return [rows[0] for rows in _firsts(entries, np.array([offset]))]


def _firsts(entries: Sequence[Entries], offsets: np.ndarray) -> list[np.ndarray]:
    """As `_first` for several offsets, (m, groups); what has the same `g` is found together."""
    found: dict[int, np.ndarray] = {}
    by_function: dict[int, list[int]] = {}
    for k, one in enumerate(entries):
        if isinstance(one.order, OrderOfMagnitudes):
            by_function.setdefault(id(one.order.inverse), []).append(k)
        else:
            found[k] = one.order.first(offsets)
    for same in by_function.values():
        orders = [entries[k].order for k in same]
        s = np.concatenate([order.s for order in orders])
        rows = OrderOfMagnitudes(s, orders[0].inverse).first(offsets)
        ends = np.cumsum([order.groups for order in orders])
        found.update(zip(same, np.split(rows, ends[:-1], axis=1), strict=True))
    return [found[k] for k in range(len(entries))]


def _count(entries: Sequence[Entries], bounds: Sequence[np.ndarray]) -> int:
    pairs = zip(entries, bounds, strict=True)
    return sum(int(one.counts(bound[None])[0]) for one, bound in pairs)


def _around(
    entries: Sequence[Entries], bounds: Sequence[np.ndarray], whole: bool = False
) -> tuple[float, float]:
    """The critical offsets on both sides of bounds; `nan` below, `inf` above where none is."""
    ends = [one.around(bound, whole) for one, bound in zip(entries, bounds, strict=True)]
    below = [end for end, _ in ends if not np.isnan(end)]
    above = [end for _, end in ends if not np.isnan(end)]
    return max(below, default=np.nan), min(above, default=np.inf)


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
