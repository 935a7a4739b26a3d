"""The rule of each class of layers; users add their own."""

from collections.abc import Mapping
from typing import Any

import keras

from keras_sparse_ortho._checks import as_text, other_keywords
from keras_sparse_ortho.layers import is_elementwise
from keras_sparse_ortho.models._channel_rules._linear import last_axis
from keras_sparse_ortho.models._channel_rules._rule import (
    ChannelCall,
    ChannelRule,
    MakeRule,
)
from keras_sparse_ortho.models._channel_rules._tied import (
    elementwise,
    passes_channels,
)

CHANNEL_RULES: dict[type | str, MakeRule] = {}
_READS_ARGUMENTS = (keras.layers.MultiHeadAttention,)


_BY_NAME = {
    "elementwise": elementwise,
    "channelwise": passes_channels,
    "last axis": last_axis,
}


@other_keywords
def register_channel_rule(kind: type, rule: str | MakeRule) -> None:
    """Sets the rule of a class of layers, for `remove_channels` and `channel_groups`.

    The rule is for the class itself, not for classes derived from it, which may compute something
    else.

    Args:
        kind: type. A class of layers.
        rule: `"elementwise"`, `"channelwise"`, `"last axis"` or a callable. An elementwise layer
            has no weights, and maps each entry alone. A channelwise one passes channels on, leaves
            constant ones as they are, and its weights, if any, have one entry for each channel on
            their last axis. One on the last axis multiplies it by its kernel, or parts of it by a
            matrix of the kernel each, and adds a bias; its configuration has `units`, and
            `use_bias` or `groups`. A callable takes a `ChannelCall` and returns a `ChannelRule`, or
            a str: the reason why the channels must stay.

    Raises TypeError if `kind` is not a class of layers or `rule` none of these.

    Examples:
        >>> import keras
        >>> class Clipped(keras.layers.Layer):
        ...     def call(self, x):
        ...         return keras.ops.clip(x, -1.0, 1.0)
        >>> register_channel_rule(Clipped, "elementwise")
    """
    if not (isinstance(kind, type) and issubclass(kind, keras.layers.Layer)):
        raise TypeError(
            f"`kind` must be a class of layers. Received: kind={as_text(kind)}"
        )
    make = _BY_NAME.get(rule) if isinstance(rule, str) else rule
    if not callable(make):
        raise TypeError(
            f"`rule` must be one of {list(_BY_NAME)}, or take a ChannelCall and return a "
            f"ChannelRule or a reason. Received: rule={as_text(rule)}"
        )
    CHANNEL_RULES[kind] = make


def add_channel_rules(rules: Mapping[type | str, MakeRule]) -> None:
    """Adds the rules of a family: of classes of layers, and by name of operations of Keras."""
    CHANNEL_RULES.update(rules)


def rule_of(call: ChannelCall) -> ChannelRule | str:
    """The rule for a call, or the reason why there is none."""
    make = _make_rule_of(call.layer)
    if make is None:
        return "its class has no rule"
    layer = call.layer
    if (
        isinstance(layer, keras.layers.Layer)
        and type(layer) not in _READS_ARGUMENTS
    ):
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
    if kind in CHANNEL_RULES:
        return CHANNEL_RULES[kind]
    if is_elementwise(layer):
        return elementwise
    is_operation = not isinstance(layer, keras.layers.Layer)
    if is_operation and kind.__module__.startswith("keras."):
        return CHANNEL_RULES.get(kind.__name__)
    return None


def _settings(call: ChannelCall) -> list[str]:
    """Arguments besides the tensors, as `training=True`, which change what a layer computes."""
    settings = [
        str(value)
        for value in call.args[1:]
        if value is not None and value is not False
    ]
    for name, value in call.kwargs.items():
        if value is not None and value is not False:
            settings.append(f"{name}={value}")
    return settings
