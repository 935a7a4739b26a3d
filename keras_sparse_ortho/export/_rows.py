"""Which rows calibrate a LiteRT file, which it is compared on, and doubts about them."""

from typing import NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._data import (
    first_batches,
    is_batched,
)
from keras_sparse_ortho._types import Nested
from keras_sparse_ortho.export._reference import (
    keras_outputs,
)
from keras_sparse_ortho.export._signature import (
    Signature,
    leaves,
)

_MOST_BATCHES = 16  # taken from a data set; enough for calibration
_FEW_ROWS = 16
# A file agrees with Keras on rows that calibrated it: one in four, at most 32, is held out.
_HELD_OUT_PART, _MOST_HELD_OUT = 4, 32
_HAVE_CALIBRATED = ", rows that calibrated the file"
# Largest input, and spread of the outputs over rows, that a network is hardly trained for.
_SMALL_INPUT, _LARGE_VALUE, _NO_SPREAD = 1 / 32, 32, 1 / 16


def inputs_of(data: Nested, count: int | None) -> Nested:
    """The inputs alone of a tuple as for `fit`, or of batches; `count` if that is known."""
    if is_batched(data):
        batches = [x for x, _, _ in first_batches(data, batches=_MOST_BATCHES)]
        return keras.tree.map_structure(
            lambda *parts: np.concatenate(parts), *batches
        )
    if (
        isinstance(data, tuple)
        and count is not None
        and len(leaves(data)) != count
    ):
        return data[0]
    return data


def count_of_inputs(model: keras.Model) -> int | None:
    """The number of inputs of a model; None if a subclassed one does not know it."""
    if getattr(model, "inputs", None):
        return len(model.inputs)
    if not model.built:
        return None
    shape = (model.get_build_config() or {}).get("input_shape")
    if not isinstance(shape, tuple | list) or isinstance(
        shape[0], tuple | list
    ):
        return None
    return 1


class Rows(NamedTuple):
    """Rows that calibrate a file, rows to compare on, and where those come from.

    Where ranges were trained, the first ones show the states inside of LSTMs alone.
    """

    calibrating: list[np.ndarray] | None
    compared: list[np.ndarray]
    origin: str


def rows_of(
    signature: Signature,
    sample: list[np.ndarray] | None,
    representative: list[np.ndarray] | None,
    trained: bool,
) -> Rows:
    """Rows to calibrate and to compare on.

    Args:
        signature: `Signature`. The inputs of the file.
        sample: The user's rows to compare on.
        representative: The user's rows to calibrate on.
        trained: bool. Whether ranges were trained, for which no rows are held out.
    """
    calibrating = None if trained else representative
    if sample is not None:
        origin = "sample"
        if calibrating is not None and _bytes_of(sample) <= _bytes_of(
            calibrating
        ):
            origin += _HAVE_CALIBRATED
        return Rows(representative, sample, origin)
    if representative is None:
        return Rows(
            None,
            signature.random_sample(),
            "standard normal rows",
        )
    first_rows = [array[: signature.default_rows] for array in representative]
    if trained:
        return Rows(representative, first_rows, "representative_data")
    count = len(representative[0])
    count_held_out = min(count // _HELD_OUT_PART, _MOST_HELD_OUT)
    if count < _FEW_ROWS or count - count_held_out < signature.batch_size:
        return Rows(
            representative,
            first_rows,
            f"representative_data{_HAVE_CALIBRATED}",
        )
    held_out = np.zeros(count, bool)
    held_out[np.linspace(0, count - 1, count_held_out).astype(int)] = True
    return Rows(
        [array[~held_out] for array in representative],
        [array[held_out] for array in representative],
        "rows held out of representative_data",
    )


def _bytes_of(
    arrays: list[np.ndarray],
) -> set[tuple[bytes, ...]]:
    rows = zip(*arrays, strict=True)
    return {tuple(part.tobytes() for part in row) for row in rows}


def doubts(
    model: keras.Model,
    signature: Signature,
    rows: list[np.ndarray],
) -> list[str]:
    """Signs that calibration rows are unlike training data; wrong scales show in outputs alone."""
    count = len(rows[0])
    signs = []
    if count < _FEW_ROWS:
        signs.append("1 row is few" if count == 1 else f"{count} rows are few")
    if count > 1 and all(np.all(array == array[:1]) for array in rows):
        return [*signs, "all rows are equal"]
    magnitudes = [
        float(np.abs(array).max()) for array in rows if array.dtype.kind == "f"
    ]
    largest = max(magnitudes, default=1.0)
    if count < 2 or _SMALL_INPUT <= largest <= _LARGE_VALUE:
        return signs
    places = np.unique(np.linspace(0, count - 1, _MOST_HELD_OUT).astype(int))
    _, outputs = keras_outputs(
        model, signature, [array[places] for array in rows]
    )
    spread = max(_spread(output) for output in outputs)
    share_at_ends = np.mean([_share_of_0_and_1(output) for output in outputs])
    if largest < _SMALL_INPUT and spread < _NO_SPREAD:
        signs.append(
            f"the inputs are at most {largest:.2g}, and the outputs hardly vary"
        )
    if largest > _LARGE_VALUE and (
        spread > _LARGE_VALUE or share_at_ends > 0.9
    ):
        signs.append(
            f"the inputs are up to {largest:.3g}, and the outputs extreme"
        )
    return signs


def _spread(output: np.ndarray) -> float:
    """The root of the mean variance over rows."""
    return float(np.sqrt(np.mean(np.var(output, axis=0))))


def _share_of_0_and_1(output: np.ndarray) -> float:
    """The share of entries that are 0 or 1, as probabilities without doubt are."""
    distance = np.minimum(abs(output), abs(output - 1))
    return float(np.mean(distance < 1e-6))
