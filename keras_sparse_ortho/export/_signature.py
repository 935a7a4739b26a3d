"""What goes into the exported model: names, static shapes, dtypes and nesting of its inputs.

The *nesting* of inputs is their structure with the position of each tensor in place of the tensor:
`{"a": 0, "b": [1, 2]}`. It is plain JSON, so that it travels to the worker processes. `keras.tree`
has no order that is the same everywhere: on torch it leaves the keys of a dict within a dict in
the order of their insertion, on all backends those of an OrderedDict, and sorts all others.
"""

import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

_SAMPLE_ROWS = 8
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
    nesting: Any

    @property
    def batch_size(self) -> int:
        """Rows of one call of the file."""
        return self.inputs[0].shape[0]

    @property
    def default_rows(self) -> int:
        """Rows to compare where the user gave none: whole batches, at least 8 rows."""
        return self.batch_size * math.ceil(_SAMPLE_ROWS / self.batch_size)

    def pack(self, arrays: list[Any]) -> Any:
        """Arrays in the order of `inputs`, nested as the Keras model takes them."""
        return pack(self.nesting, arrays)

    def flatten(self, data: Any, argument: str) -> list[np.ndarray]:
        """Check the user's arrays against the inputs and list them in the order of `inputs`.

        Args:
            data: Nested like the model's inputs, or a dict by input name; any number of rows.
            argument: Name of the user's argument, for the error messages.

        Raises:
            ValueError: if the nesting, a shape, a dtype or the number of rows does not fit.
        """
        names = [spec.name for spec in self.inputs]
        if len(names) == 1 and not isinstance(data, dict):
            single = (
                isinstance(data, (list, tuple)) and len(data) == 1 and hasattr(data[0], "shape")
            )
            given = [data[0] if single else data]
        elif isinstance(data, dict) and sorted(data) == sorted(names):
            given = [data[name] for name in names]
        elif isinstance(data, (list, tuple)) or nesting_of(data) == self.nesting:
            given = [array for _, array in leaves(data)]
        else:  # a dict of other names: the right count of arrays would be matched at random
            given = []
        if len(given) != len(names):
            raise ValueError(
                f"`{argument}` must hold one array for each input of the model, nested like the "
                f"inputs or as a dict by name: {names}. Received: {_describe(data)}"
            )
        arrays = [
            _check_array(spec, array, argument)
            for spec, array in zip(self.inputs, given, strict=True)
        ]
        rows = {array.shape[0] for array in arrays}
        if len(rows) != 1 or 0 in rows:
            raise ValueError(
                f"The arrays of `{argument}` must have the same number of rows, at least one. "
                f"Received: rows={[array.shape[0] for array in arrays]}"
            )
        return arrays

    def random_sample(self, seed: int) -> list[np.ndarray]:
        """Standard normal rows for each input.

        Raises:
            ValueError: if an input is not of a floating dtype, where no normal value fits.
        """
        rng = np.random.default_rng(seed)
        arrays = []
        for spec in self.inputs:
            if not spec.dtype.startswith("float"):
                raise ValueError(
                    f"No random sample can be drawn for input `{spec.name}`, whose dtype is "
                    f"{spec.dtype}: the valid values are not known. Pass `sample=` with arrays "
                    "for all inputs. Received: sample=None"
                )
            arrays.append(
                rng.standard_normal((self.default_rows, *spec.shape[1:])).astype(spec.dtype)
            )
        return arrays


def signature_of(model: keras.Model, batch_size: int, sample: Any = None) -> Signature:
    """Read the inputs of a built model and fix their batch dimension.

    A subclassed model does not know its inputs; they are read from `sample` instead.

    Raises:
        ValueError: if the model is not built, or an input cannot have a static shape.
    """
    if not isinstance(model, keras.Model):
        raise ValueError(
            f"`model` must be a Keras model. Received: model of type {type(model).__name__}"
        )
    if not model.built:
        raise ValueError(
            "Only a built model can be exported: its shapes and weights must exist. Call it on "
            f"data or give it a `keras.Input` first. Received: unbuilt model '{model.name}'"
        )
    structure = _input_structure(model)
    if structure is None:
        if sample is None:
            raise ValueError(
                f"Model '{model.name}' is subclassed and does not know the shapes of its inputs. "
                "Pass `sample=` with arrays nested like the inputs. Received: sample=None"
            )
        structure = sample
        arrays = [(key, np.asarray(array)) for key, array in leaves(sample)]
        tensors = [(k or "input", (None, *a.shape[1:]), a.dtype.name) for k, a in arrays]
    else:
        tensors = [(k or t.name, tuple(t.shape), str(t.dtype)) for k, t in leaves(structure)]
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
    """Put a flat list back into the nesting that a nesting describes."""
    if isinstance(nesting, dict):
        return {k: pack(v, flat) for k, v in nesting.items()}
    if isinstance(nesting, list):
        return [pack(item, flat) for item in nesting]
    return flat[nesting]


def unique_names(names: Sequence[str | None], fallback: str) -> list[str]:
    """Names a LiteRT signature can hold: no odd characters, none twice, none made up by Keras.

    Keras numbers unnamed inputs through a session, so the same model would get other names in
    each file; those become `fallback` (or `fallback_0`, `fallback_1`... where there are several).
    """
    result: list[str] = []
    for position, name in enumerate(names):
        if name is None or _AUTOMATIC_NAME.fullmatch(name):
            name = fallback if len(names) == 1 else f"{fallback}_{position}"
        name = re.sub(r"\W", "_", name, flags=re.ASCII)
        free, number = name, 0
        while free in result:
            number += 1
            free = f"{name}_{number}"
        result.append(free)
    return result


def _input_structure(model: keras.Model) -> Any:
    inputs = getattr(model, "inputs", None)
    if not inputs:
        return None
    if isinstance(model, keras.Sequential):  # its `input` raises until it is called once
        return inputs[0]
    return model.input


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
    same_kind = np.can_cast(array.dtype, spec.dtype, casting="same_kind")
    whole = array.dtype.kind in "iu" and np.dtype(spec.dtype).kind in "iu"
    if not (same_kind or whole):
        raise ValueError(
            f"`{argument}` for input `{spec.name}` must be of dtype {spec.dtype}. "
            f"Received: dtype={array.dtype}"
        )
    return array.astype(spec.dtype)


def _describe(data: Any) -> str:
    if isinstance(data, dict):
        return f"a dict with the keys {list(data)}"
    if isinstance(data, (list, tuple)):
        return f"a {type(data).__name__} of {len(leaves(data))} arrays"
    return f"one {type(data).__name__}"
