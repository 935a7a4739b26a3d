"""Whole models: listing their kernels, rewriting and stripping them."""

from keras_sparse_ortho.models._autodiff import (
    hessian_vector_product as hessian_vector_product,
)
from keras_sparse_ortho.models._autodiff import value_and_gradients as value_and_gradients
from keras_sparse_ortho.models._flops import kernel_positions as kernel_positions
from keras_sparse_ortho.models._prunable_weights import check_built as check_built
from keras_sparse_ortho.models._prunable_weights import prunable_weights as prunable_weights
from keras_sparse_ortho.models._remove_channels import remove_channels as remove_channels
from keras_sparse_ortho.models._rewrite import Replacement as Replacement
from keras_sparse_ortho.models._rewrite import is_clonable as is_clonable
from keras_sparse_ortho.models._rewrite import rewrite as rewrite
from keras_sparse_ortho.models._stateless_loss import Objective as Objective
from keras_sparse_ortho.models._stateless_loss import StatelessLoss as StatelessLoss
from keras_sparse_ortho.models._strip import strip as strip

__all__ = [
    "Objective",
    "Replacement",
    "StatelessLoss",
    "check_built",
    "hessian_vector_product",
    "is_clonable",
    "kernel_positions",
    "prunable_weights",
    "remove_channels",
    "rewrite",
    "strip",
    "value_and_gradients",
]
