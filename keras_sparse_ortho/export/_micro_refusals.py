"""Refusals of files that LiteRT Micro loads, and computes wrongly without an error."""

from keras_sparse_ortho.errors import ExportRouteError
from keras_sparse_ortho.export._flatbuffer import (
    LSTM_KIND,
    ModelT,
    OperatorT,
    SubGraphT,
    operations,
)

# Inputs of the operator: the sequences, and the kernel of the first gate.
_SEQUENCES = 0
_KERNEL = 1


def refuse_wrong_in_micro(model: ModelT, file: str) -> None:
    """Raises ExportRouteError for a file that LiteRT Micro loads and computes wrongly.

    Args:
        model: The file.
        file: str. Its path, for the message.
    """
    loops = 0
    for graph, operator, kind in operations(model):
        if kind == "WHILE":
            loops += 1
        if kind == LSTM_KIND and _is_mixed(graph, operator):
            raise ExportRouteError(
                "In LiteRT Micro the sequences and weights of an LSTM must both be float32 or both "
                "int8; of others, as in dynamic int8, it computes NaN. Export with "
                "mode='int8+lstm' and `representative_data`, or with mode='float32+lstm'. "
                f"Received: {file!r}"
            )
    if loops > 1:
        raise ExportRouteError(
            "LiteRT Micro computes one loop; of two it computes the second one wrongly, without an "
            "error, or never ends. Export LSTMs with mode='int8+lstm' or 'float32+lstm', and build "
            "GRU, SimpleRNN and other recurrent layers with unroll=True, which takes a larger "
            f"arena. Received: {file!r} with {loops} WHILE operations"
        )


def _is_mixed(graph: SubGraphT, operator: OperatorT) -> bool:
    """Whether an LSTM's kernel is of another type than its sequences."""
    sequences = graph.tensors[operator.inputs[_SEQUENCES]]
    kernel = graph.tensors[operator.inputs[_KERNEL]]
    return bool(kernel.type != sequences.type)
