"""The rule of each class of layers; users add their own."""

from typing import Any

import keras

from keras_sparse_ortho.layers import is_elementwise
from keras_sparse_ortho.models._channel_rules import (
    _attention,
    _depthwise,
    _embedding,
    _linear,
    _merges,
    _normalization,
    _operations,
    _recurrent,
    _reshapes,
    _tied,
)
from keras_sparse_ortho.models._channel_rules._rule import ChannelCall, ChannelRule, MakeRule

_RULES: dict[type | str, MakeRule] = {
    **_attention.RULES,
    **_depthwise.RULES,
    **_embedding.RULES,
    **_linear.RULES,
    **_merges.RULES,
    **_normalization.RULES,
    **_operations.RULES,
    **_recurrent.RULES,
    **_reshapes.RULES,
    **_tied.RULES,
}
_READS_ARGUMENTS = (keras.layers.MultiHeadAttention,)


def register_channel_rule(kind: type, make: MakeRule) -> None:
    """Says what a class of layers does to channels, for `remove_channels` and `channel_groups`.

    The rule is for the class itself, not for classes derived from it, which may compute something
    else. `passes_channels` is the one for layers that compute each channel by itself and keep
    constants; their weights, if any, have one entry for each channel.

    Args:
        kind: type. A class of layers.
        make: callable. Takes a `ChannelCall` and returns a `ChannelRule`, or a str: the reason why
            the channels must stay.

    Raises TypeError if `kind` is no class of layers, or `make` cannot be called.

    Examples:
        >>> import keras
        >>> class Clipped(keras.layers.Layer):
        ...     def call(self, x):
        ...         return keras.ops.clip(x, -1.0, 1.0)
        >>> register_channel_rule(Clipped, elementwise)
    """
    if not (isinstance(kind, type) and issubclass(kind, keras.layers.Layer)):
        raise TypeError(f"`kind` must be a class of layers. Received: kind={kind!r}")
    if not callable(make):
        raise TypeError(
            "`make` must take a ChannelCall and return a ChannelRule or a reason. "
            f"Received: make={make!r}"
        )
    _RULES[kind] = make


def rule_of(call: ChannelCall) -> ChannelRule | str:
    """The rule for a call, or the reason why there is none."""
    make = _make_rule_of(call.layer)
    if make is None:
        return "its class has no rule"
    layer = call.layer
    if isinstance(layer, keras.layers.Layer) and type(layer) not in _READS_ARGUMENTS:
        settings = _settings(call)
        if settings:
            return f"it is called with {', '.join(settings)}"
    if getattr(layer, "quantization_mode", None) is not None:
        return "its weights are quantized"
    if getattr(layer, "lora_enabled", False):
        return "its weights have adapters (LoRA)"
    return make(call)


def _make_rule_of(layer: Any) -> MakeRule | None:
    kind = type(layer)
    if kind in _RULES:
        return _RULES[kind]
    if is_elementwise(layer):
        return _tied.elementwise
    is_operation = not isinstance(layer, keras.layers.Layer)
    if is_operation and kind.__module__.startswith("keras."):
        return _RULES.get(kind.__name__)
    return None


def _settings(call: ChannelCall) -> list[str]:
    """Arguments besides the tensors, as `training=True`, which change what a layer computes."""
    settings = [str(value) for value in call.args[1:] if value is not None and value is not False]
    for name, value in call.kwargs.items():
        if value is not None and value is not False:
            settings.append(f"{name}={value}")
    return settings
