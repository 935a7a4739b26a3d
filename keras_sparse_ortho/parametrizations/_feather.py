"""`Feather`: masks by magnitude under a smooth threshold, with damped gradients of dead entries."""

from collections.abc import Callable
from typing import Any

import keras

from keras_sparse_ortho._checks import check_number
from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.parametrizations._scheduled_mask import StraightThroughTopK

_LEAST = 1e-6  # of 1 - (T / |w|)^p, where a live entry has fallen below T between two updates
_TINY = 1e-7  # also in float16


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class Feather(StraightThroughTopK):
    """Effective weight `w_e = w (1 - (T / |w|)^p)^(1/p)` on the largest magnitudes, 0 elsewhere.

    `T` is the largest magnitude outside the mask, so entries enter and leave the mask at the value
    0, as under a soft threshold; far above it they are as large as without. At the steps of the
    schedule `callbacks.UpdateMasks` ranks `|w|` (ties to the lower flat index), and stores the mask
    of the `round(d(t) * size)` largest and `T`. Gradients pass straight through the threshold, to
    dead entries by a share:

        dL/dw = dL/dw_e on the mask, theta dL/dw_e elsewhere

    Args:
        schedule: As for `MagnitudeMask`.
        frequency: As for `MagnitudeMask`.
        power: `p`, greater than 0. 1 is the soft threshold; the larger, the nearer to
            `StraightThroughTopK`.
        theta: The share of the gradients that dead entries get, in [0, 1].

    Raises:
        ValueError: `power` or `theta` out of range.
        NotPrunableError: If the weight is not finite.

    Limits: raw weights, their gradients and optimizer slots are dense, as is the start of most
    schedules.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> template = Feather(kso.schedules.Cubic(begin_step=0, end_step=4, frequency=2))
    >>> model = kso.parametrize(dense, template, density=0.25)
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((16, 8)), np.ones((16, 4)), batch_size=2, verbose=0,
    ...                     callbacks=[kso.callbacks.UpdateMasks()])
    >>> kso.prunable_weights(model)[0].live
    8

    Reference:

    - Glentis Georgoulakis, Retsinas and Maragos, "Feather" (2023), arXiv 2310.02448
    """

    @other_keywords()
    def __init__(
        self,
        schedule: Any = None,
        frequency: int | None = None,
        power: float = 3.0,
        theta: float = 0.3,
    ) -> None:
        super().__init__(schedule, frequency)
        self.power, self.theta = check_number("power", power), check_number("theta", theta)
        if self.power <= 0:
            raise ValueError(f"`power` must be greater than 0. Received: power={power!r}")
        if not 0 <= self.theta <= 1:
            raise ValueError(f"`theta` must be in [0, 1]. Received: theta={theta!r}")
        self._threshold: Any = None

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        super().build(weight, add_weight)
        self._threshold = add_weight(
            name="threshold", shape=(), trainable=False, initializer=self._largest_dead
        )

    def effective(self, value: Any) -> Any:
        """The thresholded value, exactly 0 outside the mask."""
        ops = keras.ops
        threshold = ops.cast(self._threshold.value, value.dtype)
        ratio = threshold / ops.maximum(ops.abs(value), _TINY)
        shares = ops.maximum(1 - ratio**self.power, _LEAST) ** (1 / self.power)
        mask, zero = self.mask.value, ops.zeros((), dtype=value.dtype)
        passed = value * ops.where(mask, ops.ones((), dtype=value.dtype), self.theta)
        return passed + ops.stop_gradient(ops.where(mask, value * shares, zero) - passed)

    def assign_mask(self, mask: Any) -> None:
        super().assign_mask(mask)
        self._set_threshold()

    def settle(self) -> None:
        super().settle()
        self._set_threshold()

    def arguments(self) -> dict[str, Any]:
        return {**super().arguments(), "power": self.power, "theta": self.theta}

    def _set_threshold(self) -> None:
        assign(self._threshold, self._largest_dead())

    def _largest_dead(self, shape: tuple[int, ...] = (), dtype: Any = None) -> Any:
        magnitudes = keras.ops.abs(self.weight.variable.value)
        dead = keras.ops.where(self.mask.value, keras.ops.zeros_like(magnitudes), magnitudes)
        return keras.ops.cast(keras.ops.max(dead), dtype or self._threshold.dtype)
