"""Whole models: listing their kernels, rewriting and stripping them."""

from keras_sparse_ortho.models._flops import kernel_positions as kernel_positions
from keras_sparse_ortho.models._prunable_weights import check_built as check_built
from keras_sparse_ortho.models._prunable_weights import prunable_weights as prunable_weights
from keras_sparse_ortho.models._rewrite import Replacement as Replacement
from keras_sparse_ortho.models._rewrite import rewrite as rewrite
from keras_sparse_ortho.models._strip import strip as strip

__all__ = [
    "Replacement",
    "check_built",
    "kernel_positions",
    "prunable_weights",
    "rewrite",
    "strip",
]
