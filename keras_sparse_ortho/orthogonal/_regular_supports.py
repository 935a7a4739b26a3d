"""Which lines are rotated with which, so that a regular pattern holds the product.

The kernel is a matrix with orthonormal rows; its longer side is cut into `lines`, the shorter one
into `groups`, and a line is live at the groups of its support. `d = gcd(lines, groups)` dense
matrices, each of `lines / d` lines and `groups / d` groups, are the start: exactly regular, as
sparse as a regular pattern can be. A level then parts the lines into cells of at most `q` and
mixes the lines of a cell, which all get the union of their supports. Neither a line's nor a
group's fan grows by more than `q`, and by exactly that if all cells have `q` lines of disjoint
supports. So levels whose product is at most `times` stay within `times` times the fans of the
start; the blocks that are missing to exactly that are zeros.
"""

import dataclasses
import itertools
import math

import numpy as np

# Sizes of cells. Products of them lie within a seventh below any number; larger cells would leave
# the kernel in parts that are not connected.
_CELLS = (2, 3, 5)
# Choices of sizes that are drawn, where supports overlap or cannot be completed.
_TRIES = 3


@dataclasses.dataclass(frozen=True)
class RegularSupports:
    """A start, the levels of cells that mix it, and the regular pattern that holds the result.

    Args:
        lines: Line numbers `(d, lines / d)` of each dense matrix of the start.
        groups: Its group numbers `(d, groups / d)`, ascending.
        levels: Cells of lines, for each level.
        live: bool `(lines, groups)`, the pattern.
    """

    lines: np.ndarray
    groups: np.ndarray
    levels: list[list[list[int]]]
    live: np.ndarray

    @classmethod
    def draw(
        cls, lines: int, groups: int, times: int, rng: np.random.Generator
    ) -> "RegularSupports":
        """A pattern with `times` times the least fans, `1 <= times <= gcd(lines, groups)`."""
        parts = math.gcd(lines, groups)
        lines_of = rng.random(lines).argsort().reshape(parts, -1)
        groups_of = np.sort(rng.random(groups).argsort().reshape(parts, -1), axis=1)
        start = [0] * lines
        for own_lines, own_groups in zip(lines_of.tolist(), groups_of.tolist(), strict=True):
            for line in own_lines:
                start[line] = sum(1 << group for group in own_groups)
        best, reached = None, 0
        for fan, sizes in cell_sizes(lines, times)[:_TRIES]:
            # No draw of these cells has larger supports than that, and hardly one as large.
            if reached * parts >= 0.95 * fan * lines * groups:
                break
            levels, live, found = _levels(start, sizes, groups, times, rng)
            if best is None or found > reached:
                best, reached = cls(lines_of, groups_of, levels, live), found
        assert best is not None
        return best


def cell_sizes(lines: int, times: int) -> list[tuple[float, list[int]]]:
    """Sizes of the cells of each level, with a product of at most `times`; largest first.

    Those with the largest mean fan, which stands before them, come first; among equals those with
    more levels, as these connect more.
    """
    found: list[tuple[float, list[int]]] = [(1.0, [])]
    for size in reversed(_CELLS):
        cells = -(-lines // size)
        small, larger = divmod(lines, cells)
        mean = ((cells - larger) * small**2 + larger * (small + 1) ** 2) / lines
        more = found
        while more:
            more = [
                (fan * mean, [*sizes, size])
                for fan, sizes in more
                if math.prod(sizes) * size <= times
            ]
            found = found + more
    # Equal up to rounding counts as equal, on every machine.
    return sorted(found, key=lambda entry: (-round(entry[0], 6), -len(entry[1]), entry[1]))


def _levels(
    start: list[int], sizes: list[int], groups: int, times: int, rng: np.random.Generator
) -> tuple[list[list[list[int]]], np.ndarray, int]:
    """Levels of cells whose supports can be completed; the pattern; and the size of supports."""
    lines = len(start)
    parts = math.gcd(lines, groups)
    bits = list(start)
    levels = [_mix(bits, size, rng) for size in sizes]
    # Where all is to be live, every union fits: no live block needs to be zero.
    while times == parts and min(line.bit_count() for line in bits) < groups:
        levels.append(_mix(bits, 2, rng))
    dropped = 0
    while True:
        live = _as_matrix(bits, groups)
        found = int(live.sum())
        if complete(live, times * groups // parts, times * lines // parts, rng):
            return levels, live, found
        # Fans that differ may leave no way to complete them, those of fewer cells do: the
        # start itself is regular. Its dead blocks are, too, so that taking an equal fraction
        # of each meets all fans, and a flow of integers exists where one of fractions does.
        levels[-1].sort(key=len, reverse=True)
        more = max(1, dropped // 2)
        del levels[-1][-more:]
        dropped += more
        if not levels[-1]:
            levels.pop()
            dropped = 0
        bits = list(start)
        for cell in itertools.chain.from_iterable(levels):
            _unite(bits, cell)


def complete(live: np.ndarray, line_fan: int, group_fan: int, rng: np.random.Generator) -> bool:
    """Sets entries of a bool `(lines, groups)` matrix live until all fans are as wanted, in place.

    Every line takes the groups that miss most; what that leaves over is found by augmenting
    paths, which fail only if there is no way.

    Returns:
        Whether there was a way.
    """
    added = np.zeros_like(live)
    missing = line_fan - live.sum(axis=1)
    needs = group_fan - live.sum(axis=0)
    for line in rng.random(len(live)).argsort():
        keys = needs + rng.random(len(needs))
        keys[live[line] | (needs <= 0)] = -1.0
        count = missing[line]
        if count:
            chosen = np.argsort(-keys)[:count]
            chosen = chosen[keys[chosen] > 0]
            live[line, chosen] = added[line, chosen] = True
            needs[chosen] -= 1
            missing[line] -= len(chosen)
    for line in np.repeat(np.arange(len(live)), missing):
        if not _augment(live, added, needs, int(line)):
            return False
    return True


def _augment(live: np.ndarray, added: np.ndarray, needs: np.ndarray, start: int) -> bool:
    """Gives a line one more group, by lines that pass on groups added to them before."""
    given_up: dict[int, int] = {start: -1}  # the group that a line on the way would pass on
    taken_by: dict[int, int] = {}
    seen = np.zeros(len(needs), dtype=bool)
    queue = [start]
    for line in queue:
        found = ~live[line] & ~seen
        ends = np.flatnonzero(found & (needs > 0))
        if len(ends):
            group = int(ends[0])
            needs[group] -= 1
            while group >= 0:
                live[line, group] = added[line, group] = True
                group = given_up[line]
                if group >= 0:
                    live[line, group] = added[line, group] = False
                    line = taken_by[group]
            return True
        seen |= found
        for group in np.flatnonzero(found).tolist():
            taken_by[group] = line
            for other in np.flatnonzero(added[:, group]).tolist():
                if other not in given_up:
                    given_up[other] = group
                    queue.append(other)
    return False


def _mix(bits: list[int], size: int, rng: np.random.Generator) -> list[list[int]]:
    """Parts lines into cells of at most `size`, as equal and disjoint as can be; unites bits."""
    lines = len(bits)
    count = -(-lines // size)
    order = rng.random(lines).argsort().tolist()
    cells = []
    for place in range(count):
        cell = [order.pop()]
        union = bits[cell[0]]
        while len(cell) < lines // count + (place < lines % count):
            best, least = 0, lines + union.bit_length()
            for k in range(len(order) - 1, -1, -1):
                common = (bits[order[k]] & union).bit_count()
                if common < least:
                    best, least = k, common
                if not common:
                    break
            line = order.pop(best)
            union |= bits[line]
            cell.append(line)
        _unite(bits, cell)
        cells.append(cell)
    return cells


def _unite(bits: list[int], cell: list[int]) -> None:
    """All lines of a cell get the union of their supports."""
    union = 0
    for line in cell:
        union |= bits[line]
    for line in cell:
        bits[line] = union


def _as_matrix(bits: list[int], groups: int) -> np.ndarray:
    size = -(-groups // 8)
    packed = b"".join(line.to_bytes(size, "little") for line in bits)
    rows = np.frombuffer(packed, dtype=np.uint8).reshape(-1, size)
    return np.unpackbits(rows, axis=1, count=groups, bitorder="little").astype(bool)
