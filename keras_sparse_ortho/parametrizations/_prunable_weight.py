"""What is known of a weight that can be pruned, and how such weights are found in a layer."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import sublayers
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import KernelLayout, kernel_layouts

if TYPE_CHECKING:
    from keras_sparse_ortho.parametrizations._parametrization import Parametrization


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
    """

    path: str
    variable: Any
    owner: Any
    layout: KernelLayout | None = None
    parametrization: "Parametrization | None" = None
    flops: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the weight."""
        return tuple(self.variable.shape)

    @property
    def size(self) -> int:
        """Number of entries."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def live(self) -> int:
        """Number of live entries: of the mask, or of nonzeros in a plain layer."""
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
        name = self.variable.name
        # DepthwiseConv calls its weight "kernel" and the initializer "depthwise_initializer".
        for stem in (name, name.removesuffix("_kernel"), "depthwise"):
            if hasattr(self.owner, f"{stem}_initializer"):
                return getattr(self.owner, f"{stem}_initializer")
        return None

    def raw_value(self) -> np.ndarray:
        """The raw weight as a NumPy array (bfloat16 as float32)."""
        return _to_numpy(keras.ops.convert_to_tensor(self.variable))

    def finite_raw_value(self) -> np.ndarray:
        """The raw weight as `raw_value`; raises NotPrunableError if it is not finite."""
        value = self.raw_value()
        finite = np.isfinite(value)
        if not finite.all():
            wrong = np.count_nonzero(~finite)
            raise NotPrunableError(
                f"The weight '{self.path}' is not finite. Received: {wrong} infinite or NaN entries"
            )
        return value

    def value(self) -> np.ndarray:
        """The effective weight as a NumPy array (bfloat16 as float32)."""
        if self.parametrization is None:
            return self.raw_value()
        raw = keras.ops.convert_to_tensor(self.variable)
        return _to_numpy(self.parametrization.effective(raw))

    def __repr__(self) -> str:
        flops = "" if self.flops is None else f", flops={self.flops}"
        return f"<{self.path} shape={self.shape}, density={self.density:.6g}{flops}>"


def _to_numpy(value: Any) -> np.ndarray:
    if keras.backend.standardize_dtype(value.dtype) == "bfloat16":
        value = keras.ops.cast(value, "float32")  # torch cannot hand bfloat16 to NumPy
    return keras.ops.convert_to_numpy(value)


def walk(layer: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yields `layer` and every layer inside it with its path, each layer once, depth first."""
    seen: set[int] = set()

    def visit(current: Any, here: str) -> Iterator[tuple[Any, str]]:
        if id(current) in seen:
            return
        seen.add(id(current))
        yield current, here
        for child in sublayers(current):
            # A wrapper of ours stands for the layer inside it.
            inside = here if getattr(current, "transparent_path", False) else _join(here, child)
            yield from visit(child, inside)

    yield from visit(layer, path)


def _join(path: str, named: Any) -> str:
    return f"{path}/{named.name}" if path else str(named.name)


def own_kernels(layer: Any, path: str) -> list[PrunableWeight]:
    """The kernels that a built layer itself owns, without those of its sublayers."""
    inherited = {id(v) for child in sublayers(layer) for v in child.weights}
    if hasattr(layer, "get_prunable_weights"):  # the duck type of TFMOT
        layouts = dict.fromkeys((v.name for v in layer.get_prunable_weights()), None)
    else:
        layouts = kernel_layouts(layer)
    return [
        PrunableWeight(_join(path, v), v, layer, layouts[v.name])
        for v in layer.weights
        if v.name in layouts and id(v) not in inherited
    ]


def find_kernels(layer: Any, path: str) -> list[PrunableWeight]:
    """All kernels in a built layer, its sublayers included."""
    return [weight for inner, here in walk(layer, path) for weight in own_kernels(inner, here)]


def refuse_unwrappable(layer: Any) -> None:
    """Raises for a layer whose weights cannot be replaced during its call."""
    for inner, path in walk(layer, layer.name):
        reason = None
        if getattr(inner, "transparent_path", False):
            reason = "it is wrapped already"
        elif isinstance(inner, keras.layers.SpectralNormalization):
            reason = (
                "SpectralNormalization assigns its kernel in every call. Leave one of the two out"
            )
        elif getattr(inner, "lora_enabled", False):
            reason = (
                "LoRA is enabled, and its update of the kernel is dense. Prune first, strip, "
                "and enable LoRA on the plain model"
            )
        elif getattr(inner, "quantization_mode", None) is not None:
            reason = "it is quantized. Prune first, strip, then quantize"
        if reason:
            raise NotPrunableError(
                f"The layer '{path}' cannot be wrapped: {reason}. "
                f"Received: layer={inner.__class__.__name__}"
            )
