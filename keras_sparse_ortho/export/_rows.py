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
    """The rows of an export.

    Attributes:
        calibrating: Rows that calibrate a file, if any do. Where ranges were trained, they show
            the states inside of LSTMs alone.
        choosing: Rows on which remedies are chosen; None where none is.
        compared: Rows to compare on.
        origin: str. Where those come from.
    """

    calibrating: list[np.ndarray] | None
    choosing: list[np.ndarray] | None
    compared: list[np.ndarray]
    origin: str


def rows_of(
    signature: Signature,
    sample: list[np.ndarray] | None,
    representative: list[np.ndarray] | None,
    trained: bool,
    chooses: bool = False,
) -> Rows:
    """Rows to calibrate, to choose and to compare on; no row has two uses if there are enough.

    Args:
        signature: `Signature`. The inputs of the file.
        sample: The user's rows to compare on.
        representative: The user's rows to calibrate on.
        trained: bool. Whether ranges were trained: every row may then compare.
        chooses: bool. Whether remedies are chosen on rows.
    """
    if representative is None or trained:
        return _without_holding_out(signature, sample, representative)
    uses = int(chooses) + int(sample is None)
    calibrating, held_out = _parted(representative, uses, signature.batch_size)
    first_rows = [array[: signature.default_rows] for array in representative]
    origin = "rows held out of representative_data"
    if uses and not held_out:
        origin = f"representative_data{_HAVE_CALIBRATED}"
        held_out = [first_rows] * uses
    choosing = held_out[0] if chooses else None
    if sample is None:
        return Rows(calibrating, choosing, held_out[-1], origin)
    origin = "sample"
    if _bytes_of(sample) <= _bytes_of(calibrating):
        origin += _HAVE_CALIBRATED
    return Rows(calibrating, choosing, sample, origin)


def _without_holding_out(
    signature: Signature,
    sample: list[np.ndarray] | None,
    representative: list[np.ndarray] | None,
) -> Rows:
    """Rows to compare a file on whose ranges need none; arguments as for `rows_of`."""
    if sample is not None:
        return Rows(representative, None, sample, "sample")
    if representative is not None:
        rows = [array[: signature.default_rows] for array in representative]
        return Rows(representative, None, rows, "representative_data")
    return Rows(None, None, signature.random_sample(), "standard normal rows")


def _parted(
    arrays: list[np.ndarray], uses: int, batch_size: int
) -> tuple[list[np.ndarray], list[list[np.ndarray]]]:
    """The rows that calibrate, and the rows of each other use; few rows all calibrate."""
    count = len(arrays[0])
    count_of_each = min(count // _HELD_OUT_PART, _MOST_HELD_OUT)
    count_held_out = uses * count_of_each
    if count < _FEW_ROWS or count - count_held_out < batch_size or not uses:
        return arrays, []
    places = np.linspace(0, count - 1, count_held_out).astype(int)
    calibrates = np.ones(count, bool)
    calibrates[places] = False
    held_out = []
    for use in range(uses):
        held_out.append([array[places[use::uses]] for array in arrays])
    return [array[calibrates] for array in arrays], held_out


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
    return float(np.sqrt(np.mean(np.var(output.astype(np.float64), axis=0))))


def _share_of_0_and_1(output: np.ndarray) -> float:
    """The share of entries that are 0 or 1, as probabilities without doubt are."""
    distance = np.minimum(abs(output), abs(output - 1))
    return float(np.mean(distance < 1e-6))
