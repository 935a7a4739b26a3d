"""Sparse paraunitary cascades: rotations of columns with one-tap shifts of columns between them."""

import math
from collections.abc import Callable

import numpy as np

from keras_sparse_ortho.orthogonal._polyphase import Polyphase
from keras_sparse_ortho.orthogonal._product import rotate_rows
from keras_sparse_ortho.orthogonal._rotations import Rotations
from keras_sparse_ortho.orthogonal._supports import Supports

# In a round so many rotations and then shifts as a part of the longer side.
_ROTATIONS, _SHIFTS = 0.5, 0.25
# Rounds in a row that add nothing before the search for fitting rotations ends.
_PATIENCE = 8

Shift = tuple[int, int, int]
"""A line, an axis, and a step of 1 or -1."""


def write_cascade(
    part: np.ndarray,
    window: Polyphase,
    count: int,
    gain: float,
    start: Rotations,
    draw: Callable[[int], Rotations],
    rng: np.random.Generator,
) -> None:
    """Writes `gain` times a sparse paraunitary matrix into a zeroed kernel.

    With `n` the shorter and `m` the longer side of `(rows, columns)`, the polynomial matrix
    `A(z)`, `n x m`, has orthonormal rows, `A(z) A(1/z)^T = I`, at the start (`[I | 0]` with rows
    at random places); rotating two columns and shifting one by a tap both keep this. They take
    turns while the support fits `count` entries. Last, every column is shifted once more, by any
    number of taps that keeps it in the window.

    Args:
        part: Kernel of shape `(*taps, channels, columns)`.
        window: Its window; the rows of the matrix.
        count: Most entries of the support, `n` at least.
        gain: Scale.
        start: Rotations that come first, e.g. covering ones. They must fit.
        draw: `draw(k)` gives `k` random rotations of the `m` columns.
        rng: For the shifts.
    """
    cascade = _Cascade(window, part.shape[-1], rng)
    segments = cascade.grow(count, start, draw)
    lines = cascade.product(segments)
    line, *place, short = np.nonzero(lines)
    row, column = (line, short) if cascade.tall else (short, line)
    places = np.array(place, dtype=np.int64).reshape(len(window.taps), len(line))
    values = gain * lines[(line, *place, short)]
    window.shift_lines(places, row, line, rng)
    window.write(part, places, row, column, values)


class _Cascade:
    """The columns of `A(z)` as lines of a box of places, all that rows have in common and more.

    If the matrix is tall, its lines are rows with places of their own phase: the box is what all
    phases have, so that any two of them can be rotated. Else its lines are columns, in which the
    entries of a row keep to the places of its phase.
    """

    def __init__(self, window: Polyphase, columns: int, rng: np.random.Generator) -> None:
        self._rng = rng
        self.tall = window.rows > columns
        self.short, self.width = sorted((window.rows, columns))
        places = window.places
        if self.tall:
            places = np.repeat(places.min(axis=1, keepdims=True), self.short, axis=1)
        self.box = tuple(int(size) for size in places.max(axis=1))
        self._begin = (rng.random(places.shape) * (places // 2 + 1)).astype(np.int64)
        # The bit of a place and a row is `flat place * short + row`, as in the lines' memory.
        self._steps = [
            self.short * math.prod(self.box[axis + 1 :]) for axis in range(len(self.box))
        ]
        grid = np.indices(self.box).reshape(len(self.box), *self.box, 1)
        inside = (grid < places.reshape(len(self.box), *[1] * len(self.box), -1)).all(axis=0)
        self._edges = [
            {step: _bits(inside & ~_neighbour(inside, axis, step)) for step in (1, -1)}
            for axis in range(len(self.box))
        ]

    def grow(
        self, limit: int, start: Rotations, draw: Callable[[int], Rotations]
    ) -> list[tuple[Rotations, list[Shift]]]:
        """Rounds of rotations and shifts while the support fits."""
        first = np.ravel_multi_index(tuple(self._begin), self.box) * self.short
        bits = [1 << int(k + place) for k, place in enumerate(first)]
        supports = Supports.of(bits + [0] * (self.width - self.short))
        supports.apply(start)
        segments = [(start, self._shifts(supports))]
        idle = 0
        while idle < _PATIENCE:
            live = supports.live
            drawn = draw(max(1, round(_ROTATIONS * self.width)))
            applied, done = supports.apply_while_fits(drawn, limit)
            if done:
                segments.append((drawn[:applied], []))
                break
            segments.append((drawn, self._shifts(supports)))
            idle = idle + 1 if supports.live == live else 0
        return segments

    def product(self, segments: list[tuple[Rotations, list[Shift]]]) -> np.ndarray:
        """The values of the lines, `(width, *box, short)`."""
        lines = np.zeros((self.width, *self.box, self.short))
        rows = np.arange(self.short)
        lines[(rows, *self._begin, rows)] = 1.0
        for rotations, shifts in segments:
            rotate_rows(lines.reshape(self.width, -1), rotations)
            for line, axis, step in shifts:
                lines[line] = np.roll(lines[line], step, axis)
        return lines

    def _shifts(self, supports: Supports) -> list[Shift]:
        """Random shifts of single lines, applied to their supports; those that leave are not."""
        tries = max(1, round(_SHIFTS * self.width))
        lines = (self._rng.random(tries) * self.width).astype(np.int64).tolist()
        axes = (self._rng.random(tries) * len(self.box)).astype(np.int64).tolist()
        steps = np.where(self._rng.random(tries) < 0.5, 1, -1).tolist()
        return [
            (line, axis, step)
            for line, axis, step in zip(lines, axes, steps, strict=True)
            if supports.shift(line, step * self._steps[axis], self._edges[axis][step])
        ]


def _neighbour(inside: np.ndarray, axis: int, step: int) -> np.ndarray:
    """Whether the place one step further is inside."""
    moved = np.roll(inside, -step, axis)
    index: list[slice | int] = [slice(None)] * inside.ndim
    index[axis] = -1 if step > 0 else 0
    moved[tuple(index)] = False
    return moved


def _bits(live: np.ndarray) -> int:
    return int.from_bytes(np.packbits(live.reshape(-1), bitorder="little").tobytes(), "little")
