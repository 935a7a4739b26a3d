"""`NByM`: at most `n` live entries among every `m` consecutive inputs."""

import dataclasses
import math
import operator
from collections.abc import Sequence

import numpy as np
from numpy.random import Generator

from keras_sparse_ortho.orthogonal._counts import (
    apportion,
    largest_mask,
    live_count,
    unmask_at_random,
)
from keras_sparse_ortho.orthogonal._eoi import DrawOptions, write_orthogonal
from keras_sparse_ortho.orthogonal._kernel import Structure, center_of
from keras_sparse_ortho.orthogonal._regular_pattern import shuffled

_LARGEST_M = 2**16  # kernels are padded to whole groups
_ROUNDING = 1e-9  # of a share of a group


@dataclasses.dataclass(frozen=True)
class NByM(Structure):
    """At most `n` live entries among every `m` consecutive inputs, for each output.

    `NByM(2, 4)` is the 2:4 pattern of sparse tensor cores. At density `n / m` every group has
    exactly `n`; a lower density is sparser within the pattern.

    Construction: the inputs of each group of `m` are split at random into `m / n` classes of `n`,
    and so are the outputs; each class of inputs and its outputs get a sparse orthogonal matrix. At
    the other taps of a convolution `n` random inputs of each output have entries of zero. With
    fewer outputs than classes, inputs of the other classes are dead at the center tap. If `m` does
    not divide the inputs, the last group is shorter: 3 inputs are one group of `NByM(2, 4)`, with
    at most 2 live entries.

    Args:
        n: Most live entries of a group. Divides `m`.
        m: Consecutive inputs of a group.

    Examples:
        >>> from keras_sparse_ortho.orthogonal import exact_orthogonal
        >>> kernel, mask = exact_orthogonal((64, 128), 0.5, seed=0, structure=NByM(2, 4))
        >>> {int(live) for live in mask.reshape(16, 4, 128).sum(axis=1).flat}
        {2}
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        self._check_sides("n", "m")
        is_divided = self.m % self.n == 0
        if not is_divided or self.m > _LARGEST_M:
            raise ValueError(
                f"`n` must divide an `m` of at most {_LARGEST_M:,}. Received: {self}"
            )

    def in_groups(
        self,
        array: np.ndarray,
        fill: float = 0,
    ) -> np.ndarray:
        """`(..., inputs, outputs)` as `(..., groups, m, outputs)`; `fill` pads the last group."""
        *outer, inputs, outputs = array.shape
        missing = -inputs % self.m
        padding = np.full((*outer, missing, outputs), fill, array.dtype)
        padded = np.concatenate([array, padding], axis=-2)
        return padded.reshape(*outer, -1, self.m, outputs)

    def largest(
        self,
        scores: np.ndarray,
        count: int,
    ) -> np.ndarray:
        """The mask of the `count` largest entries, at most `n` of each group of `m`.

        If `count` is more, groups differ by one entry at most, so that none gets one back later.
        """
        share = count / scores.size * self.m
        upper = math.ceil(share - _ROUNDING)
        upper = max(upper, self.n)
        lower = math.floor(share + _ROUNDING)
        lower = max(lower, self.n)
        ranked = self.strongest(scores, min(upper, self.m))
        if upper > lower:
            lowest = scores.min()
            is_first = self.strongest(scores, lower) >= lowest
            ranked[is_first] += scores.max() - lowest + 1.0
        return largest_mask(ranked, count)

    def strongest(
        self,
        scores: np.ndarray,
        most: int,
    ) -> np.ndarray:
        """Scores of the `most` largest entries of each group, first of equals; others below all."""
        *outer, inputs, outputs = scores.shape
        groups = self.in_groups(scores, -np.inf)
        rank = self.m - most
        ascending = np.partition(groups, rank, axis=-2)
        threshold = ascending[..., rank : rank + 1, :]
        is_live = groups >= threshold
        if np.count_nonzero(is_live) > most * threshold.size:
            larger = groups > threshold
            equal = groups == threshold
            room = most - larger.sum(axis=-2, keepdims=True)
            is_first = np.cumsum(equal, axis=-2) <= room
            is_live = larger | (equal & is_first)
        below_all = np.nextafter(scores.min(), -np.inf)
        ranked = np.where(is_live, groups, below_all)
        ranked = ranked.reshape(*outer, -1, outputs)
        return ranked[..., :inputs, :]

    def _class_sizes(
        self,
        inputs: int,
        outputs: int,
    ) -> tuple[list[int], list[int]]:
        """Inputs and outputs of each class: in proportion, so that all of the shorter side fit."""
        classes = self.m // self.n
        groups, remainder = divmod(inputs, self.m)
        extra = apportion(remainder, [1.0] * classes)
        rows = [groups * self.n + inputs_more for inputs_more in extra]
        return rows, apportion(outputs, rows)

    def unit(self, canonical_shape: Sequence[int]) -> int:
        return 1

    def least(self, canonical_shape: Sequence[int]) -> int:
        batch, part_count, *_, inputs, outputs = canonical_shape
        shorter_side = min(inputs, outputs)
        return batch * part_count * shorter_side

    def covering(self, canonical_shape: Sequence[int]) -> int:
        """The longer side of the matrix of each class that has outputs."""
        batch, part_count, *_, inputs, outputs = canonical_shape
        rows, cols = self._class_sizes(inputs, outputs)
        longer_sides = _longer_sides(rows, cols)
        return batch * part_count * sum(longer_sides)

    def most(self, canonical_shape: Sequence[int]) -> int:
        """`n` of every `m` entries; at the center tap those of the classes."""
        batch, part_count, *taps, inputs, outputs = canonical_shape
        rows, cols = self._class_sizes(inputs, outputs)
        at_center = sum(map(operator.mul, rows, cols))
        groups, remainder = divmod(inputs, self.m)
        live_inputs = groups * self.n + min(remainder, self.n)
        other_taps = math.prod(taps) - 1
        elsewhere = other_taps * live_inputs * outputs
        return batch * part_count * (elsewhere + at_center)

    def draw(
        self,
        canonical_shape: Sequence[int],
        count: int,
        density: float,
        options: DrawOptions,
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Structure.draw`."""
        batch, part_count, *taps, inputs, outputs = canonical_shape
        center_shape = (batch, part_count, inputs, outputs)
        at_center = live_count(density, math.prod(center_shape))
        at_center = min(at_center, count, self.most(center_shape))
        shares = self._shares(
            canonical_shape,
            at_center,
            count,
            options,
        )
        kernel = np.zeros(canonical_shape)
        allowed = np.zeros(canonical_shape, dtype=bool)
        if taps:
            lots = options.rng.random(canonical_shape)
            keys = self.in_groups(lots, np.inf)
            ranks = keys.argsort(axis=-2).argsort(axis=-2)
            is_drawn = ranks < self.n
            padded = is_drawn.reshape(batch, part_count, *taps, -1, outputs)
            allowed[...] = padded[..., :inputs, :]
        center = center_of(canonical_shape)
        for share, matrix in zip(
            shares, np.ndindex(batch, part_count), strict=True
        ):
            index = (*matrix, *center)
            self._write(
                kernel[index],
                allowed[index],
                share,
                options,
            )
        mask = kernel != 0
        within = mask[allowed]
        unmask_at_random(within, count, options.rng)
        mask[allowed] = within
        return kernel, mask

    def _write(
        self,
        kernel: np.ndarray,
        allowed: np.ndarray,
        count: int,
        options: DrawOptions,
    ) -> None:
        """Fills one zeroed matrix of `count` entries, and the mask that its classes allow."""
        allowed[...] = False
        inputs, outputs = kernel.shape
        classes = self._draw_classes(inputs, outputs, options.rng)
        rows, cols = self._class_sizes(inputs, outputs)
        counts = list(map(min, rows, cols))
        if options.cover:
            longer_sides = _longer_sides(rows, cols)
            counts = _raise_towards(counts, longer_sides, count)
        sizes = list(map(operator.mul, rows, cols))
        counts = _raise_towards(counts, sizes, count)
        for k, (class_inputs, class_outputs) in enumerate(classes):
            if cols[k]:
                matrix = np.zeros((rows[k], cols[k]))
                write_orthogonal(matrix, counts[k], options)
                index = np.ix_(class_inputs, class_outputs)
                kernel[index] = matrix
                allowed[index] = True

    def _draw_classes(
        self,
        inputs: int,
        outputs: int,
        rng: Generator,
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Draws the inputs and the outputs of each class."""
        rows, cols = self._class_sizes(inputs, outputs)
        groups = inputs // self.m
        in_groups = groups * self.m
        # The shuffled place of an input within its group decides its class.
        lots = rng.random((groups, self.m))
        group_starts = np.arange(0, in_groups, self.m)
        places = np.argsort(lots, axis=1)
        places += group_starts[:, None]
        output_order = shuffled(outputs, rng)
        beyond_groups = in_groups + shuffled(inputs - in_groups, rng)
        classes = []
        for k, (input_count, output_count) in enumerate(
            zip(rows, cols, strict=True)
        ):
            start = k * self.n
            class_places = places[:, start : start + self.n]
            of_groups = class_places.reshape(-1)
            other_count = input_count - of_groups.size
            of_others, beyond_groups = np.split(beyond_groups, [other_count])
            class_outputs, output_order = np.split(output_order, [output_count])
            class_inputs = np.concatenate([of_groups, of_others])
            classes.append((class_inputs, class_outputs))
        return classes


def _longer_sides(
    rows: Sequence[int],
    cols: Sequence[int],
) -> list[int]:
    """The longer side of the matrix of each class, 0 for classes without outputs."""
    sides = []
    for inputs, outputs in zip(rows, cols, strict=True):
        side = max(inputs, outputs)
        if not outputs:
            side = 0
        sides.append(side)
    return sides


def _raise_towards(
    counts: list[int],
    most: list[int],
    total: int,
) -> list[int]:
    """Raises `counts` towards `most` in proportion to the difference, up to a sum of `total`."""
    missing = list(map(operator.sub, most, counts))
    to_add = min(total - sum(counts), sum(missing))
    if to_add <= 0:
        return counts
    added = apportion(to_add, missing)
    return list(map(operator.add, counts, added))
