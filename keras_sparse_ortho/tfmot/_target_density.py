"""`TargetDensity` for tf_keras: learnt thresholds that end at a given density."""

from typing import Any

from keras_sparse_ortho.callbacks import ThresholdSteering
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.schedules import as_schedule
from keras_sparse_ortho.tfmot._prune_with_soft_threshold import SoftThresholdState
from keras_sparse_ortho.tfmot._tf_keras_internals import tf_keras, zero_slots
from keras_sparse_ortho.tfmot._weights import as_numpy, prunable_weights


class TargetDensity(tf_keras.callbacks.Callback):
    """Steers the thresholds of a `prune_with_soft_threshold` model to a global density.

    `keras_sparse_ortho.callbacks.TargetDensity` for tf_keras: all layers share an offset `o`,
    their thresholds are `t_l = g(s_l + o)`, and at the steps of the schedule the offset is set so
    that `round(d(t) * size)` entries are live. At the end the live entries are fixed.

    Args:
        final_density: Final global live fraction, in (0, 1].
        schedule: One of `keras_sparse_ortho.schedules`, or of TFMOT's; its final density is
            replaced. Default: `Cubic` over the first 70% of the run.
        frequency: Steps between two updates of the offset, if there is no schedule.
        freeze: Whether to fix the live entries at the end of the schedule.

    Raises:
        DensityError: A density outside (0, 1].
        NotPrunableError: When training begins, if no weight has a soft threshold.
        ValueError: When training begins without a schedule on data of unknown length.

    In a custom training loop call it as TFMOT's callbacks: `set_model(model)`, `on_train_begin()`,
    `on_train_batch_begin(...)` before each step, `on_epoch_end(...)`, and `on_train_end()` for the
    last step. Steps are those of `model.optimizer` if there is one, else the calls of
    `on_train_batch_begin`. It needs a `schedule` there, as the length of the training is unknown.

    Limits: those of the callback for Keras 3. It may come before or after `UpdatePruningStep`.

    Example: see `prune_with_soft_threshold`.
    """

    def __init__(
        self,
        final_density: float,
        schedule: Any = None,
        *,
        frequency: int = 100,
        freeze: bool = True,
    ) -> None:
        super().__init__()
        plan = None if schedule is None else as_schedule(schedule)
        self._steering = ThresholdSteering(final_density, plan, frequency, freeze)
        self._last: int | None = None
        self._executed, self._calls = 1, 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resolves the schedule; raises for a model without soft thresholds."""
        states = [getattr(weight, "state", None) for weight in prunable_weights(self.model)]
        thresholds = [state for state in states if isinstance(state, SoftThresholdState)]
        if not thresholds:
            raise NotPrunableError(
                "TargetDensity needs weights with soft thresholds, see keras_sparse_ortho.tfmot."
                f"prune_with_soft_threshold. Received: model={self.model.name!r} without any"
            )
        params = getattr(self, "params", None) or {}  # none in a custom loop
        self._steering.begin(thresholds, params.get("epochs"), params.get("steps"))
        self._last = None
        self._executed, self._calls = 1, 0

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Sets the offset at the steps of the schedule, and fixes the live entries at its end."""
        step = self._step()
        self._calls += 1
        executed = 1 if self._last is None else step - self._last
        if executed:  # no update after a step that loss scaling skipped
            self._last, self._executed = step, executed
            if self._steering.is_due(step, executed):
                self._steer(step)

    def on_epoch_end(self, epoch: int = -1, logs: Any = None, *, batch: int = -1) -> None:
        """Fixes the live entries if the schedule has ended, for loops without `on_train_end`.

        (TFMOT's callbacks call the first argument `batch`, and so do loops written for them.)
        """
        step = self._step()
        if self._steering.freeze and self._steering.has_ended(step):
            self._steer(step)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Does what is due at the last step."""
        step = self._step()
        if self._steering.is_due_at_end(step, self._executed):
            self._steer(step)

    def _step(self) -> int:
        optimizer = getattr(self.model, "optimizer", None)
        if optimizer is None:
            return self._calls
        return int(tf_keras.backend.get_value(optimizer.iterations))

    def _steer(self, step: int) -> None:
        state: Any
        for state, _ in self._steering.steer(step):
            zero_slots(self.model.optimizer, state.raw, as_numpy(state.raw) == 0)
        for state in self._steering.thresholds:  # frozen ones are up to date
            state.settle()
