"""A copy of a model that computes in float32, for models of mixed or half precision."""

from typing import Any

import keras

from keras_sparse_ortho.export._layers import all_layers

_HALF = ("float16", "bfloat16")


def float32_twin(model: keras.Model) -> keras.Model:
    """The model itself if it computes in float32, otherwise an equal one that does.

    LiteRT has no float16 or bfloat16 matrix products (the converter names MatMul and BiasAdd as
    missing), so what was trained in mixed precision is exported with the float32 weights that
    it keeps anyway.
    """
    if not any(layer.compute_dtype in _HALF for layer in all_layers(model)):
        return model
    config = _widen(keras.saving.serialize_keras_object(model))
    config.pop("compile_config", None)
    twin = keras.saving.deserialize_keras_object(config, safe_mode=False)
    if not twin.built:
        twin.build_from_config(config["build_config"])
    for mine, theirs in zip(twin.weights, model.weights, strict=True):
        mine.assign(keras.ops.cast(theirs.value, mine.dtype))
    return twin


def _widen(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _widen_item(node, key, value) for key, value in node.items()}
    if isinstance(node, (list, tuple)):
        return type(node)(_widen(item) for item in node)
    return node


def _widen_item(node: dict[str, Any], key: str, value: Any) -> Any:
    # A dtype is written as "dtype": "float16", or as a policy whose whole config is its name.
    holds_dtype = key == "dtype" or (key == "name" and len(node) == 1)
    if holds_dtype and isinstance(value, str) and value.removeprefix("mixed_") in _HALF:
        return "float32"
    return _widen(value)
