"""Pruning: budgets, initializers and parametrizations for a whole model."""

from keras_sparse_ortho.pruning._apply_masks import apply_masks as apply_masks
from keras_sparse_ortho.pruning._parametrize import parametrize as parametrize
from keras_sparse_ortho.pruning._sparsify import sparsify as sparsify

__all__ = ["apply_masks", "parametrize", "sparsify"]
