"""Givens rotations: how they are drawn, and what they do to the supports of the columns."""

import dataclasses
import math
from collections.abc import Callable

import numpy as np

from keras_sparse_ortho._checks import check_number

AngleLaw = float | tuple[float, float] | Callable[[np.random.Generator, int], np.ndarray] | None
"""`None` (uniform), one angle, a `(low, high)` range, or `law(rng, count) -> angles` [radians]."""


@dataclasses.dataclass(frozen=True)
class DrawOptions:
    """How a kernel is drawn; with `cover`, no output and no input is zero, as far as it can be."""

    rng: np.random.Generator
    gain: float = 1.0
    angles: AngleLaw = None
    cover: bool = True

    def __post_init__(self) -> None:
        if not math.isfinite(self.gain):
            raise ValueError(f"`gain` must be finite. Received: gain={self.gain!r}")


@dataclasses.dataclass(frozen=True)
class Rotations:
    """Givens rotations of column pairs, in the order in which they are applied.

    Rotation `t` replaces the columns `a_i, a_j` (`i = first[t]`, `j = second[t]`) by
    `cos[t] a_i + sin[t] a_j` and `-sin[t] a_i + cos[t] a_j`.
    """

    first: np.ndarray
    second: np.ndarray
    cos: np.ndarray
    sin: np.ndarray

    def __len__(self) -> int:
        return len(self.first)

    def __getitem__(self, part: slice) -> "Rotations":
        return Rotations(self.first[part], self.second[part], self.cos[part], self.sin[part])

    def __add__(self, other: "Rotations") -> "Rotations":
        pairs = zip(self._arrays(), other._arrays(), strict=True)
        return Rotations(*(np.concatenate(pair) for pair in pairs))

    def _arrays(self) -> tuple[np.ndarray, ...]:
        return self.first, self.second, self.cos, self.sin

    @classmethod
    def draw(
        cls, width: int, count: int, rng: np.random.Generator, angles: AngleLaw = None
    ) -> "Rotations":
        """Draws `count` rotations: pairs of distinct columns uniformly, angles by their law.

        The default law uses only `Generator.random` and arithmetic, so it gives the same bits on
        every machine; laws that need `cos` and `sin` may differ in the last bit of float64.
        """
        first = (rng.random(count) * width).astype(np.int64)
        second = (rng.random(count) * (width - 1)).astype(np.int64)
        second += second >= first
        return cls(first, second, *cos_sin(angles, count, rng))


def cos_sin(
    angles: AngleLaw, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of `count` angles drawn from a law."""
    if angles is None:
        return _uniform_on_circle(count, rng)
    if callable(angles):
        theta = np.asarray(angles(rng, count), dtype=np.float64)
        if theta.shape != (count,) or not np.isfinite(theta).all():
            raise ValueError(
                f"`angles(rng, {count})` must return {count} finite angles in radians. "
                f"Received: an array of shape {theta.shape}"
            )
    elif isinstance(angles, tuple):
        low, high = angles
        theta = low + (high - low) * rng.random(count)
    else:
        theta = np.full(count, check_number("angles", angles))
    return np.cos(theta), np.sin(theta)


def _uniform_on_circle(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Von Neumann's construction: double the angle of a uniform point in the unit disc."""
    points = np.empty((0, 2))
    while len(points) < count:
        # A share of pi / 4 of the points falls into the disc.
        draws = 2.0 * rng.random((math.ceil(1.3 * (count - len(points))) + 8, 2)) - 1.0
        radius2 = draws[:, 0] ** 2 + draws[:, 1] ** 2
        # The lower bound keeps the quotient below free of underflow.
        points = np.concatenate([points, draws[(radius2 <= 1.0) & (radius2 > 1e-12)]])
    x, y = points[:count, 0], points[:count, 1]
    radius2 = x * x + y * y
    return (x * x - y * y) / radius2, 2.0 * x * y / radius2


def check_angles(angles: AngleLaw) -> AngleLaw:
    """Returns an angle law in its standard form, or refuses it."""
    if angles is None or callable(angles):
        return angles
    try:
        values = np.asarray(angles, dtype=np.float64)
    except (TypeError, ValueError):
        values = np.array([np.nan])
    if values.shape not in ((), (2,)) or not np.isfinite(values).all():
        raise ValueError(
            "`angles` must be None (uniform), an angle, a (low, high) range in radians, or a "
            f"callable (rng, count) -> angles. Received: angles={angles!r}"
        )
    return float(values) if values.shape == () else (float(values[0]), float(values[1]))


def rotate_rows(transposed: np.ndarray, rotations: Rotations) -> None:
    """Applies column rotations to a matrix given by its float64 transpose, in place."""
    rows = list(transposed)
    from_x = np.empty(transposed.shape[1])
    from_y = np.empty(transposed.shape[1])
    sequence = zip(*(array.tolist() for array in rotations._arrays()), strict=True)
    for i, j, cos, sin in sequence:
        x, y = rows[i], rows[j]
        np.multiply(x, sin, out=from_x)
        np.multiply(y, sin, out=from_y)
        np.multiply(x, cos, out=x)
        np.multiply(y, cos, out=y)
        np.add(x, from_y, out=x)
        np.subtract(y, from_x, out=y)


def random_orthogonal(
    count: int, size: int, rng: np.random.Generator, angles: AngleLaw = None
) -> np.ndarray:
    """`count` dense orthogonal `size x size` matrices: every pair of rows is rotated once.

    Pairs are taken in the rounds of a round-robin tournament. This is not the Haar measure, but no
    entry is zero, and without BLAS the bits are the same on every machine.
    """
    signs = np.where(rng.random((count, size)) < 0.5, -1.0, 1.0)
    matrices = np.zeros((count, size, size))
    matrices[:, np.arange(size), np.arange(size)] = signs
    players = size + size % 2
    circle = np.arange(1, players)
    for _ in range(players - 1 if size > 1 else 0):
        seats = np.concatenate([[0], circle])
        first, second = seats[: players // 2], seats[: players // 2 - 1 : -1]
        paired = (first < size) & (second < size)  # with an odd size one row sits out each round
        first, second = first[paired], second[paired]
        cos, sin = (v.reshape(count, -1, 1) for v in cos_sin(angles, count * len(first), rng))
        x, y = matrices[:, first], matrices[:, second]
        matrices[:, first], matrices[:, second] = cos * x + sin * y, cos * y - sin * x
        circle = np.roll(circle, 1)
    return matrices


class Supports:
    """Supports of the `width` columns of `[I | 0]` (`rows` rows) under rotations, as bitsets.

    A rotation gives both columns the union of their supports (exact cancellations have probability
    zero), so one Python integer a column and one `|` a rotation give the live count.
    """

    def __init__(self, rows: int, width: int) -> None:
        self.bits = [1 << k if k < rows else 0 for k in range(width)]

    @classmethod
    def of(cls, bits: list[int]) -> "Supports":
        """Supports given as one bitset a column."""
        supports = cls(0, 0)
        supports.bits = list(bits)
        return supports

    @property
    def live(self) -> int:
        """Number of live entries in all columns."""
        return sum(map(int.bit_count, self.bits))

    def apply(self, rotations: Rotations) -> None:
        """Applies all rotations without counting, in about a third of the time."""
        bits = self.bits
        for i, j in zip(rotations.first.tolist(), rotations.second.tolist(), strict=True):
            bits[i] = bits[j] = bits[i] | bits[j]

    def apply_while_fits(self, rotations: Rotations, limit: int) -> tuple[int, bool]:
        """Applies rotations until the live count is `limit`, or one would take it over that.

        Returns how many were applied, and whether it ended there.
        """
        bits = self.bits
        counts = [column.bit_count() for column in bits]
        live = sum(counts)
        pairs = zip(rotations.first.tolist(), rotations.second.tolist(), strict=True)
        for applied, (i, j) in enumerate(pairs):
            if live == limit:
                return applied, True
            union = bits[i] | bits[j]
            count = union.bit_count()
            gained = 2 * count - counts[i] - counts[j]
            if live + gained > limit:
                return applied, True
            live += gained
            bits[i] = bits[j] = union
            counts[i] = counts[j] = count
        return len(rotations), live == limit


def schedule(rotations: Rotations, width: int) -> np.ndarray:
    """Earliest level of each rotation with disjoint, so commuting, rotations in every level."""
    last = [-1] * width
    levels = []
    for i, j in zip(rotations.first.tolist(), rotations.second.tolist(), strict=True):
        level = (last[i] if last[i] > last[j] else last[j]) + 1
        last[i] = last[j] = level
        levels.append(level)
    return np.array(levels, dtype=np.int64)
