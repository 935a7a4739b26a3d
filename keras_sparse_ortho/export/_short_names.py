"""Shortens the names of tensors in a LiteRT file.

A converter joins the names of all operations that it fused, each with the name of the model before
it. In small files that is a tenth of the bytes. No runtime reads them.
"""

from keras_sparse_ortho.export._flatbuffer import (
    ModelT,
    SubGraphT,
    name_of,
)

_BETWEEN_NAMES = ";"
_BETWEEN_PARTS = "/"


def shorten_names(model: ModelT) -> None:
    """Leaves each tensor the first of its names, without the name of the model.

    `mlp_1/dense_1/Relu;mlp_1/dense_1/BiasAdd` becomes `dense_1/Relu`. Names stay distinct in their
    graph: a number follows the second of two. Inputs and outputs keep theirs.
    """
    for graph in model.subgraphs:
        _shorten_in(graph)


def _shorten_in(graph: SubGraphT) -> None:
    ends = [*map(int, graph.inputs), *map(int, graph.outputs)]
    names = {name_of(graph.tensors[index]) for index in ends}
    for index, tensor in enumerate(graph.tensors):
        if index in ends or tensor.name is None:
            continue
        name = _distinct(_short(name_of(tensor)), names)
        names.add(name)
        tensor.name = name.encode()


def _short(name: str) -> str:
    """The name of the first operation, without that of the model."""
    operation = name.split(_BETWEEN_NAMES)[0]
    return operation.split(_BETWEEN_PARTS, maxsplit=1)[-1]


def _distinct(name: str, others: set[str]) -> str:
    """The name, or the name with the first number that makes it a new one."""
    distinct = name
    number = 1
    while distinct in others:
        number += 1
        distinct = f"{name}_{number}"
    return distinct
