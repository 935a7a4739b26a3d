"""Initializers, masks, budgets and learnt thresholds for tf_keras models and TFMOT."""

from keras_sparse_ortho._foreign_names import answer
from keras_sparse_ortho.models import weights_of as _weights_of
from keras_sparse_ortho.tfmot._copy_weights import copy_weights
from keras_sparse_ortho.tfmot._following import (
    register_calls as _register_calls,
)
from keras_sparse_ortho.tfmot._prune_by_budget import prune_by_budget
from keras_sparse_ortho.tfmot._prune_exact_orthogonal import (
    exact_orthogonal_initializers,
    prune_exact_orthogonal,
)
from keras_sparse_ortho.tfmot._prune_with_mask import (
    PruneWithMask,
    prune_with_mask,
)
from keras_sparse_ortho.tfmot._prune_with_soft_threshold import (
    PruneWithSoftThreshold,
    TargetDensity,
    prune_with_soft_threshold,
)
from keras_sparse_ortho.tfmot._tf_keras_internals import (
    PrunePreserveQuantizeScheme,
)
from keras_sparse_ortho.tfmot._tf_keras_internals import (
    tf_keras as _tf_keras,
)
from keras_sparse_ortho.tfmot._weights import (
    prunable_weights,
    register_initializers,
)
from keras_sparse_ortho.tfmot._weights import (
    register_layouts as _register_layouts,
)

__all__ = [
    "PrunePreserveQuantizeScheme",
    "PruneWithMask",
    "PruneWithSoftThreshold",
    "TargetDensity",
    "copy_weights",
    "exact_orthogonal_initializers",
    "prunable_weights",
    "prune_by_budget",
    "prune_exact_orthogonal",
    "prune_with_mask",
    "prune_with_soft_threshold",
    "register_initializers",
]

answer(__name__)
register_initializers()
_register_layouts()
_register_calls()
_weights_of.register(_tf_keras.layers.Layer)(prunable_weights)
