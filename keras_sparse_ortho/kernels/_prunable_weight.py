"""`PrunableWeight`: what is known of a weight that can be pruned."""

import dataclasses
from collections.abc import Callable
from typing import Any, Protocol

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.orthogonal import KernelLayout


class EffectiveWeight(Protocol):
    """What a weight asks of its parametrization (a class of the room below)."""

    def effective(self, value: Any) -> Any:
        """The effective weight for the raw value."""

    def mask_value(self) -> np.ndarray:
        """Which entries are live now."""


class StoredKernel(Protocol):
    """A kernel whose variable does not have its dense form, such as that of live blocks."""

    @property
    def variable(self) -> Any:
        """The Keras variable that is trained."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense kernel."""

    @property
    def layout(self) -> KernelLayout | None:
        """Meaning of the dense kernel's axes, `None` for `(*spatial, in, out)`."""

    @property
    def live(self) -> int:
        """Number of live entries."""

    def value(self) -> np.ndarray:
        """The dense kernel (bfloat16 as float32)."""

    def mask_value(self) -> np.ndarray:
        """Which entries of the dense kernel are live."""

    def is_as_drawn(self) -> bool:
        """Whether the kernel is still what an orthogonal initializer has drawn."""


@dataclasses.dataclass(frozen=True, eq=False)
class PrunableWeight:
    """A kernel of a layer: where it is, what its axes mean, and how sparse it is.

    Args:
        path: Names of the layers that hold it and of the weight, joined by `/`, below the model:
            `"block/dense/kernel"`. A `PrunableLayer` adds nothing to it, so that a weight has the
            same path before, while and after it is wrapped.
        variable: The Keras variable of the raw weight.
        owner: The layer that created the variable.
        layout: Meaning of the axes, `None` for `(*spatial, in, out)`.
        parametrization: How the effective weight comes about, `None` in plain layers.
        flops: Multiply-adds that the dense weight costs for one sample, counted once each as in
            the tables of the STR and RigL papers; `None` where it is not known.
        drawn_mask: Gives the mask that the weight's initializer drew together with its value,
            while the wrapper of its layer is built; `None` where it was not kept.
        stored: The kernel, where `variable` holds it in another form than the dense one; shape,
            count and values are then those of the dense kernel.
        registered: Whether `kernel_layouts` knows the weight; else its layout is guessed.
    """

    path: str
    variable: Any
    owner: Any
    layout: KernelLayout | None = None
    parametrization: EffectiveWeight | None = None
    flops: int | None = None
    drawn_mask: Callable[[], np.ndarray] | None = None
    stored: StoredKernel | None = None
    registered: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.variable.shape) if self.stored is None else self.stored.shape

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def live(self) -> int:
        """Number of live entries: of the mask, or of nonzeros in a plain layer."""
        if self.stored is not None:
            return self.stored.live
        if self.parametrization is not None:
            return int(np.count_nonzero(self.parametrization.mask_value()))
        return int(np.count_nonzero(self.value()))

    @property
    def density(self) -> float:
        """Live fraction."""
        return self.live / self.size

    @property
    def sparse_flops(self) -> int | None:
        """Multiply-adds of the live entries for one sample."""
        return None if self.flops is None else round(self.flops * self.live / self.size)

    @property
    def initializer(self) -> Any:
        """The initializer that the owner has for the weight, `None` if it has none."""
        # A variable in another form has another name, too.
        name = self.variable.name if self.stored is None else self.path.rpartition("/")[2]
        attribute = initializer_attribute(self.owner, name)
        return None if attribute is None else getattr(self.owner, attribute)

    @property
    def outputs_shape(self) -> tuple[int, ...]:
        """The shape of one number for each output, which broadcasts to the shape of the weight."""
        layout, rank = self.layout, len(self.shape)
        axes = (-1,) if layout is None else (*layout.batch, *layout.outputs)
        own = {axis % rank for axis in axes}
        return tuple(size if k in own else 1 for k, size in enumerate(self.shape))

    def raw_value(self, *, copy: bool = True) -> np.ndarray:
        """The raw weight as a NumPy array (bfloat16 as float32).

        Args:
            copy: `False` where the array is only read, and not kept: it may be the weight's memory.
        """
        if self.stored is not None:
            return self.stored.value()
        return to_numpy(keras.ops.convert_to_tensor(self.variable), copy=copy)

    def finite_raw_value(self) -> np.ndarray:
        """As `raw_value(copy=False)`; raises NotPrunableError if the weight is not finite."""
        value = self.raw_value(copy=False)
        finite = np.isfinite(value)
        if not finite.all():
            wrong = np.count_nonzero(~finite)
            raise NotPrunableError(
                f"The weight '{self.path}' is not finite. Received: {wrong} infinite or NaN entries"
            )
        return value

    def value(self) -> np.ndarray:
        """The effective weight as a NumPy array (bfloat16 as float32)."""
        if self.parametrization is None or self.stored is not None:
            return self.raw_value()
        raw = keras.ops.convert_to_tensor(self.variable)
        return to_numpy(self.parametrization.effective(raw))

    def __repr__(self) -> str:
        flops = "" if self.flops is None else f", flops={self.flops}"
        return f"<{self.path} shape={self.shape}, density={self.density:.6g}{flops}>"


def initializer_attribute(layer: Any, weight_name: str) -> str | None:
    """The attribute in which a layer keeps the initializer of one of its weights."""
    # DepthwiseConv calls its weight "kernel" and the initializer "depthwise_initializer".
    for stem in (weight_name, weight_name.removesuffix("_kernel"), "depthwise"):
        if hasattr(layer, f"{stem}_initializer"):
            return f"{stem}_initializer"
    return None
