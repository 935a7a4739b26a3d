"""`restore_statistics`: estimates means and variances of batch normalization again."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.calibration._layerwise import calibration_batches, sweep
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.models import check_built


@other_keywords
def restore_statistics(model: keras.Model, data: Any, *, verbose: int = 0) -> list[str]:
    """Estimates the moving means and variances of batch normalization again, in place.

    For each channel, over all positions and samples `x` that are not masked,

        mean = sum x / n,  variance = sum (x - mean)^2 / n:

    exact moments of all the data, not moving averages. Each layer is set for the inputs that the
    ones before it produce. Pruning changes these inputs, so a pruned network gains by this alone.

    Args:
        model: A built Keras model of any kind, pruned or not.
        data: Inputs, or what `fit` takes; targets are ignored. All rows of arrays, in batches of
            64; of data sets and generators the first 64 batches.
        verbose: int. 1 for a progress bar over the layers.

    Returns:
        The paths of the layers that were set.

    Raises:
        NotPrunableError: A model that is not built or has no `BatchNormalization`; batches that do
            not reach a layer; inputs of one that are not finite. The statistics are as they were.

    Warns:
        UserWarning: Fewer than 16 different rows of data; a model whose layers are all frozen.

    Limits: all batches go through the layers in front of each layer in turn. Layers called several
    times get the moments of their first call. Layers that no batch reaches and frozen ones
    (`trainable=False`) keep their statistics.

    Examples:
        >>> import keras, numpy as np
        >>> layers = [keras.Input((1,)), keras.layers.BatchNormalization(name="norm")]
        >>> model = keras.Sequential(layers)
        >>> restore_statistics(model, np.arange(17.0)[:, None])
        ['norm']
        >>> [float(v[0]) for v in model.get_layer("norm").get_weights()[2:]]
        [8.0, 24.0]
    """
    check_built(model)
    found = [(x, p) for x, p in walk(model, "") if isinstance(x, keras.layers.BatchNormalization)]
    found = [(layer, path) for layer, path in found if layer.built]
    if not found:
        raise NotPrunableError(
            f"The model must have layers BatchNormalization. Received: model={model.name!r}"
        )
    stops = [_MomentStop(layer, path) for layer, path in found if layer.trainable]
    if not stops:
        warn_user(
            "No statistics were restored: frozen layers keep theirs. Set `trainable = True` on "
            "the layers to restore, and reset it afterwards. Received: trainable=False for "
            f"{', '.join(repr(path) for _, path in found)}"
        )
        return []
    variables = [variable for stop in stops for variable in stop.variables]
    before = [to_numpy(variable) for variable in variables]
    try:
        missed = sweep(model, calibration_batches(data), stops, verbose)
    except BaseException:
        for variable, value in zip(variables, before, strict=True):
            assign(variable, value)
        raise
    return [stop.path for stop in stops if stop not in missed]


class _MomentStop:
    """Sums the inputs of a layer and their squares, relative to the first row."""

    def __init__(self, layer: Any, path: str) -> None:
        self.layer, self.path = layer, path
        self.variables = [layer.moving_mean, layer.moving_variance]
        self._count = 0
        self._start: Any = 0.0
        self._first: Any = 0.0
        self._second: Any = 0.0

    def add(self, inputs: Any, reference: Any = None, **options: Any) -> None:
        x = np.moveaxis(to_numpy(inputs, copy=False).astype(np.float64), self.layer.axis, -1)
        if options.get("mask") is not None:  # of all axes but the last
            x = x[to_numpy(options["mask"], copy=False).astype(bool)]
        x = x.reshape(-1, x.shape[-1])
        if not self._count and len(x):  # squares of numbers far from the mean lose their digits
            self._start = x[0]
        x = x - self._start
        self._count += len(x)
        self._first = self._first + x.sum(axis=0)
        self._second = self._second + (x * x).sum(axis=0)

    def finish(self) -> None:
        shift = self._first / self._count
        mean = shift + self._start
        if not np.isfinite(mean).all():
            raise NotPrunableError(
                f"The inputs of '{self.path}' must be finite on the data. Received: means {mean}"
            )
        variance = np.maximum(self._second / self._count - shift * shift, 0.0)
        for variable, value in zip(self.variables, (mean, variance), strict=True):
            assign(variable, value)
