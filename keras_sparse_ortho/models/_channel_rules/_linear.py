"""Dense layers and convolutions, also transposed ones."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.layers import is_elementwise
from keras_sparse_ortho.models._channel_rules._rule import (
    ChannelCall,
    ChannelRule,
    Constants,
    MakeRule,
    Mask,
    SmallerLayer,
    Tracer,
    activated,
    bias_of,
    count_of,
    for_single_inputs,
    has_borders,
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
        self.mixes = not is_elementwise(layer.activation)
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
        return activated(self.layer.activation, np.where(varies, np.nan, sums))

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
        size = "units" if hasattr(self.layer, "units") else "filters"
        return {
            size: count_of(live),
            "use_bias": bool(self.layer.use_bias or bias.any()),
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

    def rows(self, inputs: int) -> np.ndarray:
        """The rows of each input channel in the kernel as a matrix, at all taps."""
        taps, channels, _ = self.taps.shape
        at_first_tap = np.arange(channels).reshape(inputs, 1, -1)
        rows = at_first_tap + channels * np.arange(taps)[:, None]
        return rows.reshape(inputs, -1)


class Transposed(Linear):
    """A transposed convolution, whose kernel is `(*taps, out, in)`."""

    def _set_taps(self) -> None:
        self.kernel = np.swapaxes(self.kernel, -1, -2)
        # Few taps reach the border, and strides leave gaps.
        self.has_borders = True
        super()._set_taps()

    def smaller(
        self,
        constants: Constants,
        read: Mask,
        live: Mask,
    ) -> SmallerLayer:
        config, [kernel, *bias] = super().smaller(constants, read, live)
        return SmallerLayer(config, [np.swapaxes(kernel, -1, -2), *bias])

    def trace(
        self,
        tracer: Tracer,
        inputs: np.ndarray,
    ) -> np.ndarray:
        tracer.hold(
            inputs,
            self.layer,
            "its kernel has no rows for each channel it reads",
        )
        return tracer.make(self.layer.name, self.kernel.shape[-1])


class Grouped(ChannelRule):
    """A convolution in groups; each group goes with all its channels.

    The kernel is `(*taps, in / groups, out)`: outputs of a group read its inputs alone. All groups
    must have equally many channels, so a channel cannot go without its group.
    """

    has_kernel = True

    def __init__(
        self,
        layer: Any,
        axis: int = -1,
    ) -> None:
        super().__init__(layer, axis)
        self.kernel = value_of(layer.kernel)
        self.groups = layer.groups
        self.bias = bias_of(layer, self.kernel.shape[-1])

    def constants(self, inputs: Constants) -> Constants:
        by_group = inputs.reshape(self.groups, -1)
        if has_borders(self.layer):
            by_group = np.where(by_group != 0, np.nan, by_group)
        taps = without_tiny(self.kernel).reshape(
            -1, by_group.shape[1], self.groups, self._width
        )
        used = taps.any(axis=0)
        varies = np.einsum("gi,igo->go", np.isnan(by_group), used).ravel()
        sums = np.einsum("gi,tigo->go", np.nan_to_num(by_group), taps).ravel()
        constants = np.where(varies, np.nan, sums + self.bias)
        return activated(self.layer.activation, constants)

    @property
    def _width(self) -> int:
        """Number of outputs in a group."""
        return int(self.kernel.shape[-1]) // self.groups

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
        settings = {
            "filters": count_of(live),
            "groups": count_of(live) // self._width,
        }
        bias = self.bias[live] if self.layer.use_bias else None
        return smaller_layer(
            self.layer, settings, [self.kernel[..., live], bias]
        )

    def trace(
        self,
        tracer: Tracer,
        inputs: np.ndarray,
    ) -> np.ndarray:
        outputs = tracer.make(self.layer.name, self.kernel.shape[-1])
        by_group = [
            channels.reshape(self.groups, -1) for channels in (inputs, outputs)
        ]
        tracer.join(np.concatenate(by_group, axis=1).T)
        return outputs


@for_single_inputs
def _dense(call: ChannelCall) -> ChannelRule | str:
    [tensor] = call.inputs
    if tensor.axis != len(tensor.shape) - 1:
        return f"it does not read axis {tensor.axis}, where the channels are"
    return Linear(call.layer, call.layer.kernel, tensor.axis)


@for_single_inputs
def _convolution(call: ChannelCall) -> ChannelRule | str:
    axis = call.inputs[0].axis
    if call.layer.groups == 1:
        return Linear(call.layer, call.layer.kernel, axis)
    if not is_elementwise(call.layer.activation):
        return "its activation mixes the channels of all groups"
    return Grouped(call.layer, axis)


@for_single_inputs
def _transposed(call: ChannelCall) -> ChannelRule | str:
    return Transposed(call.layer, call.layer.kernel, call.inputs[0].axis)


RULES: dict[type | str, MakeRule] = {
    L.Dense: _dense,
    **dict.fromkeys((L.Conv1D, L.Conv2D, L.Conv3D), _convolution),
    **dict.fromkeys(
        (L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose), _transposed
    ),
}
