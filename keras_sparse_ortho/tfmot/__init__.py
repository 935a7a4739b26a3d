"""Initializers, masks, budgets and learnt thresholds for tf_keras models and TFMOT."""

from keras_sparse_ortho.tfmot._layouts import register_layouts as _register_layouts
from keras_sparse_ortho.tfmot._prune_by_budget import prune_by_budget as prune_by_budget
from keras_sparse_ortho.tfmot._prune_exact_orthogonal import (
    prune_exact_orthogonal as prune_exact_orthogonal,
)
from keras_sparse_ortho.tfmot._prune_preserve_scheme import (
    PrunePreserveQuantizeScheme as PrunePreserveQuantizeScheme,
)
from keras_sparse_ortho.tfmot._prune_with_mask import prune_with_mask as prune_with_mask
from keras_sparse_ortho.tfmot._prune_with_mask_layer import PruneWithMask as PruneWithMask
from keras_sparse_ortho.tfmot._prune_with_soft_threshold import (
    prune_with_soft_threshold as prune_with_soft_threshold,
)
from keras_sparse_ortho.tfmot._prune_with_soft_threshold_layer import (
    PruneWithSoftThreshold as PruneWithSoftThreshold,
)
from keras_sparse_ortho.tfmot._registration import register_initializers as register_initializers
from keras_sparse_ortho.tfmot._target_density import TargetDensity as TargetDensity
from keras_sparse_ortho.tfmot._weights import prunable_weights as prunable_weights

__all__ = [
    "PrunePreserveQuantizeScheme",
    "PruneWithMask",
    "PruneWithSoftThreshold",
    "TargetDensity",
    "prunable_weights",
    "prune_by_budget",
    "prune_exact_orthogonal",
    "prune_with_mask",
    "prune_with_soft_threshold",
    "register_initializers",
]

register_initializers()
_register_layouts()
