"""Keras initializers that draw a kernel together with its mask."""

from keras_sparse_ortho._other_names import public_names
from keras_sparse_ortho.initializers._approximate_isometry import ApproximateIsometry
from keras_sparse_ortho.initializers._attention_layout import AttentionLayout
from keras_sparse_ortho.initializers._draws import (
    AnyDraw,
    BlockDraw,
    Draw,
    PackedDraw,
    adopt,
    axes_for,
    draw,
    is_as_drawn,
    layout_for,
)
from keras_sparse_ortho.initializers._exact_orthogonal import ExactOrthogonal
from keras_sparse_ortho.initializers._gains import (
    CriticalPoint,
    activation_gain,
    critical_gain,
    critical_point,
)
from keras_sparse_ortho.initializers._ramanujan_orthogonal import RamanujanOrthogonal
from keras_sparse_ortho.initializers._random_sparse import RandomSparse
from keras_sparse_ortho.initializers._sparse_initializer import (
    SparseInitializer,
    are_weights_set_later,
    numpy_dtype,
    weights_set_later,
)
from keras_sparse_ortho.kernels import KernelLayout, kernel_layouts

# Public; the other names above are for the other rooms.
__all__ = [
    "ApproximateIsometry",
    "AttentionLayout",
    "ExactOrthogonal",
    "KernelLayout",
    "RamanujanOrthogonal",
    "RandomSparse",
    "SparseInitializer",
    "kernel_layouts",
]

__getattr__, __dir__ = public_names(__name__, __all__)
