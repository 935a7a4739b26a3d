"""`BlockSparseConv1D`: convolution of sequences with live blocks of channels."""

import keras

from keras_sparse_ortho.layers._block_sparse_conv import BlockSparseConv


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseConv1D(BlockSparseConv):
    """A `keras.layers.Conv1D` that connects blocks of channels with blocks of filters.

        y[.., j] = activation(sum_l conv(x[.., inputs_of[j, l]], blocks[j, l]) + b[j])

    over the `k` live blocks of output block `j`, `r` channels by `c` filters, each live at all
    taps. For each output block there is one small convolution over the channels that it reads. See
    `BlockSparseDense` for how blocks are chosen and what is gained.

    Args:
        filters: Output channels, a multiple of `c`.
        kernel_size: As for Conv1D.
        strides: As for Conv1D.
        padding: As for Conv1D.
        data_format: As for Conv1D.
        dilation_rate: As for Conv1D.
        groups: Must be 1: blocks are connections of their own.
        activation: As for Conv1D.
        use_bias: As for Conv1D.
        **kwargs: As for `BlockSparseDense`: `density`, `block`, `inputs_of`,
            `kernel_initializer`, `gain`, `seed`, and what Conv1D takes. An exactly orthogonal
            kernel stands at the center tap; the live entries at other taps begin with zeros.

    Raises:
        NotPrunableError: `groups` other than 1.
        LayoutError, DensityError, ValueError: As for `BlockSparseDense`.

    Limits: as for `BlockSparseDense`. The graph has a convolution for each output block, so that
    many small blocks take long to compile.

    Example:

    >>> import keras
    >>> layer = BlockSparseConv1D(64, 3, padding="same", density=0.5, block=16, seed=0)
    >>> model = keras.Sequential([keras.Input((20, 64)), layer])
    >>> tuple(layer.blocks.shape), layer.density
    ((4, 2, 3, 16, 16), 0.5)
    """

    namesake = keras.layers.Conv1D
