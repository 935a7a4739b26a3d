"""The base of callbacks that do something at certain steps of training."""

from typing import Any

import keras


class StepCallback(keras.callbacks.Callback):
    """Calls `on_step` before every step of training, with the number of steps before it.

    What happens at a step depends on that number and on the model alone, so that a run that is
    resumed from a checkpoint, which Keras saves at the end of a step, goes on as if it had not
    stopped. The number is the optimizer's `iterations`, counted on from the start of the epoch: on
    JAX the optimizer's variables are not up to date while `fit` runs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._epoch_start = 0

    def on_step(self, step: int, executed: int) -> None:
        """To be implemented.

        Args:
            step: Updates of the optimizer so far.
            executed: Updates since the last call: 1, or the model's `steps_per_execution`.
        """
        raise NotImplementedError

    def synced_step(self) -> int:
        """Brings the model's variables up to date; returns the optimizer's `iterations`."""
        self.sync()
        return int(self.model.optimizer.iterations)

    def sync(self) -> None:
        """Brings the model's variables up to date, which JAX keeps elsewhere during `fit`."""
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reads how many steps there were before the epoch."""
        self._epoch_start = self.synced_step()

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Calls `on_step`."""
        self.on_step(self._epoch_start + batch, self.model.steps_per_execution)
