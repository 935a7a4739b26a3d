"""`round_biases`: biases that are integers in the file of a quantized model."""

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._keras_internals import GraphCall, graph_calls, graph_ends, is_graph
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.quantization._fake_quantize import has_trained_ranges, integers_of
from keras_sparse_ortho.quantization._quantize_aware import (
    fixed_step,
    float_tensors,
    passes_on,
    projections,
    readers_of,
)
from keras_sparse_ortho.quantization._quantize_wrapper import (
    QuantizeWrapper,
    innermost,
    is_separable,
)

L = keras.layers


@other_keywords
def round_biases(model: keras.Model) -> keras.Model:
    """Moves the biases of a trained quantized model to values that its file can hold.

    LiteRT adds biases as integers in steps of the input's step `s_x` times the scale `s_k` of the
    kernel's channel:

        b <- s round(b / s),  s = s_x s_k

    A batch normalization behind is folded by the file; then `beta` changes, which rounds the sum

        beta + g (b - mean),  s = s_x s_k |g|,  g = gamma / sqrt(variance + epsilon)

    No bias changes by more than half a step. With int4 kernels these steps are most of the
    difference between a file and Keras. Call this at the end of training, which moves biases.

    Args:
        model: A trained model of `quantize_aware` with `activations="int8"`. It is changed in
            place, and returned.

    Raises:
        NotPrunableError: A subclassed model, whose ranges cannot be matched to its kernels.
        ValueError: Ranges that no training has set.

    Limits: a layer that is called several times has the steps of its first call. Biases stay as
    they are if the input's step is unknown (behind layers that are not quantized, in attention with
    a key apart from its value), and before normalizations without `beta`.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
        >>> model = kso.quantize_aware(dense, "int4")
        >>> _ = model(np.eye(4, dtype="float32"), training=True)
        >>> _ = model.layers[0].bias.assign([0.3, 0.0])
        >>> model = kso.quantization.round_biases(model)
        >>> scale = np.abs(kso.prunable_weights(model)[0].value[:, 0]).max() / 7
        >>> steps = float(keras.ops.convert_to_numpy(model.layers[0].bias)[0]) / (scale / 255)
        >>> bool(abs(steps - round(steps)) < 0.01)
        True
    """
    if not is_graph(model):
        raise NotPrunableError(
            "Which range belongs to which kernel is known of functional and Sequential models "
            f"alone. Received: {type(model).__name__}"
        )
    for variable, value in [*_changes(model)]:  # all of them first
        assign(variable, value)
    return model


def _changes(model: Any) -> Iterator[tuple[Any, np.ndarray]]:
    has_trained_ranges(model)  # raises where one is not set
    scales: dict[int, np.ndarray] = {}  # of kernels, by `id` of the layer that has it
    for weight in prunable_weights(model):
        parts = integers_of(weight)
        # The bias is added by the second half of a separable convolution.
        if is_separable(weight.owner) and weight.path.endswith("depthwise_kernel"):
            continue
        if parts is not None and parts[0].any():
            scales[id(weight.owner)] = parts[1].reshape(-1)
    for layer, step, norm in _calls(model, {}):
        scale = scales.pop(id(layer), None)  # once, where a layer is called several times
        if scale is not None and step is not None:
            yield from _change(layer, step * scale, norm)


def _calls(model: Any, steps: dict[int, float | None]) -> Iterator[tuple[Any, float | None, Any]]:
    """Each layer with the step of its input and the fused one behind it; fills `steps` by `id`."""
    calls = graph_calls(model)
    for call in calls:
        layer, inner = call.operation, innermost(call.operation)
        taken = [steps.get(id(tensor)) for tensor in float_tensors(call.inputs)]
        if isinstance(layer, QuantizeWrapper) and layer.of_inputs:
            taken = [rounding.step() for rounding in layer.of_inputs]
        step = taken[0] if len(set(taken)) == 1 else None
        results = [step if passes_on(call) else None] * len(call.outputs)
        if isinstance(inner, keras.Model):
            yield from _calls(inner, steps)
            results = [steps.get(id(t)) for t in keras.tree.flatten(graph_ends(inner)[1])]
        elif isinstance(inner, L.Layer):  # an operation, such as `a + b`, has no bias
            yield from _calls_inside(layer, taken)
            if isinstance(layer, QuantizeWrapper) and layer.of_between is not None:
                step = layer.of_between.step()
            yield inner, step, _norm_behind(call, calls)
            if isinstance(layer, QuantizeWrapper) and layer.of_output is not None:
                results = [layer.of_output.step()] * len(call.outputs)
            elif not passes_on(call):
                results = [fixed_step(inner)] * len(call.outputs)
        steps.update(zip(map(id, call.outputs), results, strict=True))


def _norm_behind(call: GraphCall, calls: list[GraphCall]) -> Any:
    """The layer that alone reads what a call gives, unless that is rounded before."""
    layer = call.operation
    if isinstance(layer, QuantizeWrapper) and layer.of_output is not None:
        return None
    after = [reader for made in call.outputs for reader in readers_of(made, calls)]
    return innermost(after[0].operation) if len(after) == 1 else None


def _calls_inside(layer: Any, given: list[Any]) -> Iterator[tuple[Any, float | None, None]]:
    """Layers inside another one, such as an attention, with the steps of their inputs."""
    inner = innermost(layer)
    # Attention takes query, value (and key); with a key apart the order is unknown.
    if len(given) == 2 or len(set(given)) == 1:
        for one, step in zip(projections(inner), (given[0], given[-1], given[-1]), strict=False):
            yield innermost(one), step, None
    for own, _ in walk(inner, ""):
        if own is not layer and isinstance(own, QuantizeWrapper) and own.of_inputs:
            yield innermost(own), own.of_inputs[0].step(), None


def _change(layer: Any, steps: np.ndarray, norm: Any) -> Iterator[tuple[Any, np.ndarray]]:
    """The bias of a layer, or of the batch normalization that is folded into it."""
    bias = getattr(layer, "bias", None)
    if not isinstance(norm, L.BatchNormalization):
        if bias is not None and steps.size in (1, bias.shape[-1], np.prod(bias.shape)):
            value = to_numpy(bias).astype(np.float64)
            yield bias, value + _to_steps(value.reshape(-1), steps).reshape(value.shape)
        return
    mean = to_numpy(norm.moving_mean).astype(np.float64)
    gain = 1 / np.sqrt(to_numpy(norm.moving_variance) + np.float64(norm.epsilon))
    gain = gain * to_numpy(norm.gamma) if norm.scale else gain
    whole = gain * ((0 if bias is None else to_numpy(bias).reshape(-1)) - mean)
    if norm.center and steps.size in (1, gain.size):
        beta = to_numpy(norm.beta).astype(np.float64)
        yield norm.beta, beta + _to_steps(whole + beta, steps * np.abs(gain))


def _to_steps(value: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The change that makes values multiples of steps; 0 for steps of 0."""
    steps = np.broadcast_to(steps, value.shape).astype(np.float64)
    return np.where(steps > 0, np.rint(value / np.where(steps > 0, steps, 1)) * steps - value, 0)
