"""A sequence of Givens rotations, and the laws it is drawn from."""

import dataclasses
import math
from collections.abc import Callable, Iterable

import numpy as np

AngleLaw = float | tuple[float, float] | Callable[[np.random.Generator, int], np.ndarray] | None
"""`None` (uniform on the circle), one angle, a range, or `law(rng, count) -> angles` [radians]."""


@dataclasses.dataclass(frozen=True)
class Rotations:
    """Givens rotations of column pairs, in the order in which they are applied.

    Rotation `t` replaces the columns `a_i, a_j` (`i = first[t]`, `j = second[t]`) by
    `cos[t] a_i + sin[t] a_j` and `-sin[t] a_i + cos[t] a_j`.

    Args:
        first: Integer array `(count,)`, column indices.
        second: Integer array `(count,)`, column indices, nowhere equal to `first`.
        cos: float64 array `(count,)`.
        sin: float64 array `(count,)`.

    Example:

    >>> rotations = Rotations.from_angles([(0, 1, 0.5), (1, 2, -0.25)])
    >>> len(rotations)
    2
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
    def none(cls) -> "Rotations":
        """No rotations."""
        return cls.from_angles([])

    @classmethod
    def from_angles(cls, sequence: Iterable[tuple[int, int, float]]) -> "Rotations":
        """Rotations from explicit `(i, j, angle)` triples, angles in radians."""
        table = np.array([tuple(entry) for entry in sequence], dtype=np.float64).reshape(-1, 3)
        pairs = table[:, :2].astype(np.int64)
        if not np.isfinite(table).all() or (pairs != table[:, :2]).any() or (pairs < 0).any():
            raise ValueError(
                "`rotations` must be (i, j, angle) triples of two column indices and a finite "
                f"angle in radians. Received: rotations={sequence!r}"
            )
        if (pairs[:, 0] == pairs[:, 1]).any():
            t = int(np.argmax(pairs[:, 0] == pairs[:, 1]))
            raise ValueError(
                f"A rotation needs two distinct columns. Received: rotations[{t}]={sequence!r}"
            )
        return cls(pairs[:, 0], pairs[:, 1], np.cos(table[:, 2]), np.sin(table[:, 2]))

    @classmethod
    def draw(
        cls, width: int, count: int, rng: np.random.Generator, angles: AngleLaw = None
    ) -> "Rotations":
        """Draws `count` rotations: pairs of distinct columns uniformly, angles by their law.

        Everything comes from `Generator.random`, whose stream is the generator's raw bits; the
        uniform angle is a point on the circle made by rejection, with arithmetic only. So the
        default law gives the same bits on every machine; a law that goes through `cos` and `sin`
        may differ in the last bit of float64 between C libraries.
        """
        first = (rng.random(count) * width).astype(np.int64)
        second = (rng.random(count) * (width - 1)).astype(np.int64)
        second += second >= first
        return cls(first, second, *cos_sin(angles, count, rng))


def cos_sin(
    angles: AngleLaw, count: int, rng: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines of `count` angles of a law."""
    if angles is None:
        return _uniform_on_circle(count, rng)
    theta = _draw_angles(angles, count, rng)
    return np.cos(theta), np.sin(theta)


def _uniform_on_circle(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Von Neumann's construction: double the angle of a uniform point in the unit disc."""
    points = np.empty((0, 2))
    while len(points) < count:
        # pi / 4 of the square's points fall into the disc; a few more than needed, mostly.
        draws = 2.0 * rng.random((math.ceil(1.3 * (count - len(points))) + 8, 2)) - 1.0
        radius2 = draws[:, 0] ** 2 + draws[:, 1] ** 2
        # The lower bound keeps the quotient below free of underflow.
        points = np.concatenate([points, draws[(radius2 <= 1.0) & (radius2 > 1e-12)]])
    x, y = points[:count, 0], points[:count, 1]
    radius2 = x * x + y * y
    return (x * x - y * y) / radius2, 2.0 * x * y / radius2


def check_angles(angles: AngleLaw) -> AngleLaw:
    """Refuses what is not an angle law."""
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


def _draw_angles(angles: AngleLaw, count: int, rng: np.random.Generator) -> np.ndarray:
    if callable(angles):
        theta = np.asarray(angles(rng, count), dtype=np.float64)
        if theta.shape != (count,) or not np.isfinite(theta).all():
            raise ValueError(
                f"`angles(rng, {count})` must return {count} finite angles in radians. "
                f"Received: an array of shape {theta.shape}"
            )
        return theta
    if isinstance(angles, tuple):
        low, high = angles
        return low + (high - low) * rng.random(count)
    assert angles is not None
    return np.full(count, float(angles))
