"""`RegularBlocks`: a kernel of regular blocks, stored as its live blocks only."""

import dataclasses
import math

import numpy as np

from keras_sparse_ortho.orthogonal._structure import center_of


@dataclasses.dataclass(frozen=True, eq=False)
class RegularBlocks:
    """The live blocks of a kernel, where every block line has equally many, and where they stand.

    Each matrix of a kernel of the canonical shape `(batch, parts, *taps, inputs, outputs)` has `I`
    input blocks of `r` inputs and `J` output blocks of `c` outputs. Output block `j` sees `k` input
    blocks, and each input block is seen by `out` output blocks, `J k = I out`:

        y[j] = sum_l  x[inputs_of[j, l]] @ blocks[j, l]

    A convolution has the same live blocks at all taps. `blocks` are those of the center tap; at the
    other taps the live entries begin with zeros, which are not stored.

    Args:
        blocks: `(batch, parts, J, k, r, c)`.
        inputs_of: int32 `(batch, parts, J, k)`, ascending in each line. Inputs are those of the
            matrix: of a grouped convolution, those of the group.
        slots_of: int32 `(batch, parts, I, out)`: the slots `j * k + l` of each input block.
        canonical_shape: Shape of the dense kernel, see `KernelLayout.canonical_shape`.
    """

    blocks: np.ndarray
    inputs_of: np.ndarray
    slots_of: np.ndarray
    canonical_shape: tuple[int, ...]

    @property
    def density(self) -> float:
        """Live fraction, the same for every line, matrix and tap."""
        return self.inputs_of.shape[-1] / self.slots_of.shape[-2]

    @property
    def live(self) -> int:
        """Live entries of the kernel, at all taps."""
        return math.prod(self.canonical_shape[2:-2]) * self.blocks.size

    def with_taps(self) -> np.ndarray:
        """The live blocks at all taps, `(batch, parts, J, k, *taps, r, c)`, zeros off the center.

        For matrices these are `blocks`.
        """
        batch, parts, *taps, _, _ = self.canonical_shape
        *_, lines, fan_in, rows, cols = self.blocks.shape
        if not taps:
            return self.blocks
        values = np.zeros((batch, parts, lines, fan_in, *taps, rows, cols), self.blocks.dtype)
        values[(slice(None),) * 4 + center_of(self.canonical_shape)] = self.blocks
        return values

    def dense(self) -> np.ndarray:
        """The kernel in its canonical shape, for small ones: it has all entries."""
        _, _, lines, _, rows, cols = self.blocks.shape
        kernel = np.zeros(self.canonical_shape, dtype=self.blocks.dtype)
        center = center_of(self.canonical_shape)
        for matrix in np.ndindex(self.canonical_shape[:2]):
            by_block = kernel[(*matrix, *center)].reshape(-1, rows, lines, cols)
            for j, inputs in enumerate(self.inputs_of[matrix]):
                by_block[inputs, :, j, :] = self.blocks[(*matrix, j)]
        return kernel

    def mask(self) -> np.ndarray:
        """The live entries of the kernel in its canonical shape, bool, for small ones."""
        batch, parts, *taps, _, _ = self.canonical_shape
        _, _, lines, _, rows, cols = self.blocks.shape
        live = np.zeros((batch, parts, lines, self.slots_of.shape[-2]), dtype=bool)
        np.put_along_axis(live, self.inputs_of, True, axis=-1)
        live = live.swapaxes(-1, -2).repeat(rows, axis=-2).repeat(cols, axis=-1)
        live = live.reshape(batch, parts, *(1 for _ in taps), *live.shape[2:])
        return np.broadcast_to(live, self.canonical_shape).copy()
