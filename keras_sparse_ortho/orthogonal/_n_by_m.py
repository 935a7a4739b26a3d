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
        if self.m % self.n or self.m > _LARGEST_M:
            raise ValueError(f"`n` must divide an `m` of at most {_LARGEST_M:,}. Received: {self}")

    def in_groups(self, array: np.ndarray, fill: float = 0) -> np.ndarray:
        """`(..., inputs, outputs)` as `(..., groups, m, outputs)`; `fill` pads the last group."""
        *outer, inputs, outputs = array.shape
        padding = np.full((*outer, -inputs % self.m, outputs), fill, array.dtype)
        padded = np.concatenate([array, padding], axis=-2)
        return padded.reshape(*outer, -1, self.m, outputs)

    def largest(self, scores: np.ndarray, count: int) -> np.ndarray:
        """The mask of the `count` largest entries, at most `n` of each group of `m`.

        If `count` is more, groups differ by one entry at most, so that none gets one back later.
        """
        share = count / scores.size * self.m
        most = max(self.n, math.ceil(share - 1e-9))
        fewest = max(self.n, math.floor(share + 1e-9))
        ranked = self.strongest(scores, min(most, self.m))
        if most > fewest:
            is_first = self.strongest(scores, fewest) > -1.0
            above_all = scores.max() + 1.0
            ranked = np.where(is_first, ranked + above_all, ranked)
        return largest_mask(ranked, count)

    def strongest(self, scores: np.ndarray, most: int) -> np.ndarray:
        """Scores of the `most` largest entries of each group, the first of equals; -2 elsewhere."""
        *outer, inputs, outputs = scores.shape
        groups = self.in_groups(scores, -3.0)
        rank = self.m - most
        least = np.partition(groups, rank, axis=-2)[..., rank : rank + 1, :]
        is_live = groups >= least
        if np.count_nonzero(is_live) > most * least.size:
            larger = groups > least
            equal = groups == least
            room = most - np.sum(larger, axis=-2, keepdims=True)
            is_live = larger | (equal & (np.cumsum(equal, axis=-2) <= room))
        ranked = np.where(is_live, groups, -2.0)
        ranked = ranked.reshape(*outer, -1, outputs)
        return ranked[..., :inputs, :]

    def _class_sizes(self, inputs: int, outputs: int) -> tuple[list[int], list[int]]:
        """Inputs and outputs of each class: in proportion, so that all of the shorter side fit."""
        groups, rest = divmod(inputs, self.m)
        shares = apportion(rest, [1.0] * (self.m // self.n))
        rows = [groups * self.n + share for share in shares]
        return rows, apportion(outputs, rows)

    def unit(self, canonical_shape: Sequence[int]) -> int:
        return 1

    def least(self, canonical_shape: Sequence[int]) -> int:
        batch, parts, *_, inputs, outputs = canonical_shape
        return batch * parts * min(inputs, outputs)

    def covering(self, canonical_shape: Sequence[int]) -> int:
        """The longer side of the matrix of each class that has outputs."""
        batch, parts, *_, inputs, outputs = canonical_shape
        rows, cols = self._class_sizes(inputs, outputs)
        return batch * parts * sum(_longer_sides(rows, cols))

    def most(self, canonical_shape: Sequence[int]) -> int:
        """`n` of every `m` entries; at the center tap those of the classes."""
        batch, parts, *taps, inputs, outputs = canonical_shape
        groups, rest = divmod(inputs, self.m)
        rows, cols = self._class_sizes(inputs, outputs)
        at_center = sum(map(operator.mul, rows, cols))
        elsewhere = outputs * (groups * self.n + min(rest, self.n))
        return batch * parts * ((math.prod(taps) - 1) * elsewhere + at_center)

    def draw(
        self,
        canonical_shape: Sequence[int],
        count: int,
        density: float,
        options: DrawOptions,
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Structure.draw`."""
        batch, parts, *taps, inputs, outputs = canonical_shape
        center_shape = (batch, parts, inputs, outputs)
        at_center = live_count(density, math.prod(center_shape))
        at_center = min(at_center, count, self.most(center_shape))
        shares = self._shares(canonical_shape, at_center, count, options)
        kernel = np.zeros(canonical_shape)
        allowed = np.zeros(canonical_shape, dtype=bool)
        if taps:
            keys = self.in_groups(options.rng.random(canonical_shape), np.inf)
            ranks = keys.argsort(axis=-2).argsort(axis=-2)
            padded = (ranks < self.n).reshape(batch, parts, *taps, -1, outputs)
            allowed[...] = padded[..., :inputs, :]
        center = center_of(canonical_shape)
        for share, matrix in zip(shares, np.ndindex(batch, parts), strict=True):
            index = (*matrix, *center)
            self._write(kernel[index], allowed[index], share, options)
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
        rows = [len(class_inputs) for class_inputs, _ in classes]
        cols = [len(class_outputs) for _, class_outputs in classes]
        counts = list(map(min, rows, cols))
        if options.cover:
            counts = _raise_towards(counts, _longer_sides(rows, cols), count)
        sizes = list(map(operator.mul, rows, cols))
        counts = _raise_towards(counts, sizes, count)
        for (class_inputs, class_outputs), entries in zip(classes, counts, strict=True):
            if len(class_outputs):
                matrix = np.zeros((len(class_inputs), len(class_outputs)))
                write_orthogonal(matrix, entries, options)
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
        groups, rest = divmod(inputs, self.m)
        grouped = groups * self.m
        # The shuffled place of an input within its group decides its class.
        places = np.argsort(rng.random((groups, self.m)), axis=1)
        places += np.arange(0, grouped, self.m)[:, None]
        output_order = shuffled(outputs, rng)
        rest_order = grouped + shuffled(rest, rng)
        classes = []
        rest_start = output_start = 0
        for k, (class_inputs, class_outputs) in enumerate(zip(rows, cols, strict=True)):
            rest_stop = rest_start + class_inputs - groups * self.n
            output_stop = output_start + class_outputs
            of_groups = places[:, k * self.n : (k + 1) * self.n].reshape(-1)
            of_rest = rest_order[rest_start:rest_stop]
            inputs_of_class = np.concatenate([of_groups, of_rest])
            classes.append((inputs_of_class, output_order[output_start:output_stop]))
            rest_start = rest_stop
            output_start = output_stop
        return classes


def _longer_sides(rows: Sequence[int], cols: Sequence[int]) -> list[int]:
    """The longer side of the matrix of each class, 0 for classes without outputs."""
    return [max(n, m) if m else 0 for n, m in zip(rows, cols, strict=True)]


def _raise_towards(
    counts: list[int],
    most: list[int],
    total: int,
) -> list[int]:
    """Raises `counts` towards `most` in proportion to the difference, up to a sum of `total`."""
    missing = [full - count for full, count in zip(most, counts, strict=True)]
    more = min(total - sum(counts), sum(missing))
    if more <= 0:
        return counts
    added = apportion(more, missing)
    return [count + add for count, add in zip(counts, added, strict=True)]
