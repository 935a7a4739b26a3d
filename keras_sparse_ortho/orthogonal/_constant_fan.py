"""`ConstantFan`: the same number of live inputs for every output."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho.orthogonal._counts import live_count
from keras_sparse_ortho.orthogonal._rotations import DrawOptions, Rotations, cos_sin, rotate_rows
from keras_sparse_ortho.orthogonal._structure import Structure, center_of

# The search for fitting pairs ends after this many random matchings in a row without one.
_PATIENCE = 4


@dataclasses.dataclass(frozen=True)
class ConstantFan(Structure):
    """The same number of live inputs for every output, or of live outputs for every input.

    With `side="in"` each output of each matrix has exactly `round(density * taps * inputs)` live
    entries; with `side="out"` each input has `round(density * taps * outputs)`.

    Construction (for `side="in"`): outputs begin with single inputs (which those of wide kernels
    share, while those of tall ones have several each); then matchings of disjoint pairs of outputs
    are rotated. A matching about doubles every fan, and fans differ by at most one, so that the
    last matching reaches the fan wanted. What overlapping supports leave missing is unmasked at
    random; these entries are zeros. With `side="out"`, inputs of a wide kernel begin with all
    outputs, where the fan allows, so that no output is zero.

    Args:
        side: `"in"` or `"out"`.

    Example:

    >>> from keras_sparse_ortho.orthogonal import exact_orthogonal
    >>> kernel, mask = exact_orthogonal((64, 100), 0.1, seed=0, structure=ConstantFan())
    >>> {int(fan) for fan in mask.sum(axis=0)}
    {6}
    """

    side: str = "in"

    def __post_init__(self) -> None:
        if self.side not in ("in", "out"):
            raise ValueError(f'`side` must be "in" or "out". Received: side={self.side!r}')

    def unit(self, canonical_shape: Sequence[int]) -> int:
        """One entry for each output (input) of each matrix."""
        batch, parts, *_, inputs, outputs = canonical_shape
        return batch * parts * (outputs if self.side == "in" else inputs)

    def least(self, canonical_shape: Sequence[int]) -> int:
        """A fan of one."""
        return self.unit(canonical_shape)

    def covering(self, canonical_shape: Sequence[int]) -> int:
        """Fans that reach the whole other side, if that is the longer one."""
        *_, inputs, outputs = canonical_shape
        from_, to = (inputs, outputs) if self.side == "in" else (outputs, inputs)
        return -(-from_ // to) * self.unit(canonical_shape)

    def draw(
        self, canonical_shape: Sequence[int], count: int, density: float, options: DrawOptions
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Structure.draw`."""
        batch, parts, *_, inputs, outputs = canonical_shape
        fan = count // self.unit(canonical_shape)
        from_, to = (inputs, outputs) if self.side == "in" else (outputs, inputs)
        least = -(-from_ // to) if options.cover else 1
        center_fan = min(max(least, live_count(density, from_)), fan)

        kernel = np.zeros(canonical_shape)
        center = center_of(canonical_shape)
        for matrix in np.ndindex(batch, parts):
            rows = options.gain * _fan_orthogonal(to, from_, center_fan, options)
            kernel[(*matrix, *center)] = rows.T if self.side == "in" else rows
        # The side whose fans are counted comes first, then the entries of its lines.
        by_line = np.moveaxis(kernel, -1 if self.side == "in" else -2, 2)
        live = by_line.reshape(batch * parts * to, -1) != 0
        keys = options.rng.random(live.shape)
        keys[live] = -1.0
        chosen = np.argpartition(keys, fan - 1, axis=1)[:, :fan]
        np.put_along_axis(live, chosen, True, axis=1)
        mask = np.moveaxis(live.reshape(by_line.shape), 2, -1 if self.side == "in" else -2)
        return kernel, np.ascontiguousarray(mask)


def _fan_orthogonal(lines: int, width: int, fan: int, options: DrawOptions) -> np.ndarray:
    """A (semi-)orthogonal `(lines, width)` matrix with at most `fan` entries in each row.

    Rotating pairs of rows keeps it orthogonal whichever side is the longer one, but makes no empty
    column live: to cover all columns, the rows must begin with them.
    """
    rng = options.rng
    share = width // lines  # columns that a row can begin with, not shared with other rows
    begin = 1.0  # mean number of entries that a row begins with
    levels = fan.bit_length() - 1
    if options.cover and lines < width <= fan * lines:
        begin = width / lines
        levels = (fan // math.ceil(begin)).bit_length() - 1
        start = _disjoint_rows(_sizes(width, lines, rng), width, rng)
    elif share > 1:
        levels = 0
        while -(-fan // 2**levels) > share:
            levels += 1
        begin = fan / 2**levels
        start = _disjoint_rows(_sizes(round(begin * lines), lines, rng), width, rng)
    elif lines <= width:
        start = _disjoint_rows(np.ones(lines, dtype=np.int64), width, rng)
    else:
        # Each column belongs to one or more rows, and each row to one column.
        owners = (np.arange(lines) % width)[rng.random(lines).argsort()]
        start = _entries(np.arange(lines), owners, owners, (lines, width), rng)
    bits = [0] * lines
    for line, column in zip(*(index.tolist() for index in np.nonzero(start)), strict=True):
        bits[line] |= 1 << column
    pairs: list[tuple[int, int]] = []
    growth = fan / 2**levels / begin
    if growth > 1.0 and lines > 1:
        # Some rows are paired ahead, to raise the mean from `begin` to `fan / 2**levels`.
        ahead = rng.random(lines).argsort()[: 2 * round((growth - 1) * lines / 2)].tolist()
        _join(bits, zip(ahead[::2], ahead[1::2], strict=False), fan, pairs)
    for _ in range(levels):
        # Small supports are joined to large ones, at random among equals.
        order = sorted(rng.random(lines).argsort().tolist(), key=lambda k: bits[k].bit_count())
        half = lines // 2
        _join(bits, zip(order[:half], order[: -half - 1 : -1], strict=True), fan, pairs)
    idle = 0
    while idle < _PATIENCE and lines > 1:
        order = rng.random(lines).argsort().tolist()
        gained = _join(bits, zip(order[::2], order[1::2], strict=False), fan, pairs)
        idle = 0 if gained else idle + 1
    table = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    rotate_rows(
        start, Rotations(table[:, 0], table[:, 1], *cos_sin(options.angles, len(table), rng))
    )
    return start


def _sizes(total: int, lines: int, rng: np.random.Generator) -> np.ndarray:
    """Random sizes that sum to `total` and differ by at most one."""
    sizes = np.full(lines, total // lines)
    sizes[rng.random(lines).argsort()[: total % lines]] += 1
    return sizes


def _disjoint_rows(sizes: np.ndarray, width: int, rng: np.random.Generator) -> np.ndarray:
    """Unit rows with the given numbers of entries, in disjoint columns."""
    columns = rng.random(width).argsort()[: sizes.sum()]
    lines = np.repeat(np.arange(len(sizes)), sizes)
    return _entries(lines, columns, lines, (len(sizes), width), rng)


def _entries(
    lines: np.ndarray, columns: np.ndarray, unit: np.ndarray, shape: Any, rng: np.random.Generator
) -> np.ndarray:
    """A matrix of random entries, those of equal numbers in `unit` scaled to the norm 1."""
    signs = np.where(rng.random(len(unit)) < 0.5, -0.5, 0.5)
    values = signs * (1.0 + rng.random(len(unit)))
    matrix = np.zeros(shape)
    matrix[lines, columns] = values / np.sqrt(np.bincount(unit, values**2))[unit]
    return matrix


def _join(
    bits: list[int], candidates: Iterable[tuple[int, int]], fan: int, pairs: list[tuple[int, int]]
) -> bool:
    """Adds the pairs whose union fits `fan` and is new to one of them; returns whether any did."""
    gained = False
    for i, j in candidates:
        union = bits[i] | bits[j]
        if bits[i] != bits[j] and union.bit_count() <= fan:
            bits[i] = bits[j] = union
            pairs.append((i, j))
            gained = True
    return gained
