"""Keras initializers that draw a kernel together with its mask."""

from keras_sparse_ortho.initializers._baselines import (
    ApproximateIsometry,
    RamanujanOrthogonal,
    RandomSparse,
)
from keras_sparse_ortho.initializers._exact_orthogonal import ExactOrthogonal
from keras_sparse_ortho.initializers._gains import activation_gain, critical_gain
from keras_sparse_ortho.initializers._sparse_initializer import (
    AnyDraw,
    BlockDraw,
    Draw,
    PackedDraw,
    SparseInitializer,
    adopt,
    are_weights_set_later,
    axes_for,
    draw,
    is_as_drawn,
    layout_for,
    numpy_dtype,
    weights_set_later,
)
from keras_sparse_ortho.kernels import KernelLayout, kernel_layouts

__all__ = [
    "ApproximateIsometry",
    "ExactOrthogonal",
    "KernelLayout",
    "RamanujanOrthogonal",
    "RandomSparse",
    "SparseInitializer",
    "kernel_layouts",
]
