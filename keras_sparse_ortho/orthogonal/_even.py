"""Sparse orthogonal matrices whose lines have even degrees and, on the longer side, equal norms.

At the start each row is a unit vector of equal magnitudes, with its share of the longer side's
columns. Level by level the columns are divided into cells of disjoint supports, and all pairs of a
cell are rotated: its columns get the union of their supports and keep their expected norm. Cells
have two columns, on the last level two to four, as the count needs.
"""

import math
from collections.abc import Iterator

import numpy as np
import scipy.sparse

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal._eoi import DrawOptions, cos_sin

_LOOK = 8  # columns that are asked for one of a disjoint support
# Levels after the last planned one, of pairs that still fit, until so much of the count is there.
_MORE_LEVELS = 4
_ENOUGH = 0.95
_ROUNDS = 8  # in which places for the last zeros are drawn at once; the rest go one by one


def write_even(out: np.ndarray, count: int, options: DrawOptions) -> None:
    """Writes `gain` times such a matrix of at most `count` entries into a zeroed 2-D array."""
    rows, width = sorted(out.shape)
    if count < rows:
        raise DensityError(f"An orthogonal {rows} x {width} matrix has at least {rows} entries.")
    rng, used = options.rng, min(width, count)
    columns, supports = _shared_out(rows, width, used, rng)
    live = used
    for sizes in _levels(width, count / used):
        before = live
        cells, live = _cells(supports, sizes, live, count, rng)
        columns = _mixing(cells, width, rng) @ columns
        if live > _ENOUGH * count or (sizes is None and live == before):
            break
    # Flat places are written in half the time of pairs of them.
    step, along = (rows, 1) if out.shape[0] >= out.shape[1] else (1, width)
    places = np.repeat(np.arange(0, step * width, step), np.diff(columns.indptr))
    places += columns.indices.astype(np.int64) * along
    out.reshape(-1)[places] = columns.data * options.gain


def _shared_out(
    rows: int, width: int, used: int, rng: np.random.Generator
) -> tuple[scipy.sparse.csr_array, list[int]]:
    """The first columns, `(width, rows)`, and their supports as bitsets: one entry in each used."""
    order = rng.random(width).argsort()[:used]
    row = np.arange(used) % rows
    signs = np.where(rng.random(used) < 0.5, -1.0, 1.0)
    values = signs / np.sqrt(np.bincount(row, minlength=rows))[row]
    supports = [0] * width
    for column, at in zip(order.tolist(), row.tolist(), strict=True):
        supports[column] = 1 << at
    return scipy.sparse.csr_array((values, (order, row)), shape=(width, rows)), supports


def _levels(width: int, growth: float) -> Iterator[list[int] | None]:
    """The sizes of the cells of each level, over which degrees grow; `None` for pairs that fit."""
    while growth > 1:
        factor = 2.0 if growth >= 4 else growth
        low = math.floor(factor)
        larger = min(round((factor - low) * width / (low + 1)), width // (low + 1))
        rest = width - larger * (low + 1)
        last = [rest % low] if rest % low else []
        yield [low + 1] * larger + [low] * (rest // low) + last
        growth = growth / 2 if growth >= 4 else 1
    yield from [None] * _MORE_LEVELS


def _cells(
    supports: list[int], sizes: list[int] | None, live: int, count: int, rng: np.random.Generator
) -> tuple[list[list[int]], int]:
    """Cells of columns with little in common, whose supports are united; and the new live count."""
    keys = rng.random(len(supports))
    if sizes is None:  # columns of the least degrees find partners first
        keys -= np.array([support.bit_count() for support in supports])
        sizes = [2] * (len(supports) // 2)
    else:
        sizes = [sizes[k] for k in rng.random(len(sizes)).argsort().tolist()]
    order, found = keys.argsort().tolist(), []
    waiting = [supports[column] for column in order]
    for size in sizes:
        cell, union = [order.pop()], waiting.pop()
        degrees = union.bit_count()
        while len(cell) < size:
            best = -1
            if waiting[-1] & union:
                common = [(s & union).bit_count() for s in waiting[: -_LOOK - 1 : -1]]
                best = -1 - common.index(min(common))
            cell.append(order.pop(best))
            support = waiting.pop(best)
            degrees += support.bit_count()
            union |= support
        gained = size * union.bit_count() - degrees
        if gained and live + gained <= count:
            live += gained
            found.append(cell)
            for column in cell:
                supports[column] = union
    return found, live


def _mixing(cells: list[list[int]], width: int, rng: np.random.Generator) -> scipy.sparse.csr_array:
    """The matrix that rotates all pairs of columns of each cell, by uniform angles."""
    sizes = np.ones(width, dtype=np.int32)
    groups = [np.array([cell for cell in cells if len(cell) == size]) for size in (2, 3, 4)]
    for members in filter(len, groups):
        sizes[members] = members.shape[1]
    indptr = np.concatenate([np.zeros(1, np.int32), np.cumsum(sizes, dtype=np.int32)])
    start, indices, values = indptr[:-1], np.zeros(indptr[-1], np.int32), np.ones(indptr[-1])
    indices[start] = np.arange(width)  # a column of no cell stays as it is
    for members in filter(len, groups):
        size = members.shape[1]
        turned = np.tile(np.eye(size), (len(members), 1, 1))
        for one in range(size):
            for other in range(one + 1, size):
                cos, sin = (part[:, None] for part in cos_sin(len(members), rng))
                x, y = turned[:, one], turned[:, other]
                turned[:, one], turned[:, other] = cos * x + sin * y, cos * y - sin * x
        places = start[members][..., None] + np.arange(size)
        indices[places], values[places] = members[:, None], turned
    return scipy.sparse.csr_array((values, indices, indptr), shape=(width, width))


def unmask_evenly(mask: np.ndarray, count: int, rng: np.random.Generator) -> None:
    """Makes dead entries of a 2-D mask live up to `count`, with degrees as even as can be."""
    flat = np.flatnonzero(mask)
    if not (missing := count - flat.size):
        return
    live = flat // mask.shape[1], flat % mask.shape[1]
    by_row, by_column = (
        _lacking(np.bincount(at, minlength=size), missing, rng)
        for at, size in zip(live, mask.shape, strict=True)
    )
    for _ in range(_ROUNDS):
        rows = np.repeat(np.arange(mask.shape[0]), by_row)
        columns = np.repeat(np.arange(mask.shape[1]), by_column)
        columns = columns[rng.random(columns.size).argsort()]
        places = np.sort(rows * mask.shape[1] + columns)
        places = places[(np.diff(places, prepend=-1) > 0) & ~mask.reshape(-1)[places]]
        mask.reshape(-1)[places] = True
        by_row -= np.bincount(places // mask.shape[1], minlength=mask.shape[0])
        by_column -= np.bincount(places % mask.shape[1], minlength=mask.shape[1])
    # Where no place is left for both, at the columns that lack most, or have least too many.
    for row in np.repeat(np.arange(mask.shape[0]), by_row).tolist():
        column = np.where(mask[row], -np.inf, by_column + rng.random(mask.shape[1])).argmax()
        mask[row, column] = True
        by_column[column] -= 1


def _lacking(degrees: np.ndarray, missing: int, rng: np.random.Generator) -> np.ndarray:
    """How many entries each line gets, so that the least degrees rise first."""
    order = np.lexsort((rng.random(degrees.size), degrees))
    ordered = degrees[order]
    # With the first k lines filled up to the degree of the last of them, this many are spent.
    spent = ordered * np.arange(1, ordered.size + 1) - np.cumsum(ordered)
    lines = int(np.searchsorted(spent, missing, side="right"))
    level, more = divmod(missing + int(ordered[:lines].sum()), lines)
    wanted = np.full(lines, level)
    wanted[:more] += 1
    lacking = np.zeros_like(degrees)
    lacking[order[:lines]] = wanted - ordered[:lines]
    return lacking
