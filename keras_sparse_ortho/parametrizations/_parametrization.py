"""The base of parametrizations: how a raw variable becomes the effective weight."""

import abc
from collections.abc import Callable
from typing import Any

import numpy as np

from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, Storage


class Parametrization(Storage):
    """Maps the raw value `w` of one weight to the effective weight `w_e` that its layer uses.

    A parametrization is small and belongs to one weight. `PrunableLayer` makes one for each weight
    from a template (`from_config(get_config())`), calls `build` once, and `effective` in every
    step; gradients are those of `effective`. Its state are variables of the wrapper, created by
    `add_weight`, so that they are saved, loaded, and passed through compiled steps.

    Subclasses implement `build`, `effective`, `mask_value` and `get_config`, and `for_density` if
    a budget can say how much of the weight is live.
    """

    @abc.abstractmethod
    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        """Creates the state for `weight` with the wrapper's `add_weight`.

        That is Keras' own, with names that are unique to the weight; with `shared=True` all
        weights of the wrapper get one variable of that name.
        """

    @abc.abstractmethod
    def effective(self, value: Any) -> Any:
        """The effective weight for the raw value, both tensors of one shape and dtype."""

    @abc.abstractmethod
    def get_config(self) -> dict[str, Any]:
        """JSON values from which `from_config` makes an unbuilt clone."""

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Parametrization":
        """The reverse of `get_config`."""
        return cls(**config)

    def clone(self) -> "Parametrization":
        """An unbuilt parametrization with the same settings, for another weight."""
        return type(self).from_config(self.get_config())

    def without_given(self) -> "Parametrization":
        """One of the same configuration, without arrays that were given."""
        return self

    def for_density(self, density: float) -> "Parametrization":
        """An unbuilt clone whose weight has this density in the end: a share of a budget.

        Raises:
            NotPrunableError: A parametrization whose density is learnt.
        """
        raise NotPrunableError(
            f"{type(self).__name__} takes no density: it is learnt. Leave `density` and `budget` "
            f"out, or steer it by a callback. Received: density={density!r}"
        )

    @property
    def parametrization(self) -> "Parametrization":
        """Itself."""
        return self

    def value(self) -> np.ndarray:
        """The effective weight as a NumPy array (bfloat16 as float32)."""
        return to_numpy(self.current())

    def current(self, after: Any = None) -> Any:
        """The effective weight as it is now, a tensor.

        Args:
            after: A tensor for which a temporary of the step may wait; see `CompactMask`.
        """
        return self.effective(self.weight.variable.value)

    def assign_raw(self, value: Any) -> None:
        """Sets the raw weight."""
        assign(self.weight.variable, value)

    def mark_as_drawn(self, kernel: Any = None) -> None:  # most do not tell
        """Notes that the raw weight is what a sparse initializer has drawn."""

    def clear_dead(self) -> None:
        """Called before the raw weight is saved or ranked, where dead entries have no part.

        Their gradients are zero, and so are their updates, but for an optimizer that mixes the
        entries of a matrix, as Muon does. Effective weights do not depend on them. It cannot be
        done in the step itself: on JAX an optimizer's step has no access to masks.
        """

    def threshold_value(self) -> np.ndarray | None:
        """The magnitudes below which entries are dead, as a NumPy array; `None` without any."""
        return None

    @property
    def layer_variable(self) -> Any:
        """The variable that the layer reads, in whose place it gets the effective weight."""
        return self.weight.variable

    def materialize(self) -> None:
        """Sets the raw weight to the effective one."""
        self.assign_raw(self.current())

    def release(self) -> None:
        """Called when the weight stays in its layer as it is, and the parametrization goes."""
