"""The weights that can be pruned: what is known of one, how they are found, chosen and seeded."""

from keras_sparse_ortho.kernels._kernel_layouts import kernel_layouts as kernel_layouts
from keras_sparse_ortho.kernels._layers_of_others import are_experts as are_experts
from keras_sparse_ortho.kernels._layers_of_others import is_table as is_table
from keras_sparse_ortho.kernels._prunable_weight import PrunableWeight as PrunableWeight
from keras_sparse_ortho.kernels._prunable_weight import StoredKernel as StoredKernel
from keras_sparse_ortho.kernels._prunable_weight import (
    initializer_attribute as initializer_attribute,
)
from keras_sparse_ortho.kernels._seeding import derived_seed as derived_seed
from keras_sparse_ortho.kernels._selection import Selection as Selection
from keras_sparse_ortho.kernels._selection import choose as choose
from keras_sparse_ortho.kernels._selection import select as select
from keras_sparse_ortho.kernels._walk import find_kernels as find_kernels
from keras_sparse_ortho.kernels._walk import find_unregistered as find_unregistered
from keras_sparse_ortho.kernels._walk import own_kernels as own_kernels
from keras_sparse_ortho.kernels._walk import walk as walk
from keras_sparse_ortho.orthogonal import KernelLayout as KernelLayout

# Public; the other names above are for the other rooms.
__all__ = ["KernelLayout", "PrunableWeight", "Selection", "kernel_layouts"]
