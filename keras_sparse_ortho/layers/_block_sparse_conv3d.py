"""`BlockSparseConv3D`: convolution of volumes with live blocks of channels."""

import keras

from keras_sparse_ortho.layers._block_sparse_conv import BlockSparseConv


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class BlockSparseConv3D(BlockSparseConv):
    """A `keras.layers.Conv3D` that connects blocks of channels with blocks of filters.

        y[.., j] = activation(sum_l conv(x[.., inputs_of[j, l]], blocks[j, l]) + b[j])

    over the `k` live blocks of output block `j`, `r` channels by `c` filters, each live at all
    taps. For each output block there is one small convolution over the channels that it reads. See
    `BlockSparseDense` for how blocks are chosen and what is gained.

    Args:
        filters: Output channels, a multiple of `c`.
        kernel_size: As for Conv3D.
        strides: As for Conv3D.
        padding: As for Conv3D.
        data_format: As for Conv3D.
        dilation_rate: As for Conv3D.
        groups: Must be 1: blocks are connections of their own.
        activation: As for Conv3D.
        use_bias: As for Conv3D.
        **kwargs: As for `BlockSparseDense`: `density`, `block`, `inputs_of`,
            `kernel_initializer`, `gain`, `seed`, and what Conv3D takes. An exactly orthogonal
            kernel stands at the center tap; the live entries at other taps begin with zeros.

    Raises:
        NotPrunableError: `groups` other than 1.
        LayoutError, DensityError, ValueError: As for `BlockSparseDense`.

    Limits: as for `BlockSparseDense`. The graph has a convolution for each output block, so that
    many small blocks take long to compile.

    Example:

    >>> import keras
    >>> layer = BlockSparseConv3D(64, 3, padding="same", density=0.5, block=16, seed=0)
    >>> model = keras.Sequential([keras.Input((4, 4, 4, 64)), layer])
    >>> tuple(layer.blocks.shape), layer.density
    ((4, 2, 3, 3, 3, 16, 16), 0.5)
    """

    namesake = keras.layers.Conv3D
