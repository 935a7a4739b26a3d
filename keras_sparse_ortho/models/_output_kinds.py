"""The meaning of a model's outputs: read from the end of its graph and from its compiled loss."""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import (
    computes_its_graph,
    graph_calls,
    graph_ends,
)
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.kernels import LayerWrapper
from keras_sparse_ortho.layers import BlockSparseDense, BlockSparseEinsumDense

L = keras.layers

_LOSSES = {
    "classes": (
        "categorical_crossentropy",
        "sparse_categorical_crossentropy",
        "categorical_focal_crossentropy",
        "categorical_hinge",
    ),
    "bits": (
        "binary_crossentropy",
        "binary_focal_crossentropy",
        "dice",
        "tversky",
        "hinge",
        "squared_hinge",
    ),
    "values": (
        "mean_squared_error",
        "mean_absolute_error",
        "mean_absolute_percentage_error",
        "mean_squared_logarithmic_error",
        "huber",
        "log_cosh",
        "poisson",
        "cosine_similarity",
        "kl_divergence",
    ),
}
# Their outputs are no probabilities.
_HINGES = (
    "categorical_hinge",
    "hinge",
    "squared_hinge",
)
# of a loss that takes probabilities
_ENDS = {
    "classes": "softmax",
    "bits": "sigmoid",
}
# Layers whose `activation` is the last thing that they compute.
_ACTIVATED = (
    L.Activation,
    L.Dense,
    L.EinsumDense,
    L.Conv1D,
    L.Conv2D,
    L.Conv3D,
    L.Conv1DTranspose,
    L.Conv2DTranspose,
    L.Conv3DTranspose,
    L.DepthwiseConv1D,
    L.DepthwiseConv2D,
    L.SeparableConv1D,
    L.SeparableConv2D,
    BlockSparseDense,
    BlockSparseEinsumDense,
)
# Operations behind which an output has the values that it had in front, perhaps in another shape.
_RESHAPING = (
    "ActivityRegularization",
    "Dropout",
    "Flatten",
    "Identity",
    "Reshape",
)


@dataclasses.dataclass(frozen=True)
class OutputKind:
    """The meaning of one output of a model.

    Attributes:
        end: The last function before the output: "softmax", "sigmoid" or "linear". `None`:
            something else, or unknown.
        answers: The task of the output: "classes", one of several; "bits", each of them
            yes or no; or "values". `None`: unknown, as of a sigmoid without a loss.
    """

    end: str | None = None
    answers: str | None = None

    @property
    def probabilities(self) -> str | None:
        """The function from logits to the output; `None` for values, as those of a regressor."""
        is_probability = (
            self.end in ("softmax", "sigmoid") and self.answers != "values"
        )
        return self.end if is_probability else None


UNKNOWN = OutputKind()


def output_kinds(model: keras.Model, count: int) -> list[OutputKind]:
    """Returns the kind of each output of a model, in the order of `keras.tree.flatten`.

    The values of outputs are never looked at: a regressor may answer between 0 and 1, too. The
    compiled loss says what an output is trained for. Without one, softmax is taken for classes.

    Args:
        model: Any Keras model. Only graphs show the ends of their outputs.
        count: int. How many outputs the model has.
    """
    ends: list[str | None] = [None] * count
    if computes_its_graph(model):
        outputs = keras.tree.flatten(graph_ends(model)[1])
        ends = [_end_of(model, tensor) for tensor in outputs]
    losses = _losses(model, count)
    return [_kind(end, loss) for end, loss in zip(ends, losses, strict=True)]


def output_names(model: keras.Model, outputs: Any) -> list[str]:
    """Returns the name of each output of a model, in the order of `keras.tree.flatten`.

    These are the keys of a dict, else the names of the layers that return them, else `"output_1"`
    and so on. Further outputs of one layer end in `"#2"` and so on.

    Args:
        model: Any Keras model.
        outputs: Its outputs on a batch, nested as the model returns them.
    """
    count = len(keras.tree.flatten(outputs))
    names: Sequence[str] = getattr(model, "output_names", None) or ()
    if isinstance(outputs, dict):
        names = sorted(outputs)
    if len(names) != count:
        names = [f"output_{number}" for number in range(1, count + 1)]
    times: collections.Counter[str] = collections.Counter()
    unique_names = []
    for name in names:
        times[name] += 1
        if times[name] > 1:
            name = f"{name}#{times[name]}"
        unique_names.append(name)
    return unique_names


def _kind(end: str | None, loss: Any) -> OutputKind:
    """The kind of an output with this end and this loss, either of which may be unknown."""
    # An instance of Keras' losses wraps a function.
    function = getattr(loss, "fn", loss)
    name = getattr(function, "__name__", None)
    answers = next(
        (kind for kind, names in _LOSSES.items() if name in names), None
    )
    if answers is None:
        return OutputKind(end, "classes" if end == "softmax" else None)
    if end in ("softmax", "sigmoid") or answers == "values":
        return OutputKind(end, answers)
    config = loss.get_config() if isinstance(loss, keras.losses.Loss) else {}
    if config.get("from_logits") or name in _HINGES:
        return OutputKind("linear", answers)
    return OutputKind(end or _ENDS[answers], answers)


def _losses(model: keras.Model, count: int) -> list[Any]:
    """The loss function of each output; `None` where there is none, or where it is not clear."""
    loss = (
        getattr(model, "loss", None)
        if getattr(model, "compiled", False)
        else None
    )
    if isinstance(loss, dict):
        names = _names_of_outputs(model, sorted(loss))
        losses = [loss.get(name) for name in names]
    elif isinstance(loss, list | tuple):
        losses = list(loss)
    else:
        losses = [loss] * count
    if len(losses) != count:
        return [None] * count
    return [
        keras.losses.get(one) if isinstance(one, str) else one for one in losses
    ]


def _names_of_outputs(
    model: keras.Model, default: Sequence[str]
) -> Sequence[str]:
    """The keys of outputs in a dict, which losses go by, else the names of the outputs."""
    if computes_its_graph(model):
        outputs = graph_ends(model)[1]
        if isinstance(outputs, dict):
            return sorted(outputs)
    names: Sequence[str] | None = getattr(model, "output_names", None)
    return names or default


def _end_of(model: keras.Model, tensor: Tensor) -> str | None:
    """The last function before a tensor of a graph, past operations that only reshape."""
    makers = {
        id(output): call
        for call in graph_calls(model)
        for output in call.outputs
    }
    call = makers[id(tensor)]
    while type(call.operation).__name__ in _RESHAPING and len(call.inputs) == 1:
        call = makers[id(call.inputs[0])]
    operation = call.operation
    while isinstance(operation, LayerWrapper):
        operation = operation.layer
    if computes_its_graph(operation):
        inner = keras.tree.flatten(graph_ends(operation)[1])
        position = [id(output) for output in call.outputs].index(id(tensor))
        return _end_of(operation, inner[position])
    if isinstance(operation, L.TimeDistributed):
        operation = operation.layer
    return _end_of_operation(operation, len(tensor.shape))


def _end_of_operation(operation: Any, rank: int) -> str | None:
    """The last function of a layer or an operation."""
    kind = type(operation).__name__
    if isinstance(operation, _ACTIVATED):
        ends = {
            keras.activations.softmax: "softmax",
            keras.activations.sigmoid: "sigmoid",
            keras.activations.linear: "linear",
        }
        return ends.get(operation.activation)
    # A score compares classes along the last axis, and no other.
    if kind == "Softmax" and operation.axis in (-1, rank - 1):
        return "softmax"
    return "sigmoid" if kind == "Sigmoid" else None
