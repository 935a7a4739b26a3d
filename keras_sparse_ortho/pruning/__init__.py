"""Pruning: budgets, initializers and parametrizations for a whole model."""

from keras_sparse_ortho.pruning._parametrize import parametrize as parametrize
from keras_sparse_ortho.pruning._sparsify import sparsify as sparsify

__all__ = ["parametrize", "sparsify"]
