"""Layers: `PrunableLayer`, which lets any Keras layer use effective weights; live blocks."""

from keras_sparse_ortho.layers._block_grid import (
    BlockGrid,
    Counts,
    check_block,
    pattern_of,
)
from keras_sparse_ortho.layers._block_layer_like import (
    BlockLayer,
    block_layer_like,
    register_block_form,
    why_no_block_form,
)
from keras_sparse_ortho.layers._block_operands import (
    BlockOperands,
    drop_padding,
    pad_blocks,
)
from keras_sparse_ortho.layers._block_sizes import (
    BlockSizes,
    block_sizes,
    why_slow,
)
from keras_sparse_ortho.layers._block_sparse_dense import (
    BlockSparseConv,
    BlockSparseConv1D,
    BlockSparseConv2D,
    BlockSparseConv3D,
    BlockSparseDense,
    BlockSparseEinsumDense,
    is_elementwise,
)
from keras_sparse_ortho.layers._block_sparse_layer import (
    BlockSparseLayer,
    constant,
)
from keras_sparse_ortho.layers._block_sparse_rnn import (
    BlockSparseGRUCell,
    BlockSparseLSTMCell,
    BlockSparseRNN,
)
from keras_sparse_ortho.layers._circular_padding import CircularPadding
from keras_sparse_ortho.layers._kernel_tiles import block_tile, line_tile
from keras_sparse_ortho.layers._product_choice import (
    block_products,
    set_block_products,
)
from keras_sparse_ortho.layers._prunable_layer import PrunableLayer
from keras_sparse_ortho.layers._token_products import product_by_token
from keras_sparse_ortho.layers._wrapped_layer import (
    plain_layer,
    register_by_sample,
)

__all__ = [
    "BlockSparseConv1D",
    "BlockSparseConv2D",
    "BlockSparseConv3D",
    "BlockSparseDense",
    "BlockSparseEinsumDense",
    "BlockSparseGRUCell",
    "BlockSparseLSTMCell",
    "BlockSparseRNN",
    "CircularPadding",
    "PrunableLayer",
    "block_products",
    "set_block_products",
]
