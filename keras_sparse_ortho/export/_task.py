"""The parts that all routes of an export share: plain model, inputs, rows, outputs to agree with.

The *nesting* of the inputs is their structure with the position of each tensor in its place, such
as `{"a": 0, "b": [1, 2]}`: JSON for workers, with one order of dict keys on all backends.
"""

import contextlib
import dataclasses
import json
import math
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._checked_data import check_finite, check_numbers
from keras_sparse_ortho._data import first_batches, is_batched
from keras_sparse_ortho._keras_internals import is_graph
from keras_sparse_ortho._text import printable
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.export._blocks import BlockPlan, plan_of
from keras_sparse_ortho.export._routes import TOLERANCES, Route
from keras_sparse_ortho.kernels import is_sparse_layer, walk
from keras_sparse_ortho.models import strip
from keras_sparse_ortho.quantization import has_trained_ranges

_SAMPLE_ROWS = 8
_HALF = ("float16", "bfloat16")
_AUTOMATIC_NAME = re.compile(r"(keras_tensor|input_layer)(_\d+)?")
_BATCHES = 16  # taken from a data set; enough for calibration
_FEW = 16  # rows
# A file agrees with Keras on rows that calibrated it: one in four, at most 32, is held out.
_PART, _MOST = 4, 32
_KNOWN = ", rows that calibrated the file"
# Largest input, and spread of the outputs over rows, that a network is hardly trained for.
_SMALL, _LARGE, _SAME = 1 / 32, 32, 1 / 16


class Steps:
    """Says on standard error what is done, after how many seconds; by default to people only."""

    def __init__(self, verbose: bool | str) -> None:
        self._start = time.monotonic()
        self.loud = sys.stderr.isatty() if verbose == "auto" else bool(verbose)

    def __call__(self, text: str = "") -> float:
        seconds = time.monotonic() - self._start
        if self.loud and text:
            print(f"{seconds:5.0f} s  {printable(text)}", file=sys.stderr, flush=True)
        return seconds


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """One input of the file: its name, its static shape (batch first) and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Signature:
    """All inputs of the file in order, and the nesting in which the Keras model takes them."""

    inputs: tuple[InputSpec, ...]
    nesting: Any

    @property
    def specs(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(spec) for spec in self.inputs]

    @property
    def batch_size(self) -> int:
        return self.inputs[0].shape[0]

    @property
    def default_rows(self) -> int:
        """Rows to compare by default: whole batches, at least 8 rows."""
        return self.batch_size * math.ceil(_SAMPLE_ROWS / self.batch_size)

    def flatten(self, data: Any, argument: str) -> list[np.ndarray]:
        """The user's arrays, nested like the inputs or a dict by name, in the order of `inputs`."""
        names = [spec.name for spec in self.inputs]
        if len(names) == 1 and not isinstance(data, dict):
            packed = isinstance(data, (list, tuple)) and len(data) == 1
            given = [data[0] if packed and hasattr(data[0], "shape") else data]
        elif isinstance(data, dict) and sorted(data) == sorted(names):
            given = [data[name] for name in names]
        elif isinstance(data, (list, tuple)) or nesting_of(data) == self.nesting:
            given = [array for _, array in leaves(data)]
        else:  # a dict with other names: matching its arrays by position would be a guess
            given = []
        if len(given) != len(names):
            got = f"a {type(data).__name__} of {len(leaves(data))} arrays"
            if isinstance(data, dict):
                got = f"a dict with the keys {list(data)}"
            raise ValueError(
                f"`{argument}` must hold one array for each input of the model, nested like the "
                f"inputs or as a dict by name: {names}. Received: {got}"
            )
        pairs = zip(self.inputs, given, strict=True)
        arrays = [_check_array(spec, array, argument) for spec, array in pairs]
        rows = [array.shape[0] for array in arrays]
        if len(set(rows)) != 1 or 0 in rows:
            raise ValueError(
                f"The arrays of `{argument}` must have the same number of rows, at least one. "
                f"Received: rows={rows}"
            )
        return arrays

    def random_sample(self) -> list[np.ndarray]:
        """Standard normal rows for each input; raises if an input is not floating."""
        rng = np.random.default_rng(0)
        arrays = []
        for spec in self.inputs:
            if not spec.dtype.startswith("float"):
                raise ValueError(
                    f"No random sample can be drawn for input `{spec.name}`, whose dtype is "
                    f"{spec.dtype}: its valid values are unknown. Pass `sample=` with arrays "
                    "for all inputs. Received: sample=None"
                )
            shape = (self.default_rows, *spec.shape[1:])
            arrays.append(rng.standard_normal(shape).astype(spec.dtype))
        return arrays


def signature_of(model: keras.Model, batch_size: int, sample: Any = None) -> Signature:
    """The inputs of a built model, or of a subclassed one's `sample`, with static shapes."""
    if not model.built:
        raise ValueError(
            "Only a built model can be exported: its shapes and weights must exist. Call it on "
            f"data or give it a `keras.Input` first. Received: unbuilt model {model.name!r}"
        )
    structure: Any = sample
    if getattr(model, "inputs", None):
        # The `input` of a Sequential raises until it is called once.
        structure = model.inputs[0] if isinstance(model, keras.Sequential) else model.input
        tensors = [(k or t.name, tuple(t.shape), str(t.dtype)) for k, t in leaves(structure)]
    elif sample is None:
        raise ValueError(
            f"Model {model.name!r} is subclassed and does not know the shapes of its inputs. "
            "Pass `sample=` (or `representative_data`) with arrays nested like the inputs. "
            "Received: sample=None"
        )
    else:
        tensors = [
            # Keras narrows float64, NumPy's default, too.
            (k or "input", (None, *a.shape[1:]), a.dtype.name.replace("float64", "float32"))
            for k, a in ((key, np.asarray(array)) for key, array in leaves(sample))
        ]
    names = unique_names([name for name, _, _ in tensors], "input")
    specs = tuple(
        InputSpec(name, _static(name, shape, batch_size), dtype)
        for name, (_, shape, dtype) in zip(names, tensors, strict=True)
    )
    return Signature(specs, nesting_of(structure))


def leaves(structure: Any, key: str | None = None) -> list[tuple[str | None, Any]]:
    """Each leaf with the innermost dict key above it, dict keys in sorted order."""
    if isinstance(structure, dict):
        return [pair for k in sorted(structure) for pair in leaves(structure[k], str(k))]
    if isinstance(structure, (list, tuple)):
        return [pair for item in structure for pair in leaves(item)]
    return [(key, structure)]


def nesting_of(structure: Any) -> Any:
    """The structure with the position of each leaf, in the order of `leaves`, in its place."""
    counter = iter(range(len(leaves(structure))))

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {k: walk(node[k]) for k in sorted(node)}
        if isinstance(node, (list, tuple)):
            return [walk(item) for item in node]
        return next(counter)

    return walk(structure)


def pack(nesting: Any, flat: Sequence[Any]) -> Any:
    """The structure of a nesting, filled with the items of a flat list."""
    return keras.tree.map_structure(lambda position: flat[position], nesting)


def unique_names(names: Sequence[str | None], fallback: str) -> list[str]:
    """Names for a LiteRT signature: word characters, unique, and independent of the session."""
    result: list[str] = []
    for position, name in enumerate(names):
        # Keras numbers unnamed inputs through a session.
        if name is None or _AUTOMATIC_NAME.fullmatch(name):
            name = fallback if len(names) == 1 else f"{fallback}_{position}"
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        tried = (name, *(f"{name}_{number}" for number in range(1, len(names))))
        result.append(next(one for one in tried if one not in result))
    return result


def _static(name: str, shape: tuple[int | None, ...], batch_size: int) -> tuple[int, ...]:
    if not shape or any(size is None for size in shape[1:]):
        raise ValueError(
            "A LiteRT file is exported with static shapes, so every dimension of an input but "
            "the batch must be known. Rebuild the model with a fixed `keras.Input(shape=...)`. "
            f"Received: input `{name}` with shape={shape}"
        )
    if shape[0] not in (None, batch_size):
        raise ValueError(
            f"The batch dimension of input `{name}` is fixed at {shape[0]} in the model. "
            f"Received: batch_size={batch_size}"
        )
    return (batch_size, *(int(size) for size in shape[1:] if size is not None))


def _check_array(spec: InputSpec, array: Any, argument: str) -> np.ndarray:
    array = np.asarray(array)
    if array.ndim == 0 or array.shape[1:] != spec.shape[1:]:
        raise ValueError(
            f"`{argument}` for input `{spec.name}` must have the shape "
            f"(rows, {', '.join(map(str, spec.shape[1:]))}). Received: shape={array.shape}"
        )
    integers = array.dtype.kind in "iu" and np.dtype(spec.dtype).kind in "iu"
    if not (integers or np.can_cast(array.dtype, spec.dtype, casting="same_kind")):
        raise ValueError(
            f"`{argument}` for input `{spec.name}` must be of dtype {spec.dtype}. "
            f"Received: dtype={array.dtype}"
        )
    return array.astype(spec.dtype)


def plain_model(model: keras.Model) -> tuple[keras.Model, keras.Model]:
    """The plain float32 model to convert, and the one to agree with: this, or the user's."""
    stripped = model
    if is_graph(model) or any(is_sparse_layer(layer) for layer, _ in walk(model, "")):
        stripped = strip(model)
        _drop_negative_zeros(stripped)
    if not any(layer.compute_dtype in _HALF for layer, _ in walk(stripped, "")):
        return stripped, model
    # A dtype, or a policy whose whole configuration is its name.
    text = json.dumps(keras.saving.serialize_keras_object(stripped))
    config = json.loads(re.sub(rf'"(mixed_)?({"|".join(_HALF)})"', '"float32"', text))
    config.pop("compile_config", None)
    plain = keras.saving.deserialize_keras_object(config, safe_mode=False)
    if not plain.built:
        plain.build_from_config(config["build_config"])
    for wide, narrow in zip(plain.weights, stripped.weights, strict=True):
        assign(wide, keras.ops.cast(narrow.value, wide.dtype))
    return plain, plain


def _drop_negative_zeros(model: keras.Model) -> None:
    """Turns -0.0, which `w * mask` leaves where w < 0, into 0.0: it makes zstd files 44% larger."""
    for variable in model.weights:
        value = np.asarray(to_numpy(variable.value))
        if value.dtype.kind == "f" and np.any(np.signbit(value[value == 0])):
            assign(variable, value + 0.0)


def keras_outputs(
    model: keras.Model, signature: Signature, sample: list[np.ndarray]
) -> tuple[list[str], list[np.ndarray]]:
    """Names and values of the model's outputs on all rows; ValueError if one is not finite."""
    pieces: list[list[np.ndarray]] = []
    keys: list[str | None] = []
    for batch in full_batches(sample, signature.batch_size):
        inputs = [keras.ops.convert_to_tensor(array) for array in batch]
        answers = leaves(model(pack(signature.nesting, inputs), training=False))
        keys = [key for key, _ in answers]
        pieces.append([np.asarray(to_numpy(tensor)) for _, tensor in answers])
    known = getattr(model, "output_names", None) or []
    if len(known) == len(keys):
        keys = [key or name for key, name in zip(keys, known, strict=True)]
    names = unique_names(keys, "output")
    rows = len(sample[0])
    outputs = [np.concatenate(piece)[:rows] for piece in zip(*pieces, strict=True)]
    for name, output in zip(names, outputs, strict=True):
        if not np.all(np.isfinite(output)):
            raise ValueError(
                "Keras' own outputs must be finite on the sample, or nothing can be compared. "
                f"Received: non-finite values in output `{name}` of model {model.name!r}"
            )
    return names, outputs


def full_batches(sample: list[np.ndarray], rows: int) -> list[list[np.ndarray]]:
    """Batches of a static size; the last one is padded with copies of the last row."""
    starts = range(0, len(sample[0]), rows)
    batches = [[array[start : start + rows] for array in sample] for start in starts]
    missing = -len(sample[0]) % rows
    batches[-1] = [np.concatenate([part, *[part[-1:]] * missing]) for part in batches[-1]]
    return batches


def kernels_of(model: keras.Model) -> dict[str, np.ndarray]:
    """Values of kernels by name, and of other weights with zeros, none of which may be lost."""
    kernels = {}
    for variable in model.weights:
        if len(variable.shape) < 2 or "bias" in variable.name:  # which the converter may fold
            continue
        value = np.asarray(to_numpy(variable.value))
        live = np.count_nonzero(value)
        if any(part in variable.name for part in ("kernel", "embedding")) or 0 < live < value.size:
            kernels[variable.path] = value
    return kernels


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
        self.say = Steps(verbose=False)
        self.seconds: dict[str, float] = {}  # by route
        count = _count_of_inputs(model)
        sample = inputs_of(sample, count)
        check_numbers(model, sample, "sample")
        count = len(leaves(sample)) if count is None and sample is not None else count
        data = inputs_of(representative_data, count)
        check_numbers(model, data, "representative_data")
        signature = signature_of(model, batch_size, data if sample is None else sample)
        representative = None if data is None else signature.flatten(data, "representative_data")
        own = None if sample is None else signature.flatten(sample, "sample")
        for arrays, argument in ((own, "sample"), (representative, "representative_data")):
            if arrays is not None:
                check_finite(model, pack(signature.nesting, arrays), argument)
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
        doubtful = None if self.has_ranges else representative
        self.doubts = [] if doubtful is None else doubts(self.model, signature, doubtful)
        self.names, self.want = keras_outputs(reference, signature, self.sample)
        self.kernels = kernels_of(self.model)  # values by path
        self.blocks = plan_of(self.model) if of_blocks else BlockPlan({}, {})

    @contextlib.contextmanager
    def timed(self, route: Route, what: str) -> Iterator[None]:
        """Adds the time of a step to that of its route."""
        start = time.monotonic()
        yield
        taken = time.monotonic() - start
        self.seconds[route.name] = self.seconds.get(route.name, 0.0) + taken
        self.say(f"{route.name}: {what}, {taken:.1f} s")

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
    """Signs that calibration rows are unlike training data; wrong scales show in outputs alone."""
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
