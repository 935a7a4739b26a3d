"""`DensityLogger`: live fractions and thresholds as metrics."""

from typing import Any

import keras

from keras_sparse_ortho._keras_internals import add_to_logs, leave_logs
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.parametrizations import Parametrization


class DensityLogger(keras.callbacks.Callback):
    """Adds density and thresholds of the kernels to the logs of every epoch.

    `density = sum(live) / sum(size)` over all kernels, and, where there are learnt thresholds,
    `threshold`, their mean over the kernels, so that they stand in the progress bar, in `History`,
    in `CSVLogger` and `TensorBoard`, wherever these stand in the list of callbacks, and as
    `val_density` and `val_threshold` beside the validation. `TargetDensity` and `UpdateMasks` add
    the same by themselves. `keras_sparse_ortho.analysis.plot_history` draws them.

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

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Joins the logs."""
        add_to_logs(self.model, self._entries)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the densities to logs that do not have them: of training loops of one's own."""
        if logs is not None and f"{self.prefix}density" not in logs:
            logs.update(self._entries())

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Leaves the logs."""
        leave_logs(self.model)

    def _entries(self) -> dict[str, float]:
        return density_and_threshold(self.model, self.per_layer, self.prefix)


def density_and_threshold(
    model: Any, per_layer: bool = False, prefix: str = ""
) -> dict[str, float]:
    """The entries of `DensityLogger`, for a model as it is now."""
    weights = prunable_weights(model)
    live = {weight.path: weight.live for weight in weights}
    size = sum(weight.size for weight in weights)
    entries = {f"{prefix}density": sum(live.values()) / size}
    thresholds = _thresholds(weights)
    if thresholds:
        entries[f"{prefix}threshold"] = sum(thresholds.values()) / len(thresholds)
    if per_layer:
        for weight in weights:
            entries[f"{prefix}density/{weight.path}"] = live[weight.path] / weight.size
        for path, mean in thresholds.items():
            entries[f"{prefix}threshold/{path}"] = mean
    return entries


def _thresholds(weights: list[PrunableWeight]) -> dict[str, float]:
    """The mean threshold of each weight that has learnt ones."""
    found = {}
    for weight in weights:
        if isinstance(weight.parametrization, Parametrization):
            threshold = weight.parametrization.threshold_value()
            if threshold is not None:
                found[weight.path] = float(threshold.mean())
    return found
