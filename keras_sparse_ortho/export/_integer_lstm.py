"""Fused LSTMs of a LiteRT file in integers, which ai-edge-quantizer (AEQ) leaves in floats.

The kernels of LiteRT and LiteRT Micro ask for one scale a matrix, a hidden state and an output in
int8 around zero, and a cell state in int16 whose scale is a power of two.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import (
    Interpreter,
    OpResolverType,
)

from keras_sparse_ortho.export._flatbuffer import (
    ModelT,
    OperatorT,
    SubGraphT,
    TensorT,
    add_code,
    kind_of,
    name_of,
    read_model,
    write_model,
)
from keras_sparse_ortho.export._fused_lstm import (
    BIASES,
    CELL_STATE,
    HIDDEN_STATE,
    KERNELS,
    RECURRENT_KERNELS,
    SEQUENCES,
    lstms,
)
from keras_sparse_ortho.export._graph_changes import (
    add_tensor,
    copying,
    set_constant,
)
from keras_sparse_ortho.export._integer_kernels import steps_of
from keras_sparse_ortho.export._lstms import GATES
from keras_sparse_ortho.export._marks import Range
from keras_sparse_ortho.export._unread import drop_operations

_LARGEST = 127  # of int8
_LEAST_INTEGER = -128
_STEPS = 255  # of a range
_LEAST_PEAK = 1e-6
_LEAST_POWER = -15  # of two, of a cell state's scale
_MOST_POWER = -9
_HALF_OF_INT16 = 2**14  # the measured peak: twice as much fits as well
_GATE_SCALE = 2.0**-12
# A range that AEQ has stored in other floats is the same if it is as near as this.
_SAME_SCALE = 1e-5
_LEAST_DYNAMIC = 1024  # entries of the kernels of a layer
_TYPES = schema.TensorType


class Peaks(NamedTuple):
    """The largest size of the entries of a hidden state and of a cell state."""

    hidden: float
    cell: float


def measured_peaks(
    content: bytes, batches: Iterable[dict[str, np.ndarray]]
) -> dict[str, Peaks]:
    """The peaks of fused LSTMs in batches, by name of their output.

    No tensor of the file has all cell states: NumPy computes them from the inputs and outputs.
    """
    model = read_model(content)
    fused = list(lstms(model))
    if not fused:
        return {}
    interpreter = Interpreter(
        model_content=content,
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        experimental_preserve_all_tensors=True,
    )
    runner = interpreter.get_signature_runner()
    peaks: dict[str, Peaks] = {}
    for batch in batches:
        runner(**batch)
        for graph, operator in fused:
            output = int(operator.outputs[0])
            hidden = interpreter.get_tensor(output)
            cell = _largest_cell_state(
                interpreter.get_tensor(int(operator.inputs[SEQUENCES])),
                hidden,
                [
                    _values(model, tensor)
                    for tensor in _matrices(graph, operator)
                ],
                [_values(model, tensor) for tensor in _biases(graph, operator)],
            )
            name = name_of(graph.tensors[output])
            before = peaks.get(name, Peaks(_LEAST_PEAK, _LEAST_PEAK))
            peaks[name] = Peaks(
                hidden=max(before.hidden, float(np.abs(hidden).max())),
                cell=max(before.cell, cell),
            )
    return peaks


def _largest_cell_state(
    sequences: np.ndarray,
    hidden: np.ndarray,
    matrices: Sequence[np.ndarray],
    biases: Sequence[np.ndarray],
) -> float:
    """The largest size of the cell states `c = sigmoid(f) c + sigmoid(i) tanh(g)` of an LSTM.

    Args:
        sequences: Array `(batch, steps, inputs)`.
        hidden: Array `(batch, steps, units)`. The hidden state after each step.
        matrices: The four kernels, and then the four recurrent kernels.
        biases: The four biases.
    """
    before = np.zeros_like(hidden)
    before[:, 1:] = hidden[:, :-1]
    sums = []
    for gate in range(GATES - 1):  # the output gate does not change the cell
        product = sequences @ matrices[gate].T
        recurrent = before @ matrices[GATES + gate].T
        sums.append(product + recurrent + biases[gate])
    added = _sigmoid(sums[0]) * np.tanh(sums[2])
    forgotten = _sigmoid(sums[1])
    cell = np.zeros_like(hidden[:, 0])
    largest = 0.0
    for step in range(hidden.shape[1]):
        cell = forgotten[:, step] * cell + added[:, step]
        largest = max(largest, float(np.abs(cell).max()))
    return largest


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return (1 + np.tanh(x / 2)) / 2


def peaks_in_ranges(
    model: ModelT,
    peaks: Mapping[str, Peaks],
    ranges: dict[str, Range],
    measured: Mapping[str, Range],
) -> dict[str, Peaks]:
    """Measured peaks with the hidden states in trained ranges, by name of an LSTM's output.

    An LSTM whose trained range is not around zero, as one of an older release, is left out: it
    stays in floats.

    Args:
        model: The file.
        peaks: Those measured.
        ranges: The ranges of tensors, by name, to which those are added that an LSTM lacks.
        measured: Measured ranges of tensors, by name.
    """
    chosen = {}
    for graph, operator in lstms(model):
        sequences = name_of(graph.tensors[operator.inputs[SEQUENCES]])
        output = name_of(graph.tensors[operator.outputs[0]])
        measured_peaks = peaks[output]
        ranges.setdefault(sequences, measured[sequences])
        ranges.setdefault(output, range_of_output(measured_peaks))
        low, high = ranges[output]
        trained_peaks = Peaks(high, measured_peaks.cell)
        least, _ = range_of_output(trained_peaks)
        if np.isclose(low, least, rtol=_SAME_SCALE):
            chosen[output] = trained_peaks
    return chosen


def range_of_output(peaks: Peaks) -> Range:
    """The range of an LSTM's output, whose zero point is 0."""
    step = peaks.hidden / _LARGEST
    return _LEAST_INTEGER * step, peaks.hidden


def with_dynamic_lstms(content: bytes) -> bytes:
    """The file with the kernels of fused LSTMs in int8. LiteRT quantizes what they multiply."""
    model = read_model(content)
    for graph, operator in lstms(model):
        matrices = _matrices(graph, operator)
        sizes = [_values(model, matrix).size for matrix in matrices]
        if sum(sizes) >= _LEAST_DYNAMIC:
            for matrix in matrices:
                _narrow(model, matrix)
    return write_model(model)


def with_integer_lstms(
    content: bytes,
    ranges: Mapping[str, Range],
    peaks: Mapping[str, Peaks],
) -> bytes:
    """The file with fused LSTMs in integers.

    Args:
        content: bytes. The file of AEQ, which left them in floats.
        ranges: The ranges of activations, by name.
        peaks: Those of LSTMs, by name of their output. An LSTM without peaks stays in floats.
    """
    model = read_model(content)
    for graph, operator in list(lstms(model)):
        name = name_of(graph.tensors[operator.outputs[0]])
        if name in peaks:
            lstm = _Lstm(model, graph, operator, name)
            lstm.take_integers(ranges)
            output_scale = lstm.output_scale(peaks[name])
            lstm.narrow_weights()
            lstm.narrow_states(peaks[name], output_scale)
            lstm.narrow_output(output_scale)
            drop_operations(graph)
    return write_model(model)


class _Lstm:
    """A fused LSTM in floats, which becomes one in integers.

    Args:
        model: The file.
        graph: Its graph.
        operator: The operator.
        name: str. The name of its output.
    """

    def __init__(
        self,
        model: ModelT,
        graph: SubGraphT,
        operator: OperatorT,
        name: str,
    ) -> None:
        self._model = model
        self._graph = graph
        self._operator = operator
        self._name = name
        self._output = int(operator.outputs[0])
        operator.inputs = [int(index) for index in operator.inputs]

    def take_integers(self, ranges: Mapping[str, Range]) -> None:
        """Makes the sequences integers: those from which they come, or new ones."""
        floats = self._operator.inputs[SEQUENCES]
        maker = self._maker_of(floats)
        if maker is None or kind_of(self._model, maker) != "DEQUANTIZE":
            low, high = ranges[name_of(self._graph.tensors[floats])]
            step = (high - low) / _STEPS
            zero_point = round(_LEAST_INTEGER - low / step)
            self._quantize(floats, step, zero_point)
            return
        integers = int(maker.inputs[0])
        tensor = self._graph.tensors[integers]
        if tensor.type == _TYPES.INT8:
            self._operator.inputs[SEQUENCES] = integers
            return
        scale, zero_point = _setting(tensor)  # of uint8
        self._quantize(integers, scale, zero_point + _LEAST_INTEGER)

    def output_scale(self, peaks: Peaks) -> float:
        """The scale of the output: to the last bit that of its readers, which XNNPACK compares."""
        wanted = float(np.float32(peaks.hidden / _LARGEST))
        for reader in self._quantizing_readers():
            scale, _ = _setting(self._graph.tensors[reader.outputs[0]])
            if np.isclose(scale, wanted, rtol=_SAME_SCALE):
                return scale
        return wanted

    def narrow_weights(self) -> None:
        """Stores kernels in int8, and biases in int32, in steps of their products."""
        step, _ = _setting(self._input(SEQUENCES))
        for place in RECURRENT_KERNELS:
            _narrow(self._model, self._input(place))
        for place, place_of_bias in zip(KERNELS, BIASES, strict=True):
            scale = step * _narrow(self._model, self._input(place))
            bias = self._input(place_of_bias)
            values = _values(self._model, bias).astype(np.float64)
            ends = np.iinfo(np.int32)
            integers = np.clip(np.rint(values / scale), ends.min, ends.max)
            set_constant(self._model, bias, integers.astype(np.int32))
            _set_scale(bias, scale)

    def narrow_states(self, peaks: Peaks, output_scale: float) -> None:
        """Stores the states in int8 and int16."""
        power = math.ceil(math.log2(peaks.cell / _HALF_OF_INT16))
        power = min(max(power, _LEAST_POWER), _MOST_POWER)
        self._narrow_state(HIDDEN_STATE, _TYPES.INT8, output_scale)
        self._narrow_state(CELL_STATE, _TYPES.INT16, 2.0**power)

    def _narrow_state(self, place: int, kind: int, scale: float) -> None:
        """Stores a state in integers, and clears it by a copy of another variable.

        ZEROS_LIKE takes neither type. Nothing writes to the other variable, which so stays zero.
        """
        state = self._input(place)
        state.type = kind
        _set_scale(state, scale)
        zeros = self._add(f"zeros of {place}", state.shape, kind, scale)
        self._graph.tensors[zeros].isVariable = True
        index = self._operator.inputs[place]
        cleared = copying(self._model, self._graph, zeros, index)
        operators = self._graph.operators
        operators[operators.index(self._maker_of(index))] = cleared

    def narrow_output(self, scale: float) -> None:
        """Makes the output integers; readers of floats get floats beside them."""
        readers = self._quantizing_readers()
        shape = self._graph.tensors[self._output].shape
        integers = self._add("integers", shape, _TYPES.INT8, scale)
        intermediates = []
        for number in range(GATES):  # which the kernel does not read
            gate = self._add(f"gate {number}", [0], _TYPES.INT16, _GATE_SCALE)
            intermediates.append(gate)
        hidden = self._add("hidden", [0], _TYPES.INT8, scale)
        self._operator.intermediates = [*intermediates, hidden]
        self._operator.outputs = [integers]
        widen = self._operation("DEQUANTIZE", 2, integers, self._output)
        operators = self._graph.operators
        operators.insert(operators.index(self._operator) + 1, widen)
        for reader in readers:
            result = int(reader.outputs[0])
            scale_of_result, _ = _setting(self._graph.tensors[result])
            if scale_of_result == scale and result not in self._graph.outputs:
                operators.remove(reader)
                _replace_input(self._graph, result, integers)

    def _quantize(self, source: int, scale: float, zero_point: int) -> None:
        """Puts a QUANTIZE of a tensor to int8 in front of the operator, as its sequences."""
        shape = self._graph.tensors[source].shape
        integers = self._add("sequences", shape, _TYPES.INT8, scale, zero_point)
        quantize = self._operation("QUANTIZE", 1, source, integers)
        operators = self._graph.operators
        operators.insert(operators.index(self._operator), quantize)
        self._operator.inputs[SEQUENCES] = integers

    def _quantizing_readers(self) -> list[OperatorT]:
        """The operations that turn the output into integers."""
        return [
            operator
            for operator in self._graph.operators
            if self._output in operator.inputs
            and kind_of(self._model, operator) == "QUANTIZE"
        ]

    def _maker_of(self, index: int) -> OperatorT | None:
        """The operation that makes a tensor; None for an input."""
        for operator in self._graph.operators:
            if index in map(int, operator.outputs):
                return operator
        return None

    def _input(self, place: int) -> TensorT:
        """The tensor at one of the places of the operator's inputs."""
        return self._graph.tensors[self._operator.inputs[place]]

    def _operation(
        self, kind: str, version: int, source: int, result: int
    ) -> OperatorT:
        """An operation of one input and one output."""
        operator = schema.OperatorT()
        operator.opcodeIndex = add_code(self._model, kind, version)
        operator.inputs = [source]
        operator.outputs = [result]
        return operator

    def _add(
        self,
        name: str,
        shape: Sequence[int],
        kind: int,
        scale: float,
        zero_point: int = 0,
    ) -> int:
        """Adds a tensor of integers to the graph; returns its index."""
        full_name = f"{self._name}/{name}"
        index = add_tensor(self._model, self._graph, full_name, shape)
        tensor = self._graph.tensors[index]
        tensor.type = kind
        _set_scale(tensor, scale, zero_point)
        return index


def _matrices(graph: SubGraphT, operator: OperatorT) -> list[TensorT]:
    """The tensors of the kernels, and then of the recurrent kernels."""
    places = (*KERNELS, *RECURRENT_KERNELS)
    return [graph.tensors[operator.inputs[place]] for place in places]


def _biases(graph: SubGraphT, operator: OperatorT) -> list[TensorT]:
    return [graph.tensors[operator.inputs[place]] for place in BIASES]


def _values(model: ModelT, tensor: TensorT) -> np.ndarray:
    """The values of a constant, which may be int8 already."""
    data = np.asarray(model.buffers[tensor.buffer].data)
    if tensor.type == _TYPES.INT8:
        scale, _ = _setting(tensor)
        return data.view(np.int8).reshape(tensor.shape) * scale
    return data.view("<f4").reshape(tensor.shape)


def _narrow(model: ModelT, tensor: TensorT) -> float:
    """Makes a constant int8 with one scale, if it is not; returns the scale."""
    if tensor.type == _TYPES.INT8:  # by another call of the same layer
        scale, _ = _setting(tensor)
        return scale
    values = _values(model, tensor)
    [steps] = steps_of(values.reshape(1, -1))
    largest = _LARGEST
    if steps > 0:  # trained: each step of training is a whole number of these
        largest = _LARGEST // steps * steps
    scale = float(np.float32(np.abs(values).max() / largest)) or 1.0
    set_constant(model, tensor, np.rint(values / scale).astype(np.int8))
    _set_scale(tensor, scale)
    return scale


def _setting(tensor: TensorT) -> tuple[float, int]:
    """The scale and the zero point of a tensor of integers with one for all entries."""
    settings = tensor.quantization
    return float(settings.scale[0]), int(settings.zeroPoint[0])


def _set_scale(tensor: TensorT, scale: float, zero_point: int = 0) -> None:
    settings = schema.QuantizationParametersT()
    settings.scale = np.array([scale], np.float32)
    settings.zeroPoint = np.array([zero_point], np.int64)
    tensor.quantization = settings


def _replace_input(graph: SubGraphT, index: int, other: int) -> None:
    """Lets the readers of a tensor read another one."""
    for operator in graph.operators:
        operator.inputs = [
            other if item == index else int(item) for item in operator.inputs
        ]
