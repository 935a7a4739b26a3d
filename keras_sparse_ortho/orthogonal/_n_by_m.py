"""`NByM`: at most n live of every m consecutive inputs."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho.orthogonal._counts import apportion, live_count, unmask_at_random
from keras_sparse_ortho.orthogonal._eoi import write_orthogonal
from keras_sparse_ortho.orthogonal._rotations import DrawOptions
from keras_sparse_ortho.orthogonal._structure import (
    Structure,
    center_of,
    positive_integers,
)

_LARGEST = 2**16  # kernels are padded to whole groups


@dataclasses.dataclass(frozen=True)
class NByM(Structure):
    """At most `n` live entries among every `m` consecutive inputs, for each output.

    `NByM(2, 4)` is the 2:4 pattern of sparse tensor cores. At density `n / m` every group has
    exactly `n`; a lower density is sparser within the pattern.

    Construction: the inputs of each group of `m` are split at random into `m / n` classes of `n`,
    and so are the outputs; each class of inputs and its outputs get a sparse orthogonal
    matrix. At the other taps of a convolution the `n` inputs are drawn at random for each
    output, and their entries are zeros. If there are fewer outputs than classes, the inputs of the
    other classes are dead at the center tap.

    If `m` does not divide the inputs, the last group is shorter, as if the kernel were padded with
    zeros: 3 inputs are one group of `NByM(2, 4)`, with at most 2 live entries.

    Args:
        n: Most live entries of a group. Divides `m`.
        m: Consecutive inputs of a group.

    Example:

    >>> from keras_sparse_ortho.orthogonal import exact_orthogonal
    >>> kernel, mask = exact_orthogonal((64, 128), 0.5, seed=0, structure=NByM(2, 4))
    >>> {int(live) for live in mask.reshape(16, 4, 128).sum(axis=1).flat}
    {2}
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        positive_integers(self, "n", "m")
        if self.m % self.n or self.m > _LARGEST:
            raise ValueError(
                f"`n` must divide `m`, and `m` be at most {_LARGEST:,}. Received: {self}"
            )

    def in_groups(self, array: np.ndarray, fill: Any = 0) -> np.ndarray:
        """`(..., inputs, outputs)` as `(..., groups, m, outputs)`; `fill` pads the last group."""
        *outer, inputs, outputs = array.shape
        padding = np.full((*outer, -inputs % self.m, outputs), fill, array.dtype)
        return np.concatenate([array, padding], axis=-2).reshape(*outer, -1, self.m, outputs)

    def _class_sizes(self, inputs: int, outputs: int) -> tuple[list[int], list[int]]:
        """Inputs and outputs of each class: in proportion, so that all of the shorter side fit."""
        groups, rest = divmod(inputs, self.m)
        parts = apportion(rest, [1.0] * (self.m // self.n))
        rows = [groups * self.n + part for part in parts]
        return rows, apportion(outputs, rows)

    def unit(self, canonical_shape: Sequence[int]) -> int:
        return 1

    def least(self, canonical_shape: Sequence[int]) -> int:
        batch, parts, *_, inputs, outputs = canonical_shape
        return batch * parts * min(inputs, outputs)

    def covering(self, canonical_shape: Sequence[int]) -> int:
        """The longer side of the matrix of each class."""
        batch, parts, *_, inputs, outputs = canonical_shape
        sizes = zip(*self._class_sizes(inputs, outputs), strict=True)
        return batch * parts * sum(max(rows, share) for rows, share in sizes if share)

    def most(self, canonical_shape: Sequence[int]) -> int:
        """`n` of every `m` entries; at the center tap those of the classes."""
        batch, parts, *taps, inputs, outputs = canonical_shape
        groups, rest = divmod(inputs, self.m)
        elsewhere = outputs * (groups * self.n + min(rest, self.n))
        center = sum(map(math.prod, zip(*self._class_sizes(inputs, outputs), strict=True)))
        return batch * parts * ((math.prod(taps) - 1) * elsewhere + center)

    def draw(
        self, canonical_shape: Sequence[int], count: int, density: float, options: DrawOptions
    ) -> tuple[np.ndarray, np.ndarray]:
        batch, parts, *taps, inputs, outputs = canonical_shape
        matrices = batch * parts
        at_center = live_count(density, matrices * inputs * outputs)
        at_center = min(at_center, count, self.most((batch, parts, inputs, outputs)))
        least = self.least(canonical_shape)
        if options.cover:
            least = max(least, min(self.covering(canonical_shape), count))
        shares = apportion(max(at_center, least), [1.0] * matrices)

        kernel = np.zeros(canonical_shape)
        allowed = np.zeros(canonical_shape, dtype=bool)
        if taps:
            keys: np.ndarray = self.in_groups(options.rng.random(canonical_shape), np.inf)
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
        self, kernel: np.ndarray, allowed: np.ndarray, count: int, options: DrawOptions
    ) -> None:
        """Fills one zeroed matrix, and the mask of the entries that its classes allow."""
        inputs, outputs = kernel.shape
        rows, sizes = self._class_sizes(inputs, outputs)
        allowed[...] = False
        # The shuffled place of an input within its group decides its class.
        groups = inputs // self.m
        places = np.argsort(options.rng.random((groups, self.m)), axis=1)
        places += np.arange(0, groups * self.m, self.m)[:, None]
        order = np.argsort(options.rng.random(outputs))
        rest = groups * self.m + np.argsort(options.rng.random(inputs % self.m))
        of_rest = np.split(rest, np.cumsum([size - groups * self.n for size in rows])[:-1])
        shares = np.split(order, np.cumsum(sizes)[:-1])
        counts = [min(pair) for pair in zip(rows, sizes, strict=True)]
        if options.cover:
            full = [max(n, share) if share else 0 for n, share in zip(rows, sizes, strict=True)]
            counts = _raise_towards(counts, full, count)
        most = [n * share for n, share in zip(rows, sizes, strict=True)]
        counts = _raise_towards(counts, most, count)
        for k, share in enumerate(shares):
            if not len(share):
                continue
            part = np.zeros((rows[k], len(share)))
            write_orthogonal(part, counts[k], options)
            own = places[:, k * self.n : (k + 1) * self.n].reshape(-1)
            index = np.ix_(np.concatenate([own, of_rest[k]]), share)
            kernel[index] = part
            allowed[index] = True


def _raise_towards(counts: list[int], most: list[int], total: int) -> list[int]:
    """Raises `counts` in proportion to what they lack of `most`, up to a sum of `total`."""
    missing = [full - count for full, count in zip(most, counts, strict=True)]
    more = min(total - sum(counts), sum(missing))
    if more <= 0:
        return counts
    return [count + add for count, add in zip(counts, apportion(more, missing), strict=True)]
