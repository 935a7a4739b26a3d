"""The weights that can be pruned: what is known of one, how it is held, found and chosen."""

from keras_sparse_ortho._foreign_names import public_names
from keras_sparse_ortho.kernels._kernel_layouts import are_experts as are_experts
from keras_sparse_ortho.kernels._kernel_layouts import is_table as is_table
from keras_sparse_ortho.kernels._kernel_layouts import kernel_layouts
from keras_sparse_ortho.kernels._storage import DenseGradient as DenseGradient
from keras_sparse_ortho.kernels._storage import PrunableWeight
from keras_sparse_ortho.kernels._storage import RepeatedLayer as RepeatedLayer
from keras_sparse_ortho.kernels._storage import Storage as Storage
from keras_sparse_ortho.kernels._storage import derived_seed as derived_seed
from keras_sparse_ortho.kernels._storage import (
    initializer_attribute as initializer_attribute,
)
from keras_sparse_ortho.kernels._storage import is_sparse_layer as is_sparse_layer
from keras_sparse_ortho.kernels._storage import storages_of as storages_of
from keras_sparse_ortho.kernels._walk import Selection
from keras_sparse_ortho.kernels._walk import choose as choose
from keras_sparse_ortho.kernels._walk import find_kernels as find_kernels
from keras_sparse_ortho.kernels._walk import names_in as names_in
from keras_sparse_ortho.kernels._walk import select as select
from keras_sparse_ortho.kernels._walk import walk as walk
from keras_sparse_ortho.orthogonal import KernelLayout

# Public; the other names above are for the other rooms.
__all__ = ["PrunableWeight"]

__getattr__, __dir__ = public_names(__name__, __all__)
