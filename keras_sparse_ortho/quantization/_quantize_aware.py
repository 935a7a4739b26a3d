"""`quantize_aware`: a model that is trained with the rounding of its integer file."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import keras
import numpy as np

from keras_sparse_ortho._foreign_names import for_value
from keras_sparse_ortho._keras_internals import (
    GraphCall,
    body_of,
    graph_calls,
    graph_ends,
    is_graph,
)
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import Draw
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    Selection,
    find_kernels,
    names_in,
    select,
    walk,
)
from keras_sparse_ortho.models import (
    Plan,
    Target,
    carry_out,
    prunable_weights,
    refuse_unfit,
    verb,
)
from keras_sparse_ortho.parametrizations import FakeQuantization
from keras_sparse_ortho.quantization._keeps_range import keeps_range
from keras_sparse_ortho.quantization._kernel_rounding import (
    Rounding,
    kernel_rounding,
    warn_of_unknown,
)
from keras_sparse_ortho.quantization._quantize_wrapper import (
    FUSED,
    QuantizeWrapper,
    activation_of,
    innermost,
    is_separable,
)


def plan_quantize_aware(
    model: keras.Model,
    weights: str | FakeQuantization | None = "int8",
    activations: str | None = "int8",
    *,
    exclude: Selection = None,
    momentum: float = 0.99,
) -> Plan:
    """Plans `quantize_aware`, with the same arguments."""
    quantizer = _checked_quantizer(weights, activations)
    matrices = prunable_weights(model, unregistered=True)
    chosen, left_out = _chosen(model, matrices, exclude)
    _refuse_quantized(model, matrices)
    unregistered = [weight for weight in chosen if not weight.registered]
    chosen = [weight for weight in chosen if weight.registered]
    if quantizer is None:
        chosen = []
    elif not chosen:
        refuse_unfit(model, [], "no kernel that could be quantized")
    roundings: Roundings = {}
    if activations is not None:
        if not is_graph(model):
            raise NotPrunableError(
                "Where a subclassed model rounds its activations is not known. Pass "
                "activations=None, and call keras_sparse_ortho.quantization.FakeQuantize layers "
                f"in it. Received: {type(model).__name__}, {activations=}"
            )
        _place(model, left_out, roundings)
    plain = [weight for weight in chosen if weight.storage is None]
    if plain:
        refuse_unfit(model, plain, "no kernel")

    if quantizer is not None:
        unregistered = [
            weight
            for weight in unregistered
            if id(weight.owner) not in left_out
        ]
        warn_of_unknown(chosen, unregistered)
    targets = {weight.path: _target(weight, quantizer) for weight in chosen}
    layer_changes = {}
    for layer, _ in walk(model, ""):
        if id(layer) in roundings:
            layer_changes[layer] = _Wrapping(roundings[id(layer)], momentum)
    return Plan(chosen, targets, layer_changes)


def _checked_quantizer(
    weights: str | FakeQuantization | None, activations: str | None
) -> FakeQuantization | None:
    """The quantizer of weights; ValueError for settings that do not fit each other."""
    quantizer = (
        FakeQuantization(weights) if isinstance(weights, str) else weights
    )
    is_fit = isinstance(quantizer, FakeQuantization)
    if quantizer is None:
        is_fit = bool(activations)
    if not is_fit or activations not in ("int8", None):
        raise ValueError(
            "`activations` must be 'int8' or None, `weights` must be 'int8', 'int4', 'ternary', a "
            f"FakeQuantization or None, and one of them not None.{for_value('weights', weights)} "
            f"Received: {activations=}, {weights=}"
        )
    return quantizer


def _refuse_quantized(model: keras.Model, known: list[PrunableWeight]) -> None:
    """NotPrunableError for a model that is quantized already."""
    quantized = []
    for weight in known:
        if weight.storage is not None and weight.storage.quantizer is not None:
            quantized.append(weight.path)
    for layer, path in walk(model, ""):
        if isinstance(layer, QuantizeWrapper):
            quantized.append(path)
    if quantized:
        raise NotPrunableError(
            "The model is quantized already: start from the one that was given to quantize_aware. "
            f"Received: {quantized[:5]}"
        )


@verb(plan_quantize_aware)
def quantize_aware(
    model: keras.Model,
    weights: str | FakeQuantization | None = "int8",
    activations: str | None = "int8",
    *,
    exclude: Selection = None,
    momentum: float = 0.99,
) -> keras.Model:
    """Returns a model that simulates integer inference during training.

    Kernels are rounded as they are used, `w_q = q(w_e)`, by a `FakeQuantization` after mask,
    threshold, compact storage or live blocks: zeros stay zero. Activations are rounded where LiteRT
    rounds them, in ranges that follow them in training (`FakeQuantize`). Gradients go straight
    through. Train the result for some epochs at a smaller learning rate than before; then
    `export_litert(model, path, mode="int8")` writes the trained integers and ranges.

    Args:
        model: A built model, dense or from `sparsify`, `prune` or `parametrize`; best trained.
        weights: `"int8"`, `"int4"`, `"ternary"`, a `FakeQuantization`, or `None`.
        activations: `"int8"` or `None`.
        exclude: Weights, as for `sparsify`, or paths of layers; their layers stay in floats.
        momentum: float. The momentum of the ranges, see `FakeQuantize`.

    Returns:
        A new model, not compiled; `quantize_aware.in_place` changes the given one instead.

    Raises:
        NotPrunableError: A model that is not built, has nothing to quantize or is quantized
            already; a subclassed model with `activations`.
        UnknownWeightError: An `exclude` that names nothing.
        ValueError: Other settings.

    LSTMs with Keras' activations have a scale for each gate, and outputs around zero, as in files
    of `mode="int8+lstm"`; inside of them states are not rounded.

    Limits: embeddings and other recurrent layers stay in floats, as do LSTMs on live blocks. So do
    operations of a functional model,
    such as `a + b`, that another operation reads, or nothing: a layer that reads one rounds what it
    gives. Inside of layers that hold others, such
    as `MultiHeadAttention`, weights are rounded, and activations are not. `strip` keeps the
    `FakeQuantize` layers: the model computes the same, and loading it needs this package.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, name="head")])
        >>> model = quantize_aware(kso.sparsify(dense, 0.1, seed=0), weights="int4")
        >>> len(np.unique(kso.prunable_weights(model)[0].value[:, 0])) <= 15
        True

    Reference: Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference" (CVPR 2018), arXiv 1712.05877
    """
    return carry_out(
        model,
        plan_quantize_aware(
            model,
            weights,
            activations,
            exclude=exclude,
            momentum=momentum,
        ),
    )


# By how the kernels of a layer are rounded, if not by output.
_SCALES: dict[Rounding | None, str] = {"by kernel": "kernel", "by gate": "gate"}


def _target(
    weight: PrunableWeight, quantizer: FakeQuantization | None
) -> Target:
    """The rounded form of a kernel; a plain one gets a full mask to be wrapped."""
    scales = _SCALES.get(kernel_rounding(weight.owner))
    if quantizer is not None and scales is not None:
        quantizer = FakeQuantization(quantizer.dtype, per=scales)
    if weight.storage is not None:
        return Target("rounded", quantizer=quantizer)
    full_mask = Draw(np.ones(weight.shape, bool))
    return Target("masked", full_mask, quantizer=quantizer)


class _Rounded(NamedTuple):
    """The roundings of a layer: of so many inputs those with these numbers, and of its output."""

    inputs: int = 0
    numbers: frozenset[int] = frozenset()
    output: bool = False


Roundings: TypeAlias = dict[int, _Rounded]
"""The roundings of layers, by their `id`."""


@dataclasses.dataclass(frozen=True)
class _Wrapping:
    """Wraps a layer in a `QuantizeWrapper`."""

    rounded: _Rounded
    momentum: float

    def change(
        self,
        layer: keras.layers.Layer,
        formed: keras.layers.Layer | None,
    ) -> keras.layers.Layer:
        body = body_of(layer) if formed is None else formed
        inputs, numbers, output = self.rounded
        wrapper = QuantizeWrapper(
            body, inputs, output, self.momentum, sorted(numbers)
        )
        wrapper.build()
        return wrapper


def _chosen(
    model: keras.Model,
    known: list[PrunableWeight],
    exclude: Selection,
) -> tuple[list[PrunableWeight], set[int]]:
    """The weights to quantize, and the layers, by `id`, that stay in floats."""
    layers = {
        path: layer for layer, path in reversed(list(walk(model, ""))) if path
    }
    paths, selection = _parted(layers, exclude)
    excluded_weights = select(known, selection, "exclude") if selection else []
    excluded_paths = {weight.path for weight in excluded_weights}
    chosen = []
    for weight in known:
        if weight.path not in excluded_paths and not _stays_in_floats(weight):
            chosen.append(weight)
    owners = {id(weight.owner) for weight in chosen if weight.registered}
    excluded_owners = {
        id(weight.owner) for weight in known if weight.path in excluded_paths
    }
    left_out = {id(layers[path]) for path in paths}
    for layer in layers.values():
        inside = {id(inner) for inner, _ in walk(layer, "")}
        if inside & excluded_owners and not inside & owners:
            left_out.add(id(layer))
    return chosen, left_out


def _stays_in_floats(weight: PrunableWeight) -> bool:
    """Whether the file has a kernel in floats: of an embedding, or of a loop of recurrent steps."""
    rounding = kernel_rounding(weight.owner)
    if keras.layers.LSTM in weight.inside and rounding == "by gate":
        return False
    is_recurrent = any(
        issubclass(kind, keras.layers.RNN) for kind in weight.inside
    )
    return is_recurrent or rounding == "floats"


def _parted(
    layers: dict[str, keras.layers.Layer], exclude: Selection
) -> tuple[list[str], Selection]:
    """The paths in a selection that are of layers without kernels, and the rest of it."""
    if exclude is None:
        return [], []
    names = names_in(exclude)
    if names is None:
        return [], exclude
    paths = []
    for name in names:
        if (
            isinstance(name, str)
            and name in layers
            and not find_kernels(layers[name], "")
        ):
            paths.append(name)
    return paths, [name for name in names if name not in paths]


L = keras.layers
# Operations of a graph that only move entries about.
_MOVING = (
    "BroadcastTo",
    "ExpandDims",
    "GetItem",
    "Moveaxis",
    "Ravel",
    "Reshape",
    "Split",
    "Squeeze",
    "Swapaxes",
    "Take",
    "Tile",
    "Transpose",
)
# The steps of the fixed ranges that LiteRT gives their outputs.
_FIXED = {
    keras.activations.softmax: 1 / 256,
    keras.activations.sigmoid: 1 / 256,
    keras.activations.tanh: 1 / 128,
}
_PRODUCTS = (
    L.Dense,
    L.EinsumDense,
    L.Conv1D,
    L.Conv2D,
    L.Conv3D,
    L.DepthwiseConv1D,
    L.DepthwiseConv2D,
)


def _place(
    model: keras.Model, left_out: set[int], roundings: Roundings
) -> None:
    """Notes the layers to wrap.

    Outputs of LiteRT's operations are rounded: a convolution with the normalization and ReLU behind
    it is one. Layers with kernels round inputs that nothing has rounded. An operation of the graph,
    such as `a + b`, has no wrapper that could round its output: the layers that read it do.

    Args:
        model: A functional or Sequential model.
        left_out: Layers, by `id`, that stay in floats.
        roundings: Those noted so far, to which more are added.
    """
    calls = graph_calls(model)
    _, outputs_of_model = graph_ends(model)
    ends = {id(tensor) for tensor in keras.tree.flatten(outputs_of_model)}
    rounded: set[int] = set()  # tensors
    of_operations: set[int] = set()  # tensors, too
    for call in calls:
        layer = call.operation
        inner = innermost(layer)
        inputs = {id(tensor) for tensor in float_tensors(call.inputs)}
        outputs = {id(tensor) for tensor in float_tensors(call.outputs)}
        if isinstance(inner, keras.Model):
            _place(inner, left_out, roundings)
            rounded |= outputs
        elif passes_on(call):
            if inputs and inputs <= rounded:
                rounded |= outputs
            elif inputs & of_operations:
                of_operations |= outputs
        elif not isinstance(layer, L.Layer):
            if not (_is_sum(layer) and is_fused(call, calls, ends)):
                of_operations |= outputs
        elif id(layer) not in left_out and len(call.outputs) == 1:
            count, numbers, rounds_output = roundings.get(id(layer), _Rounded())
            if (
                outputs
                and fixed_step(inner) is None
                and not is_fused(call, calls, ends)
            ):
                rounds_output = True
                rounded |= outputs
            needs_rounding = (
                bool(find_kernels(layer, "")) and not inputs <= rounded
            )
            if needs_rounding or inputs & of_operations:
                tensors = float_tensors(call.inputs)
                count = len(tensors)
                numbers |= {
                    number
                    for number, tensor in enumerate(tensors)
                    if id(tensor) not in rounded
                }
            rounds_inside = activation_of(layer) not in (
                None,
                *FUSED,
            ) or is_separable(layer)
            if count or rounds_output or rounds_inside:
                roundings[id(layer)] = _Rounded(count, numbers, rounds_output)
            _place_inside(layer, rounds_output, left_out, roundings)


def float_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those of floats: a call has masks and indices among its inputs as well."""
    return [
        tensor
        for tensor in tensors
        if keras.backend.is_float_dtype(tensor.dtype)
    ]


def _place_inside(
    layer: keras.layers.Layer,
    rounds_output: bool,
    left_out: set[int],
    roundings: Roundings,
) -> None:
    """Products inside of a layer, such as an attention, round their inputs and outputs.

    Args:
        layer: The layer.
        rounds_output: bool. Whether its output is rounded.
        left_out: Layers, by `id`, that stay in floats.
        roundings: Those noted so far, to which more are added.
    """
    inner = innermost(layer)
    if isinstance(inner, L.Wrapper | L.RNN):
        return
    first = [innermost(projection) for projection in projections(inner)]
    last = innermost(inner.output_dense) if first else None
    done = []
    for part, _ in walk(inner, ""):
        core = innermost(part)
        if core is inner or core in done or id(part) in left_out:
            continue
        done.append(core)
        if isinstance(core, _PRODUCTS) and activation_of(core) in FUSED:
            count = 0 if any(core is projection for projection in first) else 1
            is_rounded_outside = core is last and rounds_output
            roundings.setdefault(
                id(part),
                _Rounded(
                    count, frozenset(range(count)), not is_rounded_outside
                ),
            )


def projections(
    layer: keras.layers.Layer,
) -> list[keras.layers.Layer]:
    """The layers inside of an attention that are called on its inputs."""
    if isinstance(layer, L.MultiHeadAttention):
        return [layer.query_dense, layer.key_dense, layer.value_dense]
    return []


def passes_on(call: GraphCall) -> bool:
    """Whether the output of a layer, or an operation, has the range of its input."""
    layer = innermost(call.operation)
    if isinstance(layer, L.Layer):
        return keeps_range(layer)
    name = type(layer).__name__
    if name == "Pad":  # with zeros, which are in every range
        return all(setting is None for setting in call.settings)
    return name in _MOVING


def fixed_step(layer: keras.layers.Layer) -> float | None:
    """The step of the output of a layer whose range LiteRT knows without training."""
    activation = activation_of(layer)
    if isinstance(layer, L.Activation):
        activation = layer.activation
    if isinstance(layer, L.Softmax):
        activation = keras.activations.softmax
    for function, step in _FIXED.items():
        if function is activation:
            return step
    return None


def _is_relu(layer: keras.Operation) -> bool:
    """Whether a layer, or an operation, is a ReLU that LiteRT fuses with the one before."""
    name = type(layer).__name__
    if isinstance(layer, L.Activation):
        return layer.activation in FUSED[1:]
    if isinstance(layer, L.ReLU) or (
        name == "ReLU" and not isinstance(layer, L.Layer)
    ):
        return (
            layer.max_value in (None, 6)
            and not layer.negative_slope
            and not layer.threshold
        )
    return name in ("Relu", "Relu6") and not isinstance(layer, L.Layer)


def _is_sum(layer: keras.Operation) -> bool:
    """Whether a layer, or an operation, adds or subtracts."""
    return type(layer).__name__ in ("Add", "Subtract")


def is_fused(call: GraphCall, calls: list[GraphCall], ends: set[int]) -> bool:
    """Whether LiteRT computes a layer, or a sum, and what is behind it in one operation.

    A ReLU that is an operation of the graph, not a layer, counts where a layer reads what it gives,
    and rounds it.

    Args:
        call: The call of the layer.
        calls: All calls of the graph.
        ends: The outputs of the graph, by `id`.
    """
    (output,) = call.outputs
    readers = readers_of(output, calls)
    if len(readers) != 1 or id(output) in ends:
        return False
    layer = innermost(call.operation)
    behind = innermost(readers[0].operation)
    if not isinstance(behind, L.Layer):
        if not _is_relu(behind):
            return False
        (result,) = readers[0].outputs
        next_readers = readers_of(result, calls)
        if id(result) in ends or not next_readers:
            return False
        if not all(
            isinstance(reader.operation, L.Layer) for reader in next_readers
        ):
            return False
    if isinstance(layer, L.BatchNormalization) or _is_sum(layer):
        return _is_relu(behind)
    if activation_of(layer) is not keras.activations.linear:
        return False
    return isinstance(behind, L.BatchNormalization) or _is_relu(behind)


def readers_of(tensor: Tensor, calls: list[GraphCall]) -> list[GraphCall]:
    """The calls that read a tensor, one that reads it twice twice."""
    return [call for call in calls for read in call.inputs if read is tensor]
