"""Deep chains of kernels and ReLUs, through which mirrored kernels alone keep the signals' size."""

from collections.abc import Mapping, Sequence

import keras

from keras_sparse_ortho._keras_internals import (
    GraphCall,
    computes_its_graph,
    graph_calls,
)
from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.initializers import ExactOrthogonal, SparseInitializer
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    canonical_shape,
    find_kernels,
)
from keras_sparse_ortho.layers import CircularPadding
from keras_sparse_ortho.pruning._following import IDENTITY, activation_of
from keras_sparse_ortho.pruning._mirrored_ends import mirrored_ends

L = keras.layers
_DEEP = 30  # kernels of the shallowest network that was measured

_WITH_KERNELS = (L.Dense, L.Conv1D, L.Conv2D, L.Conv3D)
# Linear, and the order of channels stays.
_LINEAR = (
    CircularPadding,
    L.AveragePooling1D,
    L.AveragePooling2D,
    L.AveragePooling3D,
    L.GlobalAveragePooling1D,
    L.GlobalAveragePooling2D,
    L.GlobalAveragePooling3D,
    L.ZeroPadding1D,
    L.ZeroPadding2D,
    L.ZeroPadding3D,
)


def mirrored_chain(
    model: object,
    weights: Sequence[PrunableWeight],
    patterns: Mapping[str, SparseInitializer],
    density: float,
) -> dict[str, SparseInitializer]:
    """The patterns in mirrored form, if the model is a deep chain; else an empty dict.

    In such a chain at least 30 kernels follow each other, with a ReLU behind each of them but the
    last. Only padding and pooling by means are between them. Mirrored kernels must be possible: the
    widths are even, and the density leaves no output without a live entry.

    Args:
        model: Keras model, or anything else that is no graph.
        weights: list of PrunableWeight to draw.
        patterns: dict of initializers by weight path, all of them ExactOrthogonal.
        density: float. Global live fraction.
    """
    if len(weights) < _DEEP:
        return {}
    if not isinstance(model, keras.Model) or not computes_its_graph(model):
        return {}
    owners = {id(weight.owner) for weight in weights}
    if len(owners) < len(weights) or not _is_chain(graph_calls(model), owners):
        return {}
    mirrored: dict[str, SparseInitializer] = {}
    for path, pattern in patterns.items():
        assert isinstance(pattern, ExactOrthogonal)
        mirrored[path] = pattern.but_with(mirrored=True, gain="auto")
    mirrored |= mirrored_ends(model, weights, mirrored)
    entries = density * sum(weight.size for weight in weights)
    for weight in weights:
        pattern = mirrored[weight.path]
        assert isinstance(pattern, ExactOrthogonal)
        assert pattern.drawn_structure is not None
        try:
            least = pattern.drawn_structure.covering(canonical_shape(weight))
        except LayoutError:  # an odd width, or groups
            return {}
        entries -= least
    if entries < 0:
        return {}
    return mirrored


def _is_chain(calls: Sequence[GraphCall], owners: set[int]) -> bool:
    """Whether the layers of kernels follow each other, with a ReLU behind each but the last."""
    kernels = 0
    is_behind_relu = True
    previous_outputs = calls[0].outputs
    for call in calls[1:]:
        layer = call.operation
        if call.inputs != previous_outputs:
            return False
        previous_outputs = call.outputs
        if id(layer) in owners:
            activation = activation_of(layer)
            is_known = type(layer) in _WITH_KERNELS
            if not (is_known and is_behind_relu):
                return False
            kernels += 1
            is_behind_relu = activation is keras.activations.relu
            is_last = kernels == len(owners)
            if not (is_behind_relu or is_last or activation is IDENTITY):
                return False
        elif kernels == 0:
            if find_kernels(layer, ""):  # which is not mirrored
                return False
        elif _is_relu(layer):
            is_behind_relu = True
        elif kernels < len(owners) and not isinstance(layer, _LINEAR):
            return False
    return kernels == len(owners)


def _is_relu(layer: keras.Operation) -> bool:
    if isinstance(layer, L.Activation):
        return layer.activation is keras.activations.relu
    if isinstance(layer, L.ReLU):
        settings = (layer.max_value, layer.negative_slope, layer.threshold)
        return not any(settings)
    return False
