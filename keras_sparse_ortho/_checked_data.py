"""The door of every function that takes data: what a model cannot take is refused here, by name.

`check_inputs` raises before any work is done. The `warn_` functions speak of data that can be taken
and are doubtful.
"""

import re
from collections.abc import Iterator, Sequence

import keras
import numpy as np

from keras_sparse_ortho._data import Batch, samples
from keras_sparse_ortho._keras_internals import (
    computes_its_graph,
    from_zero_states,
    graph_ends,
    warn_user,
)
from keras_sparse_ortho._types import Nested, TensorLike
from keras_sparse_ortho._values import to_numpy, without_gradients

_FEWEST_ROWS = 16  # different ones; with fewer OBS is often behind magnitudes
_TRIED = 64  # rows, by a model whose inputs are not known
_LISTED = 5  # rows that an error names
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")  # colours in the errors of Keras
_LONGEST = 300  # characters of such an error


def check_inputs(
    model: keras.Model,
    x: Nested,
    argument: str = "data",
    *,
    text: bool = True,
    first_row: int = 0,
) -> None:
    """Raises a ValueError for inputs that a model cannot take.

    Args:
        model: A built Keras model.
        x: Inputs of some rows, nested as the model takes them.
        argument: str. The name of the argument that they came from.
        text: bool. Whether strings may be inputs, as TensorFlow's models can have them.
        first_row: int. The number of the first row, for the error.
    """
    check_numbers(model, x, argument, text=text)
    if computes_its_graph(model):
        _check_shapes(model, x, argument)
    elif model.built and not first_row:
        _try_first_rows(model, x, argument)
    check_finite(model, x, argument, first_row=first_row)


def check_numbers(
    model: keras.Model,
    x: Nested,
    argument: str,
    *,
    text: bool = False,
) -> None:
    """The part of `check_inputs` that is about types: numbers, and strings where `text` is true."""
    for array in keras.tree.flatten(x):
        if array is not None:
            _check_kind(array, argument, text)
    if not text:
        _refuse_inputs_of_text(model, argument)


def check_finite(
    model: keras.Model,
    x: Nested,
    argument: str,
    *,
    first_row: int = 0,
) -> None:
    """The part of `check_inputs` that is about values that are not finite.

    A model may replace them itself, as one that fills gaps does: then its outputs are finite.
    """
    wrong = sorted(set(_rows_not_finite(keras.tree.flatten(x))))
    if not wrong:
        return
    first_wrong = np.array(wrong[:_FEWEST_ROWS])
    wrong_rows = keras.tree.map_structure(
        lambda array: keras.ops.take(array, first_wrong, axis=0), x
    )
    outputs = _outputs(model, wrong_rows)
    if all(_is_finite(output) for output in outputs):
        return
    raise ValueError(
        f"`{argument}` must be finite: leave these rows out, or replace the values. "
        f"Received: NaN or infinity in {_listed(np.array(wrong) + first_row)}"
    )


def check_batches(
    model: keras.Model,
    batches: Sequence[Batch],
    argument: str = "data",
    *,
    text: bool = True,
) -> None:
    """`check_inputs` for each batch of `(x, y, sample_weight)`, and finite targets and weights."""
    first_row = 0
    for batch in batches:
        x, y, sample_weight = batch
        check_inputs(model, x, argument, text=text, first_row=first_row)
        check_targets(y, argument, "targets")
        check_targets(sample_weight, argument, "sample weights")
        first_row += samples(batch)


def check_targets(
    targets: Nested,
    argument: str = "data",
    name: str = "labels",
) -> None:
    """Raises a ValueError for targets, labels or sample weights that are no finite numbers."""
    for leaf in keras.tree.flatten(targets):
        if leaf is None:
            continue
        values = _as_array(leaf)
        if _is_text(values):
            raise ValueError(
                f"The {name} of `{argument}` must be numbers; give each class of text a number. "
                f"Received: {name} of dtype {values.dtype}, such as {values.reshape(-1)[:3]}"
            )
        if not _is_finite(values):
            wrong = np.flatnonzero(~_finite_rows(values))
            raise ValueError(
                f"The {name} of `{argument}` must be finite; leave the rows out. "
                f"Received: {_listed(wrong)}"
            )


def warn_of_few_rows(
    batches: Sequence[Batch], purpose: str = "Calibration"
) -> None:
    """Warns if there are fewer than 16 different rows."""
    different: set[bytes] = set()
    for x, _, _ in batches:
        leaves = [to_numpy(leaf, copy=False) for leaf in keras.tree.flatten(x)]
        for row in zip(*leaves, strict=False):
            different.add(b"".join(np.asarray(leaf).tobytes() for leaf in row))
            if len(different) == _FEWEST_ROWS:
                return
    count = sum(samples(batch) for batch in batches)
    warn_user(
        f"{purpose} needs at least {_FEWEST_ROWS} different rows, better a few hundred, such as "
        "rows of the training data: results from fewer fit these rows and no others. "
        f"Received: {len(different)} different among {count} rows"
    )


def warn_of_equal_rows(batches: Sequence[Batch]) -> bool:
    """Warns if there are several rows, and all of them are equal; returns whether they are."""
    count = sum(samples(batch) for batch in batches)
    if count == 1:
        return False
    first_rows: list[np.ndarray] = []
    for x, _, _ in batches:
        arrays = [to_numpy(leaf, copy=False) for leaf in keras.tree.flatten(x)]
        if not first_rows:
            first_rows = [array[:1] for array in arrays]
        for array, first_row in zip(arrays, first_rows, strict=True):
            if array.shape[1:] != first_row.shape[1:]:
                continue
            if not np.array_equal(
                array, np.broadcast_to(first_row, array.shape)
            ):
                return False
    warn_user(
        "All rows of `data` are equal, so they show one input and no others; give rows of the "
        f"training data. Received: {count} equal rows"
    )
    return True


def warn_of_weights(batches: Sequence[Batch]) -> None:
    """Warns if there are sample weights, for functions that use inputs only."""
    if any(sample_weight is not None for _, _, sample_weight in batches):
        warn_user(
            "Sample weights are not used here: all rows count the same. Leave them out, or repeat "
            "the rows that matter. Received: `data` with sample weights"
        )


def plain_text(error: Exception) -> str:
    """An error of a backend in one line, without escape codes."""
    text = " ".join(_ESCAPES.sub("", str(error)).split())
    return f"{type(error).__name__}: {text[:_LONGEST]}"


def _check_kind(
    array: TensorLike,
    argument: str,
    text: bool,
) -> None:
    """Refuses what is no array of numbers, or of text where a model may take text."""
    is_text = _is_text_leaf(array)
    is_number = not is_text
    if not keras.ops.is_tensor(array):
        values = np.asarray(array)
        is_number = values.dtype.kind in "biu" or _is_float(values)
    if is_text and not text:
        raise ValueError(
            f"`{argument}` must be numbers. A file has no operations for strings: build the model "
            "behind its TextVectorization or StringLookup, and pass what these give. "
            "Received: inputs that are strings"
        )
    if not (is_number or is_text):
        raise ValueError(
            f"`{argument}` must be arrays of numbers. Received: an input of dtype {array.dtype}"
        )


def _refuse_inputs_of_text(model: keras.Model, argument: str) -> None:
    inputs = keras.tree.flatten(getattr(model, "inputs", None) or [])
    names = [tensor.name for tensor in inputs if tensor.dtype == "string"]
    if names:
        raise ValueError(
            f"The model must take numbers, but its inputs are strings, which `{argument}` cannot "
            "hold here. Build a model behind its TextVectorization or StringLookup. "
            f"Received: inputs {names} of dtype string"
        )


def _is_text_leaf(array: TensorLike) -> bool:
    if keras.ops.is_tensor(array):
        return keras.backend.standardize_dtype(array.dtype) == "string"
    return _is_text(np.asarray(array))


def _is_text(values: np.ndarray) -> bool:
    if values.dtype.kind == "O":
        return all(isinstance(value, str | bytes) for value in values.flat)
    return values.dtype.kind in "SU"


def _check_shapes(
    model: keras.Model,
    x: Nested,
    argument: str,
) -> None:
    """Compares inputs with those of a graph, as leniently as Keras takes them."""
    expected = _named_inputs(model)
    names = [name for name, _ in expected]
    arrays = _in_order(x, names)
    has_other_names = isinstance(x, dict) and not set(names) <= x.keys()
    if has_other_names or len(arrays) != len(expected):
        received = f"{len(arrays)} arrays"
        if isinstance(x, dict):
            received = f"a dict with the keys {list(x)}"
        raise ValueError(
            f"`{argument}` must hold one array for each input of the model, nested like the inputs "
            f"or as a dict by name: {names}. Received: {received}"
        )
    for (name, tensor), array in zip(expected, arrays, strict=True):
        shape = tuple(array.shape)
        expected_shape = tuple(tensor.shape)
        if tensor.dtype != "string" and _is_text_leaf(array):
            raise ValueError(
                f"`{argument}` for input `{name}` must be numbers of dtype {tensor.dtype}. "
                "Received: an input of strings"
            )
        if not _fits(shape[1:], expected_shape[1:]):
            names_of_sizes = {None: "any"}
            sizes = ", ".join(
                names_of_sizes.get(size, str(size))
                for size in expected_shape[1:]
            )
            raise ValueError(
                f"`{argument}` for input `{name}` must have the shape (rows, {sizes}). "
                f"Received: shape={shape}"
            )


def _named_inputs(model: keras.Model) -> list[tuple[str, keras.KerasTensor]]:
    """Name and symbolic tensor of each input; the name is the key if inputs are a dict."""
    structure, _ = graph_ends(model)
    if isinstance(structure, dict):
        return [(str(key), structure[key]) for key in sorted(structure)]
    return [(tensor.name, tensor) for tensor in keras.tree.flatten(structure)]


def _in_order(x: Nested, names: list[str]) -> list[TensorLike]:
    """The arrays in the order of the inputs; all of them if they do not match."""
    if isinstance(x, dict) and set(names) <= x.keys():
        return [x[name] for name in names]
    return keras.tree.flatten(x)


def _fits(shape: Sequence[int], expected: Sequence[int | None]) -> bool:
    """Whether Keras takes this shape, which may have a last axis of one more or less."""
    if len(shape) == len(expected) + 1 and shape[-1] == 1:
        shape = shape[:-1]
    elif len(shape) == len(expected) - 1 and expected[-1] in (1, None):
        expected = expected[:-1]
    if len(shape) != len(expected):
        return False
    pairs = zip(shape, expected, strict=True)
    return all(expected_size in (None, size) for size, expected_size in pairs)


def _try_first_rows(
    model: keras.Model,
    x: Nested,
    argument: str,
) -> None:
    """Calls a model whose inputs are not known."""
    first_rows = keras.tree.map_structure(lambda array: array[:_TRIED], x)
    try:
        _outputs(model, first_rows)
    except Exception as error:  # any: each backend has its own
        shapes = [tuple(array.shape) for array in keras.tree.flatten(x)]
        raise ValueError(
            f"The model must be able to compute its outputs from `{argument}`. "
            f"Received: arrays of the shapes {shapes}, on which it ends in {plain_text(error)}"
        ) from error


def _outputs(model: keras.Model, x: Nested) -> list[np.ndarray]:
    x = keras.tree.map_structure(keras.ops.convert_to_tensor, x)
    with from_zero_states(model), without_gradients():
        outputs = keras.tree.flatten(model(x, training=False))
    return [to_numpy(output) for output in outputs]


def _as_array(leaf: TensorLike) -> np.ndarray:
    """A leaf of a batch as an array, which may share its memory."""
    if keras.ops.is_tensor(leaf):
        return to_numpy(leaf, copy=False)
    return np.asarray(leaf)


def _rows_not_finite(arrays: Sequence[TensorLike]) -> Iterator[int]:
    for array in arrays:
        values = _as_array(array)
        if not _is_finite(values):
            yield from np.flatnonzero(~_finite_rows(values)).tolist()


def _is_finite(values: np.ndarray) -> bool:
    """Whether all values are finite; text and integers are."""
    return not _is_float(values) or bool(np.isfinite(values).all())


def _is_float(values: np.ndarray) -> bool:
    return values.dtype.kind == "f" or values.dtype.name == "bfloat16"


def _finite_rows(values: np.ndarray) -> np.ndarray:
    is_finite = np.isfinite(values).reshape(len(values), -1)
    return np.asarray(is_finite.all(axis=1))


def _listed(rows: np.ndarray) -> str:
    numbers = ", ".join(map(str, rows[:_LISTED]))
    if len(rows) == 1:
        return f"row {numbers}"
    if len(rows) > _LISTED:
        numbers += ", ..."
    return f"{len(rows)} rows, {numbers}"
