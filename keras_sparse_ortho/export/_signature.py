"""The inputs of a LiteRT file, and how they are nested in the Keras model.

The *nesting* of the inputs is their structure with the position of each tensor in its place, such
as `{"a": 0, "b": [1, 2]}`: JSON for workers, with one order of dict keys on all backends.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import keras
import numpy as np

from keras_sparse_ortho._types import Nested, TensorLike

Nesting: TypeAlias = Any
"""Positions in dicts and lists, or the one position of a single input."""

_DEFAULT_ROWS = 8
_AUTOMATIC_NAME = re.compile(r"(keras_tensor|input_layer)(_\d+)?")


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
    nesting: Nesting

    @property
    def specs(self) -> list[dict[str, Any]]:
        return [dataclasses.asdict(spec) for spec in self.inputs]

    @property
    def batch_size(self) -> int:
        return self.inputs[0].shape[0]

    @property
    def default_rows(self) -> int:
        """Rows to compare by default: whole batches, at least 8 rows."""
        return self.batch_size * math.ceil(_DEFAULT_ROWS / self.batch_size)

    def flatten(self, data: Nested, argument: str) -> list[np.ndarray]:
        """The user's arrays in the order of `inputs`, checked.

        Args:
            data: Arrays nested like the inputs, or a dict by name.
            argument: str. The name of the data in messages.
        """
        arrays = self._in_order(data)
        names = [spec.name for spec in self.inputs]
        if len(arrays) != len(names):
            received = f"a {type(data).__name__} of {len(leaves(data))} arrays"
            if isinstance(data, dict):
                received = f"a dict with the keys {list(data)}"
            raise ValueError(
                f"`{argument}` must hold one array for each input of the model, nested like the "
                f"inputs or as a dict by name: {names}. Received: {received}"
            )
        checked = []
        for spec, array in zip(self.inputs, arrays, strict=True):
            checked.append(_checked_array(spec, array, argument))
        rows = [array.shape[0] for array in checked]
        if len(set(rows)) != 1 or 0 in rows:
            raise ValueError(
                f"The arrays of `{argument}` must have the same number of rows, at least one. "
                f"Received: rows={rows}"
            )
        return checked

    def _in_order(self, data: Nested) -> list[TensorLike]:
        """The arrays of some data in the order of `inputs`; an empty list if it is nested else."""
        names = [spec.name for spec in self.inputs]
        if isinstance(data, dict):
            if sorted(data) == sorted(names):
                return [data[name] for name in names]
        elif len(names) == 1:
            is_packed = isinstance(data, (list, tuple)) and len(data) == 1
            if is_packed and hasattr(data[0], "shape"):
                return [data[0]]
            return [data]
        if isinstance(data, (list, tuple)) or nesting_of(data) == self.nesting:
            return [array for _, array in leaves(data)]
        # A dict with other names: matching its arrays by position would be a guess.
        return []

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


def signature_of(
    model: keras.Model,
    batch_size: int,
    sample: Nested = None,
) -> Signature:
    """The inputs of a built model, or of a subclassed one's `sample`, with static shapes."""
    if not model.built:
        raise ValueError(
            "Only a built model can be exported: its shapes and weights must exist. Call it on "
            f"data or give it a `keras.Input` first. Received: unbuilt model {model.name!r}"
        )
    tensors: list[tuple[str | None, tuple[int | None, ...], str]] = []
    if getattr(model, "inputs", None):
        # The `input` of a Sequential raises until it is called once.
        is_sequential = isinstance(model, keras.Sequential)
        structure = model.inputs[0] if is_sequential else model.input
        for key, tensor in leaves(structure):
            tensors.append(
                (
                    key or tensor.name,
                    tuple(tensor.shape),
                    str(tensor.dtype),
                )
            )
    elif sample is None:
        raise ValueError(
            f"Model {model.name!r} is subclassed and does not know the shapes of its inputs. "
            "Pass `sample=` (or `representative_data`) with arrays nested like the inputs. "
            "Received: sample=None"
        )
    else:
        structure = sample
        for key, array in leaves(sample):
            values = np.asarray(array)
            # Keras narrows float64, NumPy's default, too.
            dtype = values.dtype.name.replace("float64", "float32")
            tensors.append(
                (
                    key or "input",
                    (None, *values.shape[1:]),
                    dtype,
                )
            )
    names = unique_names([name for name, _, _ in tensors], "input")
    specs = []
    for name, (_, shape, dtype) in zip(names, tensors, strict=True):
        specs.append(
            InputSpec(
                name,
                _static_shape(name, shape, batch_size),
                dtype,
            )
        )
    return Signature(tuple(specs), nesting_of(structure))


def leaves(
    structure: Nested, key: str | None = None
) -> list[tuple[str | None, Any]]:
    """Each leaf with the innermost dict key above it, dict keys in sorted order."""
    pairs = []
    if isinstance(structure, dict):
        for inner in sorted(structure):
            pairs += leaves(structure[inner], str(inner))
    elif isinstance(structure, (list, tuple)):
        for item in structure:
            pairs += leaves(item)
    else:
        pairs.append((key, structure))
    return pairs


def nesting_of(structure: Nested) -> Nesting:
    """The structure with the position of each leaf, in the order of `leaves`, in its place."""
    counter = iter(range(len(leaves(structure))))

    def positions(node: Nested) -> Nesting:
        if isinstance(node, dict):
            return {key: positions(node[key]) for key in sorted(node)}
        if isinstance(node, (list, tuple)):
            return [positions(item) for item in node]
        return next(counter)

    return positions(structure)


def pack(nesting: Nesting, flat: Sequence[Any]) -> Nested:
    """The structure of a nesting, filled with the items of a flat list."""
    return keras.tree.map_structure(lambda position: flat[position], nesting)


def unique_names(names: Sequence[str | None], fallback: str) -> list[str]:
    """Names for a LiteRT signature: word characters, unique, and independent of the session."""
    unique: list[str] = []
    for position, name in enumerate(names):
        # Keras numbers unnamed inputs through a session.
        if name is None or _AUTOMATIC_NAME.fullmatch(name):
            name = fallback if len(names) == 1 else f"{fallback}_{position}"
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        number = 0
        numbered = name
        while numbered in unique:
            number += 1
            numbered = f"{name}_{number}"
        unique.append(numbered)
    return unique


def full_batches(
    sample: Sequence[np.ndarray], rows: int
) -> list[list[np.ndarray]]:
    """Batches of a static size; the last one is padded with copies of the last row."""
    count = len(sample[0])
    batches = []
    for start in range(0, count, rows):
        batches.append([array[start : start + rows] for array in sample])
    missing = -count % rows
    if missing:
        padded = []
        for part in batches[-1]:
            copies = [part[-1:]] * missing
            padded.append(np.concatenate([part, *copies]))
        batches[-1] = padded
    return batches


def _static_shape(
    name: str,
    shape: tuple[int | None, ...],
    batch_size: int,
) -> tuple[int, ...]:
    """The shape of an input with the batch; ValueError if an axis is unknown."""
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
    return (
        batch_size,
        *(int(size) for size in shape[1:] if size is not None),
    )


def _checked_array(
    spec: InputSpec, data: TensorLike, argument: str
) -> np.ndarray:
    """An array of an input, in its dtype; ValueError if it does not fit."""
    array = np.asarray(data)
    if array.ndim == 0 or array.shape[1:] != spec.shape[1:]:
        raise ValueError(
            f"`{argument}` for input `{spec.name}` must have the shape "
            f"(rows, {', '.join(map(str, spec.shape[1:]))}). Received: shape={array.shape}"
        )
    are_integers = (
        array.dtype.kind in "iu" and np.dtype(spec.dtype).kind in "iu"
    )
    if not are_integers and not np.can_cast(
        array.dtype, spec.dtype, casting="same_kind"
    ):
        raise ValueError(
            f"`{argument}` for input `{spec.name}` must be of dtype {spec.dtype}. "
            f"Received: dtype={array.dtype}"
        )
    return array.astype(spec.dtype)
