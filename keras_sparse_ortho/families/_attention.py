"""MultiHeadAttention: the stream that it reads and returns, its heads and their widths."""

import math
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho.models import (
    ChannelCall,
    ChannelRule,
    Constants,
    Mask,
    SmallerLayer,
    Tracer,
    add_channel_rules,
    count_of,
    smaller_layer,
    value_of,
    without_tiny,
)

L = keras.layers


class _Input(NamedTuple):
    """One of the tensors that go in: the projections that read it, and where its channels are."""

    projections: tuple[str, ...]  # none read a mask
    channels: slice


class Attention(ChannelRule):
    """Attention with the kernels `(in, heads, width)` and, of the output, `(heads, width, out)`.

    A head goes if its values are 0 or nothing reads its outputs. Its width shrinks, too:

        scores = Q K^T / sqrt(key_dim),    heads = softmax(scores) V

    A column of Q and K goes if it is 0 in one of them (and Q is scaled by the new `key_dim`), a
    column of V if it is 0 or nothing reads it. All heads have one width: that of the widest. On
    JAX the widths of queries and values are one, too.

    Args:
        layer: MultiHeadAttention, built.
        inputs: sequence of _Input.
    """

    has_kernel = True
    shrinks_inside = True

    def __init__(
        self,
        layer: Any,
        inputs: list[_Input],
        axis: int = -1,
    ) -> None:
        super().__init__(layer, axis)
        self.inputs = inputs
        # JAX's attention has one width for queries, keys and values.
        self.has_one_width = keras.backend.backend() == "jax"
        self.projections = {
            "query": layer.query_dense,
            "key": layer.key_dense,
            "value": layer.value_dense,
        }
        self.kernels = {
            name: value_of(p.kernel) for name, p in self.projections.items()
        }
        self.output_kernel = value_of(layer.output_dense.kernel)

    def constants(self, inputs: Constants) -> Constants:
        return np.full(self.output_kernel.shape[-1], np.nan)

    def needed(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> tuple[Mask, Mask]:
        heads = _live_heads(self._live_values(live))
        read = read.copy()
        for tensor in self.inputs:
            part = read[tensor.channels]
            for name in tensor.projections:
                rows = without_tiny(self.kernels[name])[:, heads].any(
                    axis=(1, 2)
                )
                part |= rows & (constants[tensor.channels] != 0)
            if not tensor.projections:
                part |= True
        return read, live

    def _live_columns(self, name: str) -> Mask:
        """Columns `(heads, width)` of a projection that are not always 0."""
        columns: Mask = np.any(without_tiny(self.kernels[name]), axis=0)
        projection = self.projections[name]
        if projection.bias is None:
            return columns
        return columns | (value_of(projection.bias) != 0)

    def _live_values(self, live: Mask) -> Mask:
        """Columns of the values that are not 0, and that a live output reads."""
        rows = without_tiny(self.output_kernel)[..., live].any(axis=2)
        return self._live_columns("value") & rows

    def dead_inside(self) -> dict[str, int]:
        """The values in heads whose values are the bias alone; such heads stay."""
        kernel = self.kernels["value"]
        count = int(kernel.shape[2] * np.sum(~kernel.any(axis=(0, 2))))
        return {"value/kernel": count}

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerLayer | None:
        """The layer with fewer heads, narrower ones, and fewer channels around them."""
        values = self._live_values(live)
        heads = _live_heads(values)
        scores = self._live_columns("query") & self._live_columns("key")
        key_dim = _width(scores[heads])
        value_dim = _width(values[heads])
        if self.has_one_width:
            key_dim = value_dim = max(key_dim, value_dim)
        score_columns = _live_first(scores[heads], key_dim)
        value_columns = _live_first(values[heads], value_dim)
        scale = math.sqrt(key_dim / scores.shape[1])
        by_variable = {
            **self._projected("query", read, heads, score_columns, scale),
            **self._projected("key", read, heads, score_columns),
            **self._projected("value", read, heads, value_columns),
            **self._returned(live, heads, value_columns),
        }
        weights = [by_variable[id(variable)] for variable in self.layer.weights]
        before = [tuple(variable.shape) for variable in self.layer.weights]
        if [weight.shape for weight in weights] == before:
            return None
        settings = {
            "num_heads": count_of(heads),
            "key_dim": key_dim,
            "value_dim": value_dim,
            "output_shape": (count_of(live),),
        }
        return smaller_layer(self.layer, settings, weights)

    def _projected(
        self,
        name: str,
        read: Mask,
        heads: Mask,
        columns: np.ndarray,
        scale: float = 1.0,
    ) -> dict[int, np.ndarray]:
        """Kernel and bias of a projection: some of its rows and heads, and columns of each head."""
        projection = self.projections[name]
        kernel = (
            self.kernels[name][self._rows_read_by(name, read)][:, heads] * scale
        )
        arrays = {
            id(projection.kernel): np.take_along_axis(
                kernel, columns[None], axis=2
            )
        }
        if projection.bias is not None:
            bias = value_of(projection.bias)[heads] * scale
            arrays[id(projection.bias)] = np.take_along_axis(
                bias, columns, axis=1
            )
        return arrays

    def _returned(
        self,
        live: Mask,
        heads: Mask,
        columns: np.ndarray,
    ) -> dict[int, np.ndarray]:
        """Kernel and bias of the outputs: some heads, rows of each, and some outputs."""
        projection = self.layer.output_dense
        kernel = self.output_kernel[heads][..., live]
        arrays = {
            id(projection.kernel): np.take_along_axis(
                kernel, columns[..., None], axis=1
            ),
        }
        if projection.bias is not None:
            arrays[id(projection.bias)] = value_of(projection.bias)[live]
        return arrays

    def _rows_read_by(
        self,
        name: str,
        read: Mask,
    ) -> Mask:
        [rows] = [
            read[x.channels] for x in self.inputs if name in x.projections
        ]
        return rows

    def trace(
        self,
        tracer: Tracer,
        inputs: np.ndarray,
    ) -> np.ndarray:
        """Reads the inputs of the projections, and makes the channels of the output."""
        for tensor in self.inputs:
            channels = inputs[tensor.channels]
            if not tensor.projections:
                tracer.hold(
                    channels, self.layer, "they are a mask of attention"
                )
            for name in tensor.projections:
                rows = np.arange(len(channels))[:, None]
                tracer.read(self.projections[name].kernel, channels, rows)
        variable = self.layer.output_dense.kernel
        heads, width, outputs = self.output_kernel.shape
        rows = np.arange(heads * width).reshape(heads, width)
        tracer.read(
            variable, tracer.make(f"{self.layer.name}/heads", heads), rows
        )
        if not self.has_one_width:
            tracer.read(
                variable,
                tracer.make(f"{self.layer.name}/values", width),
                rows.T,
            )
        return tracer.make(self.layer.name, outputs)


def _live_heads(values: Mask) -> Mask:
    """Heads with live columns of values; the first stays where there are none."""
    heads: Mask = np.any(values, axis=1)
    heads[0] |= not heads.any()
    return heads


def _width(live: Mask) -> int:
    """The number of live columns of the widest head, at least one."""
    return max(int(live.sum(axis=1).max()), 1)


def _live_first(live: Mask, width: int) -> np.ndarray:
    """For each head its live columns, filled up with others to a width."""
    order = np.argsort(~live, axis=1, kind="stable")
    return np.sort(order[:, :width], axis=1)


_ARGUMENTS = (
    *(
        "query",
        "value",
        "key",
        "query_mask",
        "value_mask",
        "key_mask",
        "attention_mask",
    ),
    *("return_attention_scores", "training", "use_causal_mask"),
)


def _attention(call: ChannelCall) -> ChannelRule | str:
    """The rule of a call of attention, or the reason why its channels stay."""
    layer = call.layer
    arguments = {
        **dict(zip(_ARGUMENTS, call.args, strict=False)),
        **call.kwargs,
    }
    if arguments.get("training") or len(call.output_shapes) != 1:
        return "it is called in training, or returns its scores"
    if (
        getattr(layer, "_use_gate", False)
        or layer.output_dense.kernel.ndim != 3
    ):
        return "it has a gate, or outputs of several axes"
    if any(tensor.axis != len(tensor.shape) - 1 for tensor in call.inputs):
        return "the channels of an input are not its last axis"
    if not all(tensor.size for tensor in call.inputs):
        return "the number of channels of an input is not known"
    return Attention(
        layer, _inputs(call, arguments), len(call.output_shape) - 1
    )


def _inputs(
    call: ChannelCall,
    arguments: dict[str, Any],
) -> list[_Input]:
    """The tensors in the order of the call's inputs, with the projections that read them."""
    inputs = []
    start = 0
    sizes = iter(tensor.size for tensor in call.inputs)
    for name, value in arguments.items():
        if not keras.utils.is_keras_tensor(value):
            continue
        projections: tuple[str, ...] = (
            (name,) if name in ("query", "key", "value") else ()
        )
        if name == "value" and arguments.get("key") is None:
            projections = ("value", "key")
        stop = start + next(sizes)
        inputs.append(_Input(projections, slice(start, stop)))
        start = stop
    return inputs


add_channel_rules({L.MultiHeadAttention: _attention})
