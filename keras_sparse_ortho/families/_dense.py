"""Dense: a matrix on the last axis of the inputs."""

import keras

from keras_sparse_ortho.families._register_layer import register_layer
from keras_sparse_ortho.kernels import KernelLayout
from keras_sparse_ortho.models import (
    ChannelCall,
    ChannelRule,
    Linear,
    for_single_inputs,
)

L = keras.layers


@for_single_inputs
def _dense(call: ChannelCall) -> ChannelRule | str:
    [tensor] = call.inputs
    if tensor.axis != len(tensor.shape) - 1:
        return f"it does not read axis {tensor.axis}, where the channels are"
    return Linear(call.layer, call.layer.kernel, tensor.axis)


register_layer(
    L.Dense,
    {"kernel": KernelLayout.dense()},
    positions="last axis",
    rows="last axis",
    channels=_dense,
    rounding="by output",
    by_sample=True,
)
