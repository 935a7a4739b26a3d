"""Takes out of a LiteRT file what no operation reads."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho.export._flatbuffer import ModelT, OperatorT, SubGraphT

_VECTORS_OF_OPERATORS = ("inputs", "outputs", "intermediates")
_MISSING = -1  # the index of an optional input that is not there


def drop_unread(model: ModelT) -> None:
    """Removes tensors that no operation reads or writes, and then buffers, in place.

    LiteRT Micro gives memory to every tensor.
    """
    for number, graph in enumerate(model.subgraphs):
        ends = []
        for signature in model.signatureDefs or []:
            if signature.subgraphIndex == number:
                ends += [*signature.inputs, *signature.outputs]
        _drop_tensors(graph, ends)
    _drop_buffers(model)
    _drop_codes(model)


def drop_operations(graph: SubGraphT) -> list[OperatorT]:
    """Removes operations whose outputs nothing reads, in place; returns them, the last one first.

    Those without outputs stay: they assign variables.
    """
    dropped = []
    read = {*_indices(graph.outputs)}
    for operator in reversed(list(graph.operators)):
        outputs = _indices(operator.outputs)
        if outputs and read.isdisjoint(outputs):
            dropped.append(operator)
        else:
            read.update(_indices(operator.inputs))
    graph.operators = [
        operator
        for operator in graph.operators
        if not any(operator is other for other in dropped)
    ]
    return dropped


def _drop_tensors(graph: SubGraphT, ends: Sequence[Any]) -> None:
    """Removes tensors of a graph, and gives the others their new numbers.

    Args:
        graph: The graph.
        ends: Its inputs and outputs in signatures.
    """
    used = {end.tensorIndex for end in ends}
    used.update(_indices(graph.inputs))
    used.update(_indices(graph.outputs))
    for operator in graph.operators:
        for vector in _VECTORS_OF_OPERATORS:
            used.update(_indices(getattr(operator, vector)))
    used.discard(_MISSING)
    places = _new_places(used)
    graph.tensors = [graph.tensors[index] for index in places]
    places[_MISSING] = _MISSING
    graph.inputs = _placed(graph.inputs, places)
    graph.outputs = _placed(graph.outputs, places)
    for end in ends:
        end.tensorIndex = places[end.tensorIndex]
    for operator in graph.operators:
        for vector in _VECTORS_OF_OPERATORS:
            placed = _placed(getattr(operator, vector), places)
            setattr(operator, vector, placed)


def _drop_buffers(model: ModelT) -> None:
    """Removes buffers that no tensor and no metadata have; the first one, which is empty, stays."""
    holders = list(model.metadata or [])
    for graph in model.subgraphs:
        holders += graph.tensors
    used = {holder.buffer for holder in holders}
    used.add(0)
    places = _new_places(used)
    model.buffers = [model.buffers[index] for index in places]
    for holder in holders:
        holder.buffer = places[holder.buffer]


def _drop_codes(model: ModelT) -> None:
    """Removes the codes of operations that the model does not have."""
    operators = []
    for graph in model.subgraphs:
        operators += graph.operators
    used = {operator.opcodeIndex for operator in operators}
    places = _new_places(used)
    model.operatorCodes = [model.operatorCodes[index] for index in places]
    for operator in operators:
        operator.opcodeIndex = places[operator.opcodeIndex]


def _new_places(used: set[int]) -> dict[int, int]:
    """The new index of each old one, in order."""
    places = {}
    for place, index in enumerate(sorted(used)):
        places[index] = place
    return places


def _indices(vector: Iterable[int] | None) -> list[int]:
    """The numbers in a vector of a flatbuffer, which may be missing."""
    if vector is None:
        return []
    return list(map(int, vector))


def _placed(
    vector: Iterable[int] | None,
    places: dict[int, int],
) -> np.ndarray | None:
    """A vector with new indices."""
    if vector is None:
        return None
    indices = [places[index] for index in _indices(vector)]
    return np.array(indices, np.int32)
