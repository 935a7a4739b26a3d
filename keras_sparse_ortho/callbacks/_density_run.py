"""`DensityLogger`, and `DensityRun`, the base of callbacks that bring a model to a density."""

import abc
import warnings
from typing import Any

from keras_sparse_ortho._keras_internals import after_fit, level_of_user
from keras_sparse_ortho.callbacks._step_callback import Logging, StepCallback
from keras_sparse_ortho.errors import DensityWarning, NotPrunableError
from keras_sparse_ortho.models import (
    DensityGap,
    density_gap,
    prunable_weights,
    warn_of_gap,
    watch_saving,
)
from keras_sparse_ortho.parametrizations import Parametrization


class DensityLogger(Logging):
    """Adds density and thresholds of the kernels to the logs of every epoch.

    `density = sum(live) / sum(size)` over all kernels, and, where there are learnt thresholds,
    `threshold`, their mean over the kernels. `History`, the progress bar, and all callbacks of the
    list have them. `TargetDensity` and `UpdateMasks` add the same by
    themselves.

    Args:
        per_layer: Whether to add `density/<path>` and `threshold/<path>` (the mean over channels)
            for each kernel as well.
        prefix: Put before the names, e.g. `"pruned_"`.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> model = kso.sparsify(keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)]), 0.25)
    >>> model.compile("sgd", "mse")
    >>> history = model.fit(np.ones((8, 8)), np.ones((8, 4)), verbose=0,
    ...                     callbacks=[kso.callbacks.DensityLogger()])
    >>> history.history["density"]
    [0.25]
    """

    def __init__(self, per_layer: bool = False, prefix: str = "") -> None:
        super().__init__()
        self.per_layer = per_layer
        self.prefix = prefix

    def logged(self) -> dict[str, float]:
        """Density and thresholds of the model as it is now."""
        return density_and_threshold(self.model, self.per_layer, self.prefix)


def density_and_threshold(
    model: Any, per_layer: bool = False, prefix: str = ""
) -> dict[str, float]:
    """The entries of `DensityLogger`, for a model as it is now."""
    weights = prunable_weights(model)
    live = {weight.path: weight.live for weight in weights}
    size = sum(weight.size for weight in weights)
    entries = {f"{prefix}density": sum(live.values()) / size}
    thresholds = {}
    for weight in weights:
        if isinstance(weight.parametrization, Parametrization):
            threshold = weight.parametrization.threshold_value()
            if threshold is not None:
                thresholds[weight.path] = float(threshold.mean())
    if thresholds:
        entries[f"{prefix}threshold"] = sum(thresholds.values()) / len(thresholds)
    if per_layer:
        for weight in weights:
            entries[f"{prefix}density/{weight.path}"] = live[weight.path] / weight.size
        for path, mean in thresholds.items():
            entries[f"{prefix}threshold/{path}"] = mean
    return entries


class DensityRun(StepCallback):
    """A callback that brings a model to a density, and warns when the run ends without it.

    Weights of an earlier epoch, which `EarlyStopping` may restore before or after this callback,
    are not pruned, as no training would follow. The density is checked when all callbacks are done.
    """

    _kind: type[Parametrization]
    _names: str

    def __init__(self) -> None:
        super().__init__()
        # The parametrizations of `_kind` that this callback brings to a density.
        self._own: list[Any] = []
        self._at_epoch_end: list[Any] | None = None
        self._last_step = 0
        # Why the last step could not do what was due.
        self._not_finite: NotPrunableError | None = None

    def logged(self) -> dict[str, float]:
        """What to add to the logs of an epoch."""
        return density_and_threshold(self._watched)

    @abc.abstractmethod
    def state(self) -> list[Any]:
        """What this callback has set in the model; it differs once weights were restored."""

    @abc.abstractmethod
    def end_step(self) -> int | None:
        """The step at which the last schedule ends."""

    @abc.abstractmethod
    def finish_run(self, step: int) -> None:
        """Does what is due at the last step."""

    def prepare(self) -> None:
        """Refuses a model without such parametrizations, and forgets the run before."""
        found = [weight.parametrization for weight in prunable_weights(self._watched)]
        self._own = [own for own in found if isinstance(own, self._kind)]
        if not self._own:
            raise NotPrunableError(
                f"{type(self).__name__} needs weights with {self._names}, see "
                "keras_sparse_ortho.parametrize. "
                f"Received: model={self._watched.name!r} without any"
            )
        self._at_epoch_end = self._not_finite = None
        watch_saving(self._watched, False)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Notes the state of the model as training has left it, and adds to the logs."""
        super().on_epoch_end(epoch, logs)
        self.sync()
        self._at_epoch_end = self.state()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Does what is due at the last step, unless weights were restored; checks the density."""
        super().on_train_end(logs)
        self._last_step = self.synced_step()
        if not self.in_loop and not self._were_restored():
            try:
                self.finish_run(self._last_step)
            except NotPrunableError as error:  # an error here would cost `fit` its History
                self._not_finite = error
            self._at_epoch_end = self.state()
        after_fit(self._watched, self._check_density)

    def _were_restored(self) -> bool:
        return self._at_epoch_end is not None and self._at_epoch_end != self.state()

    def _check_density(self) -> None:
        if self._not_finite is not None:
            warnings.warn(
                f"{type(self).__name__} could not bring the weights to their density after the "
                "last step, as the run has left infinite or NaN ones. Train again, with a lower "
                f"learning rate or other data. Received: {self._not_finite}",
                DensityWarning,
                stacklevel=level_of_user(),
            )
            return
        gap = density_gap(self._own)
        watch_saving(self._watched, gap is not None)
        if gap is not None:
            warn_of_gap(gap, self._reason(gap))

    def _reason(self, gap: DensityGap) -> str:
        end, step = self.end_step(), self._last_step
        if self._were_restored():
            return (
                "weights of an earlier epoch were restored when training ended. Wrap EarlyStopping "
                "and ModelCheckpoint in callbacks.BestAtDensity, so that only epochs at that "
                "density count"
            )
        if end is None or step >= end:
            if gap.live < gap.asked:
                return "more entries than that are already 0"
            return "the live entries were fixed before, by another run"
        if getattr(self._watched, "stop_training", False):
            return f"training was stopped at step {step}, before the schedule ends at step {end}"
        return (
            f"the schedule ends at step {end}, and the run at step {step}. Fractions of a run, as "
            "in schedules.Cubic(0.1, begin_step=0.0, end_step=0.7), follow its length"
        )
