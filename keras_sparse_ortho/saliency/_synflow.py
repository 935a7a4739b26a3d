"""`synflow`: pruning without data, by conserved synaptic saliency."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import compiled, float64_operations, value_and_gradients
from keras_sparse_ortho._checks import check_integer, other_keywords
from keras_sparse_ortho._interception import observe
from keras_sparse_ortho._keras_internals import VariableOverrides, copy_objects, from_zero_states
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import Selection, walk
from keras_sparse_ortho.models import input_specs
from keras_sparse_ortho.orthogonal import floored_masks, live_count
from keras_sparse_ortho.saliency._saliency import Saliency, scored_weights

L = keras.layers

_IDENTITIES = (  # in a linear network of positive weights, or scales of data
    *(L.Activation, L.ReLU, L.LeakyReLU, L.PReLU, L.ELU, L.Softmax),
    *(L.Rescaling, L.Normalization, L.UnitNormalization),
)
_BY_INPUT = (L.LayerNormalization, L.GroupNormalization, L.RMSNormalization)


@other_keywords
def synflow(
    model: Any,
    density: float,
    *,
    rounds: int = 100,
    include: Selection = None,
    exclude: Selection = None,
    on_collapse: str = "error",
) -> Saliency:
    """Score `|w| * dR/d|w|` with `R = 1^T (prod |W_l|) 1`, pruned in many rounds, without data.

    Round `k` of `n` keeps the `round(density^(k / n) * size)` highest scores among the live
    entries. `R` is the sum of the outputs of the masked network for an input of ones, made linear
    and positive:

    - all float variables are replaced by their absolute values, and activations by the identity;
    - batch normalization is as in inference, with mean 0;
    - layer, group and RMS normalization keep scale and offset only; an Embedding is multiplied by
      ones; Rescaling and Normalization of data are skipped.

    `rounds` is an int. The other arguments and errors are those of `snip`; the model needs a fixed
    sample shape, but no loss. Scores are those of the last round. Entries removed earlier have
    negative ones: the earlier, the lower, and within a round in the order of its scores.

    Raises NotPrunableError for an `R` that over- or underflows, samples of no fixed shape, and
    models that cannot be copied.

    Limits: recurrent gates and attention weights are not linear and stay: query and key kernels get
    scores of 0, so exclude them. Functions that a model calls as operations, not as layers or
    `activation=`, stay as well.

    Examples:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
        >>> model.layers[0].set_weights([np.array([[1.0], [-3.0]]), np.zeros(1)])
        >>> synflow(model, 0.5, rounds=1).scores["a/kernel"].tolist()
        [[1.0], [3.0]]

    Reference: Tanaka, Kunin, Yamins and Ganguli (NeurIPS 2020), arXiv 2006.05467.
    """
    check_integer("rounds", rounds)
    weights = scored_weights(model, density, include, exclude, on_collapse)
    size = sum(weight.size for weight in weights)
    values = [np.abs(weight.raw_value()).astype("float64") for weight in weights]
    masks = [np.ones(weight.shape, dtype=bool) for weight in weights]
    scores = values
    variables = [weight.variable for weight in weights]
    with _synaptic_flow(model, variables) as gradient:
        for number in range(1, rounds + 1):
            total, gradients = gradient(values)
            finite = all(np.isfinite(gradient).all() for gradient in gradients)
            if not (finite and 0 < total < np.inf):
                raise NotPrunableError(
                    "The synaptic flow R of the model over- or underflows float64, or no signal "
                    f"reaches the outputs. Received: R={total} in round {number}"
                )
            scores = [
                np.where(mask, value * slope, dead)
                for mask, value, slope, dead in zip(masks, values, gradients, scores, strict=True)
            ]
            before = masks
            count = live_count(density ** (number / rounds), size)
            masks = floored_masks(scores, [weight.layout for weight in weights], count)
            if number < rounds:
                # Scores of removed entries go to [number - rounds, that + 1/2], below 0, in order.
                highest = max(float(score.max()) for score in scores) or 1.0
                for score, old, new in zip(scores, before, masks, strict=True):
                    dying = np.nonzero(old & ~new)
                    score[dying] = number - rounds + score[dying] / (2 * highest)
            values = [value * mask for value, mask in zip(values, masks, strict=True)]
    return Saliency("SynFlow", density, weights, scores, on_collapse, masks)


@contextlib.contextmanager
def _synaptic_flow(
    model: Any, variables: list[Any]
) -> Iterator[Callable[[Sequence[np.ndarray]], tuple[float, list[np.ndarray]]]]:
    """Makes a linear copy of the model; yields the function `values -> R, dR/dvalues`.

    Args:
        model: Model, which does not change.
        variables: list of its variables that the values are for.
    """
    ones = _ones(model)
    is_float = keras.backend.is_float_dtype  # NumPy has no bfloat16
    floats = [variable for variable in model.variables if is_float(variable.dtype)]
    linear, copies = copy_objects(model, without_values=floats)
    scored = [copies[id(variable)] for variable in variables]
    among_scored = {id(variable) for variable in variables}
    others = [variable for variable in floats if id(variable) not in among_scored]
    with float64_operations(), _linearized(linear):
        constants = [_constant_value(variable) for variable in others]

        def pure(values: list[Any], constants: list[Any]) -> Any:
            def flow(inner: list[Any]) -> Any:
                held = [*scored, *(copies[id(variable)] for variable in others)]
                pairs = zip(held, [*inner, *constants], strict=True)
                # The outer scope catches and drops updates, of seed states for instance.
                with keras.StatelessScope(), VariableOverrides(pairs), from_zero_states(linear):
                    outputs = keras.tree.flatten(linear(ones, training=False))
                    sums = [keras.ops.sum(keras.ops.cast(o, "float64")) for o in outputs]
                return sum(sums[1:], sums[0])

            return value_and_gradients(flow, values)

        # JAX would be slow without XLA; on TensorFlow XLA compiles for long.
        step = compiled(pure, xla=keras.backend.backend() == "jax")

        def gradient(values: Sequence[np.ndarray]) -> tuple[float, list[np.ndarray]]:
            tensors = [keras.ops.convert_to_tensor(value, dtype="float64") for value in values]
            total, gradients = step(tensors, constants)
            return float(to_numpy(total)), [to_numpy(gradient) for gradient in gradients]

        yield gradient


def _constant_value(variable: Any) -> Any:
    value = np.abs(to_numpy(variable))
    if variable.name.endswith("moving_mean"):
        value = np.zeros_like(value)
    return keras.ops.convert_to_tensor(value, dtype="float64")


def _ones(model: Any) -> Any:
    specs = input_specs(model)
    if specs is None:
        raise NotPrunableError(
            "SynFlow needs to know the shape of a sample, and that of this model is unknown or not "
            f"fixed. Received: the model {model.name!r}"
        )
    is_float = keras.backend.is_float_dtype  # NumPy has no bfloat16
    return keras.tree.map_structure(
        lambda spec: np.ones(spec.shape, "float32" if is_float(spec.dtype) else spec.dtype), specs
    )


@contextlib.contextmanager
def _linearized(model: Any) -> Iterator[None]:
    """Makes a model compute in float64 without activations; inside, also without normalization.

    Args:
        model: Model, a copy that nobody else has.
    """
    layers = [layer for layer, _ in walk(model, "")]
    for layer in layers:
        if getattr(layer, "quantization_mode", None) is None:
            layer.dtype_policy = "float64"
        # Recurrent layers have that of their cell; recurrent_activation, of the gates, stays.
        activation = vars(layer).get("activation")
        if callable(activation) and not isinstance(activation, L.Layer):
            # Bypass `__setattr__`: Keras would track the value.
            vars(layer)["activation"] = keras.activations.linear
    with observe(layers, _linear_call):
        yield


def _linear_call(layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for kinds, linear in _CALLS:
        if isinstance(layer, kinds):
            return linear(layer, *args, **kwargs)
    return call(*args, **kwargs)


def _embed_ones(layer: Any, inputs: Any) -> Any:
    row = keras.ops.sum(keras.ops.convert_to_tensor(layer.embeddings), axis=0)
    return keras.ops.broadcast_to(row, (*inputs.shape, *row.shape))


def _scale_and_shift(layer: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    axis = layer.axis
    axes = [a % len(inputs.shape) for a in (axis if isinstance(axis, list | tuple) else [axis])]
    shape = [size if k in axes else 1 for k, size in enumerate(inputs.shape)]
    for name in ("gamma", "scale"):
        value = getattr(layer, name, None)
        if isinstance(value, keras.Variable):
            inputs = inputs * keras.ops.reshape(value.value, shape)
    beta = getattr(layer, "beta", None)
    if isinstance(beta, keras.Variable):
        inputs = inputs + keras.ops.reshape(beta.value, shape)
    return inputs


_CALLS: tuple[tuple[Any, Callable[..., Any]], ...] = (
    (_IDENTITIES, lambda layer, inputs, *args, **kwargs: inputs),
    (L.Embedding, _embed_ones),
    (_BY_INPUT, _scale_and_shift),
)
