"""Kernels: what can be pruned (`PrunableWeight`), and how a sparse one is held (`Storage`)."""

import abc
import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import numpy as np

from keras_sparse_ortho._foreign_names import Answering
from keras_sparse_ortho._keras_internals import packed_shape, unpacked_value
from keras_sparse_ortho._text import printable
from keras_sparse_ortho._types import Optimizer, TensorLike
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.orthogonal import KernelLayout


class Storage(abc.ABC):
    """One sparse kernel: as a mask over a dense variable, as live values, or as live blocks."""

    form_name: ClassVar[str] = "masked"
    """The name of the `storages.StorageForm` whose layers have it."""

    compact: ClassVar[bool] = False
    """Whether only live entries are stored: the variable has another shape."""

    movable: ClassVar[bool] = False
    """Whether the mask is fixed, so that dynamic sparse training may move live places."""

    in_blocks: ClassVar[bool] = False
    """Whether places are blocks, and lines of blocks keep their number of them."""

    place_size: int = 1
    """Entries in a place: single ones, or those of a block."""

    quantizer: Any = None
    """The `parametrizations.FakeQuantization` of the effective kernel, or `None`."""

    @property
    def fixed(self) -> bool:
        """Whether the mask does not change any more, so other storages can take it."""
        return self.movable

    @property
    @abc.abstractmethod
    def weight(self) -> "PrunableWeight":
        """Path, trained variable, owner and axes of the kernel."""

    @property
    def parametrization(self) -> Any:
        """Maps the raw variable to the effective kernel; `None` where nothing does."""
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the dense kernel."""
        return tuple(self.weight.variable.shape)

    @abc.abstractmethod
    def value(self) -> np.ndarray:
        """The dense effective kernel (bfloat16 as float32)."""

    def raw_value(self, *, copy: bool = True) -> np.ndarray:
        """The dense raw kernel; without `copy` perhaps the memory of the variable."""
        return to_numpy(
            keras.ops.convert_to_tensor(self.weight.variable), copy=copy
        )

    @abc.abstractmethod
    def mask_value(self) -> np.ndarray:
        """Which entries of the dense kernel are live."""

    @property
    def live(self) -> int:
        """The number of live entries."""
        return int(np.count_nonzero(self.mask_value()))

    @abc.abstractmethod
    def assign_raw(self, value: TensorLike) -> None:
        """Takes the values of a dense kernel; dead entries are ignored."""

    def settle(self) -> None:  # noqa: B027 (most have nothing to do)
        """Called once a dense kernel has been assigned."""

    def support(self) -> list[keras.Variable]:
        """The variables that say which entries are live: masks, indices."""
        return []

    @property
    def drawn_by(self) -> Any:
        """The sparse initializer that drew the mask, if one did."""
        return None

    @property
    def block_size(self) -> tuple[int, int] | None:
        """Rows and columns of the blocks that a mask is made of; `None` where that is unknown."""
        return None

    @property
    def least_density(self) -> float | None:
        """The least density of a kernel in blocks, of which the others are multiples."""
        return None

    def is_as_drawn(self) -> bool:
        """Whether the kernel is still, bit by bit, what an orthogonal initializer has drawn."""
        return False

    def unfinished(self) -> str | None:
        """Why the kernel must not be stripped yet, or `None`."""
        return None

    def live_places(self) -> np.ndarray:
        """Which places are live: the mask, or `(*matrices, I, J)` for blocks."""
        return self.mask_value()

    def live_sums(self) -> np.ndarray:
        """`sum |w|` over each place, zero where it is dead."""
        return np.abs(self.raw_value())

    def place_sums(self, gradient: np.ndarray) -> np.ndarray:
        """`sum |g|` over each place of the gradient that `dense_gradient` collects."""
        return np.abs(gradient)

    def move(self, live: np.ndarray, optimizer: Optimizer | None) -> None:
        """Makes other places live, as many as before; new values and slots start from zero."""
        raise NotImplementedError

    def dense_gradient(self) -> "DenseGradient":
        """How the gradient at all entries, live and dead, is computed."""
        raise NotImplementedError

    def slot_to_dense(self, slot: np.ndarray, start: float) -> np.ndarray:
        """A slot of the variable in the kernel's shape, with its start value at dead entries."""
        return slot

    def slot_from_dense(self, slot: np.ndarray) -> np.ndarray:
        """The inverse of `slot_to_dense`."""
        return slot


@dataclasses.dataclass(frozen=True)
class DenseGradient:
    """The variables of a loss whose gradients give that at all entries of a kernel.

    Args:
        variables: list of variables.
        values: callable. Their values, arrays or tensors.
        collect: callable. From their gradients to that at all places: of the dense kernel's shape,
            or for blocks `(*matrices, J, I, *taps, r, c)`.
        replaced: Pairs of variables and the values that they have meanwhile, such as a full mask.
    """

    variables: list[keras.Variable]
    values: Callable[[], list[TensorLike]]
    collect: Callable[..., np.ndarray]
    replaced: tuple[tuple[keras.Variable, np.ndarray], ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class PrunableWeight(Answering):
    """A kernel of a layer: where it is, what its axes mean, and how sparse it is.

    Args:
        path: str. Names of the layers that hold it and of the weight, below the model:
            `"block/dense/kernel"`, whether the weight is wrapped or not.
        variable: Variable of the raw weight.
        owner: Layer that created the variable.
        layout: KernelLayout. Meaning of the axes, `None` for `(*spatial, in, out)`.
        storage: Storage of the live entries, `None` in plain layers.
        flops: int or `None`. Multiply-adds of the dense weight for one sample, counted once each as
            in the tables of the STR and RigL papers.
        drawn_mask: callable or `None`. Gives the mask that the weight's initializer drew, while the
            layer's wrapper is built.
        registered: bool. Whether `kernel_layouts` knows the weight; else its layout is guessed.
        inside: tuple of types. Classes of the layers that hold it, from the model to its owner.
    """

    path: str
    variable: keras.Variable
    owner: keras.layers.Layer
    layout: KernelLayout | None = None
    storage: Storage | None = None
    flops: int | None = None
    drawn_mask: Callable[[], np.ndarray] | None = None
    registered: bool = True
    inside: tuple[type, ...] = ()

    @property
    def name(self) -> str:
        """The name of the weight in its layer, the last part of the path."""
        return self.path.rpartition("/")[2]

    @property
    def parametrization(self) -> Any:
        """Maps the raw to the effective weight; `None` in plain layers and those of live blocks."""
        return None if self.storage is None else self.storage.parametrization

    @property
    def shape(self) -> tuple[int, ...]:
        if self.storage is not None:
            return self.storage.shape
        return packed_shape(self.owner, self.variable) or tuple(
            self.variable.shape
        )

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def mask(self) -> np.ndarray:
        """Which entries are live, a bool array: the mask, or the nonzeros in a plain layer."""
        return (
            self.value != 0
            if self.storage is None
            else self.storage.mask_value()
        )

    @property
    def live(self) -> int:
        """Number of live entries: of the mask, or of nonzeros in a plain layer."""
        return (
            int(np.count_nonzero(self.value))
            if self.storage is None
            else self.storage.live
        )

    @property
    def density(self) -> float:
        """Live fraction."""
        return self.live / self.size

    @property
    def sparse_flops(self) -> int | None:
        """Multiply-adds of the live entries for one sample."""
        return (
            None
            if self.flops is None
            else round(self.flops * self.live / self.size)
        )

    @property
    def initializer(self) -> Any:
        """The initializer that the owner has for the weight, `None` if it has none."""
        name = self.variable.name if self.storage is None else self.name
        attribute = initializer_attribute(self.owner, name)
        return None if attribute is None else getattr(self.owner, attribute)

    @property
    def outputs_shape(self) -> tuple[int, ...]:
        """The shape of one number for each output, which broadcasts to the shape of the weight."""
        layout = self.layout or KernelLayout.convolution()
        rank = len(self.shape)
        output_axes = {axis % rank for axis in (*layout.batch, *layout.outputs)}
        return tuple(
            size if axis in output_axes else 1
            for axis, size in enumerate(self.shape)
        )

    def raw_value(self, *, copy: bool = True) -> np.ndarray:
        """The raw weight (bfloat16 as float32); without `copy` it may be the weight's memory."""
        if self.storage is not None:
            return self.storage.raw_value(copy=copy)
        unpacked = unpacked_value(self.owner, self.variable)
        if unpacked is not None:
            return unpacked
        return to_numpy(keras.ops.convert_to_tensor(self.variable), copy=copy)

    def finite_raw_value(self) -> np.ndarray:
        """As `raw_value(copy=False)`; raises NotPrunableError if the weight is not finite."""
        value = self.raw_value(copy=False)
        wrong_count = np.count_nonzero(~np.isfinite(value))
        if wrong_count:
            raise NotPrunableError(
                f"The weight {self.path!r} is not finite. "
                f"Received: {wrong_count} infinite or NaN entries"
            )
        return value

    @property
    def value(self) -> np.ndarray:
        """The effective weight as a NumPy array (bfloat16 as float32)."""
        return (
            self.raw_value() if self.storage is None else self.storage.value()
        )

    def __repr__(self) -> str:
        flops = "" if self.flops is None else f", flops={self.flops}"
        return f"<{printable(self.path)} shape={self.shape}, density={self.density:.6g}{flops}>"


def initializer_attribute(
    layer: keras.layers.Layer, weight_name: str
) -> str | None:
    """The attribute in which a layer has the initializer of a weight; `None` if it has none."""
    # DepthwiseConv calls its weight "kernel" and the initializer "depthwise_initializer".
    for stem in (weight_name, weight_name.removesuffix("_kernel"), "depthwise"):
        if hasattr(layer, f"{stem}_initializer"):
            return f"{stem}_initializer"
    return None


def derived_seed(seed: int, path: str) -> int:
    """A seed for the weight at `path`: the same on every machine, another for every path."""
    digest = hashlib.blake2b(
        f"{seed}/{path}".encode(errors="surrogatepass"), digest_size=4
    ).digest()
    # 31 bits: some backends take no more.
    return int.from_bytes(digest, "little") >> 1
