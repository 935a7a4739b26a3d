"""Keras initializers that draw a kernel together with its mask."""

from keras_sparse_ortho._other_names import public_names
from keras_sparse_ortho.initializers._approximate_isometry import ApproximateIsometry
from keras_sparse_ortho.initializers._attention_layout import AttentionLayout
from keras_sparse_ortho.initializers._draws import AnyDraw as AnyDraw
from keras_sparse_ortho.initializers._draws import BlockDraw as BlockDraw
from keras_sparse_ortho.initializers._draws import Draw as Draw
from keras_sparse_ortho.initializers._draws import PackedDraw as PackedDraw
from keras_sparse_ortho.initializers._draws import adopt as adopt
from keras_sparse_ortho.initializers._draws import axes_for as axes_for
from keras_sparse_ortho.initializers._draws import draw as draw
from keras_sparse_ortho.initializers._draws import is_as_drawn as is_as_drawn
from keras_sparse_ortho.initializers._draws import layout_for as layout_for
from keras_sparse_ortho.initializers._exact_orthogonal import ExactOrthogonal
from keras_sparse_ortho.initializers._gains import CriticalPoint as CriticalPoint
from keras_sparse_ortho.initializers._gains import activation_gain as activation_gain
from keras_sparse_ortho.initializers._gains import critical_gain as critical_gain
from keras_sparse_ortho.initializers._gains import critical_point as critical_point
from keras_sparse_ortho.initializers._ramanujan_orthogonal import RamanujanOrthogonal
from keras_sparse_ortho.initializers._random_sparse import RandomSparse
from keras_sparse_ortho.initializers._sparse_initializer import SparseInitializer
from keras_sparse_ortho.initializers._sparse_initializer import (
    are_weights_set_later as are_weights_set_later,
)
from keras_sparse_ortho.initializers._sparse_initializer import numpy_dtype as numpy_dtype
from keras_sparse_ortho.initializers._sparse_initializer import (
    weights_set_later as weights_set_later,
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
