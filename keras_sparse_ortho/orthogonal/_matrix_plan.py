"""How each matrix of a kernel is drawn: what `exact_orthogonal` was asked for, in one value."""

import dataclasses

import numpy as np

from keras_sparse_ortho.orthogonal._cascade import write_cascade
from keras_sparse_ortho.orthogonal._eoi import covering_rotations, write_orthogonal
from keras_sparse_ortho.orthogonal._equal_norms import (
    draw_within_classes,
    equal_norms_count,
    equal_norms_start,
    write_equal_norms,
)
from keras_sparse_ortho.orthogonal._polyphase import Polyphase, write_shifted
from keras_sparse_ortho.orthogonal._rotations import AngleLaw, Rotations


@dataclasses.dataclass(frozen=True)
class MatrixPlan:
    """Draws matrices of one kind, one after the other from the same generator.

    Args:
        gain: Scale.
        rng: The generator.
        angles: Law of the angles.
        sequence: Explicit rotations, or `None` for random ones.
        cover: Whether empty rows and columns get an entry first.
        norms: `"equal"`, or `None`.
    """

    gain: float
    rng: np.random.Generator
    angles: AngleLaw
    sequence: Rotations | None
    cover: bool
    norms: str | None

    def least(self, inputs: int, outputs: int) -> int:
        """Entries that a matrix should have at least, where the count of its kernel allows."""
        if self.norms == "equal" and inputs < outputs:
            return equal_norms_count(inputs, outputs)
        return max(inputs, outputs) if self.cover else min(inputs, outputs)

    def write(self, out: np.ndarray, count: int) -> None:
        """Fills a zeroed `(inputs, outputs)` matrix with `count` entries at most."""
        if self.norms == "equal" and out.shape[0] < out.shape[1]:
            write_equal_norms(out, count, self.gain, self.rng, self.angles)
        else:
            write_orthogonal(
                out, count, self.gain, self.rng, self.angles, self.sequence, cover=self.cover
            )

    def write_signs(self, out: np.ndarray) -> None:
        """Fills matrices of one entry each, as `write` does one after the other."""
        out[...] = np.where(self.rng.random(out.shape) < 0.5, self.gain, -self.gain)

    def write_shifted(
        self, part: np.ndarray, window: Polyphase, count: int, transposed: bool
    ) -> None:
        """Fills a zeroed kernel `(*taps, channels, columns)` by a matrix spread over its taps."""
        shape = (window.rows, part.shape[-1])
        matrix = np.zeros(shape[::-1] if transposed else shape, dtype=part.dtype)
        self.write(matrix, count)
        write_shifted(part, matrix.T if transposed else matrix, window, self.rng)

    def write_cascade(
        self, part: np.ndarray, window: Polyphase, count: int, transposed: bool
    ) -> None:
        """Fills a zeroed kernel `(*taps, channels, columns)` by a paraunitary cascade."""
        rows, columns = window.rows, part.shape[-1]
        short, width = sorted((rows, columns))
        widens = rows > columns if transposed else rows < columns
        start, classes = Rotations.none(), None
        if self.norms == "equal" and widens:
            start, classes = equal_norms_start(short, width, self.rng)
        elif self.cover:
            start = covering_rotations(short, width, count, self.rng, self.angles)

        def draw(size: int) -> Rotations:
            if width == 1:
                return Rotations.none()
            if classes is not None:
                return draw_within_classes(classes, size, self.rng, self.angles)
            return Rotations.draw(width, size, self.rng, self.angles)

        sign = -1.0 if width == 1 and self.rng.random() < 0.5 else 1.0
        write_cascade(part, window, count, sign * self.gain, start, draw, self.rng)
