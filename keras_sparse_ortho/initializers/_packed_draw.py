"""What was drawn for a weight, in as little memory as it needs until the weight gets it."""

import dataclasses
import math
from typing import Any, ClassVar

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import layout_of
from keras_sparse_ortho._values import placed
from keras_sparse_ortho.initializers._sparse_initializer import SparseInitializer


@dataclasses.dataclass(frozen=True)
class PackedDraw:
    """As a `Draw` with values, whose mask takes one bit an entry; it is unpacked when read.

    A whole model is drawn before anything of it is changed, so that all draws are there at once.

    Args:
        bits: The mask, eight entries a byte, in the order of flat indices.
        values: The kernel, perhaps as a tensor of the backend; or the values of live entries, in
            the same order.
        shape: Of the weight.
        live: Number of live entries.
        initializer: What drew them.
    """

    bits: np.ndarray
    values: Any
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
        variable: Any = None,
    ) -> "PackedDraw":
        """That of a kernel which is zero where its mask is not live.

        Args:
            kernel: The values.
            mask: Bool array.
            initializer: What drew them.
            variable: One like that in which the kernel will be stored, which is kept as such a
                tensor then, but on several devices. `None` where live entries alone will be.
        """
        values = kernel[mask] if variable is None else _for_variable(kernel, variable)
        live = int(np.count_nonzero(mask))
        return cls(np.packbits(mask), values, kernel.shape, live, initializer)

    @property
    def mask(self) -> np.ndarray:
        """Bool array of the weight's shape."""
        flat = np.unpackbits(self.bits, count=math.prod(self.shape))
        return flat.view(bool).reshape(self.shape)

    @property
    def kernel(self) -> Any:
        """Values that the weight is to get."""
        if tuple(self.values.shape) == self.shape:
            return self.values
        dense = np.zeros(self.shape, self.values.dtype)
        dense[self.mask] = self.values
        return dense


def _for_variable(kernel: np.ndarray, variable: Any) -> Any:
    """A kernel as a tensor like a variable, or as it is where devices each take a part of it.

    So the array's memory serves the next draw. That of all draws would be free only as the model
    grows, in pieces that TensorFlow cannot use.
    """
    if layout_of(variable) is not None:
        return kernel
    # An operation: TensorFlow keeps the array that it has made a tensor of until the next one.
    return keras.ops.reshape(placed(kernel, variable), kernel.shape)
