"""The base of parametrizations with a stored mask."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import in_stateless_scope
from keras_sparse_ortho._values import assign, placed, to_numpy
from keras_sparse_ortho.initializers import are_weights_set_later
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.parametrizations._parametrization import Parametrization


class Masked(Parametrization):
    """Effective weight `w_e = w` where a stored mask is live, and exactly 0 elsewhere.

    The mask is a bool variable, so that it can change without recompiling and is saved. Subclasses
    say in `_initial_mask` what it is at first. Raw weights are zero where it is not live.
    """

    def __init__(self) -> None:
        self._weight: PrunableWeight | None = None
        self.mask: Any = None

    @property
    def weight(self) -> PrunableWeight:
        """The weight it was built for."""
        if self._weight is None:
            name = type(self).__name__
            raise ValueError(f"This {name} is not built: wrap a layer with it and build that.")
        return self._weight

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        """Creates the mask as a bool variable that is saved with the model."""
        self._weight = weight
        self.mask = add_weight(
            name="mask",
            shape=weight.shape,
            dtype="bool",
            trainable=False,
            # As an initializer, so that a layer built inside a scope that only traces shapes gets
            # its mask when Keras initializes the variables after it.
            initializer=self._initialize,
        )

    def effective(self, value: Any) -> Any:
        """`where(mask, w, 0)`; unlike a product it gives 0 for masked infinities and gradients."""
        return keras.ops.where(self.mask.value, value, keras.ops.zeros((), dtype=value.dtype))

    def mask_value(self) -> np.ndarray:
        """Which entries are live, as a NumPy bool array."""
        return to_numpy(self.mask)

    def support(self) -> list[Any]:
        """The mask."""
        return [self.mask]

    def assign_mask(self, mask: Any) -> None:
        """Sets another mask, and the raw weight to zero where it is not live.

        Args:
            mask: Bool array of the weight's shape; a tensor is not copied to the host.
        """
        if not keras.ops.is_tensor(mask):
            mask = np.asarray(mask)
        shape, dtype = tuple(mask.shape), keras.backend.standardize_dtype(mask.dtype)
        if shape != self.weight.shape or dtype != "bool":
            raise ValueError(
                f"The mask of '{self.weight.path}' is a bool array of shape {self.weight.shape}. "
                f"Received: dtype {dtype}, shape {shape}"
            )
        mask = placed(mask, self.mask)
        # What was dead is zero for sure only after this: see `clear_dead`.
        self._clear(keras.ops.logical_and(mask, self.mask.value))
        assign(self.mask, mask)

    def settle(self) -> None:
        """Sets the raw weight to zero where the mask is not live."""
        self.clear_dead()

    def clear_dead(self) -> None:
        """Sets the raw weight to zero where the mask is not live."""
        self._clear(self.mask.value)

    @abc.abstractmethod
    def _initial_mask(self) -> np.ndarray:
        """The mask for the weight as it is when the wrapper is built."""

    def _clear(self, mask: Any) -> None:
        raw = self.weight.variable
        assign(raw, keras.ops.where(mask, raw.value, keras.ops.zeros((), dtype=raw.dtype)))

    def _initialize(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        if in_stateless_scope():  # a placeholder, of which Keras only uses the shape
            return keras.ops.zeros(shape, dtype="bool")
        mask = self._initial_mask()
        if not are_weights_set_later():
            self._clear(placed(mask, self.weight.variable))
        # From here on the variable holds it.
        self._weight = dataclasses.replace(self.weight, drawn_mask=None)
        return keras.ops.convert_to_tensor(mask)
