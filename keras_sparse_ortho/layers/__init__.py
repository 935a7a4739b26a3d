"""Layers: `PrunableLayer`, which lets any Keras layer use effective weights; live blocks."""

from keras_sparse_ortho.layers._block_layer_like import block_layer_like as block_layer_like
from keras_sparse_ortho.layers._block_sparse_conv import BlockSparseConv as BlockSparseConv
from keras_sparse_ortho.layers._block_sparse_conv1d import BlockSparseConv1D as BlockSparseConv1D
from keras_sparse_ortho.layers._block_sparse_conv2d import BlockSparseConv2D as BlockSparseConv2D
from keras_sparse_ortho.layers._block_sparse_conv3d import BlockSparseConv3D as BlockSparseConv3D
from keras_sparse_ortho.layers._block_sparse_dense import BlockSparseDense as BlockSparseDense
from keras_sparse_ortho.layers._block_sparse_einsum_dense import (
    BlockSparseEinsumDense as BlockSparseEinsumDense,
)
from keras_sparse_ortho.layers._block_sparse_layer import BlockSparseLayer as BlockSparseLayer
from keras_sparse_ortho.layers._circular_padding import CircularPadding as CircularPadding
from keras_sparse_ortho.layers._prunable_layer import PrunableLayer as PrunableLayer
from keras_sparse_ortho.layers._scanned_stack import ScannedStack as ScannedStack

# Public; the other names above are for the other rooms.
__all__ = [
    "BlockSparseConv1D",
    "BlockSparseConv2D",
    "BlockSparseConv3D",
    "BlockSparseDense",
    "BlockSparseEinsumDense",
    "CircularPadding",
    "PrunableLayer",
    "ScannedStack",
    "block_layer_like",
]
