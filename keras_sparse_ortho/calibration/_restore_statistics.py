"""`restore_statistics`: sets means and variances of batch normalization for pruned kernels."""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._keras_internals import from_zero_states, warn_user
from keras_sparse_ortho._values import assign, to_numpy, without_gradients
from keras_sparse_ortho.calibration._layerwise import calibration_batches
from keras_sparse_ortho.calibration._moments import samples_in
from keras_sparse_ortho.calibration._sweep import sweep
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.models import check_built, origin_of

_ROWS_A_HELD_ROW = 4  # one in so many decides whether new statistics are better
_FEWEST = 16  # rows; of fewer none is held out
_ROUNDING = 1e-5  # by which two calls of one layer may differ, of the size of its inputs


@other_keywords
def restore_statistics(
    model: keras.Model,
    data: Any,
    *,
    reference: keras.Model | None = None,
    verbose: int = 0,
) -> list[str]:
    """Sets the moving means and variances of batch normalization for pruned kernels, in place.

    Pruning changes what these layers see. For each channel, with the moments `mean_p, std_p` of
    its inputs in `model`, and `mean_r, std_r` in the reference, on the same rows:

        ratio = std_p / std_r
        mean = ratio * mean_of_reference + (mean_p - ratio * mean_r)
        variance = ratio^2 * variance_of_reference

    So the rows say how pruning moved the statistics, not what these are: the network was trained on
    other rows. Where nothing was pruned, nothing changes. Each layer is set for the inputs that the
    ones before it produce. One row in four is held out, and the new statistics stay only if they
    bring the outputs of these rows nearer to the reference's.

    Args:
        model: A built Keras model of any kind.
        data: Inputs, or what `fit` takes; targets and sample weights are not used. All rows of
            arrays, in batches of 64 to 512; of data sets and generators the first 64 batches.
        reference: The model as it was before pruning, with its statistics. Default: the model that
            `prune` or another function of this package made `model` from, while it exists. A model
            that was loaded has none.
        verbose: int. 1 for a progress bar over the layers.

    Returns:
        The paths of the layers that were set. None if held-out rows preferred the old statistics.

    Raises:
        NotPrunableError: A model that is not built or has no `BatchNormalization`; batches that do
            not reach a layer; inputs of one that are not finite. The statistics are as they were.
        ValueError: Data that the model cannot take; a reference that lacks a layer of the model.

    Warns:
        UserWarning: Fewer than 16 different rows of data; a model whose layers are all frozen;
            layers that keep their statistics because there is no reference.

    Limits: subclassed models compute the layers in front of each layer again, so they take longer.
    Layers called several times get the moments of all their calls. Layers that no batch reaches and
    frozen ones (`trainable=False`) keep their statistics. Without a reference, layers that were
    never trained (mean 0, variance 1) get the exact moments of the data. Rows of one class show
    little of the others, and held-out rows of that class cannot tell: give rows of all classes.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> kernel = keras.layers.Dense(8, kernel_initializer="ones")
        >>> norm = keras.layers.BatchNormalization(name="norm")
        >>> dense = keras.Sequential([keras.Input((4,)), kernel, norm])
        >>> x = np.random.default_rng(0).uniform(size=(64, 4))
        >>> pruned = kso.prune(dense, 0.5, budget="uniform")
        >>> restore_statistics(pruned, x, reference=dense)
        ['norm']
    """
    check_built(model)
    layers = _normalizations(model)
    if not layers:
        raise NotPrunableError(
            f"The model must have layers BatchNormalization. Received: model={model.name!r}"
        )
    free = {path: layer for path, layer in layers.items() if layer.trainable}
    if not free:
        warn_user(
            "No statistics were restored: frozen layers keep theirs. Set `trainable = True` on "
            "the layers to restore, and reset it afterwards. Received: trainable=False for "
            f"{', '.join(map(repr, layers))}"
        )
        return []
    batches = calibration_batches(model, data)
    made_from, pairs = _references(model, reference, free)
    fresh = (
        []
        if reference is not None
        else [path for path in free if _is_fresh(free[path])]
    )
    pairs = {path: layer for path, layer in pairs.items() if path not in fresh}
    _warn_of_lone_layers(
        [path for path in free if path not in pairs and path not in fresh]
    )
    stops = [_RestoringStop(free[path], path) for path in [*fresh, *pairs]]
    variables = [variable for stop in stops for variable in stop.variables]
    before = [to_numpy(variable.value) for variable in variables]
    used_batches, held_batches = (
        (batches, batches) if not pairs else _split(model, batches)
    )
    with contextlib.ExitStack() as undo:
        undo.callback(_put_back, variables, before)
        if pairs:
            targets = _outputs(made_from, held_batches)
            distance = _distance(_outputs(model, held_batches), targets)
            _measure_references(made_from, pairs, used_batches, stops, verbose)
        missed = sweep(model, used_batches, stops, verbose)
        if pairs:
            new_distance = _distance(_outputs(model, held_batches), targets)
            if not new_distance <= distance:
                return []
        undo.pop_all()
    return [stop.path for stop in stops if stop not in missed and stop.is_set]


def _put_back(
    variables: Sequence[Any],
    values: Sequence[np.ndarray],
) -> None:
    for variable, value in zip(variables, values, strict=True):
        assign(variable, value)


def _normalizations(model: Any) -> dict[str, Any]:
    """The built layers of batch normalization by path."""
    return {
        path: layer
        for layer, path in walk(model, "")
        if isinstance(layer, keras.layers.BatchNormalization) and layer.built
    }


def _is_fresh(layer: Any) -> bool:
    """Whether a layer has the statistics that it was made with."""
    mean = to_numpy(layer.moving_mean.value)
    variance = to_numpy(layer.moving_variance.value)
    return bool(np.all(mean == 0.0) and np.all(variance == 1.0))


def _references(
    model: Any,
    reference: Any,
    layers: dict[str, Any],
) -> tuple[Any, dict[str, Any]]:
    """The model before pruning, and its layers of the same paths and channels.

    Args:
        model: The model whose statistics the caller sets.
        reference: The model that the user gave, or `None` for the one that `model` was made from.
        layers: Layers of batch normalization of `model`, by path.
    """
    made_from = origin_of(model) if reference is None else reference
    if made_from is None:
        return None, {}
    check_built(made_from)
    reference_layers = _normalizations(made_from)
    pairs = {
        path: reference_layers[path]
        for path, layer in layers.items()
        if path in reference_layers
        and reference_layers[path].moving_mean.shape == layer.moving_mean.shape
    }
    alone = [path for path in layers if path not in pairs]
    if alone and reference is not None:
        raise ValueError(
            "`reference` must be the model before pruning, with the same layers of batch "
            f"normalization, of as many channels. Received: {reference.name!r}, which lacks "
            f"{', '.join(map(repr, alone))}"
        )
    return made_from, pairs


def _warn_of_lone_layers(paths: Sequence[str]) -> None:
    if paths:
        warn_user(
            "Trained statistics stay where nothing shows how pruning has moved them: rows alone "
            "cannot, because training saw others. Pass the model before pruning: "
            "restore_statistics(pruned, data, reference=dense). "
            f"Received: reference=None, and no model that this one was made from, for "
            f"{', '.join(map(repr, paths))}"
        )


def _split(
    model: Any,
    batches: Sequence[Any],
) -> tuple[list[Any], list[Any]]:
    """Batches of the rows to measure on, and of one row in four, to judge by."""
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    has_fixed_batches = any(tensor.shape[0] is not None for tensor in inputs)
    count = samples_in(batches)
    if has_fixed_batches or count < _FEWEST:
        return list(batches), list(batches)
    # At random: rows may come in a cycle of classes.
    order = np.random.default_rng(0).permutation(count)
    used_batches: list[Any] = []
    held_batches: list[Any] = []
    position = 0
    for batch in batches:
        positions = order[position : position + samples_in([batch])]
        position += len(positions)
        is_held = positions % _ROWS_A_HELD_ROW == 0
        if not is_held.all():
            used_batches.append(_rows_of(batch, ~is_held))
        if is_held.any():
            held_batches.append(_rows_of(batch, is_held))
    return used_batches, held_batches


def _rows_of(
    batch: Any,
    is_taken: np.ndarray,
) -> Any:
    rows = np.flatnonzero(is_taken)
    return keras.tree.map_structure(
        lambda array: keras.ops.take(array, rows, axis=0), batch
    )


def _outputs(
    model: Any,
    batches: Sequence[Any],
) -> list[np.ndarray]:
    """Each floating-point output of a model, flattened, on all batches."""
    outputs_of_batches = []
    with from_zero_states(model), without_gradients():
        for batch in batches:
            arrays = map(
                to_numpy, keras.tree.flatten(model(batch, training=False))
            )
            floats = [
                array.astype(np.float64)
                for array in arrays
                if array.dtype.kind != "i"
            ]
            outputs_of_batches.append([array.ravel() for array in floats])
    return [
        np.concatenate(pieces)
        for pieces in zip(*outputs_of_batches, strict=True)
    ]


def _distance(
    outputs: Sequence[np.ndarray],
    targets: Sequence[np.ndarray],
) -> float:
    """The squared error of the outputs, of each relative to its variance; infinity for NaN."""
    distance = 0.0
    for output, target in zip(outputs, targets, strict=True):
        scale = float(np.var(target)) or 1.0
        distance += float(np.mean((output - target) ** 2)) / scale
    return distance if np.isfinite(distance) else np.inf


def _measure_references(
    reference: Any,
    layers: dict[str, Any],
    batches: Sequence[Any],
    stops: Sequence["_RestoringStop"],
    verbose: int,
) -> None:
    """Gives each stop the moments of its layer's twin in the model before pruning."""
    twins = [_MomentStop(layer, path) for path, layer in layers.items()]
    missed = sweep(
        reference,
        batches,
        twins,
        verbose,
    )
    moments = {
        twin.path: twin.moments() for twin in twins if twin not in missed
    }
    for stop in stops:
        if stop.path in layers:
            stop.twin = layers[stop.path]
            stop.twin_moments = moments.get(stop.path)


@dataclasses.dataclass(frozen=True)
class _Moments:
    """Mean and variance of each channel."""

    mean: np.ndarray
    variance: np.ndarray


class _MomentStop:
    """Sums the inputs of a layer and their squares, relative to the first row."""

    def __init__(
        self,
        layer: Any,
        path: str,
    ) -> None:
        self.layer = layer
        self.path = path
        self._count = 0
        self._start: Any = 0.0
        self._first: Any = 0.0
        self._second: Any = 0.0

    def add(self, inputs: Any, reference: Any = None, **options: Any) -> None:
        """Adds all positions of one call that are not masked."""
        x = to_numpy(inputs, copy=False).astype(np.float64)
        x = np.moveaxis(x, self.layer.axis, -1)
        mask = options.get("mask")  # of all axes but the last
        if mask is not None:
            x = x[to_numpy(mask, copy=False).astype(bool)]
        x = x.reshape(-1, x.shape[-1])
        # Squares of numbers far from the mean lose their digits.
        if not self._count and len(x):
            self._start = x[0]
        x = x - self._start
        self._count += len(x)
        self._first = self._first + x.sum(axis=0)
        self._second = self._second + (x * x).sum(axis=0)

    def moments(self) -> _Moments:
        """Exact moments over all positions and samples that are not masked."""
        shift = self._first / self._count
        mean = shift + self._start
        if not np.isfinite(mean).all():
            raise NotPrunableError(
                f"The inputs of {self.path!r} must be finite on the data. Received: means {mean}"
            )
        variance = self._second / self._count - shift * shift
        return _Moments(mean, np.maximum(variance, 0.0))

    def finish(self) -> None:
        """Nothing: the model before pruning stays as it is."""


class _RestoringStop(_MomentStop):
    """Sets the statistics of its layer, relative to the twin in the model before pruning."""

    twin: Any = None  # without one, the layer gets the moments themselves
    twin_moments: _Moments | None = None  # none if no batch reaches the twin
    is_set = False

    @property
    def variables(self) -> list[Any]:
        return [self.layer.moving_mean, self.layer.moving_variance]

    def finish(self) -> None:
        """Assigns mean and variance."""
        moments = self.moments()
        if self.twin is not None:
            if self.twin_moments is None:
                return
            moments = _moved(self.twin, self.twin_moments, moments)
        assign(self.layer.moving_mean, moments.mean)
        assign(self.layer.moving_variance, moments.variance)
        self.is_set = True


def _moved(
    twin: Any,
    before: _Moments,
    after: _Moments,
) -> _Moments:
    """The trained statistics, moved as pruning moved the moments on the rows.

    Args:
        twin: The layer of the model before pruning, which has the trained statistics.
        before: Moments of the twin's inputs on the rows.
        after: Moments of the pruned layer's inputs on the same rows.
    """
    mean = to_numpy(twin.moving_mean.value).astype(np.float64)
    variance = to_numpy(twin.moving_variance.value).astype(np.float64)
    # A channel that is constant on the rows does not show its scale.
    varies = before.variance > 0.0
    divisor = np.where(varies, before.variance, 1.0)
    square = np.where(varies, after.variance / divisor, 1.0)
    square = np.where(np.abs(square - 1.0) < _ROUNDING, 1.0, square)
    ratio = np.sqrt(square)
    shift = after.mean - ratio * before.mean
    scale = np.sqrt(before.variance) + np.abs(before.mean)
    shift = np.where(np.abs(shift) < _ROUNDING * scale, 0.0, shift)
    # Where nothing was pruned in front, this is the trained mean to the last bit.
    return _Moments(ratio * mean + shift, square * variance)
