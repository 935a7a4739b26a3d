"""Which layers of a graph round their inputs and outputs, so that LiteRT computes in int8."""

import dataclasses
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import graph_calls, graph_ends
from keras_sparse_ortho.kernels import find_kernels, walk
from keras_sparse_ortho.quantization._quantize_wrapper import (
    FUSED,
    activation_of,
    innermost,
)

L = keras.layers
# Their output has the range of their input, or has zeros beside.
_PASS_ON = (
    *(L.Flatten, L.Reshape, L.Permute, L.RepeatVector, L.InputLayer, L.Identity),
    *(L.Dropout, L.SpatialDropout1D, L.SpatialDropout2D, L.SpatialDropout3D),
    *(L.GaussianDropout, L.GaussianNoise, L.AlphaDropout),
    *(L.MaxPooling1D, L.MaxPooling2D, L.MaxPooling3D),
    *(L.GlobalMaxPooling1D, L.GlobalMaxPooling2D, L.GlobalMaxPooling3D),
    *(L.ZeroPadding1D, L.ZeroPadding2D, L.ZeroPadding3D),
    *(L.Cropping1D, L.Cropping2D, L.Cropping3D),
)
# The steps of the fixed ranges that LiteRT gives their outputs.
_FIXED = {
    keras.activations.softmax: 1 / 256,
    keras.activations.sigmoid: 1 / 256,
    keras.activations.tanh: 1 / 128,
}
_PRODUCTS = (
    *(L.Dense, L.EinsumDense, L.Conv1D, L.Conv2D, L.Conv3D),
    *(L.DepthwiseConv1D, L.DepthwiseConv2D),
)


@dataclasses.dataclass
class Rounding:
    """How many input tensors of a layer are rounded; whether its output and activation are."""

    inputs: int = 0
    output: bool = False
    activation: bool = False


def roundings(model: Any, left_out: set[int]) -> dict[int, Rounding]:
    """What is rounded, by `id` of the layer, in a graph; layers that are `left_out` stay in floats.

    Rounded are the outputs of operations as LiteRT has them: a convolution with the normalization
    and the ReLU behind it is one. Layers with kernels round their inputs where nothing has.
    """
    found: dict[int, Rounding] = {}
    _place(model, left_out, found)
    return found


def _place(model: Any, left_out: set[int], found: dict[int, Rounding]) -> None:
    calls = graph_calls(model)
    consumers: dict[int, list[Any]] = {}
    for call in calls:
        for tensor in call.inputs:
            consumers.setdefault(id(tensor), []).append(call.operation)
    ends = {id(tensor) for tensor in keras.tree.flatten(graph_ends(model)[1])}
    rounded: set[int] = set()  # tensors
    for call in calls:
        layer, inner = call.operation, innermost(call.operation)
        if isinstance(inner, keras.Model):
            _place(inner, left_out, found)
            rounded |= {id(tensor) for tensor in call.outputs}
            continue
        if passes_on(inner):
            if call.inputs and all(id(tensor) in rounded for tensor in call.inputs):
                rounded |= {id(tensor) for tensor in call.outputs}
            continue
        if not isinstance(layer, L.Layer) or id(layer) in left_out or len(call.outputs) != 1:
            continue
        (output,) = call.outputs
        after = consumers.get(id(output), [])
        fused = len(after) == 1 and id(output) not in ends and _is_fused(inner, innermost(after[0]))
        fixed = fixed_step(inner) is not None
        own = found.setdefault(id(layer), Rounding())
        own.activation = activation_of(layer) not in (None, *FUSED)
        if not fused and not fixed and keras.backend.is_float_dtype(output.dtype):
            own.output = True
            rounded.add(id(output))
        floats = [t for t in call.inputs if keras.backend.is_float_dtype(t.dtype)]
        if find_kernels(layer, "") and any(id(tensor) not in rounded for tensor in floats):
            own.inputs = len(floats)
        _place_inside(layer, own, left_out, found)


def _place_inside(
    layer: Any, outer: Rounding, left_out: set[int], found: dict[int, Rounding]
) -> None:
    """Products inside of a layer, such as those of an attention, round what they take and give."""
    inner = innermost(layer)
    if isinstance(inner, L.Wrapper | L.RNN):
        return
    outside, done = projections(inner), []
    for own, _ in walk(inner, ""):
        core = innermost(own)
        if core is inner or core in done or id(own) in left_out:
            continue
        done.append(core)
        if isinstance(core, _PRODUCTS) and activation_of(core) in FUSED:
            inputs = 0 if any(core is innermost(one) for one in outside) else 1
            last = outside and core is innermost(inner.output_dense)
            found.setdefault(id(own), Rounding(inputs, output=not (last and outer.output)))


def projections(layer: Any) -> list[Any]:
    """The layers inside of an attention that are called on its inputs."""
    if isinstance(layer, L.MultiHeadAttention):
        return [layer.query_dense, layer.key_dense, layer.value_dense]
    return []


def passes_on(layer: Any) -> bool:
    """Whether the output of a layer has the range of its input."""
    return isinstance(layer, _PASS_ON) or _is_linear(layer)


def fixed_step(layer: Any) -> float | None:
    """The step of the output of a layer whose range LiteRT knows without training."""
    return next((step for own, step in _FIXED.items() if own is _function_of(layer)), None)


def _is_linear(layer: Any) -> bool:
    return isinstance(layer, L.Activation) and layer.activation is keras.activations.linear


def _is_relu(layer: Any) -> bool:
    if isinstance(layer, L.ReLU):
        return layer.max_value in (None, 6) and not layer.negative_slope and not layer.threshold
    relus = (keras.activations.relu, keras.activations.relu6)
    return isinstance(layer, L.Activation) and layer.activation in relus


def _function_of(layer: Any) -> Any:
    if isinstance(layer, L.Softmax):
        return keras.activations.softmax
    return layer.activation if isinstance(layer, L.Activation) else activation_of(layer)


def _is_fused(layer: Any, after: Any) -> bool:
    """Whether LiteRT computes a layer and the one behind it in one operation."""
    if isinstance(layer, L.BatchNormalization | L.Add | L.Subtract):
        return _is_relu(after)
    linear = activation_of(layer) is keras.activations.linear
    return linear and (isinstance(after, L.BatchNormalization) or _is_relu(after))
