"""`LearntThreshold`: the base of parametrizations with a trainable threshold."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.parametrizations._parametrization import Parametrization
from keras_sparse_ortho.parametrizations._regularization import add_weight_decay
from keras_sparse_ortho.parametrizations._threshold_functions import (
    ThresholdFunction,
    threshold_function,
)


class LearntThreshold(Parametrization):
    """A threshold `t = g(s)` with a trainable `s`, which `callbacks.TargetDensity` can steer.

    While it is steered `t = g(s + offset)`, and 0 once it is frozen. Subclasses say what the
    threshold is compared with, in `effective`, `critical_offsets` and `freeze`, and what it is that
    `TargetDensity` counts (`counted`).

    Args:
        g: `"sigmoid"`, `"exp"`, `"softplus"`, or a `ThresholdFunction`.
        s_init: What `s` starts from.
        weight_decay: Strength `lambda` of the L2 that is added to the loss for the trained
            variables, `lambda / 2 * sum(v ** 2)` each.

    Raises:
        ValueError: An unknown function, a negative strength, an `s_init` that is not finite.
    """

    counted = "entries"

    def __init__(self, g: str | ThresholdFunction, s_init: float, weight_decay: float) -> None:
        if isinstance(g, dict):  # from a configuration
            g = keras.saving.deserialize_keras_object(g)
        if not np.isfinite(s_init):
            raise ValueError(f"`s_init` must be finite. Received: s_init={s_init!r}")
        if not weight_decay >= 0:
            raise ValueError(
                f"`weight_decay` must not be negative. Received: weight_decay={weight_decay!r}"
            )
        self.g = g
        self.s_init = float(s_init)
        self.weight_decay = float(weight_decay)
        self._function = threshold_function(g)
        self._weight: PrunableWeight | None = None
        self.s: Any = None
        self.offset: Any = None
        self.active: Any = None
        self._target: Any = None

    @property
    def weight(self) -> PrunableWeight:
        """The weight it was built for."""
        if self._weight is None:
            raise ValueError(
                f"This {type(self).__name__} is not built: wrap a layer with it and build that"
            )
        return self._weight

    def _build_threshold(
        self,
        weight: PrunableWeight,
        add_weight: Callable[..., Any],
        shape: tuple[int, ...] = (),
        shared: bool = False,
    ) -> None:
        """Creates `s`, and the offset and switch by which `TargetDensity` steers it."""
        weight.finite_raw_value()
        self._weight = dataclasses.replace(weight, drawn_mask=None)
        self.s = add_weight(
            name="s",
            shared=shared,
            shape=shape,
            initializer=keras.initializers.Constant(self.s_init),
            trainable=True,
        )
        # Non-trainable: t = g(s + offset) while active, and 0 once frozen.
        self.offset = add_weight(name="s_offset", shape=(), initializer="zeros", trainable=False)
        self.active = add_weight(name="s_active", shape=(), initializer="ones", trainable=False)
        # What TargetDensity was asked for, 0 if nothing; and 1 if the live entries are to be fixed.
        self._target = add_weight(name="s_target", shape=(2,), initializer="zeros", trainable=False)
        if self.weight_decay and self.s.regularizer is None:  # a shared one decays once
            add_weight_decay(self.s, self.weight_decay)

    def _threshold(self) -> Any:
        t = self._function.forward(self.s.value + self.offset.value)
        # Not a product: an inactive threshold is 0 even where g overflows.
        return keras.ops.where(self.active.value > 0, t, keras.ops.zeros((), dtype=t.dtype))

    def threshold_value(self) -> np.ndarray:
        """The threshold `t`: one value, or one for each output."""
        return np.ravel(to_numpy(self._threshold()))

    @property
    def frozen(self) -> bool:
        """Whether the threshold is 0 for good, and the live entries are fixed."""
        return not float(to_numpy(self.active))

    @property
    def steered(self) -> Any:
        """The variable whose entries the threshold takes."""
        return self.weight.variable

    def aim(self, density: float, freeze: bool) -> None:
        """Notes the density that `TargetDensity` was asked for; it is saved with the weight.

        Args:
            density: Live fraction of all steered weights together.
            freeze: Whether the live entries are to be fixed there.
        """
        assign(self._target, np.array([density, freeze], np.float32))

    @property
    def target_density(self) -> float | None:
        """The density, of all steered weights, that was asked for; `None` if none was."""
        density = to_numpy(self._target)[0]
        return float(f"{density:.7g}") if density else None  # 0.1, which float32 has not

    @property
    def target_is_frozen(self) -> bool:
        """Whether the live entries are to be fixed at that density."""
        return bool(to_numpy(self._target)[1])

    def counts(self) -> tuple[int, int]:
        """How many of what `TargetDensity` counts are live now, and how many there are."""
        mask = self.mask_value()
        return int(np.count_nonzero(mask)), mask.size

    @property
    def dies_at_once(self) -> int:
        """How many of them die together."""
        return 1

    def magnitudes(self) -> tuple[PrunableWeight, np.ndarray, Callable[..., np.ndarray]] | None:
        """The weight, `s` and `g^-1`, if an entry dies at `g^-1(|w|) - s`; else `None`.

        Then its entries can be ranked where they are, and need not be copied for that.
        """
        return None

    @abc.abstractmethod
    def critical_offsets(self) -> np.ndarray:
        """For every entry of `steered` the offset at which it dies, as a NumPy array.

        An entry is live while the offset is below its critical one. So the offset between the
        k-th and the next largest, over all weights, leaves exactly k entries live.
        """

    @abc.abstractmethod
    def freeze(self, mask: Any) -> Any:
        """Fixes which entries are live: the threshold becomes 0, dead entries stay 0.

        Args:
            mask: Which entries of `steered` are to be live; in NumPy, or a tensor.

        Returns:
            Which are; in NumPy, or a tensor.
        """

    def arguments(self) -> dict[str, Any]:
        """Those of the constructor."""
        return {"g": self.g, "s_init": self.s_init, "weight_decay": self.weight_decay}

    def get_config(self) -> dict[str, Any]:
        """The arguments, as JSON values."""
        g = self.g if isinstance(self.g, str) else keras.saving.serialize_keras_object(self.g)
        return {**self.arguments(), "g": g}

    def clone(self) -> "LearntThreshold":
        """An unbuilt one with the same settings, for another weight."""
        return type(self)(**self.arguments())
