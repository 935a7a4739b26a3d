"""`NByM`: at most n live of every m consecutive inputs."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.orthogonal._counts import apportion, live_count, unmask_at_random
from keras_sparse_ortho.orthogonal._eoi import write_orthogonal
from keras_sparse_ortho.orthogonal._rotations import DrawOptions
from keras_sparse_ortho.orthogonal._structure import (
    Structure,
    center_of,
    describe,
    positive_integers,
)


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

    Args:
        n: Most live entries of a group. Divides `m`.
        m: Consecutive inputs of a group.

    Raises:
        LayoutError: When a kernel is drawn whose inputs `m` does not divide.

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
        if self.m % self.n:
            raise ValueError(f"`n` must divide `m`. Received: {self}")

    def check(self, canonical_shape: Sequence[int]) -> None:
        """Refuses inputs that cannot be divided into groups."""
        inputs = canonical_shape[-2]
        if inputs % self.m:
            raise LayoutError(
                f"{self} needs inputs divisible by {self.m}; change the layer's size or the "
                "structure, or `exclude` the layer. "
                f"Received: a kernel of {describe(canonical_shape)}"
            )

    def unit(self, canonical_shape: Sequence[int]) -> int:
        """Single entries."""
        return 1

    def least(self, canonical_shape: Sequence[int]) -> int:
        """As without a structure, the shorter side of each matrix."""
        batch, parts, *_, inputs, outputs = canonical_shape
        return batch * parts * min(inputs, outputs)

    def covering(self, canonical_shape: Sequence[int]) -> int:
        """The longer side of the matrix of each class."""
        batch, parts, *_, inputs, outputs = canonical_shape
        classes = self.m // self.n
        shares = [len(share) for share in np.array_split(np.arange(outputs), classes)]
        return batch * parts * sum(max(inputs // classes, share) for share in shares if share)

    def most(self, canonical_shape: Sequence[int]) -> int:
        """`n` of every `m` entries."""
        return math.prod(canonical_shape) * self.n // self.m

    def draw(
        self, canonical_shape: Sequence[int], count: int, density: float, options: DrawOptions
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Structure.draw`."""
        batch, parts, *taps, inputs, outputs = canonical_shape
        matrices = batch * parts
        at_center = live_count(density, matrices * inputs * outputs)
        at_center = min(at_center, count, matrices * inputs * outputs * self.n // self.m)
        least = self.least(canonical_shape)
        if options.cover:
            least = max(least, min(self.covering(canonical_shape), count))
        shares = apportion(max(at_center, least), [1.0] * matrices)

        kernel = np.zeros(canonical_shape)
        allowed = np.zeros(canonical_shape, dtype=bool)
        if taps:
            keys: np.ndarray = options.rng.random(
                (batch, parts, *taps, inputs // self.m, self.m, outputs)
            )
            ranks = keys.argsort(axis=-2).argsort(axis=-2)
            allowed[...] = (ranks < self.n).reshape(canonical_shape)
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
        classes = self.m // self.n
        allowed[...] = False
        # The shuffled place of an input within its group decides its class.
        places = np.argsort(options.rng.random((inputs // self.m, self.m)), axis=1)
        places += np.arange(0, inputs, self.m)[:, None]
        order = np.argsort(options.rng.random(outputs))
        shares = np.array_split(order, classes)
        rows = inputs // classes
        counts = [min(rows, len(share)) for share in shares]
        if options.cover:
            full = [max(rows, len(share)) if len(share) else 0 for share in shares]
            counts = _raise_towards(counts, full, count)
        counts = _raise_towards(counts, [rows * len(share) for share in shares], count)
        for k, share in enumerate(shares):
            if not len(share):
                continue
            part = np.zeros((rows, len(share)))
            write_orthogonal(part, counts[k], options)
            index = np.ix_(places[:, k * self.n : (k + 1) * self.n].reshape(-1), share)
            kernel[index] = part
            allowed[index] = True


def _raise_towards(counts: list[int], most: list[int], total: int) -> list[int]:
    """Raises `counts` in proportion to what they lack of `most`, up to a sum of `total`."""
    missing = [full - count for full, count in zip(most, counts, strict=True)]
    more = min(total - sum(counts), sum(missing))
    if more <= 0:
        return counts
    return [count + add for count, add in zip(counts, apportion(more, missing), strict=True)]
