"""`SparseInitializer`: the base of initializers that draw a mask with each kernel; their draws."""

import abc
import dataclasses
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import keras
import ml_dtypes
import numpy as np

from keras_sparse_ortho._checks import check_seed
from keras_sparse_ortho._keras_internals import layout_of, restored
from keras_sparse_ortho._types import Config
from keras_sparse_ortho._values import placed
from keras_sparse_ortho.errors import DensityError, NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import KernelLayout, RegularBlocks

Layout = KernelLayout | None
# A kernel, and the bool mask of its live entries.
Sampled = tuple[np.ndarray, np.ndarray]
LayoutLike = KernelLayout | Callable[[tuple[int, ...]], KernelLayout] | None
"""A layout, or a callable that finds one for a shape."""


class SparseInitializer(keras.initializers.Initializer, abc.ABC):
    """A Keras initializer that draws a mask with each kernel; subclasses implement `sample`.

    Args:
        seed: int or `None`, drawn now from Python's `random` as in Keras
            (`keras.utils.set_random_seed`); a clone draws another one. An instance gives the same
            values at every call for a shape.
        layout: KernelLayout, or callable `shape -> KernelLayout`. Meaning of the axes; `None` for
            `(*spatial, in, out)`, and in a wrapped layer for its layout in `kernel_layouts`.
    """

    isometry: str | None = None
    """`"exact"` or `"approximate"` for orthogonal kernels."""

    settings: ClassVar[tuple[str, ...]] = ()
    """The arguments that attributes of these names hold, besides `seed` and `layout`."""

    removed: ClassVar[Mapping[str, Any]] = {}
    """Arguments that only files of earlier versions have, each with its one value of today."""

    def __init__(
        self, seed: int | None = None, layout: LayoutLike = None
    ) -> None:
        self.seed = check_seed(seed)
        self._draw_seed = (
            random.randrange(2**31) if self.seed is None else self.seed
        )
        if isinstance(layout, dict):
            is_ours = "class_name" not in layout
            layout = (
                KernelLayout.from_config(layout)
                if is_ours
                else restored(layout)
            )
        if not (
            layout is None
            or isinstance(layout, KernelLayout)
            or callable(layout)
        ):
            raise ValueError(
                "`layout` must be a KernelLayout, a callable shape -> KernelLayout, or None. "
                f"Received: layout={layout!r}"
            )
        self.layout = layout

    @abc.abstractmethod
    def sample(
        self,
        shape: Sequence[int],
        dtype: Any = None,
        layout: Layout = None,
    ) -> Sampled:
        """Draws a kernel in Keras layout, and the bool mask of its live entries.

        `dtype` is a floating type, by default `keras.config.floatx()`; `layout` overrides the
        initializer's own.
        """

    def sample_blocks(
        self,
        shape: Sequence[int],
        layout: Layout = None,
    ) -> RegularBlocks | None:
        """The live blocks that `sample` draws, or `None` if these are not regular blocks."""
        return None

    def __call__(
        self, shape: Sequence[int], dtype: Any = None, **kwargs: Any
    ) -> Any:
        """Returns the kernel as a tensor of the backend; for tf_keras as an array."""
        kernel, _ = self.sample(shape, dtype)
        if hasattr(dtype, "as_numpy_dtype"):
            return kernel
        return keras.ops.convert_to_tensor(kernel)

    def at_density(
        self,
        density: float,
        seed: int,
        shape: Sequence[int],
        layout: Layout = None,
    ) -> "SparseInitializer":
        """Returns this pattern at a density and seed; `layout` is for patterns that have none."""
        config = self.get_config()
        if "density" not in config:
            raise ValueError(
                f"{type(self).__name__} has no `density` for a budget to set. Use it as the "
                "initializer of the layers, and call keras_sparse_ortho.apply_masks(model). "
                f"Received: initializer={self!r}"
            )
        return type(self).from_config(
            {**config, "density": density, "seed": seed}
        )

    def least_counts(
        self,
        shape: Sequence[int],
        layout: Layout = None,
    ) -> tuple[int, int]:
        """Fewest live entries of a kernel, and fewest without dead outputs."""
        return 1, 1

    def need_density(self, density: float | None) -> float:
        """The density, or a DensityError for a pattern that has none."""
        if density is None:
            raise DensityError(
                f"{type(self).__name__} in a layer needs a density; without one it is a pattern "
                "for sparsify(model, density, initializer=...). Received: density=None"
            )
        return density

    def resolve_layout(
        self,
        shape: Sequence[int],
        layout: Layout = None,
    ) -> KernelLayout:
        """The given layout, else the initializer's own, else the default."""
        if layout is None:
            layout = (
                self.layout(tuple(shape))
                if callable(self.layout)
                else self.layout
            )
        return layout or KernelLayout.convolution()

    @classmethod
    def from_config(cls, config: Config) -> "SparseInitializer":
        for name, today in cls.removed.items():
            if config.get(name, today) not in (None, today):
                raise ValueError(
                    f"`{name}` has been removed; use the default. Received: {name}={config[name]!r}"
                )
        arguments = {
            name: value
            for name, value in config.items()
            if name not in cls.removed
        }
        return cls(**arguments)

    def get_config(self) -> Config:
        config: Config = {"seed": self.seed, "layout": None}
        if isinstance(self.layout, KernelLayout):
            config["layout"] = self.layout.get_config()
        elif self.layout is not None:
            config["layout"] = keras.saving.serialize_keras_object(self.layout)
        for name in self.settings:
            config[name] = keras.saving.serialize_keras_object(
                getattr(self, name)
            )
        return config


def numpy_dtype(dtype: Any) -> np.dtype:
    """The type of a kernel, by default `keras.config.floatx()`; a ValueError for no float."""
    name = keras.backend.standardize_dtype(dtype or keras.config.floatx())
    if not keras.backend.is_float_dtype(name) or name.startswith("float8"):
        raise ValueError(
            "A sparse kernel needs the dtype bfloat16, float16, float32 or float64. "
            f"Received: dtype={dtype!r}"
        )
    return (
        np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
    )


@dataclasses.dataclass(frozen=True)
class Draw:
    """A mask for a weight, and new values if it has any.

    Args:
        mask: bool array of the weight's shape. Live entries.
        kernel: array of this shape, or `None`: the weight keeps its values.
        initializer: SparseInitializer that drew the mask, `None` for other masks.
        fresh: bool. Whether the weight has, or will get, exactly the values drawn.
        block: `(rows, cols)`. Size of the regular blocks that the mask is made of, if it is.

    Examples:
        >>> draw = Draw(np.eye(4, dtype=bool))
        >>> draw.live, draw.sets_values
        (4, False)
    """

    mask: np.ndarray
    kernel: np.ndarray | None = None
    initializer: SparseInitializer | None = None
    fresh: bool = False
    block: tuple[int, int] | None = None

    @property
    def live(self) -> int:
        return int(np.count_nonzero(self.mask))

    @property
    def sets_values(self) -> bool:
        return self.kernel is not None


@dataclasses.dataclass(frozen=True)
class BlockDraw:
    """A draw of regular blocks; mask and kernel are made when they are read."""

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
    """A mask packed in bits, with values; without an initializer these are trained ones."""

    # The mask, eight entries a byte, in the order of flat indices.
    bits: np.ndarray
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
        variable: keras.Variable = None,
    ) -> "PackedDraw":
        """Packs a kernel; as a tensor like the `variable` that will store it densely, if given."""
        if variable is None:
            values: Any = kernel[mask]
        elif layout_of(variable) is not None:
            values = kernel  # sharded later
        else:
            # So the next draw can use the array's memory. Reshaped: TensorFlow keeps the array of
            # a tensor until the next operation.
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
    """Draws a new kernel and mask, along the true axes of the weight."""
    axes = axes_for(weight, initializer)
    blocks = initializer.sample_blocks(weight.shape, layout=axes)
    if blocks is not None:
        return BlockDraw(
            blocks, weight.shape, layout_for(weight, initializer), initializer
        )
    kernel, mask = initializer.sample(weight.shape, layout=axes)
    return Draw(mask, kernel, initializer, fresh=True)


def adopt(weight: PrunableWeight, initializer: SparseInitializer) -> AnyDraw:
    """The mask that a weight's own initializer drew; refuses one that drops nonzero entries.

    If it drew along other axes than the layer's and the weight is unchanged, the kernel is drawn
    again along the true axes.
    """
    if weight.drawn_mask is not None:
        return Draw(weight.drawn_mask(), None, initializer, fresh=True)
    value = weight.raw_value()
    drawn = draw(weight, initializer)
    assert drawn.kernel is not None
    if axes_for(weight, initializer) not in (None, KernelLayout.convolution()):
        without_axes, _ = initializer.sample(
            weight.shape, weight.variable.dtype
        )
        if np.array_equal(without_axes.astype(value.dtype), value):
            return drawn
    lost = int(np.count_nonzero(value[~drawn.mask]))
    if not lost:
        stored = drawn.kernel.astype(numpy_dtype(weight.variable.dtype)).astype(
            value.dtype
        )
        return Draw(
            drawn.mask, None, initializer, fresh=np.array_equal(stored, value)
        )
    raise NotPrunableError(
        f"The weight {weight.path!r} has changed since its initializer drew it, and the "
        "initializer's mask would drop nonzero entries. An initializer alone does not keep its "
        "mask: wrap the layer before training, or prune the trained model with "
        "keras_sparse_ortho.prune(model, density). "
        f"Received: {lost} nonzero entries outside the mask"
    )


def axes_for(
    weight: PrunableWeight,
    initializer: SparseInitializer,
) -> KernelLayout | None:
    """The layout to draw with: the layer's, unless the user gave the initializer one."""
    return weight.layout if initializer.layout is None else None


def layout_for(
    weight: PrunableWeight, initializer: SparseInitializer
) -> KernelLayout:
    """The layout that a weight is drawn with."""
    return initializer.resolve_layout(
        weight.shape, axes_for(weight, initializer)
    )


def is_as_drawn(weight: PrunableWeight) -> bool:
    """Whether a plain weight still has the values that its own sparse initializer drew."""
    kernel, _ = weight.initializer.sample(weight.shape, weight.variable.dtype)
    value = weight.raw_value()
    return np.array_equal(kernel.astype(value.dtype), value)
