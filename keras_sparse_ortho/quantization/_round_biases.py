"""`round_biases`: biases that are integers in the file of a quantized model."""

from collections.abc import Iterator
from typing import NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._keras_internals import (
    GraphCall,
    graph_calls,
    graph_ends,
    is_graph,
)
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.quantization._fake_quantize import (
    has_trained_ranges,
    integers_of,
)
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
    for variable, value in list(_rounded_variables(model)):  # all of them first
        assign(variable, value)
    return model


class _LayerCall(NamedTuple):
    """A call of a layer: the step of its input, and the layer that is fused behind it."""

    layer: keras.layers.Layer
    step: float | None
    behind: keras.layers.Layer | None


def _rounded_variables(
    model: keras.Model,
) -> Iterator[tuple[keras.Variable, np.ndarray]]:
    """The biases of a model, and those of normalizations, with the values that a file can hold."""
    has_trained_ranges(model)  # raises where one is not set
    # Of kernels, by `id` of the layer that has it.
    scales: dict[int, np.ndarray] = {}
    for weight in prunable_weights(model):
        # The bias is added by the second half of a separable convolution.
        if is_separable(weight.owner) and weight.path.endswith(
            "depthwise_kernel"
        ):
            continue
        parts = integers_of(weight)
        if parts is None:
            continue
        integers, scale = parts
        if integers.any():
            scales[id(weight.owner)] = scale.reshape(-1)
    for call in _layer_calls(model, {}):
        if id(call.layer) not in scales:
            continue
        # Once, where a layer is called several times.
        scale = scales.pop(id(call.layer))
        if call.step is not None:
            yield from _rounded_bias(call.layer, call.step * scale, call.behind)


def _layer_calls(
    model: keras.Model, steps: dict[int, float | None]
) -> Iterator[_LayerCall]:
    """The calls of layers in a graph.

    Args:
        model: The model.
        steps: The steps of tensors by `id`, to which those of the graph are added.
    """
    calls = graph_calls(model)
    for call in calls:
        layer = call.operation
        inner = innermost(layer)
        input_steps = _steps_of_inputs(call, steps)
        step = _common(input_steps)
        if isinstance(inner, keras.Model):
            yield from _layer_calls(inner, steps)
            _, outputs = graph_ends(inner)
            output_steps = [
                steps.get(id(tensor)) for tensor in keras.tree.flatten(outputs)
            ]
            _note(call.outputs, output_steps, steps)
            continue
        output_step = None
        if passes_on(call):
            output_step = step
        # An operation, such as `a + b`, has no bias.
        if isinstance(inner, L.Layer):
            yield from _calls_inside(layer, input_steps)
            between = None
            rounded = None
            if isinstance(layer, QuantizeWrapper):
                between = layer.of_between
                rounded = layer.of_output
            if between is not None:
                step = between.step()
            yield _LayerCall(inner, step, _layer_behind(call, calls))
            if rounded is not None:
                output_step = rounded.step()
            elif not passes_on(call):
                output_step = fixed_step(inner)
        _note(
            call.outputs,
            [output_step] * len(call.outputs),
            steps,
        )


def _steps_of_inputs(
    call: GraphCall, steps: dict[int, float | None]
) -> list[float | None]:
    """The steps of the inputs of a call, rounded by the layer itself or before."""
    layer = call.operation
    input_steps = [
        steps.get(id(tensor)) for tensor in float_tensors(call.inputs)
    ]
    if isinstance(layer, QuantizeWrapper):
        for number, rounding in zip(
            layer.rounded_numbers, layer.of_inputs, strict=True
        ):
            input_steps[number] = rounding.step()
    return input_steps


def _common(steps: list[float | None]) -> float | None:
    """The step of all of some tensors; None if there are several."""
    return steps[0] if len(set(steps)) == 1 else None


def _note(
    tensors: list[Tensor],
    values: list[float | None],
    steps: dict[int, float | None],
) -> None:
    """Notes the steps of some tensors."""
    for tensor, step in zip(tensors, values, strict=True):
        steps[id(tensor)] = step


def _layer_behind(
    call: GraphCall, calls: list[GraphCall]
) -> keras.layers.Layer | None:
    """The layer that alone reads the output of a call, unless that is rounded before."""
    layer = call.operation
    if isinstance(layer, QuantizeWrapper) and layer.of_output is not None:
        return None
    readers = []
    for output in call.outputs:
        readers += readers_of(output, calls)
    return innermost(readers[0].operation) if len(readers) == 1 else None


def _calls_inside(
    layer: keras.layers.Layer, steps: list[float | None]
) -> Iterator[_LayerCall]:
    """Layers inside another one, such as an attention, with the steps of their inputs."""
    inner = innermost(layer)
    # Attention takes query, value (and key); with a key apart the order is unknown.
    if len(steps) == 2 or len(set(steps)) == 1:
        steps_of_projections = (
            steps[0],
            steps[-1],
            steps[-1],
        )
        for part, step in zip(
            projections(inner),
            steps_of_projections,
            strict=False,
        ):
            yield _LayerCall(innermost(part), step, None)
    for part, _ in walk(inner, ""):
        if (
            part is not layer
            and isinstance(part, QuantizeWrapper)
            and part.of_inputs
        ):
            yield _LayerCall(
                innermost(part),
                part.of_inputs[0].step(),
                None,
            )


def _rounded_bias(
    layer: keras.layers.Layer,
    steps: np.ndarray,
    behind: keras.layers.Layer | None,
) -> Iterator[tuple[keras.Variable, np.ndarray]]:
    """The bias of a layer, or of the batch normalization that is folded into it, rounded.

    Args:
        layer: The layer.
        steps: The steps of its products, one for all or by channel.
        behind: The layer that is fused with it.
    """
    bias = getattr(layer, "bias", None)
    if isinstance(behind, L.BatchNormalization):
        yield from _rounded_beta(behind, bias, steps)
    elif bias is not None and steps.size in (
        1,
        bias.shape[-1],
        np.prod(bias.shape),
    ):
        values = to_numpy(bias).astype(np.float64)
        change = _to_steps(values.reshape(-1), steps)
        yield bias, values + change.reshape(values.shape)


def _rounded_beta(
    norm: keras.layers.BatchNormalization,
    bias: keras.Variable | None,
    steps: np.ndarray,
) -> Iterator[tuple[keras.Variable, np.ndarray]]:
    """The `beta` of a normalization that rounds the bias of the folded layer."""
    mean = to_numpy(norm.moving_mean).astype(np.float64)
    variance = to_numpy(norm.moving_variance)
    gain = 1 / np.sqrt(variance + np.float64(norm.epsilon))
    if norm.scale:
        gain = gain * to_numpy(norm.gamma)
    before = 0 if bias is None else to_numpy(bias).reshape(-1)
    shift = gain * (before - mean)
    if norm.center and steps.size in (1, gain.size):
        beta = to_numpy(norm.beta).astype(np.float64)
        yield (
            norm.beta,
            beta + _to_steps(shift + beta, steps * np.abs(gain)),
        )


def _to_steps(value: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The change that makes values multiples of steps; 0 for steps of 0."""
    steps = np.broadcast_to(steps, value.shape).astype(np.float64)
    is_set = steps > 0
    counts = np.rint(value / np.where(is_set, steps, 1))
    return np.where(is_set, counts * steps - value, 0)
