"""Rules for the channels of each class of layers, and a registry of them."""

from keras_sparse_ortho.models._channel_rules._linear import (
    Grouped,
    Linear,
    last_axis,
)
from keras_sparse_ortho.models._channel_rules._registry import (
    add_channel_rules,
    register_channel_rule,
    rule_of,
)
from keras_sparse_ortho.models._channel_rules._rule import (
    ChannelCall,
    ChannelRule,
    ChannelTensor,
    Constants,
    MakeRule,
    Mask,
    Shape,
    SmallerLayer,
    SmallerOperation,
    Tracer,
    activated,
    bias_of,
    count_of,
    for_single_inputs,
    has_borders,
    smaller_layer,
    value_of,
    without_tiny,
)
from keras_sparse_ortho.models._channel_rules._tied import (
    Tied,
    elementwise,
    identity_sources,
    passes_channels,
)

__all__ = [
    "ChannelCall",
    "ChannelRule",
    "ChannelTensor",
    "Constants",
    "Grouped",
    "Linear",
    "MakeRule",
    "Mask",
    "Shape",
    "SmallerLayer",
    "SmallerOperation",
    "Tied",
    "Tracer",
    "activated",
    "add_channel_rules",
    "bias_of",
    "count_of",
    "elementwise",
    "for_single_inputs",
    "has_borders",
    "identity_sources",
    "last_axis",
    "passes_channels",
    "register_channel_rule",
    "rule_of",
    "smaller_layer",
    "value_of",
    "without_tiny",
]
