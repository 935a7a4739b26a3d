"""`equalize`: channels of like ranges, so that one scale of int8 fits all of a tensor."""

import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._checks import check_number, other_keywords
from keras_sparse_ortho._keras_internals import (
    computes_its_graph,
    from_zero_states,
    graph_calls,
    graph_ends,
)
from keras_sparse_ortho._values import to_numpy, without_gradients
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import (
    ChannelClasses,
    ChannelGraph,
    check_built,
    strip,
)
from keras_sparse_ortho.quantization._fake_quantize import ranges_of
from keras_sparse_ortho.quantization._quantize_aware import is_fused

_MOST = 64.0  # a factor; more takes digits of the next kernel
_SMALLEST = 1e-6  # share of a tensor's largest value, below which a channel counts as empty
_ROWS = 16  # of a piece of a batch
_TOLERANCE = 1e-4  # of the outputs: sums are rounded otherwise


@other_keywords
def equalize(
    model: keras.Model,
    data: Any,
    *,
    power: float = 0.5,
) -> keras.Model:
    """Equalizes the ranges of channels before static int8, without changing what a model computes.

    A file of int8 rounds all channels of a tensor in one step, so a channel of small values keeps
    few levels. With the largest magnitude `r_c` of channel `c` and that of its tensor, `r`, on the
    data, each channel is multiplied, and the kernels that read it are divided, by

        s_c = (r / r_c) ** power,  at most 64

    This is exact in floats where `f(s x) = s f(x)`: in ReLU, LeakyReLU and PReLU, pooling, padding,
    reshapes, concatenations and sums, whose tensors share `s_c`. Dense, Conv, DepthwiseConv,
    SeparableConv (also between its two kernels) and BatchNormalization are where factors begin and
    end. Below the limit of a ReLU6 it holds on the data: `s_c` is at most 6 over the largest value
    there.

    Args:
        model: Model, built, functional or Sequential, wrapped or plain; trained.
        data: A few hundred rows of inputs, or what `fit` takes.
        power: float in (0, 1]. 1 gives all channels one range, which costs the kernels behind more
            than it gains.

    Returns:
        A new plain model, not compiled, with the outputs of `model`. Export it with `mode="int8"`,
        or let `export_litert(..., mode="int8", equalize=True)` do both.

    Raises:
        NotPrunableError: A subclassed model; one of `quantize_aware`, whose ranges are trained; one
            in which the outputs on the data would change, by a layer with a wrong channel rule.
        ValueError: A `power` outside (0, 1], or data that the model cannot take.

    Limits: gains depend on the ranges: about half of the error where these differ much, as behind
    DepthwiseConv, little where they are even; compare both files. Beyond a ReLU6's limit rows that
    are larger than all of `data` change. Channels that a nested model, LayerNormalization, a
    recurrent layer, attention, a product of tensors or another activation reads keep their ranges.
    Biases and masks: zeros stay zero; train before, not after.

    Examples:
        >>> import keras, numpy as np
        >>> layers = [keras.layers.Dense(6, "relu", name="up"), keras.layers.Dense(2)]
        >>> model = keras.Sequential([keras.Input((8,)), *layers])
        >>> x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
        >>> equal = equalize(model, x)
        >>> bool(np.abs(keras.ops.convert_to_numpy(equal(x) - model(x))).max() < 1e-5)
        True

    Reference: Nagel et al., "Data-Free Quantization through Weight Equalization and Bias
    Correction" (ICCV 2019), arXiv 1906.04721; here by ranges of activations.
    """
    # A room that `import keras_sparse_ortho` leaves out.
    from keras_sparse_ortho.calibration import calibration_batches

    power = check_number("power", power)
    if power > 1:
        raise ValueError(f"`power` must be in (0, 1]. Received: power={power}")
    check_built(model)
    if not computes_its_graph(model) or ranges_of(model):
        raise NotPrunableError(
            "Channels are equalized in functional models, and Sequential ones with an Input, "
            "before `quantize_aware`. Received: "
            f"model={model.name!r} of type {type(model).__name__}"
        )
    batches = calibration_batches(model, data)
    equalized = strip(model)
    graph = ChannelGraph(equalized)
    ranges = _measured_ranges(equalized, graph, batches)
    factors = _Factors(equalized, graph, ranges, power)
    for call in graph.calls:
        if call.rule is None:
            continue
        inputs = np.concatenate([factors.of(key) for key in call.inputs])
        outputs = np.concatenate([factors.of(key) for key in call.outputs])
        if np.any(inputs != 1.0) or np.any(outputs != 1.0):
            weights = call.rule.rescaled(inputs, outputs)
            if weights:
                call.layer.set_weights(weights)
    _equalize_inside(equalized, graph, batches, power)
    _check_same_outputs(model, equalized, batches[0])
    return equalized


def _equalize_inside(
    model: keras.Model,
    graph: ChannelGraph,
    batches: Sequence[Any],
    power: float,
) -> None:
    """Equalizes the channels between two kernels of one layer, such as a SeparableConv's."""
    inputs_of = {id(call.operation): call.inputs for call in graph_calls(model)}
    rules = []
    tensors = []
    for call in graph.calls:
        if call.rule is None or len(call.inputs) != 1:
            continue
        tensor = call.rule.inside(inputs_of[id(call.layer)][0])
        if tensor is not None:
            rules.append((call.rule, call.layer))
            tensors.append(tensor)
    if not tensors:
        return
    axes = [len(tensor.shape) - 1 for tensor in tensors]
    ranges = _ranges_of(model, tensors, axes, batches)
    for (rule, layer), tensor in zip(rules, tensors, strict=True):
        peak = ranges[id(tensor)].peak
        shares = peak / max(peak.max(), np.finfo(np.float64).tiny)
        layer.set_weights(rule.rescaled_inside(_factors_of(shares, power)))


def _factors_of(shares: np.ndarray, power: float) -> np.ndarray:
    """The factors of channels whose largest values are shares of their tensor's."""
    factors = np.where(shares > _SMALLEST, shares, 1.0) ** -power
    return np.minimum(factors, _MOST)


class ChannelRange(NamedTuple):
    """The least and largest value of each channel of a tensor."""

    low: np.ndarray
    high: np.ndarray

    @property
    def peak(self) -> np.ndarray:
        """The largest magnitude of each channel."""
        return np.maximum(-self.low, self.high)


def _measured_ranges(
    model: keras.Model,
    graph: ChannelGraph,
    batches: Sequence[Any],
) -> dict[int, ChannelRange]:
    """The range of each channel of each tensor of floats on the data, by `id` of the tensor."""
    tensors = []
    for call in graph_calls(model):
        for tensor in call.outputs:
            is_float = keras.backend.is_float_dtype(tensor.dtype)
            if is_float and graph.sizes[id(tensor)]:
                tensors.append(tensor)
    axes = [graph.tensors[id(tensor)].axis for tensor in tensors]
    return _ranges_of(model, tensors, axes, batches)


def _ranges_of(
    model: keras.Model,
    tensors: Sequence[keras.KerasTensor],
    axes: Sequence[int],
    batches: Sequence[Any],
) -> dict[int, ChannelRange]:
    """The range of each channel of tensors of a model, which are on these axes, on the data."""
    inputs, _ = graph_ends(model)
    probe = keras.Model(inputs, tensors)
    ranges: dict[int, ChannelRange] = {}
    with from_zero_states(model), without_gradients():
        for rows in _in_pieces(batches):
            values = keras.tree.flatten(probe(rows, training=False))
            for tensor, axis, value in zip(tensors, axes, values, strict=True):
                by_channel = np.moveaxis(to_numpy(value), axis, 0)
                by_channel = by_channel.reshape(len(by_channel), -1)
                low = by_channel.min(axis=1).astype(np.float64)
                high = by_channel.max(axis=1).astype(np.float64)
                before = ranges.get(id(tensor))
                if before is not None:
                    low = np.minimum(low, before.low)
                    high = np.maximum(high, before.high)
                ranges[id(tensor)] = ChannelRange(low, high)
    return ranges


def _in_pieces(batches: Sequence[Any]) -> Iterator[Any]:
    """Batches in pieces of a few rows: the outputs of all layers are there at once."""
    for batch in batches:
        count = len(keras.tree.flatten(batch)[0])
        for start in range(0, count, _ROWS):
            piece = slice(start, start + _ROWS)
            yield keras.tree.map_structure(operator.itemgetter(piece), batch)


def _rounded_tensors(model: keras.Model) -> set[int]:
    """The tensors, by `id`, that a file holds: none between a convolution and its ReLU."""
    calls = graph_calls(model)
    _, ends = graph_ends(model)
    end_keys = {id(tensor) for tensor in keras.tree.flatten(ends)}
    rounded: set[int] = set()
    for call in calls:
        is_layer = isinstance(call.operation, keras.layers.Layer)
        is_single = is_layer and len(call.outputs) == 1 and bool(call.inputs)
        if not is_single or not is_fused(call, calls, end_keys):
            rounded.update(id(tensor) for tensor in call.outputs)
    return rounded


class _Factors:
    """The factor of each channel. It is the `Scales` of the rules.

    Args:
        model: Model.
        graph: ChannelGraph. Its calls.
        ranges: The ranges of tensors, by `id`.
        power: float. As for `equalize`.
    """

    def __init__(
        self,
        model: keras.Model,
        graph: ChannelGraph,
        ranges: dict[int, ChannelRange],
        power: float,
    ) -> None:
        self._graph = graph
        self._classes = ChannelClasses()
        self._held_numbers: list[np.ndarray] = []
        self._numbers: dict[int, np.ndarray] = {}  # by tensor
        bounds = []
        for call in graph.calls:
            outputs = self._trace(call)
            limit = None if call.rule is None else call.rule.limit()
            if limit is None:
                self.hold(outputs)
            elif math.isfinite(limit):
                bounds.append((call.outputs, limit))
        for tensor in model.outputs:
            self.hold(self._numbers[id(tensor)])
        self._by_number = self._solved(
            ranges, _rounded_tensors(model), power, bounds
        )

    def make(self, count: int) -> np.ndarray:
        return self._classes.add(count)

    def join(self, columns: np.ndarray) -> None:
        self._classes.join(columns)

    def hold(self, channels: np.ndarray) -> None:
        self._held_numbers.append(channels)

    def of(self, key: int) -> np.ndarray:
        """The factors of a tensor's channels."""
        return self._by_number[self._numbers[key]]

    def _trace(self, call: Any) -> np.ndarray:
        """Numbers of all output channels of a call."""
        read = [np.zeros(0, int), *[self._numbers[key] for key in call.inputs]]
        inputs = np.concatenate(read)
        count = sum(self._graph.sizes[key] for key in call.outputs)
        if call.rule is None:
            self.hold(inputs)
            outputs = self.make(count)
        else:
            outputs = call.rule.scale(self, inputs, count)
        self._numbers.update(self._graph.split(call.outputs, outputs))
        return outputs

    def _solved(
        self,
        ranges: dict[int, ChannelRange],
        rounded: set[int],
        power: float,
        bounds: Sequence[tuple[list[int], float]],
    ) -> np.ndarray:
        """The factor of each number: that of its class."""
        roots = self._classes.roots()
        shares = np.zeros(len(roots))
        for key in self._numbers:
            if key not in rounded or key not in ranges:
                continue
            peak = ranges[key].peak
            share = peak / max(peak.max(), np.finfo(np.float64).tiny)
            np.maximum.at(shares, roots[self._numbers[key]], share)
        factors = _factors_of(shares, power)
        for keys, limit in bounds:
            for key in keys:
                high = np.maximum(ranges[key].high, limit * _SMALLEST)
                most = np.maximum(limit / high, 1.0)
                np.minimum.at(factors, roots[self._numbers[key]], most)
        for numbers in self._held_numbers:
            factors[roots[numbers]] = 1.0
        return factors[roots]


def _check_same_outputs(
    model: keras.Model,
    equalized: keras.Model,
    batch: Any,
) -> None:
    """NotPrunableError where a model computes something else on a batch."""
    with from_zero_states(model), without_gradients():
        expected = keras.tree.flatten(model(batch, training=False))
        actual = keras.tree.flatten(equalized(batch, training=False))
    for before, after in zip(expected, actual, strict=True):
        values = to_numpy(before).astype(np.float64)
        difference = np.abs(to_numpy(after) - values).max(initial=0.0)
        scale = max(np.abs(values).max(initial=0.0), 1e-6)
        if not difference <= _TOLERANCE * scale:
            raise NotPrunableError(
                "An equalized model must have the outputs of the given one. A layer with a channel "
                "rule of yours may compute something else than its rule says. Received: "
                f"model={model.name!r}, outputs {difference / scale:.2g} apart"
            )
