"""Errors of a file of int8 by tensor, each rounded alone; stretches of operations in floats."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter

from keras_sparse_ortho.export._flatbuffer import (
    OperatorT,
    add_code,
    kind_of,
    name_of,
    read_model,
    write_model,
)
from keras_sparse_ortho.export._graph_changes import copy_tensor
from keras_sparse_ortho.export._integer_kernels import IntegerKernel
from keras_sparse_ortho.export._integers import (
    IntegerPlan,
    calibration_of,
    in_storage,
    integer_plan,
)
from keras_sparse_ortho.export._kernel_names import name_kernels
from keras_sparse_ortho.export._layer_tensors import layers_of_tensors
from keras_sparse_ortho.export._marks import Range
from keras_sparse_ortho.export._ranges import PASS_ON
from keras_sparse_ortho.export._stretch import TensorError

Batch = dict[str, np.ndarray]
"""Inputs by name."""

_LOWEST, _LEVELS = -128, 255  # of int8
_WITH_POLES = ("DIV", "LOG", "RSQRT")


def named_errors(
    content: bytes,
    batches: Sequence[Batch],
    held: Sequence[Batch],
    layers: str,
    kernels: Mapping[str, Sequence[np.ndarray]],
) -> dict[str, Any]:
    """The errors of all tensors of a file of floats, and of all together, as JSON has them.

    Args:
        content: bytes. The file.
        batches: Inputs to calibrate on.
        held: Inputs to measure on.
        layers: str. A file of `write_layer_outputs`.
        kernels: Kernels by path.
    """
    model = read_model(content)
    name_kernels(model, kernels)
    content = write_model(model)
    calibration = calibration_of(content, batches)
    plan = integer_plan(content, "int8", calibration)
    errors = tensor_errors(plan, held)
    quantized = in_storage(content, "int8", calibration)
    file_error = relative_error(
        outputs_of(quantized, held), outputs_of(content, held)
    )
    by_tensor = layers_of_tensors(content, layers)
    rows = []
    for tensor in errors:
        layer = by_tensor.get(tensor.name, tensor.name)
        rows.append([tensor.kind, layer, tensor.name, tensor.error])
    return {"tensors": rows, "file": file_error}


def tensor_errors(
    plan: IntegerPlan, held: Sequence[Batch]
) -> list[TensorError]:
    """The error of each tensor that a plan rounds: kernels, then activations in order.

    A tensor that is only moved has the range and the values of the one before: it counts once.
    """
    graph = plan.model.subgraphs[0]
    expected = outputs_of(write_model(plan.model), held)
    places = {
        id(operator): place for place, operator in enumerate(graph.operators)
    }
    in_floats = {id(operator) for _, operator in plan.in_floats}
    errors = []

    def measure(
        kind: str, name: str, operators: Sequence[OperatorT], size: int
    ) -> None:
        error = relative_error(
            outputs_of(write_model(plan.model), held), expected
        )
        touched = tuple(places[id(operator)] for operator in operators)
        errors.append(TensorError(kind, name, touched, size, error))

    for kernel in plan.kernels:
        is_main = id(kernel.operator) in places
        if is_main and id(kernel.operator) not in in_floats:
            with _rounded_kernel(plan, kernel):
                measure(
                    "kernel", kernel.name, [kernel.operator], kernel.values.size
                )
    for index, operators in rounded_tensors(plan).items():
        name = name_of(graph.tensors[index])
        with contextlib.ExitStack() as stack:
            for touched in (index, *_limited_results(plan, index)):
                bounds = plan.ranges[name_of(graph.tensors[touched])]
                stack.enter_context(rounded_tensor(plan, touched, bounds))
            measure("activations", name, operators, 0)
    return errors


def _limited_results(plan: IntegerPlan, index: int) -> list[int]:
    """The outputs of operations with a pole that read a tensor.

    They are infinite in floats where an entry is rounded to 0. In integers they end with their
    range, as they do where they are rounded, too.
    """
    graph = plan.model.subgraphs[0]
    results = []
    for operator in graph.operators:
        if index not in map(int, operator.inputs):
            continue
        if kind_of(plan.model, operator) not in _WITH_POLES:
            continue
        (result,) = map(int, operator.outputs)
        if name_of(graph.tensors[result]) in plan.ranges:
            results.append(result)
    return results


def rounded_tensors(plan: IntegerPlan) -> dict[int, list[OperatorT]]:
    """The tensors that are rounded, with the operations that write them, and then read them."""
    graph = plan.model.subgraphs[0]
    in_floats = {id(operator) for _, operator in plan.in_floats}
    indices = [int(index) for index in graph.inputs]
    writers: dict[int, OperatorT] = {}
    readers: dict[int, list[OperatorT]] = {}
    for operator in graph.operators:
        for index in map(int, operator.inputs):
            readers.setdefault(index, []).append(operator)
        for index in map(int, operator.outputs):
            indices.append(index)
            writers[index] = operator
    tensors = {}
    for index in indices:
        tensor = graph.tensors[index]
        touching = list(readers.get(index, []))
        writer = writers.get(index)
        if writer is not None:
            touching.insert(0, writer)
        is_float = tensor.type == schema.TensorType.FLOAT32
        has_integers = any(
            id(operator) not in in_floats for operator in touching
        )
        if not is_float or not has_integers:
            continue
        if name_of(tensor) in plan.ranges and not _is_moved(plan, writer):
            tensors[index] = touching
    return tensors


def _is_moved(plan: IntegerPlan, writer: OperatorT | None) -> bool:
    """Whether an operation gives entries of a tensor another place, in its range."""
    if writer is None or kind_of(plan.model, writer) not in PASS_ON:
        return False
    tensors = plan.model.subgraphs[0].tensors
    source = name_of(tensors[writer.inputs[0]])
    result = name_of(tensors[writer.outputs[0]])
    return plan.ranges.get(source) == plan.ranges.get(result)


@contextlib.contextmanager
def _rounded_kernel(plan: IntegerPlan, kernel: IntegerKernel) -> Iterator[None]:
    """A file with one kernel in the values of its integers."""
    tensor = kernel.graph.tensors[kernel.operator.inputs[1]]
    buffer = plan.model.buffers[tensor.buffer]
    before = buffer.data
    largest = kernel.largest_integer
    step = kernel.bounds.astype(np.float64) / largest
    integers = np.rint(kernel.values / step).clip(-largest, largest)
    rounded = (integers * step).astype("<f4")
    buffer.data = rounded.reshape(-1).view(np.uint8)
    try:
        yield
    finally:
        buffer.data = before


@contextlib.contextmanager
def rounded_tensor(
    plan: IntegerPlan, index: int, bounds: Range
) -> Iterator[None]:
    """A file in which all that read one tensor get the values of its integers."""
    model = plan.model
    graph = model.subgraphs[0]
    ends = [
        output
        for signature in model.signatureDefs
        for output in signature.outputs
        if output.tensorIndex == index
    ]
    outputs = list(graph.outputs)
    tensors = list(graph.tensors)
    operators = list(graph.operators)
    readers = [
        operator for operator in operators if index in map(int, operator.inputs)
    ]
    inputs = [list(operator.inputs) for operator in readers]
    integers = copy_tensor(model, graph, index, "integers")
    rounded = copy_tensor(model, graph, index, "rounded")
    graph.tensors[integers].type = schema.TensorType.INT8
    graph.tensors[integers].quantization = _quantization(bounds)
    for operator, indices in zip(readers, inputs, strict=True):
        operator.inputs = [
            rounded if item == index else int(item) for item in indices
        ]
    graph.outputs = [
        rounded if item == index else int(item) for item in outputs
    ]
    for end in ends:
        end.tensorIndex = rounded
    # In front of the first operation that reads the tensor.
    place = len(operators)
    if readers:
        place = operators.index(readers[0])
    graph.operators[place:place] = [
        _conversion(plan, "QUANTIZE", index, integers),
        _conversion(plan, "DEQUANTIZE", integers, rounded),
    ]
    try:
        yield
    finally:
        for operator, indices in zip(readers, inputs, strict=True):
            operator.inputs = indices
        for end in ends:
            end.tensorIndex = index
        graph.outputs = outputs
        graph.tensors = tensors
        graph.operators = operators


def _quantization(bounds: Range) -> Any:
    """The scale and the zero point of a range."""
    low = min(bounds[0], 0.0)
    high = max(bounds[1], 0.0)
    scale = (high - low) / _LEVELS
    quantization = schema.QuantizationParametersT()
    quantization.scale = [scale]
    quantization.zeroPoint = [round(_LOWEST - low / scale)]
    return quantization


def _conversion(
    plan: IntegerPlan, kind: str, source: int, result: int
) -> OperatorT:
    """An operation of one input and one output."""
    operator = schema.OperatorT()
    operator.opcodeIndex = add_code(plan.model, kind, 2)
    operator.inputs = [source]
    operator.outputs = [result]
    return operator


def outputs_of(content: bytes, batches: Sequence[Batch]) -> list[np.ndarray]:
    """The outputs of a file on batches, in the order of their names."""
    interpreter = Interpreter(model_content=content)
    runner = interpreter.get_signature_runner()
    by_batch = []
    for batch in batches:
        answers = runner(**batch)
        by_batch.append(
            [np.array(answers[name], np.float64) for name in sorted(answers)]
        )
    return [np.stack(pieces) for pieces in zip(*by_batch, strict=True)]


def relative_error(
    actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> float:
    """The squared differences of all outputs over their squares."""
    squares = sum(_squares(actual, expected))
    total = sum(float(np.sum(output**2)) for output in expected)
    return squares / (total or 1.0)


def errors_by_output(
    actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> list[float]:
    """The squared differences of each output over its squares."""
    errors = []
    for squares, output in zip(
        _squares(actual, expected), expected, strict=True
    ):
        errors.append(squares / (float(np.sum(output**2)) or 1.0))
    return errors


def _squares(
    actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]
) -> list[float]:
    """The squared differences of each output."""
    return [
        float(np.sum((value - reference) ** 2))
        for value, reference in zip(actual, expected, strict=True)
    ]
