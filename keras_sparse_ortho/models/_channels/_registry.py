"""Which rule is that of which layer."""

import types
from collections.abc import Mapping

import keras

from keras_sparse_ortho._keras_internals import GraphCall
from keras_sparse_ortho.layers import CircularPadding
from keras_sparse_ortho.models._channels import _linear, _tied
from keras_sparse_ortho.models._channels._rule import Barrier, ChannelRule

L = keras.layers

_TIED = [
    "ActivityRegularization",
    "AlphaDropout",
    "Dropout",
    "GaussianDropout",
    "GaussianNoise",
    "Identity",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "SpatialDropout3D",
    "AveragePooling1D",
    "AveragePooling2D",
    "AveragePooling3D",
    "MaxPooling1D",
    "MaxPooling2D",
    "MaxPooling3D",
    "GlobalAveragePooling1D",
    "GlobalAveragePooling2D",
    "GlobalAveragePooling3D",
    "GlobalMaxPooling1D",
    "GlobalMaxPooling2D",
    "GlobalMaxPooling3D",
    "Cropping1D",
    "Cropping2D",
    "Cropping3D",
    "UpSampling1D",
    "UpSampling2D",
    "UpSampling3D",
]

_RULES: Mapping[type, type[ChannelRule]] = types.MappingProxyType(
    {
        **{getattr(L, name): _tied.Tied for name in _TIED},
        **dict.fromkeys((L.Dense, L.Conv1D, L.Conv2D, L.Conv3D), _linear.Linear),
        **dict.fromkeys((L.DepthwiseConv1D, L.DepthwiseConv2D), _linear.Depthwise),
        **dict.fromkeys((L.SeparableConv1D, L.SeparableConv2D), _linear.Separable),
        **dict.fromkeys((L.ZeroPadding1D, L.ZeroPadding2D, L.ZeroPadding3D), _tied.Padding),
        **dict.fromkeys((L.ReLU, L.LeakyReLU, L.ELU), _tied.Elementwise),
        CircularPadding: _tied.Tied,
        L.Activation: _tied.Activation,
        L.BatchNormalization: _tied.Normalization,
        L.Reshape: _tied.Reshape,
        L.Flatten: _tied.Flatten,
        L.Concatenate: _tied.Concatenation,
        L.Add: _tied.Sum,
        L.Subtract: _tied.Difference,
        L.Multiply: _tied.Product,
        L.Average: _tied.Mean,
        L.Maximum: _tied.Largest,
        L.Minimum: _tied.Least,
    }
)


def rule_for(call: GraphCall, calls: int) -> ChannelRule:
    """The rule of a call; a `Barrier` for layers that are not known.

    By the class itself, as a subclass may compute something else.

    Args:
        call: The call.
        calls: How often its layer is called in the model. One that changes would have to shrink
            alike for all calls: it is left alone.
    """
    layer = call.operation
    inputs = [tuple(tensor.shape) for tensor in call.inputs]
    output = tuple(call.outputs[0].shape) if call.outputs else ()
    rule = _RULES.get(type(layer), Barrier)
    changes = bool(getattr(layer, "weights", None)) or rule is _tied.Reshape
    # Such as `training=True`, with which BatchNormalization and Dropout are something else.
    told = any(setting is not None and setting is not False for setting in call.settings)
    alone = len(call.outputs) == 1 and call.inputs and (calls == 1 or not changes)
    if told or not alone or not rule.fits(layer, inputs, output):
        rule = Barrier
    return rule(layer, inputs, output)
