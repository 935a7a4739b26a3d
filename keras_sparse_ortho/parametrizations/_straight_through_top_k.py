"""`StraightThroughTopK`: top-k in the forward pass, a dense gradient in the backward pass."""

from typing import Any

import keras

from keras_sparse_ortho._values import assign
from keras_sparse_ortho.parametrizations._scheduled_mask import ScheduledMask


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class StraightThroughTopK(ScheduledMask):
    """Effective weight `w_e = w` on the largest magnitudes, with `dL/dw = dL/dw_e` everywhere.

    The straight-through estimator of "Discovering Neural Wirings" (DNW): the forward pass uses the
    `round(d * size)` largest magnitudes (ties to the lower flat index), the gradient passes to all
    raw weights, so that dead entries grow and come back. The callback
    `keras_sparse_ortho.callbacks.UpdateMasks` renews the stored mask every `frequency` steps.

    Args:
        schedule: The density `d`, in (0, 1], or a schedule of it.
        frequency: Steps between renewals where `schedule` is a density. Default: 1, as in the
            paper. Dead entries move by gradients that their own values do not change, and between
            two renewals nothing holds them back: the more steps, the more of the mask is
            exchanged at once, which can cost a network many points of accuracy.

    Raises:
        NotPrunableError: If the weight is not finite.

    Limits: raw weights, their gradients and optimizer slots are dense; only `strip` and the
    forward pass are sparse. Every renewal ranks all weights: on CPUs in NumPy, which can take as
    long as a step of a small network. `MagnitudeMask` has sparse gradients, and few renewals.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="head")])
    >>> model = kso.parametrize(dense, StraightThroughTopK(0.25))
    >>> kso.prunable_weights(model)
    [<head/kernel shape=(8, 4), density=0.25>]

    Reference:

    - Wortsman, Farhadi and Rastegari, "Discovering Neural Wirings" (NeurIPS 2019), arXiv 1906.00586
    """

    def __init__(self, schedule: Any, frequency: int | None = 1) -> None:
        super().__init__(schedule, frequency)

    def effective(self, value: Any) -> Any:
        """`w + stop_gradient(where(mask, w, 0) - w)`, which is exactly `w` or exactly 0."""
        return value + keras.ops.stop_gradient(super().effective(value) - value)

    def settle(self) -> None:
        """Ranks the raw weight as it is now."""
        assign(self.mask, self._initial_mask())

    def _initial_mask(self) -> Any:
        return self._ranked(self.schedule.at_start())

    def _clear(self, mask: Any) -> None:
        """Nothing: raw weights stay, so that dead entries can come back."""

    def _forgotten(self, mask: Any) -> None:
        """Nothing, for the same reason."""
