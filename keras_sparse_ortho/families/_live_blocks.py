"""The package's own layers on live blocks, which compute as the layers that they replace."""

from keras_sparse_ortho.families._convolution import output_pixels
from keras_sparse_ortho.families._einsum import einsum_positions
from keras_sparse_ortho.kernels import SparseLayer
from keras_sparse_ortho.layers import (
    BlockSparseConv,
    BlockSparseDense,
    BlockSparseEinsumDense,
)
from keras_sparse_ortho.models import kernel_positions, last_axis_positions
from keras_sparse_ortho.quantization import kernel_rounding

kernel_positions.register(BlockSparseDense, last_axis_positions)
kernel_positions.register(BlockSparseEinsumDense, einsum_positions)
kernel_positions.register(BlockSparseConv, output_pixels)
kernel_rounding.register(SparseLayer, lambda layer: "by output")
