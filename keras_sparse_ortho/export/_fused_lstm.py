"""LSTMs in a float32 LiteRT file, each as one UNIDIRECTIONAL_SEQUENCE_LSTM.

The operator's inputs have fixed places. Places that stay empty are of peepholes, projections and
layer normalizations. Both states are variables that outlive a call of the file, so the graph clears
them in front of the operator.
"""

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from keras_sparse_ortho.export._flatbuffer import (
    LSTM_KIND,
    ModelT,
    OperatorT,
    SubGraphT,
    add_code,
    operations,
    read_model,
    write_model,
)
from keras_sparse_ortho.export._graph_changes import (
    add_constant,
    add_tensor,
)
from keras_sparse_ortho.export._lstms import (
    GATES,
    LSTM_MARK,
    LstmWeights,
)
from keras_sparse_ortho.export._unread import drop_operations

SEQUENCES = 0
KERNELS = range(1, 5)
RECURRENT_KERNELS = range(5, 9)
BIASES = range(12, 16)
HIDDEN_STATE = 18
CELL_STATE = 19
_INPUTS = 24
_EMPTY = -1

Marks: TypeAlias = dict[str, int]
"""The tensors at the ends of traced LSTMs, by name of the output that marked them."""

Matrices: TypeAlias = dict[tuple[int, str], list[int]]
"""The tensors of the gates of a kernel, by the number of its cell and its name."""


def lstms(model: ModelT) -> Iterator[tuple[SubGraphT, OperatorT]]:
    """The fused LSTMs of a file, each with its graph."""
    for graph, operator, kind in operations(model):
        if kind == LSTM_KIND:
            yield graph, operator


def with_lstms(content: bytes, calls: Sequence[LstmWeights]) -> bytes:
    """The float32 file of a trace with operators in place of the placeholders of LSTMs.

    Args:
        content: bytes. The file, in which extra outputs name the ends of the placeholders.
        calls: The LSTMs, in the order of the trace.
    """
    model = read_model(content)
    (signature,) = model.signatureDefs
    graph = model.subgraphs[signature.subgraphIndex]
    marks = _take_marks(graph, signature)
    matrices: Matrices = {}
    for number, weights in enumerate(calls):
        sequences = marks[f"{LSTM_MARK}{number}_sequences"]
        output = marks[f"{LSTM_MARK}{number}_output"]
        inputs = _inputs_of(model, graph, sequences, weights, matrices)
        _replace(model, graph, inputs, output)
    drop_operations(graph)
    return write_model(model)


def _take_marks(graph: SubGraphT, signature: schema.SignatureDefT) -> Marks:
    """Takes the outputs that name the ends of LSTMs out of a file."""
    marks: Marks = {}
    outputs = []
    for end in signature.outputs:
        name = end.name.decode()
        if name.startswith(LSTM_MARK):
            marks[name] = int(end.tensorIndex)
        else:
            outputs.append(end)
    signature.outputs = outputs
    graph.outputs = [end.tensorIndex for end in outputs]
    return marks


def _inputs_of(
    model: ModelT,
    graph: SubGraphT,
    sequences: int,
    weights: LstmWeights,
    matrices: Matrices,
) -> list[int]:
    """The inputs of the operator that computes a call of an LSTM.

    Args:
        model: The file.
        graph: The graph, to which constants and states are added.
        sequences: int. The tensor of the sequences.
        weights: The weights of the LSTM.
        matrices: Those of earlier calls, which calls of the same layer share.
    """
    inputs = [_EMPTY] * _INPUTS
    inputs[SEQUENCES] = sequences
    for name, places, gates in (
        ("kernel", KERNELS, weights.kernels),
        ("recurrent_kernel", RECURRENT_KERNELS, weights.recurrent_kernels),
    ):
        key = weights.owner, name
        if key not in matrices:
            path = f"{weights.path}/{name}"
            matrices[key] = _add_gates(model, graph, path, gates)
        for place, index in zip(places, matrices[key], strict=True):
            inputs[place] = index
    biases = _add_gates(model, graph, f"{weights.path}/bias", weights.biases)
    for place, index in zip(BIASES, biases, strict=True):
        inputs[place] = index
    shape = [int(graph.tensors[sequences].shape[0]), len(weights.biases[0])]
    for place, name in (
        (HIDDEN_STATE, "hidden_state"),
        (CELL_STATE, "cell_state"),
    ):
        state = add_tensor(model, graph, f"{weights.path}/{name}", shape)
        graph.tensors[state].isVariable = True
        inputs[place] = state
    return inputs


def _add_gates(
    model: ModelT, graph: SubGraphT, path: str, gates: Sequence[np.ndarray]
) -> list[int]:
    """Adds the gates of a weight as constants; returns their indices."""
    indices = []
    for number, values in enumerate(gates, start=1):
        name = f"{path} ({number} of {GATES})"
        indices.append(add_constant(model, graph, name, values))
    return indices


def _replace(
    model: ModelT, graph: SubGraphT, inputs: Sequence[int], output: int
) -> None:
    """Puts the operator, and two that clear its states, in the place of a placeholder.

    Raises ValueError if the converter has moved the sequences behind that place.
    """
    (place,) = [
        place
        for place, operator in enumerate(graph.operators)
        if output in map(int, operator.outputs)
    ]
    for operator in graph.operators[place:]:
        if inputs[SEQUENCES] in map(int, operator.outputs):
            raise ValueError("the sequences of an LSTM come after its output")
    operator = schema.OperatorT()
    operator.opcodeIndex = add_code(model, LSTM_KIND, 1)
    operator.inputs = list(inputs)
    operator.outputs = [output]
    operator.builtinOptionsType = (
        schema.BuiltinOptions.UnidirectionalSequenceLSTMOptions
    )
    # It clips no state, and takes batches first, unless these options say so.
    operator.builtinOptions = schema.UnidirectionalSequenceLSTMOptionsT()
    operator.builtinOptions.fusedActivationFunction = (
        schema.ActivationFunctionType.TANH
    )
    graph.operators[place : place + 1] = [
        _zeros(model, inputs[HIDDEN_STATE]),
        _zeros(model, inputs[CELL_STATE]),
        operator,
    ]


def _zeros(model: ModelT, state: int) -> OperatorT:
    """An operation that sets a variable to zeros."""
    operator = schema.OperatorT()
    operator.opcodeIndex = add_code(model, "ZEROS_LIKE", 1)
    operator.inputs = [state]
    operator.outputs = [state]
    operator.builtinOptionsType = schema.BuiltinOptions.ZerosLikeOptions
    operator.builtinOptions = schema.ZerosLikeOptionsT()
    return operator
