"""`SparseInitializer`: the base of initializers that draw a kernel together with its mask."""

import abc
import contextlib
import contextvars
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import ml_dtypes
import numpy as np

from keras_sparse_ortho._checks import check_seed
from keras_sparse_ortho._keras_internals import restored
from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal import KernelLayout, RegularBlocks

LayoutLike = KernelLayout | Callable[[tuple[int, ...]], KernelLayout] | None
"""A layout, or a callable that finds one for a shape."""

_set_later: contextvars.ContextVar[bool] = contextvars.ContextVar("set_later", default=False)


@contextlib.contextmanager
def weights_set_later() -> Iterator[None]:
    """A scope for copies of layers, whose weights are set later: sparse initializers give zeros."""
    token = _set_later.set(True)
    try:
        yield
    finally:
        _set_later.reset(token)


def are_weights_set_later() -> bool:
    """Whether this is inside `weights_set_later`."""
    return _set_later.get()


class SparseInitializer(keras.initializers.Initializer, abc.ABC):
    """Base class: a Keras initializer that draws a mask with each kernel.

    Subclasses implement `sample`. `keras_sparse_ortho.PrunableLayer` adopts the mask of any
    initializer derived from this class.

    Args:
        seed: Integer or `None`. `None` draws a seed now, from Python's `random` as Keras does (so
            `keras.utils.set_random_seed` makes it reproducible); a clone draws another one. As with
            Keras' initializers, an instance gives the same values at every call for a shape.
        layout: Meaning of the kernel's axes: a `KernelLayout`, or a callable
            `shape -> KernelLayout`, or `None` for `(*spatial, in, out)`. A wrapped layer with
            `None` uses the layout that `kernel_layouts` has for it.
    """

    isometry: str | None = None
    """`"exact"` or `"approximate"` for orthogonal kernels."""

    def __init__(self, seed: int | None = None, layout: LayoutLike = None) -> None:
        self.seed = check_seed(seed)
        self._draw_seed = random.randrange(2**31) if self.seed is None else self.seed
        if isinstance(layout, dict) and "class_name" in layout:
            layout = restored(layout)
        elif isinstance(layout, dict):
            layout = KernelLayout(**layout)
        if not (layout is None or isinstance(layout, KernelLayout) or callable(layout)):
            raise ValueError(
                "`layout` must be a KernelLayout, a callable shape -> KernelLayout, or None. "
                f"Received: layout={layout!r}"
            )
        self.layout = layout

    @abc.abstractmethod
    def sample(
        self, shape: Sequence[int], dtype: Any = None, layout: KernelLayout | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Draws a kernel of a shape in Keras layout, and the bool mask of its live entries.

        `dtype` is the floating type of the kernel, e.g. `"bfloat16"`, `keras.config.floatx()` by
        default. `layout` overrides the initializer's own layout for this call.
        """

    def sample_blocks(
        self, shape: Sequence[int], dtype: Any = None, layout: KernelLayout | None = None
    ) -> RegularBlocks | None:
        """What `sample` draws as live blocks alone, if it draws regular blocks, else `None`."""
        return None

    def __call__(self, shape: Sequence[int], dtype: Any = None, **kwargs: Any) -> Any:
        """Returns the kernel as a tensor of the active backend.

        tf_keras passes a `tf.DType` and more keywords; it gets a NumPy array, which works with any
        Keras backend.
        """
        if are_weights_set_later():
            return keras.ops.zeros(shape, dtype=dtype)
        kernel, _ = self.sample(shape, dtype)
        if hasattr(dtype, "as_numpy_dtype"):
            return kernel
        return keras.ops.convert_to_tensor(kernel)

    def at_density(
        self, density: float, seed: int, shape: Sequence[int], layout: KernelLayout | None = None
    ) -> "SparseInitializer":
        """The same pattern with another density and seed, for one kernel of a whole model.

        `layout` is the meaning of the axes of `shape`, if the initializer has none of its own.
        """
        config = self.get_config()
        if "density" not in config:
            raise ValueError(
                f"A {type(self).__name__} has no `density` for a budget to set. Use it as the "
                "initializer of the layers, and call keras_sparse_ortho.apply_masks(model). "
                f"Received: initializer={self!r}"
            )
        return type(self).from_config({**config, "density": density, "seed": seed})

    def least_counts(
        self, shape: Sequence[int], layout: KernelLayout | None = None
    ) -> tuple[int, int]:
        """Fewest live entries of a kernel, and fewest without dead outputs."""
        return 1, 1

    def need_density(self, density: float | None) -> float:
        """Returns the density, or raises if it is `None`."""
        if density is None:
            raise DensityError(
                f"A {type(self).__name__} in a layer needs a density; without one it is a pattern "
                "for sparsify(model, density, initializer=...). Received: density=None"
            )
        return density

    def resolve_layout(
        self, shape: Sequence[int], layout: KernelLayout | None = None
    ) -> KernelLayout | None:
        """The layout for a shape: the given one, else the initializer's own, else `None`."""
        if layout is not None:
            return layout
        if callable(self.layout):
            return self.layout(tuple(shape))
        return self.layout

    def get_config(self) -> dict[str, Any]:
        layout: Any = self.layout
        if isinstance(layout, KernelLayout):
            layout = layout.get_config()
        elif layout is not None:
            layout = keras.saving.serialize_keras_object(layout)
        return {"seed": self.seed, "layout": layout}


def numpy_dtype(dtype: Any) -> np.dtype:
    """NumPy's dtype for a floating Keras dtype, `bfloat16` included."""
    name = keras.backend.standardize_dtype(dtype or keras.config.floatx())
    if not keras.backend.is_float_dtype(name) or name.startswith("float8"):
        raise ValueError(
            "A sparse kernel needs the dtype bfloat16, float16, float32 or float64. "
            f"Received: dtype={dtype!r}"
        )
    return np.dtype(ml_dtypes.bfloat16) if name == "bfloat16" else np.dtype(name)
