"""What all routes of an export share: the plain model, its rows, and the outputs to agree with.

A file agrees with Keras on the rows that calibrated it whatever they are. So others are compared.
Rows that are all scaled wrongly cannot be told by each other: there the model has to know better.
"""

import dataclasses
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
from keras_sparse_ortho.export._routes import Route
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.quantization import has_trained_ranges, integers_of

_BATCHES = 16  # taken from a data set; enough for calibration
_FEW = 16  # rows
_PART, _MOST = 4, 32  # one row in four is held out, and at most 32
_KNOWN = ", rows that calibrated the file"
# Largest input, and spread of the outputs over rows, that a network is hardly trained for.
_SMALL, _LARGE, _SAME = 1 / 32, 32, 1 / 16


@dataclasses.dataclass(frozen=True)
class Task:
    """What all routes of an export share."""

    model: keras.Model  # plain, in float32
    signature: Signature
    names: list[str]  # of the outputs
    want: list[np.ndarray]  # Keras' outputs on `sample`
    sample: list[np.ndarray]
    origin: str  # of the rows of `sample`
    chosen: bool  # whether these are the user's
    calibrating: list[np.ndarray] | None  # rows to calibrate on
    doubts: tuple[str, ...]  # about the user's rows
    tolerance: float | None  # None: each route's own
    timeout: float  # seconds for each job of a subprocess
    trained: bool  # whether quantization-aware training has rounded kernels
    has_ranges: bool  # and activations
    kernels: dict[str, np.ndarray]  # values by path
    blocks: BlockPlan  # which of them leave whole blocks of zeros, if a route asks for that
    folder: Path = Path()  # for staging; to be set before anything is converted

    def allowed(self, route: Route) -> float:
        """The largest error that passes."""
        return route.tolerance if self.tolerance is None else self.tolerance


def make_task(
    model: keras.Model,
    batch_size: int,
    sample: Any,
    representative_data: Any,
    tolerance: float | None,
    timeout: float,
    of_blocks: bool = False,
) -> Task:
    """Check the model and its data, strip the model and compute its outputs."""
    if tolerance is not None and not tolerance >= 0:  # `not` refuses NaN as well
        raise ValueError(f"`tolerance` must be 0 or more. Received: tolerance={tolerance!r}")
    example = representative_data if sample is None else sample
    signature = signature_of(model, batch_size, _first_inputs(model, example))
    representative = chosen = None
    if representative_data is not None:
        data = inputs_of(representative_data, signature)
        representative = signature.flatten(data, "representative_data")
        if len(representative[0]) < batch_size:
            raise ValueError(
                "`representative_data` must fill at least one batch. Received: "
                f"{len(representative[0])} rows with batch_size={batch_size}"
            )
    if sample is not None:
        chosen = signature.flatten(inputs_of(sample, signature), "sample")
    trained = has_trained_ranges(model)
    rows = rows_of(signature, chosen, representative, trained)
    plain, reference = plain_model(model)
    found = [] if representative is None or trained else doubts(plain, signature, representative)
    names, want = keras_outputs(reference, signature, rows.compared)
    return Task(
        plain,
        signature,
        names,
        want,
        rows.compared,
        rows.origin,
        sample is not None or representative is not None,
        rows.calibrating,
        tuple(found),
        None if tolerance is None else float(tolerance),
        timeout,
        any(integers_of(weight) is not None for weight in prunable_weights(model)),
        trained,
        kernels_of(plain),
        plan_of(plain) if of_blocks else BlockPlan({}, {}),
    )


def inputs_of(data: Any, signature: Signature) -> Any:
    """The inputs alone of data with targets: a tuple as for `fit`, or batches."""
    if isinstance(data, tuple) and len(leaves(data)) != len(signature.inputs):
        return data[0]
    if is_batched(data):
        inputs = [x for x, _, _ in first_batches(data, batches=_BATCHES)]
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *inputs)
    return data


def _first_inputs(model: keras.Model, data: Any) -> Any:
    """The inputs of a subclassed model from `(x, y)` or batches, other data as they are."""
    if getattr(model, "inputs", None):
        return data
    if is_batched(data):
        ((inputs, _, _),) = first_batches(data, batches=1)
        return inputs
    build = (model.get_build_config() or {}).get("input_shape") if model.built else None
    single = isinstance(build, tuple | list) and not isinstance(build[0], tuple | list)
    return data[0] if single and isinstance(data, tuple) and len(data) > 1 else data


# --- rows -----------------------------------------------------------------------------------------


class Rows(NamedTuple):
    """What calibrates a file, if anything, what it is compared on, and where that comes from."""

    calibrating: list[np.ndarray] | None
    compared: list[np.ndarray]
    origin: str


def rows_of(
    signature: Signature,
    sample: list[np.ndarray] | None,
    representative: list[np.ndarray] | None,
    trained: bool,
) -> Rows:
    """Rows to calibrate on and to compare on; the former are needed where no range is trained."""
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

    They are few, or all equal, or their scale is one that networks are hardly trained for: below
    1/32, where the outputs vary by less than 1/16; or above 32, where the outputs vary by more than
    32, or nearly all are 0 or 1. Smaller factors, and those of networks without biases, are not
    seen.
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
