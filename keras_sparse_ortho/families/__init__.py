"""The answers for each kind of layer: `register_layer`, and a file a family."""

from keras_sparse_ortho.families import (
    _attention,
    _convolution,
    _dense,
    _depthwise,
    _einsum,
    _embedding,
    _live_blocks,
    _merges,
    _normalization,
    _operations,
    _pointwise,
    _recurrent,
    _reshapes,
)
from keras_sparse_ortho.families._register_layer import register_layer

__all__ = ["register_layer"]
