"""The weights that can be pruned: what is known of one, how it is held, found and chosen."""

from keras_sparse_ortho.kernels._layer_kinds import (
    LayerWrapper,
    SparseLayer,
    WholeLayer,
    is_sparse_layer,
    is_wrapper,
    storages_of,
)
from keras_sparse_ortho.kernels._storage import (
    DenseGradient,
    PrunableWeight,
    Storage,
    derived_seed,
    initializer_attribute,
)
from keras_sparse_ortho.kernels._walk import (
    Selection,
    are_experts,
    choose,
    find_kernels,
    is_table,
    kernel_layouts,
    names_in,
    select,
    walk,
)
from keras_sparse_ortho.orthogonal import KernelLayout

__all__ = ["PrunableWeight"]
