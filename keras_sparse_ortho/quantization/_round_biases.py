"""`round_biases`: biases that are integers in the file of a quantized model."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import graph_calls, graph_ends, is_graph
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.quantization._fake_quantize import has_trained_ranges, integers_of
from keras_sparse_ortho.quantization._quantize_aware import fixed_step, passes_on, projections
from keras_sparse_ortho.quantization._quantize_wrapper import QuantizeWrapper, innermost

L = keras.layers
Scales = dict[int, np.ndarray]  # of kernels, by `id` of the layer that has it
Change = tuple[Any, np.ndarray]  # a variable and its new value
_ROUNDING = 1e-6  # of a bias, in float32


def round_biases(model: keras.Model) -> keras.Model:
    """Moves the biases of a trained quantized model to the values that its file can hold.

    LiteRT adds biases as integers in the steps of the products that they are added to, the step
    `s_x` of the input times the scale `s_k` of the kernel's channel:

        b <- s round(b / s),  s = s_x s_k

    or, with a batch normalization behind, which the file folds, the same for all that is added,

        beta + g (b - mean),  s = s_x s_k |g|,  g = gamma / sqrt(variance + epsilon)

    by a change of `beta`. No bias changes by more than half a step. With int4 kernels these steps
    are most of the difference between a file and Keras. Call it at the end of training: training on
    moves the biases again.

    Args:
        model: What `quantize_aware` with `activations="int8"` returned, trained. It is changed in
            place, and returned.

    Raises:
        NotPrunableError: A subclassed model, whose ranges cannot be told to belong to its kernels.
        ValueError: Ranges that no training has set.

    Limits: a layer that is called several times has the steps of its first call. Biases stay as
    they are where the step of the input is not known (behind layers that are not quantized, and in
    an attention that is called with a key apart from its value), and before normalizations without
    `beta`.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, name="head")])
    >>> model = kso.quantize_aware(dense, "int4")
    >>> _ = model(np.eye(4, dtype="float32"), training=True)
    >>> model.layers[0].bias.assign([0.3, 0.0]) is not None
    True
    >>> kernel = kso.prunable_weights(model)[0].value
    >>> model = kso.quantization.round_biases(model)
    >>> bias = float(keras.ops.convert_to_numpy(model.layers[0].bias)[0])
    >>> steps = bias / (np.abs(kernel[:, 0]).max() / 7 / 255)
    >>> bool(abs(steps - round(steps)) < 0.01)
    True
    """
    if not is_graph(model):
        raise NotPrunableError(
            "Which range belongs to which kernel is known of functional and Sequential models "
            f"alone. Received: {type(model).__name__}"
        )
    for variable, value in _changes(model):
        assign(variable, value)
    return model


def biases_are_rounded(model: keras.Model) -> bool:
    """Whether `round_biases` would change nothing, up to the rounding of floats."""
    return not is_graph(model) or all(
        np.all(np.abs(value - to_numpy(variable)) <= _ROUNDING * np.abs(value).max(initial=0))
        for variable, value in _changes(model)
    )


def _changes(model: Any) -> list[Change]:
    """The variables of a graph to be changed, and their new values."""
    has_trained_ranges(model)  # raises where one is not set
    changes: list[Change] = []
    scales: Scales = {}
    for weight in prunable_weights(model):
        parts = integers_of(weight)
        if parts is not None and parts[0].any():
            scales[id(weight.owner)] = parts[1].reshape(-1)
    _round(model, scales, changes)
    return changes


def _round(model: Any, scales: Scales, changes: list[Change]) -> dict[int, float]:
    """Notes the new biases of a graph; returns the steps of its tensors by their `id`."""
    calls = graph_calls(model)
    steps: dict[int, float] = {}
    for call in calls:
        layer, inner = call.operation, innermost(call.operation)
        own = getattr(layer, "of_inputs", None) if isinstance(layer, QuantizeWrapper) else None
        given = [one.step() for one in own] if own else [steps.get(id(t)) for t in call.inputs]
        if isinstance(inner, keras.Model):
            found = _round(inner, scales, changes)
            ends = keras.tree.flatten(graph_ends(inner)[1])
            results = [found.get(id(tensor)) for tensor in ends]
        else:
            _round_inside(layer, given, scales, changes)
            step = given[0] if given and len(set(given)) == 1 else None
            made = {id(tensor) for tensor in call.outputs}
            after = [one.operation for one in calls if made.intersection(map(id, one.inputs))]
            fused = getattr(layer, "of_output", None) is None and len(after) == 1
            norm = innermost(after[0]) if fused else None
            _round_one(inner, step, scales, changes, norm)
            results = [_step_after(layer, inner, step)] * len(call.outputs)
        for tensor, one in zip(call.outputs, results, strict=True):
            if one is not None:
                steps[id(tensor)] = one
    return steps


def _step_after(layer: Any, inner: Any, step: float | None) -> float | None:
    """The step of the output of a layer, `None` if it is not known."""
    if isinstance(layer, QuantizeWrapper) and layer.of_output is not None:
        return layer.of_output.step()
    return step if passes_on(inner) else fixed_step(inner)


def _round_inside(layer: Any, given: list[Any], scales: Scales, changes: list[Change]) -> None:
    """Notes the new biases of layers inside another one, such as those of an attention."""
    inner = innermost(layer)
    # Those of an attention are on query, value (key) and value; with a key apart the order is open.
    if len(given) == 2 or len(set(given)) == 1:
        for one, step in zip(projections(inner), (given[0], given[-1], given[-1]), strict=False):
            _round_one(innermost(one), step, scales, changes)
    for own, _ in walk(inner, ""):
        if own is not layer and isinstance(own, QuantizeWrapper) and own.of_inputs:
            _round_one(innermost(own), own.of_inputs[0].step(), scales, changes)


def _round_one(
    layer: Any, step: float | None, scales: Scales, changes: list[Change], norm: Any = None
) -> None:
    """Notes the bias of a layer, or that of the batch normalization that is folded into it."""
    scale = scales.pop(id(layer), None)  # once, where a layer is called several times
    if scale is None or step is None:
        return
    bias = getattr(layer, "bias", None)
    if not isinstance(norm, L.BatchNormalization):
        if bias is not None and scale.size in (1, bias.shape[-1], np.prod(bias.shape)):
            value = to_numpy(bias).astype(np.float64)
            change = _to_steps(value.reshape(-1), step * scale).reshape(value.shape)
            changes.append((bias, value + change))
        return
    mean = to_numpy(norm.moving_mean).astype(np.float64)
    gain = 1 / np.sqrt(to_numpy(norm.moving_variance) + np.float64(norm.epsilon))
    gain = gain * to_numpy(norm.gamma) if norm.scale else gain
    whole = gain * ((0 if bias is None else to_numpy(bias).reshape(-1)) - mean)
    if not norm.center or scale.size not in (1, gain.size):
        return
    beta = to_numpy(norm.beta).astype(np.float64)
    change = _to_steps(whole + beta, step * scale * np.abs(gain))
    changes.append((norm.beta, beta + change))


def _to_steps(value: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """What is to be added to values so that they are multiples of steps; 0 for steps of 0."""
    steps = np.broadcast_to(steps, value.shape).astype(np.float64)
    return np.where(steps > 0, np.rint(value / np.where(steps > 0, steps, 1)) * steps - value, 0)
