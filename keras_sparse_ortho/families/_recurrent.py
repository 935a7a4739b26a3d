"""SimpleRNN, GRU and LSTM, also in both directions."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import ConvLSTMCell
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.families._register_layer import register_layer
from keras_sparse_ortho.kernels import KernelLayout, LastAxisRows, Layouts, Rows
from keras_sparse_ortho.models import (
    ChannelCall,
    ChannelRule,
    Constants,
    Mask,
    SmallerLayer,
    Tracer,
    add_channel_rules,
    count_of,
    for_single_inputs,
    pixels,
    smaller_layer,
    value_of,
    without_tiny,
)
from keras_sparse_ortho.quantization import Rounding, kernel_rounding

L = keras.layers


class Recurrent(ChannelRule):
    """Units whose states the units read at the next step.

    The kernels are `(in, gates * units)` and `(units, gates * units)`. A unit goes if no layer
    reads its output and no live unit its state.
    """

    has_kernel = True

    def __init__(
        self,
        layer: Any,
        name: str,
        axis: int = -1,
    ) -> None:
        super().__init__(layer, axis)
        self.name = name
        self.cell = layer.cell
        self.kernel = value_of(layer.cell.kernel)
        self.recurrent = value_of(layer.cell.recurrent_kernel)
        self.units = layer.cell.units
        self.gates = self.kernel.shape[1] // self.units

    def constants(self, inputs: Constants) -> Constants:
        return np.full(self.units, np.nan)

    def needed(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> tuple[Mask, Mask]:
        states = self._reads(self.recurrent)
        while True:
            more = live | states[:, live].any(axis=1)
            if (more == live).all():
                break
            live = more
        rows = self._reads(self.kernel)[:, live].any(axis=1)
        return read | (rows & (constants != 0)), live

    def _reads(self, kernel: np.ndarray) -> np.ndarray:
        """Which units read which row of a kernel, at any gate."""
        by_gate = without_tiny(kernel).reshape(
            len(kernel), self.gates, self.units
        )
        reads: Mask = np.any(by_gate, axis=1)
        return reads

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerLayer:
        columns = np.tile(live, self.gates)
        bias = (
            value_of(self.cell.bias)[..., columns]
            if self.cell.use_bias
            else None
        )
        weights = [
            self.kernel[read][:, columns],
            self.recurrent[live][:, columns],
            bias,
        ]
        return smaller_layer(self.layer, {"units": count_of(live)}, weights)

    def trace(
        self,
        tracer: Tracer,
        inputs: np.ndarray,
    ) -> np.ndarray:
        tracer.read(self.cell.kernel, inputs, np.arange(len(inputs))[:, None])
        outputs = tracer.make(self.name, self.units)
        tracer.read(
            self.cell.recurrent_kernel, outputs, np.arange(self.units)[:, None]
        )
        return outputs


class BothDirections(ChannelRule):
    """Bidirectional: two recurrent layers on the same inputs, their outputs side by side.

    Keras needs as many units in one direction as in the other.
    """

    has_kernel = True

    def __init__(
        self,
        layer: Any,
        axis: int = -1,
    ) -> None:
        super().__init__(layer, axis)
        directions = (layer.forward_layer, layer.backward_layer)
        self.rules = [
            Recurrent(inner, f"{layer.name}/{inner.name}")
            for inner in directions
        ]

    def _split(self, outputs: np.ndarray) -> list[np.ndarray]:
        return np.split(outputs, [self.rules[0].units])

    def constants(self, inputs: Constants) -> Constants:
        return np.concatenate([rule.constants(inputs) for rule in self.rules])

    def needed(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> tuple[Mask, Mask]:
        forward, backward = self._split(live)
        while True:
            read, forward = self.rules[0].needed(constants, read, forward)
            read, backward = self.rules[1].needed(constants, read, backward)
            missing = count_of(forward) - count_of(backward)
            if missing == 0:
                return read, np.concatenate([forward, backward])
            fewer = backward if missing > 0 else forward
            fewer[np.flatnonzero(~fewer)[: abs(missing)]] = True

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerLayer:
        config = self.layer.get_config()
        weights = []
        names = ("layer", "backward_layer")
        for name, rule, outputs in zip(
            names, self.rules, self._split(live), strict=True
        ):
            shrunk = rule.smaller(constants, read, outputs)
            # `build_config` has the shapes of the old inputs.
            inner = {**config[name], "config": shrunk.config}
            inner.pop("build_config", None)
            config[name] = inner
            weights += shrunk.weights
        return SmallerLayer(config, weights)

    def trace(
        self,
        tracer: Tracer,
        inputs: np.ndarray,
    ) -> np.ndarray:
        directions = [rule.trace(tracer, inputs) for rule in self.rules]
        tracer.join(np.stack(directions))
        return np.concatenate(directions)


def _why_not(layer: Any, call: ChannelCall) -> str | None:
    """The reason why a recurrent layer has no rule, or `None`."""
    if type(layer) not in _CELLS:
        return f"{type(layer).__name__} has no rule"
    if layer.stateful:
        return "its states stay from batch to batch"
    if len(call.output_shapes) != 1:
        return "it returns its states"
    return None


@for_single_inputs
def _recurrent(call: ChannelCall) -> ChannelRule | str:
    axis = len(call.output_shape) - 1
    return _why_not(call.layer, call) or Recurrent(
        call.layer, call.layer.name, axis
    )


@for_single_inputs
def _both_directions(call: ChannelCall) -> ChannelRule | str:
    layer = call.layer
    if layer.merge_mode != "concat":
        return f"its directions are merged by {layer.merge_mode!r}"
    if layer.forward_layer.cell.units != layer.backward_layer.cell.units:
        return "its directions differ in their number of units"
    reason = _why_not(layer.forward_layer, call) or _why_not(
        layer.backward_layer, call
    )
    return reason or BothDirections(layer, len(call.output_shape) - 1)


_CELLS = (L.SimpleRNN, L.GRU, L.LSTM)


class StepRows(LastAxisRows):
    """The inputs of a cell at each step, or the states before them."""

    reads = "steps"


def _inputs_of_steps(cell: keras.layers.Layer) -> Rows:
    return StepRows()


def _states(cell: keras.layers.Layer) -> Rows | None:
    """A GRU that resets states before its product multiplies other ones than those of its steps."""
    if getattr(cell, "reset_after", True):
        return StepRows()
    return None


def _timesteps(
    layer: keras.layers.Layer,
    inputs: Tensor,
    outputs: Tensor,
) -> int:
    """The steps of the RNN layer's inputs, (batch, timesteps, features)."""
    return int(inputs.shape[1])


def _conv_lstm_positions(
    layer: keras.layers.Layer,
    inputs: Tensor,
    outputs: Tensor,
) -> int:
    """Both kernels apply at all pixels of the state, in every step of the RNN layer."""
    state_rank = len(inputs.shape) - 2
    state_shape = outputs.shape[-state_rank:]
    return int(inputs.shape[1]) * pixels(layer, (1, *state_shape))


def _rounding_of_lstm(cell: keras.layers.LSTMCell) -> Rounding:
    """LiteRT's operator for LSTMs has a scale a gate; what it does not compute stays in floats."""
    if (
        type(cell) is L.LSTMCell
        and cell.activation is keras.activations.tanh
        and cell.recurrent_activation is keras.activations.sigmoid
    ):
        return "by gate"
    return "floats"


def _layouts(gates: int) -> Layouts:
    """The layouts of a cell whose kernels have this many gates side by side."""
    layout = KernelLayout.recurrent(gates)
    return {"kernel": layout, "recurrent_kernel": layout}


for _kind, _gates in (
    (L.SimpleRNNCell, 1),
    (L.GRUCell, 3),
    (L.LSTMCell, 4),
):
    register_layer(
        _kind,
        _layouts(_gates),
        positions=_timesteps,
        rows={"kernel": _inputs_of_steps, "recurrent_kernel": _states},
        rounding="floats",
    )
kernel_rounding.register(L.LSTMCell, _rounding_of_lstm)
register_layer(
    ConvLSTMCell,
    _layouts(4),
    positions=_conv_lstm_positions,
    rounding="floats",
)
add_channel_rules(
    {
        **dict.fromkeys(_CELLS, _recurrent),
        L.Bidirectional: _both_directions,
    }
)
