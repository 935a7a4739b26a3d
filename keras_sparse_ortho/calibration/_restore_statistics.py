"""`restore_statistics`: means and variances of batch normalization, estimated anew."""

import math
import warnings
from typing import Any

import keras

from keras_sparse_ortho._backend import float64_operations
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.calibration._sweep import Stop, calibration_batches, sweep
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.models import check_built

ops = keras.ops


def restore_statistics(model: keras.Model, data: Any, *, verbose: int = 0) -> list[str]:
    """Estimates the moving means and variances of batch normalization anew, in place.

    Over all positions and samples `x` that are not masked, for each channel

        mean = sum x / n,  variance = sum (x - mean)^2 / n:

    exact moments over all the data, not moving averages. Layers are set one after the other, each
    for the inputs that the ones before it give. Pruning changes these inputs, so a pruned network
    with batch normalization gains by this alone, without training.

    Args:
        model: A built Keras model of any kind, pruned or not.
        data: Inputs, or what `fit` takes; targets are not used. All rows of arrays, in batches of
            64; of data sets and generators the first 64 batches.
        verbose: 1 for a progress bar over the layers.

    Returns:
        The paths of the layers that were set.

    Raises:
        NotPrunableError: A model that is not built or has no `BatchNormalization`; batches that go
            through its layers in another order than the first. The statistics are as they were.

    Warns:
        UserWarning: Fewer than 16 different rows of data; a model whose layers are all frozen.

    Limits: all batches go through the layers in front of each layer in turn. A layer that is called
    several times gets the moments of its first call. Layers that no batch reaches keep their
    statistics, and are not in the list. Frozen layers (`trainable=False`) keep theirs as well, as
    in `fit`.

    Example:

    >>> import keras, numpy as np
    >>> model = keras.Sequential([keras.Input((1,)), keras.layers.BatchNormalization(name="norm")])
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
    stops = [_Moments(layer, path) for layer, path in found if layer.trainable]
    if not stops:
        warnings.warn(
            "No statistics were restored: frozen layers keep theirs. Set `trainable = True` on "
            "the layers to restore, and reset it afterwards. Received: trainable=False for "
            f"{', '.join(repr(path) for _, path in found)}",
            stacklevel=2,
        )
        return []
    before = [to_numpy(variable) for stop in stops for variable in stop.variables]
    try:
        missed = sweep(model, calibration_batches(data), stops, verbose)
    except BaseException:
        variables = [variable for stop in stops for variable in stop.variables]
        for variable, value in zip(variables, before, strict=True):
            assign(variable, value)
        raise
    return [stop.path for stop in stops if stop not in missed]


class _Moments(Stop):
    """The sums of the inputs of one layer and of their squares, from a value near the mean."""

    def __init__(self, layer: Any, path: str) -> None:
        super().__init__(layer, path)
        self.variables = [layer.moving_mean, layer.moving_variance]
        self._count: Any = 0.0
        self._first: Any = 0.0
        self._second: Any = 0.0

    def add(self, inputs: Any, reference: Any = None, **options: Any) -> None:
        mask = options.get("mask")
        with float64_operations():
            x = ops.cast(inputs, "float64")
            axis = self.layer.axis % len(x.shape)
            others = [k for k in range(len(x.shape)) if k != axis]
            shape = [size if k == axis else 1 for k, size in enumerate(x.shape)]
            x = x - ops.reshape(ops.cast(self.variables[0].value, "float64"), shape)
            count: Any = math.prod(int(x.shape[k]) for k in others)
            if mask is not None:  # of all axes but the last
                kept = ops.cast(mask, "float64")
                count = ops.sum(kept)
                x = x * ops.expand_dims(kept, -1)
            self._count = self._count + count
            self._first = self._first + ops.sum(x, axis=others)
            self._second = self._second + ops.sum(x * x, axis=others)

    def finish(self) -> None:
        with float64_operations():
            shift = self._first / self._count
            mean = shift + ops.cast(self.variables[0].value, "float64")
            moments = [to_numpy(mean), to_numpy(self._second / self._count - shift * shift)]
        for variable, value in zip(self.variables, moments, strict=True):
            assign(variable, value)
