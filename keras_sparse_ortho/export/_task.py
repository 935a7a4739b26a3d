"""What all routes of an export share: the plain model, its rows, and the outputs to agree with."""

import dataclasses
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._data import first_batches, is_batched
from keras_sparse_ortho.export._block_convolutions import Plan, plan
from keras_sparse_ortho.export._model import (
    Signature,
    keras_outputs,
    kernels_of,
    leaves,
    plain_model,
    signature_of,
)
from keras_sparse_ortho.export._rows import doubts, rows_of
from keras_sparse_ortho.quantization import has_integers, has_trained_ranges

_BATCHES = 16  # taken from a data set; enough for calibration


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
    representative: list[np.ndarray] | None  # rows to calibrate on
    doubts: tuple[str, ...]  # about them
    tolerance: float | None  # None: each route's own
    timeout: float  # seconds for each job of a subprocess
    trained: bool  # whether quantization-aware training has rounded kernels
    has_ranges: bool  # and activations
    kernels: dict[str, np.ndarray]  # values by path
    blocks: Plan  # which of them leave whole blocks of zeros, if a route asks for that
    folder: Path = Path()  # for staging; to be set before anything is converted


def make_task(
    model: keras.Model,
    batch_size: int,
    sample: Any,
    representative_data: Any,
    tolerance: float | None,
    seed: int,
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
    rows = rows_of(signature, chosen, representative, trained, seed)
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
        has_integers(model),
        trained,
        kernels_of(plain),
        plan(plain) if of_blocks else Plan({}, {}),
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
