"""`TargetDensity` for tf_keras: learnt thresholds that end at the density asked for."""

from types import SimpleNamespace
from typing import Any

from keras_sparse_ortho import callbacks
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.schedules import Schedule
from keras_sparse_ortho.tfmot._imports import tf_keras
from keras_sparse_ortho.tfmot._soft_threshold_state import SoftThresholdState
from keras_sparse_ortho.tfmot._tf_keras_internals import zero_slots
from keras_sparse_ortho.tfmot._weights import as_numpy, prunable_weights


class TargetDensity(tf_keras.callbacks.Callback):
    """Steers the thresholds of a `prune_with_soft_threshold` model to a global density.

    `keras_sparse_ortho.callbacks.TargetDensity`, which does the work, for tf_keras: all layers
    share an offset `o`, their thresholds are `t_l = g(s_l + o)`, and at the steps of the schedule
    the offset is set so that `round(d(t) * size)` entries are live. At the end the live entries
    are fixed. See there for how.

    Args:
        final_density: Global live fraction in the end, in (0, 1].
        schedule: One of `keras_sparse_ortho.schedules`; its final density is replaced. Default:
            `Cubic` over the first 70% of the run.
        frequency: Steps between two settings of the offset, where no schedule is given.
        freeze: Whether to fix the live entries at the end of the schedule.

    Raises:
        DensityError: A density outside (0, 1].
        NotPrunableError: When training begins, if no weight has a soft threshold.
        ValueError: When training begins without a schedule on data whose length is not known.

    Limits: those of the callback for Keras 3. Together with TFMOT's `UpdatePruningStep` it may
    stand before or after it.

    Example: see `prune_with_soft_threshold`.
    """

    def __init__(
        self,
        final_density: float,
        schedule: Schedule | None = None,
        *,
        frequency: int = 100,
        freeze: bool = True,
    ) -> None:
        super().__init__()
        self._steering = _Steering(final_density, schedule, frequency=frequency, freeze=freeze)
        self._last: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Refuses a model without soft thresholds; lays out the schedule."""
        self._steering.adopt(self.model, self.params)
        self._last = None

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the offset if the schedule says so, and fixes the live entries at its end."""
        step = self._steering.synced_step()
        executed = 1 if self._last is None else step - self._last
        if executed:  # not where a loss scale was too large, and the step left out
            self._last = step
            self._steering.on_step(step, executed)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Does what is due at the last step."""
        self._steering.on_train_end()


class _Steering(callbacks.TargetDensity):
    """The callback for Keras 3, told what it needs to know of a tf_keras model."""

    def adopt(self, model: Any, params: dict[str, Any]) -> None:
        """Takes the place of `on_train_begin`."""
        states = [getattr(weight, "state", None) for weight in prunable_weights(model)]
        found: list[Any] = [state for state in states if isinstance(state, SoftThresholdState)]
        if not found:
            raise NotPrunableError(
                "TargetDensity needs weights with soft thresholds, see keras_sparse_ortho.tfmot."
                f"prune_with_soft_threshold. Received: model={model.name!r} without any"
            )
        self.params = params
        self._watched = SimpleNamespace(optimizer=model.optimizer, steps_per_execution=1)
        self._thresholds = found
        self._all_frozen = all(t.frozen for t in found)
        self._plan = self.schedule or self._default_schedule()

    def on_step(self, step: int, executed: int) -> None:
        self._watched.steps_per_execution = executed  # for the end of the run
        super().on_step(step, executed)

    def sync(self) -> None:
        """Variables of tf_keras are always up to date."""

    def synced_step(self) -> int:
        return int(tf_keras.backend.get_value(self._watched.optimizer.iterations))

    def _set(self, density: float, *, fix: bool) -> None:
        steered: list[Any] = [t for t in self._thresholds if not t.frozen]
        super()._set(density, fix=fix)
        for state in steered:
            if state.frozen:
                zero_slots(self._watched.optimizer, state.raw, as_numpy(state.raw) == 0)
            else:
                state.settle()
