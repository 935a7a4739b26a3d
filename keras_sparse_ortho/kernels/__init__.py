"""The weights that can be pruned: what is known of one, how it is held, found and chosen."""

from keras_sparse_ortho.kernels._layer_kinds import (
    LayerWrapper,
    SparseLayer,
    WholeLayer,
    has_dropout_rates,
    is_sparse_layer,
    is_wrapper,
    storages_of,
)
from keras_sparse_ortho.kernels._layouts import (
    Layouts,
    are_experts,
    is_table,
    kernel_layouts,
)
from keras_sparse_ortho.kernels._rows import (
    LastAxisRows,
    MakeRows,
    Rows,
    RowsRule,
    as_matrices,
    canonical_shape,
    from_matrices,
    kernel_rows,
    last_axis_rows,
    rows_by_name,
    rows_of,
)
from keras_sparse_ortho.kernels._selection import (
    Selection,
    choose,
    names_in,
    select,
)
from keras_sparse_ortho.kernels._storage import (
    DenseGradient,
    PrunableWeight,
    Storage,
    derived_seed,
    initializer_attribute,
)
from keras_sparse_ortho.kernels._walk import find_kernels, walk
from keras_sparse_ortho.orthogonal import KernelLayout

__all__ = ["PrunableWeight"]
