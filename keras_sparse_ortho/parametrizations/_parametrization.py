"""`Parametrization`, how a raw variable becomes the effective weight, and `Masked`."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import in_stateless_scope
from keras_sparse_ortho._types import Config, Tensor
from keras_sparse_ortho._values import assign, placed, to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, Storage


class Parametrization(Storage):
    """Maps the raw value `w` of one weight to the effective weight `w_e` that its layer uses.

    `PrunableLayer` makes one for each weight from a template (`clone`), calls `build` once, and
    `effective` in every step. State is in variables that `add_weight` creates. Subclasses implement
    `build`, `effective`, `mask_value` and `get_config`, and `for_density` for budgets.
    """

    _weight: PrunableWeight | None = None

    @property
    def weight(self) -> PrunableWeight:
        """The weight it was built for."""
        if self._weight is None:
            name = type(self).__name__
            raise ValueError(
                f"This {name} is not built: wrap a layer with it and build that."
            )
        return self._weight

    @abc.abstractmethod
    def build(
        self, weight: PrunableWeight, add_weight: Callable[..., Any]
    ) -> None:
        """Creates the state for `weight` with the wrapper's `add_weight`.

        That is Keras' own, with names that are unique to the weight; with `shared=True` all weights
        of the wrapper share one variable of that name.
        """

    @abc.abstractmethod
    def effective(self, value: Any) -> Any:
        """The effective weight for the raw value, both tensors of one shape and dtype."""

    @abc.abstractmethod
    def get_config(self) -> Config:
        """JSON values from which `from_config` makes an unbuilt clone."""

    @classmethod
    def from_config(cls, config: Config) -> "Parametrization":
        return cls(**config)

    def clone(self) -> "Parametrization":
        """An unbuilt parametrization with the same settings, for another weight."""
        return type(self).from_config(self.get_config())

    def for_density(self, density: float) -> "Parametrization":
        """An unbuilt clone whose weight has this density in the end, as set by a budget."""
        raise NotPrunableError(
            f"{type(self).__name__} learns its density. Leave out `density` and `budget`, or use "
            f"callbacks.TargetDensity. Received: density={density!r}"
        )

    @property
    def parametrization(self) -> "Parametrization":
        return self

    def value(self) -> np.ndarray:
        return to_numpy(self.current())

    def current(self, after: Any = None) -> Any:
        """The effective weight now, a tensor; a temporary of the step may wait for `after`."""
        return self.quantized(self.effective(self.weight.variable.value))

    def quantized(self, value: Any) -> Any:
        if self.quantizer is None:
            return value
        return self.quantizer(value, self.weight.outputs_shape)

    def assign_raw(self, value: Any) -> None:
        assign(self.weight.variable, value)

    def mark_as_drawn(self, kernel: Any = None) -> None:
        """Notes that the raw weight is as drawn; `FixedMask` does."""

    def clear_dead(self) -> None:
        """Called before the raw weight is saved or ranked: sets dead raw entries to zero."""
        # Optimizers such as Muon mix the entries of a matrix, and on JAX cannot read masks.

    def threshold_value(self) -> np.ndarray | None:
        """The magnitudes below which entries are dead, as a NumPy array; `None` without any."""
        return None

    @property
    def layer_variable(self) -> Any:
        """The variable of the layer that the effective weight replaces."""
        return self.weight.variable

    @property
    def trained_variable(self) -> Any:
        """The variable that training moves."""
        return self.weight.variable

    def materialize(self) -> None:
        self.assign_raw(self.current())

    def keep_untrained(self) -> None:
        """Called when the layer is frozen or unfrozen: freezes a raw weight that no step uses."""

    def release(self) -> None:
        """Called when the parametrization is removed and the weight stays in its layer."""


class Masked(Parametrization):
    """Effective weight `w_e = w` where a mask is live, and 0 elsewhere, as raw weights are.

    The mask is a bool variable of the weight's shape. A subclass may keep it in another one, such
    as one of bits, by `mask_dtype`, `mask_shape`, `packed` and `unpacked`.
    """

    awaits_values = False
    """Whether the raw weight is set after `build`, so that `build` leaves its values alone."""

    mask_dtype: ClassVar[str] = "bool"
    """The dtype of the mask's variable."""

    def mask_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the mask's variable, for a weight of a shape."""
        return shape

    def packed(self, mask: Tensor) -> Tensor:
        """The value of the mask's variable for a bool tensor of the weight's shape."""
        return mask

    def unpacked(self, value: Tensor) -> Tensor:
        """The inverse of `packed`."""
        return value

    def live_entries(self) -> Tensor:
        """The mask, a bool tensor of the weight's shape."""
        return self.unpacked(self.mask.value)

    def build(
        self, weight: PrunableWeight, add_weight: Callable[..., Any]
    ) -> None:
        self._weight = weight
        self.mask = add_weight(
            name="mask",
            shape=self.mask_shape(weight.shape),
            dtype=self.mask_dtype,
            trainable=False,
            initializer=self._initialize,
        )

    def effective(self, value: Any) -> Any:
        """`where(mask, w, 0)`; unlike a product it gives 0 for masked infinities and gradients."""
        return keras.ops.where(
            self.live_entries(), value, keras.ops.zeros((), dtype=value.dtype)
        )

    def mask_value(self) -> np.ndarray:
        if self.mask_dtype == "bool":
            return to_numpy(self.mask)
        return to_numpy(self.live_entries())

    def support(self) -> list[Any]:
        return [self.mask]

    def assign_mask(self, mask: Any) -> None:
        """Sets another mask, a bool array of the shape, and the raw weight to zero elsewhere."""
        if not keras.ops.is_tensor(mask):
            mask = np.asarray(mask)
        shape, dtype = (
            tuple(mask.shape),
            keras.backend.standardize_dtype(mask.dtype),
        )
        if shape != self.weight.shape or dtype != "bool":
            raise ValueError(
                f"The mask of {self.weight.path!r} must be bool, of shape {self.weight.shape}. "
                f"Received: dtype {dtype}, shape {shape}"
            )
        mask = placed(mask, self.mask)
        # An optimizer may have changed entries that were dead before, too, see `clear_dead`.
        self._clear(keras.ops.logical_and(mask, self.live_entries()))
        assign(self.mask, self.packed(mask))

    def settle(self) -> None:
        self.clear_dead()

    def clear_dead(self) -> None:
        self._clear(self.live_entries())

    @abc.abstractmethod
    def _initial_mask(self) -> np.ndarray:
        """The mask for the weight as it is when the wrapper is built."""

    def _clear(self, mask: Any) -> None:
        raw = self.weight.variable
        assign(
            raw,
            keras.ops.where(
                mask, raw.value, keras.ops.zeros((), dtype=raw.dtype)
            ),
        )

    def _initialize(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        if in_stateless_scope():  # only shapes are traced
            return keras.ops.zeros(shape, dtype=self.mask_dtype)
        mask = self._initial_mask()
        if not self.awaits_values:
            self._clear(placed(mask, self.weight.variable))
        self._weight = dataclasses.replace(self.weight, drawn_mask=None)
        return self.packed(keras.ops.convert_to_tensor(mask))


def quantized_value(
    quantizer: Any, value: np.ndarray, outputs: tuple[int, ...]
) -> np.ndarray:
    if quantizer is None:
        return value
    return to_numpy(quantizer(keras.ops.convert_to_tensor(value), outputs))
