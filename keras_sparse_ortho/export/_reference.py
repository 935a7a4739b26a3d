"""The plain float32 model behind a LiteRT file, its outputs, and its kernels."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import is_graph
from keras_sparse_ortho._types import Nested
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import ExportConversionError
from keras_sparse_ortho.export._process import converter_backend
from keras_sparse_ortho.export._signature import (
    Signature,
    full_batches,
    leaves,
    pack,
    unique_names,
)
from keras_sparse_ortho.kernels import is_sparse_layer, walk
from keras_sparse_ortho.models import strip

_SEED = "seed_generator_state"  # the name of Keras' states of random numbers
_HALF = ("float16", "bfloat16")
_HALF_POLICIES = (*_HALF, "mixed_float16", "mixed_bfloat16")


def plain_model(
    model: keras.Model,
) -> tuple[keras.Model, keras.Model]:
    """The plain float32 model to convert, and the one to agree with: this, or the user's."""
    stripped = model
    if is_graph(model) or any(
        is_sparse_layer(layer) for layer, _ in walk(model, "")
    ):
        stripped = strip(model)
        _drop_negative_zeros(stripped)
    if not any(layer.compute_dtype in _HALF for layer, _ in walk(stripped, "")):
        return stripped, model
    config = in_float32(keras.saving.serialize_keras_object(stripped))
    config.pop("compile_config", None)
    plain = keras.saving.deserialize_keras_object(config, safe_mode=False)
    if not plain.built:
        plain.build_from_config(config["build_config"])
    for wide, narrow in zip(plain.weights, stripped.weights, strict=True):
        assign(wide, keras.ops.cast(narrow.value, wide.dtype))
    return plain, plain


def in_float32(config: Any, is_dtype: bool = False) -> Any:
    """A configuration with float32 in place of half precision; names stay.

    Args:
        config: JSON values.
        is_dtype: bool. Whether they belong to a key such as "dtype".
    """
    if isinstance(config, str):
        return "float32" if is_dtype and config in _HALF_POLICIES else config
    if isinstance(config, list | tuple):
        return [in_float32(item, is_dtype) for item in config]
    if not isinstance(config, dict):
        return config
    changed = {}
    for key, value in config.items():
        changed[key] = in_float32(value, is_dtype or str(key).endswith("dtype"))
    return changed


def _drop_negative_zeros(model: keras.Model) -> None:
    """Turns -0.0, which `w * mask` leaves where w < 0, into 0.0: it makes zstd files 44% larger."""
    for variable in model.weights:
        value = np.asarray(to_numpy(variable.value))
        if value.dtype.kind == "f" and np.any(np.signbit(value[value == 0])):
            assign(variable, value + 0.0)


def keras_outputs(
    model: keras.Model,
    signature: Signature,
    sample: list[np.ndarray],
) -> tuple[list[str], list[np.ndarray]]:
    """Names and values of the model's outputs on all rows; ValueError if one is not finite.

    States pass from batch to batch, as in a file. The model has its own again afterwards.
    """
    keys: list[str | None] = []
    batches: list[list[np.ndarray]] = []
    with keras.StatelessScope():
        for batch in full_batches(sample, signature.batch_size):
            inputs = [keras.ops.convert_to_tensor(array) for array in batch]
            nested = pack(signature.nesting, inputs)
            answers = leaves(model(nested, training=False))
            keys = [key for key, _ in answers]
            batches.append(
                [np.asarray(to_numpy(tensor)) for _, tensor in answers]
            )
    output_names = getattr(model, "output_names", None) or []
    if len(output_names) == len(keys):
        keys = [
            key or name for key, name in zip(keys, output_names, strict=True)
        ]
    names = unique_names(keys, "output")
    outputs = []
    for pieces in zip(*batches, strict=True):
        outputs.append(np.concatenate(pieces)[: len(sample[0])])
    for name, output in zip(names, outputs, strict=True):
        if not np.all(np.isfinite(output)):
            raise ValueError(
                "Keras' own outputs must be finite on the sample, or nothing can be compared. "
                f"Received: non-finite values in output `{name}` of model {model.name!r}"
            )
    return names, outputs


def check_states(model: keras.Model, inputs: Nested) -> None:
    """Raises where a file would not have the states of a model.

    Args:
        model: The plain model.
        inputs: Its inputs in one batch.
    """
    states = _states_of(model)
    left_over = []
    for state in states:
        if np.any(to_numpy(state.value)):
            left_over.append(state.path)
    if left_over:
        raise ValueError(
            "Stateful layers must have states of zeros, from which a file starts: call their "
            f"`reset_states()` before the export. Received: {left_over[:5]}"
        )
    if converter_backend() == "tensorflow":
        return
    assigned = assigned_variables(model, inputs)
    if assigned:
        raise ExportConversionError(
            f"Model {model.name!r} assigns variables in a call, and without TensorFlow's converter "
            "a file would have them as constants. Install it: pip install "
            '"keras-sparse-ortho[litert]"; or make the states inputs and outputs of the model. '
            f"Received: variables {assigned[:5]}"
        )


def assigned_variables(model: keras.Model, inputs: Nested) -> list[str]:
    """The paths of the variables that a call assigns, such as a ring buffer; the model stays."""
    with keras.StatelessScope() as scope:
        model(inputs, training=False)
    assigned = []
    for variable in (*model.variables, *_states_of(model)):
        is_assigned = scope.get_current_value(variable) is not None
        # Recurrent layers draw masks of dropout that they do not use.
        if is_assigned and variable.name != _SEED:
            assigned.append(variable.path)
    return assigned


def _states_of(model: keras.Model) -> list[keras.Variable]:
    """The states of stateful recurrent layers, which Keras does not count as the model's."""
    states = []
    for layer, _ in walk(model, ""):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            states += keras.tree.flatten(layer.states)
    return [state for state in states if isinstance(state, keras.Variable)]


def kernels_of(model: keras.Model) -> dict[str, np.ndarray]:
    """Values of kernels by name, and of other weights with zeros, none of which may be lost."""
    kernels = {}
    for variable in model.weights:
        # Which the converter may fold.
        if len(variable.shape) < 2 or "bias" in variable.name:
            continue
        value = np.asarray(to_numpy(variable.value))
        is_kernel = "kernel" in variable.name or "embedding" in variable.name
        if is_kernel or 0 < np.count_nonzero(value) < value.size:
            kernels[variable.path] = value
    return kernels
