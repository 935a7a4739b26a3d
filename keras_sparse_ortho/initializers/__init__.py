"""Keras initializers that draw a kernel together with its mask."""

from keras_sparse_ortho.initializers._baselines import (
    ApproximateIsometry,
    RamanujanOrthogonal,
    RandomSparse,
)
from keras_sparse_ortho.initializers._exact_orthogonal import ExactOrthogonal
from keras_sparse_ortho.initializers._gains import (
    activation_gain,
    critical_gain,
    mirrored_gain,
)
from keras_sparse_ortho.initializers._sparse_initializer import (
    AnyDraw,
    BlockDraw,
    Draw,
    PackedDraw,
    SparseInitializer,
    adopt,
    axes_for,
    draw,
    is_as_drawn,
    layout_for,
    numpy_dtype,
)
from keras_sparse_ortho.kernels import KernelLayout, kernel_layouts

__all__ = [
    "ApproximateIsometry",
    "Draw",
    "ExactOrthogonal",
    "KernelLayout",
    "RamanujanOrthogonal",
    "RandomSparse",
    "SparseInitializer",
    "kernel_layouts",
]
