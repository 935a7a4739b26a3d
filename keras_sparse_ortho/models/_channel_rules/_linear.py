"""The rules of kernels that multiply channels: of one matrix, and of several side by side."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.kernels import KernelLayout, kernel_layouts
from keras_sparse_ortho.layers import is_elementwise
from keras_sparse_ortho.models._channel_rules._rule import (
    ChannelCall,
    ChannelRule,
    Constants,
    Mask,
    Scales,
    SmallerLayer,
    Tracer,
    activated,
    activation_of,
    bias_of,
    count_of,
    for_single_inputs,
    has_bias,
    has_borders,
    limit_of,
    size_name,
    smaller_layer,
    value_of,
    without_tiny,
)

L = keras.layers


class Linear(ChannelRule):
    """A kernel `(*taps, in, out)` that reads all channels, then bias and activation.

    With padding a constant adds no bias at the border. It adds there what one channel of constant
    `c` adds with the kernel `sum_i (c_i / c) K_i`: one of the channels stays, and carries the
    others.

    Args:
        layer: Layer.
        variable: Variable. The kernel.
        axis: int. The axis of the channels in inputs and outputs.
    """

    has_kernel = True

    def __init__(
        self,
        layer: Any,
        variable: Any,
        axis: int = -1,
    ) -> None:
        super().__init__(layer, axis)
        self.variable = variable
        self.kernel = value_of(variable)
        self.has_borders = has_borders(layer)
        self.mixes = not is_elementwise(activation_of(layer))
        self._set_taps()

    def _set_taps(self) -> None:
        self.taps = without_tiny(self.kernel).reshape(
            -1, *self.kernel.shape[-2:]
        )
        self.bias = bias_of(self.layer, self.kernel.shape[-1])

    def fixed_inputs(self, inputs: Constants) -> Constants:
        """The inputs of the kernel: NaN where their share of the outputs is not one constant."""
        if self.has_borders:
            return np.where(inputs != 0, np.nan, inputs)
        return inputs

    def constants(self, inputs: Constants) -> Constants:
        fixed = self.fixed_inputs(inputs)
        varies = self.taps[:, np.isnan(fixed)].any(axis=(0, 1)) | self.mixes
        sums = np.nan_to_num(fixed) @ self.taps.sum(axis=0) + self.bias
        constants = np.where(varies, np.nan, sums)
        return activated(activation_of(self.layer), constants)

    def needed(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> tuple[Mask, Mask]:
        """Varying channels that a live output reads, and one to carry constants."""
        live = live | self.mixes
        used = self.taps[:, :, live].any(axis=(0, 2))
        read = read | (used & np.isnan(constants))
        if self.has_borders:
            size = np.abs(np.nan_to_num(constants))
            wanted = np.where(used, size, 0)
            # A carrier much smaller than the others would get a large kernel.
            if wanted.any() and not (read & (size >= 0.1 * wanted.max())).any():
                read[np.argmax(wanted)] = True
        return read, live

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerLayer:
        """Rows and columns go; their sum is in the bias, or in the row of the carrier."""
        kernel = self.kernel[..., live].copy()
        if self.has_borders:
            self._give_to_carrier(kernel, constants, read)
        return self._with(
            kernel[..., read, :], self._new_bias(constants, read), live
        )

    def _new_bias(
        self,
        constants: Constants,
        rows: Mask,
    ) -> np.ndarray:
        """The bias with the shares of constant rows that go."""
        gone = np.where(rows, 0, np.nan_to_num(self.fixed_inputs(constants)))
        return self.bias + gone @ self.taps.sum(axis=0)

    def _give_to_carrier(
        self,
        kernel: np.ndarray,
        constants: Constants,
        read: Mask,
    ) -> None:
        size = np.where(read, np.abs(np.nan_to_num(constants)), 0)
        carrier = int(np.argmax(size))
        if size[carrier] > 0:  # else no live output reads constants
            shares = (
                np.where(read, 0, np.nan_to_num(constants)) / constants[carrier]
            )
            kernel[..., carrier, :] += np.einsum(
                "i,...io->...o", shares, kernel
            )

    def _with(
        self,
        kernel: np.ndarray,
        bias: np.ndarray,
        live: Mask,
    ) -> SmallerLayer:
        settings = self._settings(bias, live)
        return smaller_layer(
            self.layer, settings, [kernel, self._bias_of(settings, bias, live)]
        )

    def _settings(
        self,
        bias: np.ndarray,
        live: Mask,
    ) -> dict[str, Any]:
        return {
            size_name(self.layer): count_of(live),
            "use_bias": bool(has_bias(self.layer) or bias.any()),
        }

    @staticmethod
    def _bias_of(
        settings: dict[str, Any],
        bias: np.ndarray,
        live: Mask,
    ) -> np.ndarray | None:
        return bias[live] if settings["use_bias"] else None

    def trace(
        self,
        tracer: Tracer,
        inputs: np.ndarray,
    ) -> np.ndarray:
        tracer.read(self.variable, inputs, self.rows(len(inputs)))
        return tracer.make(self.layer.name, self.kernel.shape[-1])

    def limit(self) -> float | None:
        return limit_of(activation_of(self.layer))

    def scale(
        self,
        scales: Scales,
        inputs: np.ndarray,
        outputs: int,
    ) -> np.ndarray:
        return scales.make(outputs)

    def rescaled(
        self,
        inputs: np.ndarray,
        outputs: np.ndarray,
    ) -> list[np.ndarray]:
        kernel = self.kernel * (outputs / inputs[:, None])
        return with_scaled_bias(self.layer, [kernel], outputs)

    def rows(self, inputs: int) -> np.ndarray:
        """The rows of each input channel in the kernel as a matrix, at all taps."""
        taps, channels, _ = self.taps.shape
        at_first_tap = np.arange(channels).reshape(inputs, 1, -1)
        rows = at_first_tap + channels * np.arange(taps)[:, None]
        return rows.reshape(inputs, -1)


class Grouped(ChannelRule):
    """Matrices side by side, each on channels of its own; each goes with all of these.

    All groups must have equally many channels, so a channel cannot go without its group.

    Args:
        layer: Layer. Its configuration has `groups`, and `units` or `filters`.
        variable: Variable. The kernel, a matrix `(*taps, in, out)` for each group.
        layout: KernelLayout. Its axes.
        axis: int. The axis of the channels in inputs and outputs.
    """

    has_kernel = True

    def __init__(
        self,
        layer: Any,
        variable: Any,
        layout: KernelLayout,
        axis: int = -1,
    ) -> None:
        super().__init__(layer, axis)
        self.layout = layout
        self.kernel = value_of(variable)
        canonical = layout.to_canonical(without_tiny(self.kernel))
        batch, parts, *_, inputs, outputs = canonical.shape
        self.groups = batch * parts
        self.taps = canonical.reshape(self.groups, -1, inputs, outputs)
        self.bias = bias_of(layer, self.groups * outputs)

    def constants(self, inputs: Constants) -> Constants:
        by_group = inputs.reshape(self.groups, -1)
        if has_borders(self.layer):
            by_group = np.where(by_group != 0, np.nan, by_group)
        used = self.taps.any(axis=1)
        varies = np.einsum("gi,gio->go", np.isnan(by_group), used).ravel()
        sums = np.einsum(
            "gi,gtio->go", np.nan_to_num(by_group), self.taps
        ).ravel()
        constants = np.where(varies, np.nan, sums + self.bias)
        return activated(activation_of(self.layer), constants)

    def needed(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> tuple[Mask, Mask]:
        inputs = read.reshape(self.groups, -1)
        outputs = live.reshape(self.groups, -1)
        stays = inputs.any(axis=1) | outputs.any(axis=1)
        return np.repeat(stays, inputs.shape[1]), np.repeat(
            stays, outputs.shape[1]
        )

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerLayer:
        live_groups: Mask = np.any(live.reshape(self.groups, -1), axis=1)
        if self.layout.batch:
            kernel = np.compress(live_groups, self.kernel, self.layout.batch[0])
        else:
            kernel = np.compress(live, self.kernel, self.layout.outputs[0])
        settings = {
            size_name(self.layer): count_of(live),
            "groups": count_of(live_groups),
        }
        weights = [kernel]
        if has_bias(self.layer):
            weights.append(self.bias[live])
        return smaller_layer(self.layer, settings, weights)

    def trace(
        self,
        tracer: Tracer,
        inputs: np.ndarray,
    ) -> np.ndarray:
        outputs = tracer.make(self.layer.name, len(self.bias))
        by_group = [
            channels.reshape(self.groups, -1) for channels in (inputs, outputs)
        ]
        tracer.join(np.concatenate(by_group, axis=1).T)
        return outputs

    def limit(self) -> float | None:
        if self.layout.batch:
            return None
        return limit_of(activation_of(self.layer))

    def scale(
        self,
        scales: Scales,
        inputs: np.ndarray,
        outputs: int,
    ) -> np.ndarray:
        if self.layout.batch:
            return super().scale(scales, inputs, outputs)
        return scales.make(outputs)

    def rescaled(
        self,
        inputs: np.ndarray,
        outputs: np.ndarray,
    ) -> list[np.ndarray]:
        rows = inputs.reshape(self.groups, -1).T
        by_output = np.repeat(rows, len(outputs) // self.groups, axis=1)
        kernel = self.kernel * (outputs / by_output)
        return with_scaled_bias(self.layer, [kernel], outputs)


def with_scaled_bias(
    layer: keras.layers.Layer,
    kernels: list[np.ndarray],
    outputs: np.ndarray,
) -> list[np.ndarray]:
    """Kernels, and behind them the bias of the layer, if it has one, times factors."""
    if has_bias(layer):
        return [*kernels, value_of(layer.bias) * outputs]
    return kernels


@for_single_inputs
def last_axis(call: ChannelCall) -> ChannelRule | str:
    """Makes the rule of a layer whose one kernel multiplies the last axis of its inputs.

    One matrix `(in, out)` reads all of the axis. Several, as `kernel_layouts` names them, read a
    part each, and go as a whole.

    Args:
        call: ChannelCall. A call of the layer.

    Returns a ChannelRule, or a str: the reason why the channels of this call must stay.
    """
    [tensor] = call.inputs
    if tensor.axis != len(tensor.shape) - 1:
        return f"it does not read axis {tensor.axis}, where the channels are"
    reason = _why_no_product(call.layer)
    if reason:
        return reason
    [(name, layout)] = kernel_layouts(call.layer).items()
    layout = layout or KernelLayout.dense()
    variable = call.layer.weights[0]
    rank = len(variable.shape)
    axes = [
        axis % rank for axis in (*layout.batch, *layout.inputs, *layout.outputs)
    ]
    is_one_matrix = layout.matrices(variable.shape) == 1
    if layout.gates > 1 or len(axes) < rank or len(layout.batch) > 1:
        return f"{name!r} is no matrix for each part of its inputs"
    if is_one_matrix and axes == [0, 1]:
        return Linear(call.layer, variable, tensor.axis)
    if is_one_matrix or (layout.batch and layout.groups > 1):
        return f"{name!r} has other axes than (in, out) or (groups, in, out)"
    if not is_elementwise(activation_of(call.layer)):
        return "its activation mixes the channels of all groups"
    return Grouped(call.layer, variable, layout, tensor.axis)


def _why_no_product(layer: Any) -> str | None:
    """Why the weights or the settings of a layer are not those of one product, or `None`."""
    names = list(kernel_layouts(layer))
    bias = getattr(layer, "bias", None)
    weights = [variable.name for variable in layer.weights]
    expected = names if bias is None else [*names, bias.name]
    if len(names) != 1 or weights != expected:
        return f"its weights are {weights}, not one kernel and perhaps a bias"
    config = layer.get_config()
    layout = kernel_layouts(layer)[names[0]] or KernelLayout.dense()
    needed = ["use_bias"]
    if layout.matrices(layer.weights[0].shape) > 1:
        needed = ["groups"]
    missing = [key for key in needed if key not in config]
    if "units" not in config and "filters" not in config:
        missing.append("units")
    if missing:
        return f"its configuration has no {missing}"
    if bias is not None and bias.shape != (config[size_name(layer)],):
        return f"its bias has the shape {tuple(bias.shape)}"
    return None
