"""`DensityLogger`: live fractions and thresholds as metrics."""

from typing import Any

import keras

from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.parametrizations import Parametrization


class DensityLogger(keras.callbacks.Callback):
    """Adds density and thresholds of the kernels to the logs of every epoch.

    `density = sum(live) / sum(size)` over all kernels, and, where there are learnt thresholds,
    `threshold`, their mean over the kernels, so that they stand in the progress bar, in `History`,
    and, for callbacks after this one in the list, in `CSVLogger` and `TensorBoard`.
    `keras_sparse_ortho.analysis.plot_history` draws them.

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

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds the densities to `logs`."""
        if logs is None:
            return
        weights = prunable_weights(self.model)
        live = {weight.path: weight.live for weight in weights}
        size = sum(weight.size for weight in weights)
        logs[f"{self.prefix}density"] = sum(live.values()) / size
        if self.per_layer:
            for weight in weights:
                logs[f"{self.prefix}density/{weight.path}"] = live[weight.path] / weight.size
        self._add_thresholds(logs, weights)

    def _add_thresholds(self, logs: dict[str, Any], weights: list[PrunableWeight]) -> None:
        means = {}
        for weight in weights:
            if not isinstance(weight.parametrization, Parametrization):
                continue
            threshold = weight.parametrization.threshold_value()
            if threshold is not None:
                means[weight.path] = float(threshold.mean())
        if not means:
            return
        logs[f"{self.prefix}threshold"] = sum(means.values()) / len(means)
        if self.per_layer:
            for path, mean in means.items():
                logs[f"{self.prefix}threshold/{path}"] = mean
