"""`synflow`: pruning without data, by conserved synaptic saliency."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

import keras
import numpy as np

from keras_sparse_ortho._backend import (
    compiled,
    float64_operations,
    value_and_gradients,
)
from keras_sparse_ortho._checks import check_integer, other_keywords
from keras_sparse_ortho._data import Batch
from keras_sparse_ortho._interception import observe
from keras_sparse_ortho._keras_internals import (
    VariableOverrides,
    copy_objects,
    from_zero_states,
)
from keras_sparse_ortho._types import Nested, Tensor
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, Selection, walk
from keras_sparse_ortho.models import input_specs
from keras_sparse_ortho.orthogonal import floored_masks, live_count
from keras_sparse_ortho.saliency._saliency import Saliency
from keras_sparse_ortho.saliency._score import ModelScore, register_score

Array = np.ndarray
Gradient = Callable[[Sequence[Array]], tuple[float, list[Array]]]

# They are the identity in a linear network of positive weights, or scale data.
_IDENTITIES = (
    keras.layers.Activation,
    keras.layers.ReLU,
    keras.layers.LeakyReLU,
    keras.layers.PReLU,
    keras.layers.ELU,
    keras.layers.Softmax,
    keras.layers.Rescaling,
    keras.layers.Normalization,
    keras.layers.UnitNormalization,
)
_NORMALIZED_BY_INPUT = (
    keras.layers.LayerNormalization,
    keras.layers.GroupNormalization,
    keras.layers.RMSNormalization,
)


@register_score
@dataclasses.dataclass(frozen=True)
class SynFlow(ModelScore):
    """The score `|w| * dR/d|w|`, see `synflow`.

    Args:
        rounds: int. In how many steps entries are removed.
    """

    name: ClassVar[str] = "synflow"
    label: ClassVar[str | None] = "SynFlow"
    for_untrained: ClassVar[bool] = True
    refits: ClassVar[bool] = False
    calls_model: ClassVar[bool] = True

    rounds: int = 100

    def scores(
        self,
        model: keras.Model,
        weights: list[PrunableWeight],
        density: float,
        batches: list[Batch],
    ) -> list[np.ndarray]:
        """Prunes in rounds to falling densities; entries of later rounds score higher."""
        rounds = self.rounds
        size = sum(weight.size for weight in weights)
        layouts = [weight.layout for weight in weights]
        values = [
            np.ascontiguousarray(np.abs(weight.raw_value()), "float64")
            for weight in weights
        ]
        masks = [np.ones(weight.shape, dtype=bool) for weight in weights]
        scores = [value.copy() for value in values]
        variables = [weight.variable for weight in weights]
        with _synaptic_flow(model, variables) as gradient:
            for number in range(1, rounds + 1):
                flow, slopes = gradient(values)
                _check_flow(flow, slopes, number)
                for score, value, slope, mask in zip(
                    scores, values, slopes, masks, strict=True
                ):
                    np.multiply(value, slope, out=score, where=mask)
                if number == rounds:
                    break
                count = live_count(density ** (number / rounds), size)
                next_masks = floored_masks(scores, layouts, count)
                removed = _removed_places(masks, next_masks)
                _move_below_zero(scores, removed, number - rounds)
                for value, places in zip(values, removed, strict=True):
                    value.reshape(-1)[places] = 0.0
                masks = next_masks
        return scores


def _check_flow(flow: float, slopes: list[Array], number: int) -> None:
    is_finite = all(np.isfinite(slope).all() for slope in slopes)
    if not (is_finite and 0 < flow < np.inf):
        raise NotPrunableError(
            "The synaptic flow R of the model over- or underflows float64, or no signal "
            f"reaches the outputs. Received: R={flow} in round {number}"
        )


def _removed_places(masks: list[Array], next_masks: list[Array]) -> list[Array]:
    """The flat places of the entries of each kernel that a round removes."""
    removed = []
    for mask, next_mask in zip(masks, next_masks, strict=True):
        is_removed = np.ravel(mask & ~next_mask)
        removed.append(np.flatnonzero(is_removed))
    return removed


def _move_below_zero(
    scores: list[Array], removed: list[Array], start: int
) -> None:
    """Moves the scores of entries that a round removes to [start, start + 1/2], in order.

    Args:
        scores: Contiguous arrays, which change.
        removed: The flat places of the entries, by array.
        start: int below 0.
    """
    highest = max(float(score.max()) for score in scores)
    if highest == 0.0:
        highest = 1.0
    for score, places in zip(scores, removed, strict=True):
        flat = score.reshape(-1)
        flat[places] = start + flat[places] / (2 * highest)


@other_keywords
def synflow(
    model: keras.Model,
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
    score = SynFlow(check_integer("rounds", rounds))
    return score.saliency(
        model,
        density,
        include=include,
        exclude=exclude,
        on_collapse=on_collapse,
    )


@contextlib.contextmanager
def _synaptic_flow(
    model: keras.Model, variables: Sequence[keras.Variable]
) -> Iterator[Gradient]:
    """Makes a linear copy of the model; yields the function `values -> R, dR/dvalues`.

    Args:
        model: Model, which does not change.
        variables: list of its variables that the values are for.
    """
    ones = _ones(model)
    floats = [variable for variable in model.variables if _is_float(variable)]
    linear, copies = copy_objects(model, without_values=floats)
    scored_ids = {id(variable) for variable in variables}
    constants = [
        variable for variable in floats if id(variable) not in scored_ids
    ]
    replaced = [copies[id(variable)] for variable in [*variables, *constants]]

    def flow_and_slopes(
        values: list[Tensor], constant_values: list[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        def flow(inner_values: list[Tensor]) -> Tensor:
            pairs = zip(
                replaced, [*inner_values, *constant_values], strict=True
            )
            # The outer scope catches and drops updates, of seed states for instance.
            with (
                keras.StatelessScope(),
                VariableOverrides(pairs),
                from_zero_states(linear),
            ):
                outputs = keras.tree.flatten(linear(ones, training=False))
                sums = [
                    keras.ops.sum(keras.ops.cast(output, "float64"))
                    for output in outputs
                ]
            return sum(sums[1:], sums[0])

        return value_and_gradients(flow, values)

    with float64_operations(), _linearized(linear):
        constant_values = [_constant_value(variable) for variable in constants]
        # JAX would be slow without XLA; on TensorFlow XLA compiles for long.
        step = compiled(flow_and_slopes, xla=keras.backend.backend() == "jax")

        def gradient(values: Sequence[Array]) -> tuple[float, list[Array]]:
            tensors = [
                keras.ops.convert_to_tensor(value, dtype="float64")
                for value in values
            ]
            total, slopes = step(tensors, constant_values)
            arrays = [to_numpy(slope, copy=False) for slope in slopes]
            return float(to_numpy(total)), arrays

        yield gradient


def _is_float(variable: keras.Variable) -> bool:
    """Whether a variable or spec holds floats; NumPy does not know bfloat16."""
    return bool(keras.backend.is_float_dtype(variable.dtype))


def _constant_value(variable: keras.Variable) -> Tensor:
    value = np.abs(to_numpy(variable))
    if variable.name.endswith("moving_mean"):
        value = np.zeros_like(value)
    return keras.ops.convert_to_tensor(value, dtype="float64")


def _ones(model: keras.Model) -> Nested:
    specs = input_specs(model)
    if specs is None:
        raise NotPrunableError(
            "SynFlow needs to know the shape of a sample, and that of this model is unknown or not "
            f"fixed. Received: the model {model.name!r}"
        )

    def ones(spec: keras.KerasTensor) -> Array:
        dtype = spec.dtype
        if keras.backend.is_float_dtype(dtype):
            dtype = "float32"
        return np.ones(spec.shape, dtype)

    return keras.tree.map_structure(ones, specs)


@contextlib.contextmanager
def _linearized(model: keras.Model) -> Iterator[None]:
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
        if callable(activation) and not isinstance(
            activation, keras.layers.Layer
        ):
            # Bypass `__setattr__`: Keras would track the value.
            vars(layer)["activation"] = keras.activations.linear
    with observe(layers, _linear_call):
        yield


def _linear_call(
    layer: keras.layers.Layer,
    call: Callable[..., Nested],
    *args: Nested,
    **kwargs: Nested,
) -> Nested:
    """The linear form of a layer's call, in its place."""
    if isinstance(layer, _IDENTITIES):
        return _inputs_of(*args, **kwargs)
    if isinstance(layer, keras.layers.Embedding):
        return _embed_ones(layer, _inputs_of(*args, **kwargs))
    if isinstance(layer, _NORMALIZED_BY_INPUT):
        return _scale_and_shift(layer, _inputs_of(*args, **kwargs))
    return call(*args, **kwargs)


def _inputs_of(inputs: Nested, *args: Nested, **kwargs: Nested) -> Nested:
    """The first argument of a call, by position or by name."""
    return inputs


def _embed_ones(layer: keras.layers.Embedding, inputs: Tensor) -> Tensor:
    row = keras.ops.sum(keras.ops.convert_to_tensor(layer.embeddings), axis=0)
    return keras.ops.broadcast_to(row, (*inputs.shape, *row.shape))


def _scale_and_shift(layer: keras.layers.Layer, inputs: Tensor) -> Tensor:
    axes = layer.axis
    if not isinstance(axes, list | tuple):
        axes = [axes]
    rank = len(inputs.shape)
    normalized_axes = [axis % rank for axis in axes]
    shape = [1] * rank
    for axis in normalized_axes:
        shape[axis] = inputs.shape[axis]
    for name in ("gamma", "scale"):
        scale = getattr(layer, name, None)
        if isinstance(scale, keras.Variable):
            inputs = inputs * keras.ops.reshape(scale.value, shape)
    shift = getattr(layer, "beta", None)
    if isinstance(shift, keras.Variable):
        inputs = inputs + keras.ops.reshape(shift.value, shape)
    return inputs
