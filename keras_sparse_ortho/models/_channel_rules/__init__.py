"""Rules for the channels of each class of layers, and a registry of them."""

from keras_sparse_ortho.models._channel_rules._attention import Attention
from keras_sparse_ortho.models._channel_rules._registry import (
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
)
from keras_sparse_ortho.models._channel_rules._tied import Tied

__all__ = [
    "Attention",
    "ChannelCall",
    "ChannelRule",
    "ChannelTensor",
    "Constants",
    "MakeRule",
    "Mask",
    "Shape",
    "SmallerLayer",
    "SmallerOperation",
    "Tied",
    "Tracer",
    "register_channel_rule",
    "rule_of",
]
