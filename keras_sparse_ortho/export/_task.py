"""What all routes of an export share: the plain model, its rows, and the outputs to agree with.

A file always agrees with Keras on the rows that calibrated it, so others are compared. Rows that
are all scaled wrongly look alike; only the model's outputs show it.
"""

from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._data import first_batches, is_batched
from keras_sparse_ortho.export._blocks import BlockPlan, plan_of
from keras_sparse_ortho.export._model import (
    Signature,
    keras_outputs,
    kernels_of,
    leaves,
    plain_model,
    signature_of,
)
from keras_sparse_ortho.export._routes import TOLERANCES, Route
from keras_sparse_ortho.quantization import has_trained_ranges

_BATCHES = 16  # taken from a data set; enough for calibration
_FEW = 16  # rows
_PART, _MOST = 4, 32  # one row in four is held out, and at most 32
_KNOWN = ", rows that calibrated the file"
# Largest input, and spread of the outputs over rows, that a network is hardly trained for.
_SMALL, _LARGE, _SAME = 1 / 32, 32, 1 / 16


class Task:
    """The checked arguments of an export, the plain model, and Keras' outputs."""

    folder = Path()  # for staging; to be set before anything is converted
    ends = "float32", "float32"  # types of the inputs and outputs of files

    def __init__(
        self,
        model: keras.Model,
        batch_size: int,
        sample: Any,
        representative_data: Any,
        tolerance: float | None,
        timeout: float,
        of_blocks: bool = False,
    ) -> None:
        if tolerance is not None and not tolerance >= 0:  # `not` refuses NaN as well
            raise ValueError(f"`tolerance` must be 0 or more. Received: tolerance={tolerance!r}")
        self.tolerance, self.timeout = tolerance, timeout  # seconds for each job of a subprocess
        count = _count_of_inputs(model)
        sample = inputs_of(sample, count)
        count = len(leaves(sample)) if count is None and sample is not None else count
        data = inputs_of(representative_data, count)
        signature = signature_of(model, batch_size, data if sample is None else sample)
        representative = None if data is None else signature.flatten(data, "representative_data")
        own = None if sample is None else signature.flatten(sample, "sample")
        if representative is not None and len(representative[0]) < batch_size:
            raise ValueError(
                "`representative_data` must fill at least one batch. Received: "
                f"{len(representative[0])} rows with batch_size={batch_size}"
            )
        self.signature = signature
        self.has_ranges = has_trained_ranges(model)
        rows = rows_of(signature, own, representative, self.has_ranges)
        self.calibrating, self.sample, self.origin = rows
        self.model, reference = plain_model(model)  # in float32
        told = None if self.has_ranges else representative
        self.doubts = [] if told is None else doubts(self.model, signature, told)
        self.names, self.want = keras_outputs(reference, signature, self.sample)
        self.kernels = kernels_of(self.model)  # values by path
        self.blocks = plan_of(self.model) if of_blocks else BlockPlan({}, {})

    def allowed(self, route: Route) -> float:
        return TOLERANCES[route.storage] if self.tolerance is None else float(self.tolerance)


def inputs_of(data: Any, count: int | None) -> Any:
    """The inputs alone of a tuple as for `fit`, or of batches; `count` if that is known."""
    if is_batched(data):
        inputs = [x for x, _, _ in first_batches(data, batches=_BATCHES)]
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *inputs)
    more = isinstance(data, tuple) and count is not None and len(leaves(data)) != count
    return data[0] if more else data


def _count_of_inputs(model: keras.Model) -> int | None:
    if getattr(model, "inputs", None):
        return len(model.inputs)
    shape = (model.get_build_config() or {}).get("input_shape") if model.built else None
    return 1 if isinstance(shape, tuple | list) and not isinstance(shape[0], tuple | list) else None


class Rows(NamedTuple):
    """Rows that calibrate a file, rows to compare on, and where those come from."""

    calibrating: list[np.ndarray] | None
    compared: list[np.ndarray]
    origin: str


def rows_of(
    signature: Signature,
    sample: list[np.ndarray] | None,
    representative: list[np.ndarray] | None,
    trained: bool,
) -> Rows:
    """Rows to calibrate and to compare on; the former are needed without trained ranges."""
    calibrating = None if trained else representative
    if sample is not None:
        known = calibrating is not None and _bytes_of(sample) <= _bytes_of(calibrating)
        return Rows(calibrating, sample, f"sample{_KNOWN if known else ''}")
    if representative is None:
        return Rows(None, signature.random_sample(), "standard normal rows")
    count, batch = len(representative[0]), signature.batch_size
    few = [array[: signature.default_rows] for array in representative]
    if trained:
        return Rows(None, few, "representative_data")
    apart = min(count // _PART, _MOST)
    if count < _FEW or count - apart < batch:
        return Rows(representative, few, f"representative_data{_KNOWN}")
    held_out = np.zeros(count, bool)
    held_out[np.linspace(0, count - 1, apart).astype(int)] = True
    return Rows(
        [array[~held_out] for array in representative],
        [array[held_out] for array in representative],
        "rows held out of representative_data",
    )


def _bytes_of(arrays: list[np.ndarray]) -> set[tuple[bytes, ...]]:
    return {tuple(one.tobytes() for one in row) for row in zip(*arrays, strict=True)}


def doubts(model: keras.Model, signature: Signature, rows: list[np.ndarray]) -> list[str]:
    """Signs that calibration rows are not like the data that a model was trained on.

    They are few, or all equal, or of a scale below 1/32 with outputs that vary by less than 1/16;
    or above 32 with outputs that vary by more than 32, or are nearly all 0 or 1. Smaller factors,
    and those of networks without biases, are not seen.
    """
    count = len(rows[0])
    found = []
    if count < _FEW:
        found.append(f"{count} row{'s are' if count > 1 else ' is'} few")
    if count > 1 and all(np.all(array == array[:1]) for array in rows):
        return [*found, "all rows are equal"]
    floats = [float(np.abs(array).max()) for array in rows if array.dtype.kind == "f"]
    largest = max(floats, default=1.0)
    if count < 2 or _SMALL <= largest <= _LARGE:
        return found
    some = np.unique(np.linspace(0, count - 1, _MOST).astype(int))
    _, outputs = keras_outputs(model, signature, [array[some] for array in rows])
    spread = max(float(np.sqrt(np.mean(np.var(one, axis=0)))) for one in outputs)
    ends = np.mean([np.mean(np.minimum(abs(one), abs(one - 1)) < 1e-6) for one in outputs])
    if largest < _SMALL and spread < _SAME:
        found.append(f"the inputs are at most {largest:.2g}, and the outputs hardly vary")
    if largest > _LARGE and (spread > _LARGE or ends > 0.9):
        found.append(f"the inputs are up to {largest:.3g}, and the outputs extreme")
    return found
