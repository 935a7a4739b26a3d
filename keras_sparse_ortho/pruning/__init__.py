"""Pruning at initialization: budget, initializer and masks for a whole model."""

from keras_sparse_ortho.pruning._sparsify import sparsify as sparsify

__all__ = ["sparsify"]
