"""`UpdateMasks`: renews scheduled masks."""

from typing import Any

from keras_sparse_ortho._optimizer_slots import zero_slots
from keras_sparse_ortho.callbacks._step_callback import StepCallback
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.parametrizations import ScheduledMask


class UpdateMasks(StepCallback):
    """Renews the masks of `MagnitudeMask` and `StraightThroughTopK` at the steps of their schedule.

    Before step `t` every weight whose schedule is due gets the mask of its
    `round(d(t) * size)` largest magnitudes. Raw weights that a `MagnitudeMask` drops are set to
    zero, and so are their moments and averages in the optimizer. What is due at the last step of a
    run is done when it ends.

    A mask is a variable, so nothing is recompiled; the callback holds no state, so that a run
    resumed from a checkpoint equals one that was not interrupted. With `steps_per_execution` of
    more than 1 a renewal waits for the end of the execution.

    Raises:
        NotPrunableError: When training begins, if no weight has a scheduled mask.

    Limits: ranking is done on the host, with NumPy: its cost is that of copying the weights there
    every `frequency` steps.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    >>> model = kso.parametrize(dense, kso.parametrizations.MagnitudeMask(0.25, frequency=2))
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0, callbacks=[UpdateMasks()])
    >>> round(kso.prunable_weights(model)[0].density, 3)
    0.25
    """

    def __init__(self) -> None:
        super().__init__()
        self._scheduled: list[ScheduledMask] = []

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses a model without scheduled masks."""
        weights = prunable_weights(self.model)
        parametrizations = [weight.parametrization for weight in weights]
        self._scheduled = [p for p in parametrizations if isinstance(p, ScheduledMask)]
        if not self._scheduled:
            raise NotPrunableError(
                "UpdateMasks needs weights with MagnitudeMask or StraightThroughTopK, see "
                f"keras_sparse_ortho.parametrize. Received: model={self.model.name!r} without any"
            )

    def on_step(self, step: int, executed: int) -> None:
        """Renews the masks that are due."""
        due = [mask for mask in self._scheduled if mask.schedule.due(step, executed)]
        if due:
            self.sync()
        for parametrization in due:
            forgotten = parametrization.renew(step)
            zero_slots(self._watched.optimizer, parametrization.weight.variable, forgotten)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Renews the masks that are due at the last step."""
        self.on_step(self.synced_step(), self._watched.steps_per_execution)
