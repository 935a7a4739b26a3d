"""What was drawn for a weight, in as little memory as it needs until the weight gets it."""

import dataclasses
import math
from typing import ClassVar

import numpy as np

from keras_sparse_ortho.initializers._sparse_initializer import SparseInitializer


@dataclasses.dataclass(frozen=True)
class PackedDraw:
    """As a `Draw` with values, whose mask takes one bit an entry; it is unpacked when read.

    A whole model is drawn before anything of it is changed, so that all draws are there at once.

    Args:
        bits: The mask, eight entries a byte, in the order of flat indices.
        values: The kernel; or the values of live entries, in the same order.
        shape: Of the weight.
        live: Number of live entries.
        initializer: What drew them.
    """

    bits: np.ndarray
    values: np.ndarray
    shape: tuple[int, ...]
    live: int
    initializer: SparseInitializer
    fresh: ClassVar[bool] = True
    sets_values: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        kernel: np.ndarray,
        mask: np.ndarray,
        initializer: SparseInitializer,
        *,
        dense: bool = False,
    ) -> "PackedDraw":
        """That of a kernel which is zero where its mask is not live.

        Args:
            kernel: The values.
            mask: Bool array.
            initializer: What drew them.
            dense: Whether the kernel is kept as it is, for a weight that will be stored so.
        """
        values = kernel if dense else kernel[mask]
        live = int(np.count_nonzero(mask))
        return cls(np.packbits(mask), values, kernel.shape, live, initializer)

    @property
    def mask(self) -> np.ndarray:
        """Bool array of the weight's shape."""
        flat = np.unpackbits(self.bits, count=math.prod(self.shape))
        return flat.view(bool).reshape(self.shape)

    @property
    def kernel(self) -> np.ndarray:
        """Values that the weight is to get."""
        if self.values.shape == self.shape:
            return self.values
        dense = np.zeros(self.shape, self.values.dtype)
        dense[self.mask] = self.values
        return dense
