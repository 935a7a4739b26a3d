"""Kernels drawn for given weights, along the axes that their layers give them."""

import dataclasses
from typing import ClassVar

import numpy as np

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers._packed_draw import PackedDraw
from keras_sparse_ortho.initializers._sparse_initializer import SparseInitializer, numpy_dtype
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight
from keras_sparse_ortho.orthogonal import RegularBlocks


@dataclasses.dataclass(frozen=True)
class Draw:
    """A mask for a weight, and where it comes from.

    Args:
        mask: Bool array of the weight's shape.
        kernel: Values that the weight is to get; `None` to keep those it has.
        initializer: What drew the mask, and the kernel with it; `None` for masks of other origin.
        fresh: Whether the weight has, or is to get, exactly the values that were drawn.
    """

    mask: np.ndarray
    kernel: np.ndarray | None = None
    initializer: SparseInitializer | None = None
    fresh: bool = False

    @property
    def live(self) -> int:
        """Number of live entries."""
        return int(np.count_nonzero(self.mask))

    @property
    def sets_values(self) -> bool:
        """Whether there are values that the weight is to get."""
        return self.kernel is not None


@dataclasses.dataclass(frozen=True)
class BlockDraw:
    """As a `Draw`, of regular blocks, which are all that it holds: dense forms are made when read.

    Args:
        blocks: What was drawn.
        shape: Of the weight.
        layout: Meaning of its axes.
        initializer: What drew the blocks.
    """

    blocks: RegularBlocks
    shape: tuple[int, ...]
    layout: KernelLayout
    initializer: SparseInitializer
    fresh: ClassVar[bool] = True
    sets_values: ClassVar[bool] = True

    @property
    def live(self) -> int:
        """Number of live entries."""
        return self.blocks.live

    @property
    def mask(self) -> np.ndarray:
        """Bool array of the weight's shape."""
        return self.layout.from_canonical(self.blocks.mask(), self.shape)

    @property
    def kernel(self) -> np.ndarray:
        """Values that the weight is to get."""
        return self.layout.from_canonical(self.blocks.dense(), self.shape)


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
    """The mask that a weight's own initializer drew when the layer was built.

    An initializer in a layer sees only a shape. Where it drew along other axes than the layer's
    true ones, and the weight has not been touched since, the draw has a kernel along the true
    axes.

    Raises:
        NotPrunableError: A weight that was changed, so that the mask would drop nonzero entries.
    """
    if weight.drawn_mask is not None:
        return Draw(weight.drawn_mask(), None, initializer, fresh=True)
    value = weight.raw_value()
    drawn = draw(weight, initializer)
    assert drawn.kernel is not None
    if axes_for(weight, initializer) not in (None, KernelLayout.convolution()):
        blind, _ = initializer.sample(weight.shape, weight.variable.dtype)
        if np.array_equal(blind.astype(value.dtype), value):
            return drawn
    lost = int(np.count_nonzero(value[~drawn.mask]))
    if not lost:
        stored = drawn.kernel.astype(numpy_dtype(weight.variable.dtype)).astype(value.dtype)
        return Draw(drawn.mask, None, initializer, fresh=np.array_equal(stored, value))
    raise NotPrunableError(
        f"The weight '{weight.path}' has been changed since its initializer drew it, and the "
        "initializer's mask would drop entries that are not zero. An initializer alone holds no "
        "mask: wrap the layer before training, or prune what was trained with "
        "keras_sparse_ortho.prune(model, density). "
        f"Received: {lost} nonzero entries outside the mask"
    )


def axes_for(weight: PrunableWeight, initializer: SparseInitializer) -> KernelLayout | None:
    """The layout to draw with: the layer's own, unless the user gave the initializer one."""
    return weight.layout if initializer.layout is None else None


def layout_for(weight: PrunableWeight, initializer: SparseInitializer) -> KernelLayout:
    """What the axes of a weight mean to an initializer that draws it, `(*spatial, in, out)` too."""
    own = axes_for(weight, initializer) or initializer.resolve_layout(weight.shape)
    return own or KernelLayout.convolution()


def is_as_drawn(weight: PrunableWeight) -> bool:
    """Whether a plain weight is still what its own initializer, one of ours, drew."""
    kernel, _ = weight.initializer.sample(weight.shape, weight.variable.dtype)
    value = weight.raw_value()
    return np.array_equal(kernel.astype(value.dtype), value)
