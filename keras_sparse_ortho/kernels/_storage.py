"""`Storage`: how a sparse kernel is held, and all that the other rooms ask of it.

A new storage is a subclass, and a layer whose method `storages()` returns it: strip, the
conversions, dynamic sparse training, reports and files ask nothing else.
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy


class Storage(abc.ABC):
    """One sparse kernel: as a mask over a dense variable, as live values, or as live blocks.

    *Places* are what dynamic sparse training moves: single entries, or whole blocks.
    """

    compact = False
    """Whether only live entries are stored, so that the variable is not shaped as the kernel."""

    movable = False
    """Whether the mask is fixed, so that dynamic sparse training may move its live places."""

    place_size = 1
    """Entries in a place."""

    in_blocks = False
    """Whether places are blocks that move so that each line of blocks keeps its number of them."""

    quantizer: Any = None
    """What rounds the effective kernel to few values (`parametrizations.FakeQuantization`)."""

    # --- the kernel ------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def weight(self) -> Any:
        """The `PrunableWeight`: path, trained variable, owner and axes of the kernel."""

    @property
    def parametrization(self) -> Any:
        """What maps the raw variable to the effective kernel; `None` where nothing does."""
        return None

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the dense kernel."""
        return tuple(self.weight.variable.shape)

    @abc.abstractmethod
    def value(self) -> np.ndarray:
        """The dense effective kernel (bfloat16 as float32)."""

    def raw_value(self, *, copy: bool = True) -> np.ndarray:
        """The dense raw kernel; without `copy` perhaps the memory of the variable."""
        if self.compact:
            return self.value()
        return to_numpy(keras.ops.convert_to_tensor(self.weight.variable), copy=copy)

    @abc.abstractmethod
    def mask_value(self) -> np.ndarray:
        """Which entries of the dense kernel are live."""

    @property
    def live(self) -> int:
        """Number of live entries."""
        return int(np.count_nonzero(self.mask_value()))

    @abc.abstractmethod
    def assign_raw(self, value: Any) -> None:
        """Takes the values of a dense kernel; dead entries are ignored."""

    def settle(self) -> None:  # noqa: B027 (most have nothing to do)
        """Called once a dense kernel has been assigned."""

    def support(self) -> list[Any]:
        """The variables that say which entries are live: masks, indices."""
        return []

    # --- where it comes from ---------------------------------------------------------------------

    @property
    def drawn_by(self) -> Any:
        """The sparse initializer that drew the mask, if one did."""
        return None

    def is_as_drawn(self) -> bool:
        """Whether the kernel is still, bit by bit, what an orthogonal initializer has drawn."""
        return False

    def unfinished(self) -> str | None:
        """Why the kernel must not be stripped yet, or `None`."""
        return None

    # --- dynamic sparse training: where `movable` ------------------------------------------------

    def live_places(self) -> np.ndarray:
        """Which places are live: the mask, or `(*matrices, I, J)` for blocks."""
        return self.mask_value()

    def live_sums(self) -> np.ndarray:
        """`sum |w|` over each place, zero where it is dead."""
        return np.abs(self.raw_value())

    def place_sums(self, gradient: Any) -> Any:
        """`sum |g|` over each place, of what `dense_gradient` collects."""
        return abs(gradient)

    def move(self, live: Any, optimizer: Any) -> None:
        """Makes other places live, as many as before.

        Those that stay keep values and optimizer slots; new ones start from zero.
        """
        raise NotImplementedError

    def dense_gradient(self) -> "DenseGradient":
        """How the gradient at all entries, live and dead, is computed."""
        raise NotImplementedError

    # --- optimizer slots in another storage ------------------------------------------------------

    def slot_to_dense(self, slot: np.ndarray, start: float) -> np.ndarray:
        """A slot of the variable in the kernel's shape, with its start value at dead entries."""
        return slot

    def slot_from_dense(self, slot: np.ndarray) -> np.ndarray:
        """The reverse of `slot_to_dense`."""
        return slot


@dataclasses.dataclass(frozen=True)
class DenseGradient:
    """What a loss is differentiated by for the gradient at all entries of a kernel.

    Args:
        variables: Variables by which the loss is differentiated.
        values: Gives their values, arrays or tensors.
        collect: From their gradients to that at all places: of the dense kernel's shape, or for
            blocks `(*matrices, J, I, *taps, r, c)`.
        held: Pairs of a variable and its value meanwhile, such as an all-live mask.
    """

    variables: list[Any]
    values: Callable[[], list[Any]]
    collect: Callable[..., Any]
    held: tuple[tuple[Any, Any], ...] = ()


class SparseLayer(Protocol):
    """A layer that holds kernels in storages, in place of a plain layer."""

    def storages(self) -> dict[str, Storage]:
        """The storages by the names that the kernels have in the plain layer."""

    def to_dense_layer(self) -> Any:
        """The plain layer, built, with the effective weights; a wrapper gives up the one inside."""


class RepeatedLayer(abc.ABC):
    """A layer that computes one layer many times, each time with its own weights."""

    layer: Any
    """The layer that is repeated."""
    weights: list[Any]

    @abc.abstractmethod
    def like(self, layer: Any) -> Any:
        """The same of another layer, not built."""

    @abc.abstractmethod
    def to_plain_stack(self) -> Any:
        """The same of plain layers, built, where the layers hold live blocks."""

    @abc.abstractmethod
    def unrolled(self, values: Iterable[tuple[Any, Any]] = ()) -> Any:
        """A model of all the layers, with other `values` of some weights."""


def is_sparse_layer(layer: Any) -> bool:
    """Whether a layer is a `SparseLayer`, built or not."""
    # By the class: instances of wrappers also have the attributes of what they wrap.
    return hasattr(type(layer), "to_dense_layer")


def storages_of(layer: Any) -> dict[str, Storage]:
    """The storages of a layer's own kernels by name; empty for plain layers."""
    found: dict[str, Storage] = layer.storages() if hasattr(type(layer), "storages") else {}
    return found
