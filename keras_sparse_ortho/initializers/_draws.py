"""Kernels drawn for given weights, along the axes that their layers give them."""

import dataclasses
import math
from typing import Any, ClassVar

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import layout_of
from keras_sparse_ortho._values import placed
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers._sparse_initializer import SparseInitializer, numpy_dtype
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight
from keras_sparse_ortho.orthogonal import RegularBlocks


@dataclasses.dataclass(frozen=True)
class Draw:
    """A mask for a weight, and the initializer that drew it, `None` for other masks."""

    mask: np.ndarray
    kernel: np.ndarray | None = None  # None: the weight keeps its values
    initializer: SparseInitializer | None = None
    fresh: bool = False  # whether the weight has, or will get, exactly the values drawn
    block: tuple[int, int] | None = None  # the size of its regular blocks, if it is made of such

    @property
    def live(self) -> int:
        return int(np.count_nonzero(self.mask))

    @property
    def sets_values(self) -> bool:
        return self.kernel is not None


@dataclasses.dataclass(frozen=True)
class BlockDraw:
    """A draw of regular blocks, stored as such; mask and kernel are made when they are read."""

    blocks: RegularBlocks
    shape: tuple[int, ...]
    layout: KernelLayout
    initializer: SparseInitializer
    fresh: ClassVar[bool] = True
    sets_values: ClassVar[bool] = True

    @property
    def live(self) -> int:
        return self.blocks.live

    @property
    def mask(self) -> np.ndarray:
        return self.layout.from_canonical(self.blocks.mask(), self.shape)

    @property
    def kernel(self) -> np.ndarray:
        return self.layout.from_canonical(self.blocks.dense(), self.shape)


@dataclasses.dataclass(frozen=True)
class PackedDraw:
    """A mask of one bit an entry, with values: all of a model's kernels wait at once.

    Without an initializer the values were not drawn, but come from trained ones.
    """

    bits: np.ndarray  # the mask, eight entries a byte, in the order of flat indices
    values: Any  # the kernel, possibly as a tensor; or the values of the live entries alone
    shape: tuple[int, ...]
    live: int
    initializer: SparseInitializer | None
    sets_values: ClassVar[bool] = True

    @classmethod
    def of(
        cls,
        kernel: np.ndarray,
        mask: np.ndarray,
        initializer: SparseInitializer | None,
        *,
        variable: Any = None,
    ) -> "PackedDraw":
        """Packs a kernel; as a tensor like the `variable` that will store it densely, if given."""
        if variable is None:
            values: Any = kernel[mask]
        elif layout_of(variable) is not None:
            values = kernel  # sharded later
        else:
            # The array's memory is then free for the next draw; freed in pieces as the model grows,
            # TensorFlow could not use it. Reshaped, as TensorFlow keeps the array that a tensor was
            # made of until the next operation.
            values = keras.ops.reshape(placed(kernel, variable), kernel.shape)
        live = int(np.count_nonzero(mask))
        return cls(np.packbits(mask), values, kernel.shape, live, initializer)

    @property
    def fresh(self) -> bool:
        return self.initializer is not None

    @property
    def mask(self) -> np.ndarray:
        flat = np.unpackbits(self.bits, count=math.prod(self.shape))
        return flat.view(bool).reshape(self.shape)

    @property
    def kernel(self) -> Any:
        if tuple(self.values.shape) == self.shape:
            return self.values
        dense = np.zeros(self.shape, self.values.dtype)
        dense[self.mask] = self.values
        return dense


AnyDraw = Draw | BlockDraw | PackedDraw


def draw(weight: PrunableWeight, initializer: SparseInitializer) -> AnyDraw:
    """Draws kernel and mask anew, along the true axes of the weight."""
    axes = axes_for(weight, initializer)
    blocks = initializer.sample_blocks(weight.shape, layout=axes)
    if blocks is not None:
        return BlockDraw(blocks, weight.shape, layout_for(weight, initializer), initializer)
    kernel, mask = initializer.sample(weight.shape, layout=axes)
    return Draw(mask, kernel, initializer, fresh=True)


def adopt(weight: PrunableWeight, initializer: SparseInitializer) -> AnyDraw:
    """The mask that a weight's own initializer drew; refuses one that would drop nonzero entries.

    In a layer it saw only a shape. If it drew along other axes than those of the layer, and the
    weight is unchanged, the draw has a new kernel along the true axes.
    """
    if weight.drawn_mask is not None:
        return Draw(weight.drawn_mask(), None, initializer, fresh=True)
    value = weight.raw_value()
    drawn = draw(weight, initializer)
    assert drawn.kernel is not None
    if axes_for(weight, initializer) not in (None, KernelLayout.convolution()):
        without_axes, _ = initializer.sample(weight.shape, weight.variable.dtype)
        if np.array_equal(without_axes.astype(value.dtype), value):
            return drawn
    lost = int(np.count_nonzero(value[~drawn.mask]))
    if not lost:
        stored = drawn.kernel.astype(numpy_dtype(weight.variable.dtype)).astype(value.dtype)
        return Draw(drawn.mask, None, initializer, fresh=np.array_equal(stored, value))
    raise NotPrunableError(
        f"The weight '{weight.path}' has changed since its initializer drew it, and the "
        "initializer's mask would drop nonzero entries. An initializer alone does not keep its "
        "mask: wrap the layer before training, or prune the trained model with "
        "keras_sparse_ortho.prune(model, density). "
        f"Received: {lost} nonzero entries outside the mask"
    )


def axes_for(weight: PrunableWeight, initializer: SparseInitializer) -> KernelLayout | None:
    """The layout to draw with: the layer's, unless the user gave the initializer one."""
    return weight.layout if initializer.layout is None else None


def layout_for(weight: PrunableWeight, initializer: SparseInitializer) -> KernelLayout:
    """The layout by which an initializer draws a weight; `(*spatial, in, out)` by default."""
    own = axes_for(weight, initializer) or initializer.resolve_layout(weight.shape)
    return own or KernelLayout.convolution()


def is_as_drawn(weight: PrunableWeight) -> bool:
    """Whether a plain weight still has the values that its own sparse initializer drew."""
    kernel, _ = weight.initializer.sample(weight.shape, weight.variable.dtype)
    value = weight.raw_value()
    return np.array_equal(kernel.astype(value.dtype), value)
