"""`DensityRun`: callbacks that bring a model to a density, and say so if it is not there."""

import abc
from collections.abc import Sequence
from typing import Any

from keras_sparse_ortho._keras_internals import add_to_logs, after_fit, leave_logs
from keras_sparse_ortho.callbacks._step_callback import StepCallback
from keras_sparse_ortho.models import warn_of_gap, watch_saving
from keras_sparse_ortho.parametrizations import DensityGap, density_gap


class DensityRun(StepCallback):
    """The end of a run: what is due at its last step is done, or it is said why it was not.

    Callbacks such as `EarlyStopping` restore weights of an earlier epoch when training ends, before
    or after this one. These are left as they are, and not pruned at once without training: a
    warning names the density that they have. It is looked at when all callbacks are done.
    """

    def __init__(self) -> None:
        super().__init__()
        self._at_epoch_end: list[Any] | None = None
        self._last_step = 0

    @abc.abstractmethod
    def parametrizations(self) -> Sequence[Any]:
        """Those of the model that this callback brings to a density."""

    @abc.abstractmethod
    def logged(self) -> dict[str, float]:
        """What to add to the logs."""

    @abc.abstractmethod
    def state(self) -> list[Any]:
        """What this callback has set in the model, so that it shows if weights were restored."""

    @abc.abstractmethod
    def end_step(self) -> int | None:
        """The step at which the last schedule ends."""

    @abc.abstractmethod
    def finish_run(self, step: int) -> None:
        """Does what is due at the last step."""

    def prepare(self) -> None:
        """Joins the logs."""
        self._at_epoch_end = None
        watch_saving(self._watched, False)
        add_to_logs(self._watched, self.logged)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the state of the model as training has left it; adds to logs without entries."""
        self.sync()
        self._at_epoch_end = self.state()
        if logs is not None and not logs.keys() >= (entries := self.logged()).keys():
            logs.update(entries)

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Does what is due at the last step, unless weights were restored; then looks for a gap."""
        super().on_train_end(logs)
        leave_logs(self._watched)
        self._last_step = self.synced_step()
        if not self._were_restored():
            self.finish_run(self._last_step)
            self._at_epoch_end = self.state()
        after_fit(self._watched, self._look_for_gap)

    def _were_restored(self) -> bool:
        return self._at_epoch_end is not None and self._at_epoch_end != self.state()

    def _look_for_gap(self) -> None:
        gap = density_gap(self.parametrizations())
        watch_saving(self._watched, gap is not None)
        if gap is not None:
            warn_of_gap(gap, self._reason(gap))

    def _reason(self, gap: DensityGap) -> str:
        end, step = self.end_step(), self._last_step
        if self._were_restored():
            return (
                "weights of an earlier epoch were restored when training ended. Put "
                "callbacks.BestAtDensity around EarlyStopping and ModelCheckpoint, so that epochs "
                "count once the density is reached"
            )
        if end is None or step >= end:
            if gap.live < gap.asked:
                return "more entries than that are 0"
            return "what is live was fixed before, by another run"
        if self._watched.stop_training:
            return f"training was stopped at step {step}, before the schedule ends at step {end}"
        return (
            f"the schedule ends at step {end}, and the run at step {step}. Parts of a run, as in "
            "schedules.Cubic(0.1, begin_step=0.0, end_step=0.7), follow its length"
        )
