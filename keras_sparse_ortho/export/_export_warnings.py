"""What `export_litert` warns of: calibration rows, routes that failed, files that clip."""

import warnings
from collections.abc import Iterable

import keras

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.export._candidates import Candidate
from keras_sparse_ortho.export._compare import ExportVerificationError, compare
from keras_sparse_ortho.export._error_source import error_source
from keras_sparse_ortho.export._model import keras_outputs
from keras_sparse_ortho.export._task import Task
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.quantization import FakeQuantize, biases_are_rounded, without_ranges

_AS_TRAINED = 0.01  # rms: files of trained integers whose biases are rounded are closer to Keras
_CLIPPED = 0.05  # of the outputs
_LOST = 0.25  # rms: ranges that fit the data change the outputs by less


class ExportFallbackWarning(UserWarning):
    """A route failed, or was replaced by the dense one, or its file needs XNNPACK off."""


def warn_of_rows(task: Task) -> None:
    """Warns of calibration rows that do not look like training data."""
    if not task.doubts or task.representative is None:
        return
    low = min(float(array.min()) for array in task.representative)
    high = max(float(array.max()) for array in task.representative)
    warnings.warn(
        "An int8 file is right only within the ranges that `representative_data` shows it, and "
        f"these rows are doubtful: {'; '.join(task.doubts)}. Give 100 to 500 rows of real data, "
        "scaled as in training, and compare the file with Keras on others. "
        f"Received: values from {low:.3g} to {high:.3g}",
        stacklevel=3,
    )


def warn_of_routes(tried: Iterable[Candidate]) -> None:
    """Warns of files that were made and then refused: they crash, or differ from Keras."""
    # Those of the converter's own sparsity are known to fail on some models.
    wrong = {
        one.route.name: str(one.failure).split("Received: ")[-1]
        for one in tried
        if isinstance(one.failure, ExportVerificationError) and one.route.encoding != "sp"
    }
    if wrong:
        warnings.warn(
            "Files of some routes were made and then refused. That is a fault of the converter or "
            "the interpreter, or of calibration rows that do not fit; "
            f"mode={next(iter(wrong))!r} exports by such a route and names the layer where the "
            f"difference starts. Received: {'; '.join(map(': '.join, wrong.items()))}",
            ExportFallbackWarning,
            stacklevel=3,
        )


def warn_of_clipping(task: Task, taken: Candidate) -> None:
    """Warns of outputs that are beyond what calibration rows gave."""
    clipped = 0.0 if taken.comparison is None else taken.comparison.clipped
    if clipped > _CLIPPED:
        warnings.warn(
            f"{clipped:.0%} of the outputs are clipped: they are beyond the range that the file "
            "has from `representative_data`. Give more rows, with outputs as large. "
            f"Received: route '{taken.route.name}', compared on {task.origin}",
            stacklevel=3,
        )


def warn_of_ranges(task: Task) -> None:
    """Warns of trained ranges that the user's own rows do not fit into."""
    ranges = [
        (layer.path, float(to_numpy(layer.high)) - float(to_numpy(layer.low)))
        for layer, _ in walk(task.model, "")
        if isinstance(layer, FakeQuantize)
    ]
    empty = [path for path, width in ranges if width == 0]
    if empty:
        warnings.warn(
            "Trained ranges of activations must hold more than zero, or the file computes zeros "
            f"there: call the model on real data with training=True. Received: {empty[:5]}",
            stacklevel=3,
        )
    elif task.chosen:
        with without_ranges(task.model):
            _, floats = keras_outputs(task.model, task.signature, task.sample)
        lost = compare(task.names, floats, task.want, "rms").error
        if lost > _LOST:
            warnings.warn(
                f"Rounding activations changes Keras' own outputs by {lost:.0%} on these rows: the "
                "ranges were trained on other data, or are so wide that their steps are coarse. "
                "Train on data scaled as these rows are, or leave layers in floats (`exclude`). "
                f"Received: {len(task.sample[0])} rows ({task.origin})",
                stacklevel=3,
            )


def warn_of_integers(task: Task, taken: Candidate, model: keras.Model) -> None:
    """Warns of a file of trained integers that differs from Keras, with the reason."""
    error = taken.outcome.error or 0.0
    if error <= _AS_TRAINED:
        return
    if biases_are_rounded(model):
        source = error_source(task, taken.route, error / 2)
        reason = "the difference starts at " + (f"{source}" if source else "no single layer")
        advice = "Measure accuracy with `load_litert`, or leave that layer in floats (`exclude`)."
    else:
        reason = "biases are rounded in steps that are coarse, most of all with int4"
        advice = (
            "Call keras_sparse_ortho.quantization.round_biases(model) when training has ended, "
            "and measure accuracy after it."
        )
    warnings.warn(
        f"The file has the trained integers, and yet differs from Keras by {error:.2%}: {reason}. "
        f"{advice}",
        stacklevel=3,
    )
