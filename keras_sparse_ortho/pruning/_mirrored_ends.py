"""Which kernels of a model mirror one side alone: the first ones and the last ones."""

from collections.abc import Mapping, Sequence

import keras

from keras_sparse_ortho._keras_internals import (
    computes_its_graph,
    graph_calls,
    warn_user,
)
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.initializers import ExactOrthogonal, SparseInitializer
from keras_sparse_ortho.kernels import PrunableWeight, find_kernels

_Kernels = frozenset[int]  # the ids of their variables


def mirrored_ends(
    model: object,
    weights: Sequence[PrunableWeight],
    patterns: Mapping[str, SparseInitializer],
) -> dict[str, SparseInitializer]:
    """The patterns with `mirrored=True` whose kernels are at an end of a model.

    No kernel comes before a first one, which mirrors its outputs alone, and none behind a last
    one, which mirrors its inputs alone. A kernel that is both is not mirrored. The order is not
    known in layers with several kernels, and in a model that is no graph: kernels are mirrored on
    both sides, with a warning.

    Args:
        model: Keras model, or anything else that is no graph.
        weights: list of PrunableWeight to draw.
        patterns: dict of initializers by weight path.
    """
    mirrored: dict[str, ExactOrthogonal] = {}
    for path, pattern in patterns.items():
        if isinstance(pattern, ExactOrthogonal) and pattern.mirrored is True:
            mirrored[path] = pattern
    if not mirrored:
        return {}
    order = _KernelOrder(model)
    ends: dict[str, SparseInitializer] = {}
    unknown = []
    for weight in weights:
        if weight.path not in mirrored:
            continue
        kernel = id(weight.variable)
        if kernel not in order.kernels:
            unknown.append(repr(weight.path))
            continue
        pattern = mirrored[weight.path]
        is_first = kernel not in order.with_kernel_before
        is_last = kernel not in order.with_kernel_behind
        if is_first and is_last:
            ends[weight.path] = pattern.but_with(mirrored=False)
        elif is_first:
            ends[weight.path] = pattern.but_with(mirrored="outputs")
        elif is_last:
            ends[weight.path] = pattern.but_with(mirrored="inputs")
    if unknown:
        warn_user(
            "It is not known which kernels come before and behind these, so they are mirrored on "
            "both sides. Make the first and the last ones sparse in calls of their own, with "
            '`include` and ExactOrthogonal(mirrored="outputs") or "inputs". '
            f"Received: {', '.join(unknown)}"
        )
    return ends


class _KernelOrder:
    """The kernels of the layers of a graph that have one each, and where others are around them."""

    def __init__(self, model: object) -> None:
        self.kernels: set[int] = set()
        self.with_kernel_before: set[int] = set()
        self.with_kernel_behind: set[int] = set()
        self._sources: dict[int, _Kernels] = {}
        if isinstance(model, keras.Model) and computes_its_graph(model):
            self._walk(model)

    def _walk(self, model: keras.Model) -> None:
        """Notes for each tensor of a graph the kernels that it comes from without another one."""
        for call in graph_calls(model):
            if (
                not call.inputs
            ):  # of a model, known from outside where it is nested
                continue
            sources = self._sources_of(call.inputs)
            layer = call.operation
            if computes_its_graph(layer):
                for inside, outside in zip(
                    layer.inputs, call.inputs, strict=False
                ):
                    self._sources[id(inside)] = self._sources_of([outside])
                self._walk(layer)
                for inside, outside in zip(
                    layer.outputs, call.outputs, strict=True
                ):
                    self._sources[id(outside)] = self._sources_of([inside])
                continue
            kernels: _Kernels = frozenset()
            if isinstance(layer, keras.layers.Layer):
                kernels = frozenset(
                    id(kernel.variable) for kernel in find_kernels(layer, "")
                )
            if len(kernels) == 1:
                self.kernels |= kernels
            if kernels:
                self.with_kernel_behind |= sources
                if sources:
                    self.with_kernel_before |= kernels
                sources = kernels
            for tensor in call.outputs:
                self._sources[id(tensor)] = sources

    def _sources_of(self, tensors: Sequence[Tensor]) -> _Kernels:
        """The kernels that any of the tensors comes from without another one."""
        sources: _Kernels = frozenset()
        for tensor in tensors:
            sources |= self._sources.get(id(tensor), frozenset())
        return sources
