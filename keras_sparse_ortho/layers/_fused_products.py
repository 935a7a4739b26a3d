"""`fused_product`: products with live blocks, each by one kernel for a GPU."""

import keras

from keras_sparse_ortho._gathers import reshape, with_gradient
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.layers._block_grid import BlockGrid
from keras_sparse_ortho.layers._block_operands import (
    BlockOperands,
    drop_padding,
    outputs_of_slots,
    pad_blocks,
)
from keras_sparse_ortho.layers._product_choice import (
    GATHERED,
    INTERPRETED,
    block_products,
)

ops = keras.ops

_DTYPES = ("float32", "bfloat16", "float16")


def takes_kernels(x: Tensor) -> bool:
    """Whether products with `x` are computed by kernels: as was chosen, where these can."""
    if block_products() == GATHERED:
        return False
    batch = x.shape[0]
    # A symbol of jax.export; torch's open sizes are taken.
    if keras.backend.backend() == "jax" and not isinstance(batch, int):
        return False
    return batch > 0 and keras.backend.standardize_dtype(x.dtype) in _DTYPES


def fused_product(x: Tensor, kernel: BlockOperands) -> Tensor:
    """Returns `x K` for `x` of shape `(n, inputs)`, by kernels that copy no blocks of `x`.

        Y[j] = sum_l X[inputs_of[j, l]] W[j, l]

    There are derivatives of any order, but on JAX none in forward mode.

    Args:
        x: Tensor of shape `(n, inputs)`, for which `takes_kernels`.
        kernel: BlockOperands of the kernel `K`, without taps.

    Raises ValueError under a `keras.distribution`: kernels would run on all rows on each device.
    """
    if keras.distribution.distribution() is not None:
        raise ValueError(
            "Kernels for products with live blocks are for one device: call "
            'keras_sparse_ortho.layers.set_block_products("gathered") before '
            "models are compiled for several. Received: "
            f"products={block_products()!r} under a distribution"
        )
    grid = kernel.grid
    x = pad_blocks(x, 1, grid.inputs, grid.rows)
    interpreted = block_products() == INTERPRETED
    places = kernel.places_by_slot
    blocks = kernel.blocks_by_slot
    if keras.backend.backend() == "torch":
        outputs = _product_on_torch(grid, x, blocks, places, interpreted)
    else:
        outputs = _OnJax(grid, interpreted).product(x, blocks, *places)
    return drop_padding(outputs, 1, grid.outputs, grid.cols)


def _product_on_torch(
    grid: BlockGrid,
    x: Tensor,
    blocks: Tensor,
    places: list[Tensor],
    interpreted: bool,
) -> Tensor:
    """`(n, outputs)` with padding, by an operator of torch."""
    from keras_sparse_ortho.layers import _triton_products

    counts = (list(grid.of_outputs.counts), list(grid.of_inputs.counts))
    return _triton_products.block_product(
        x, blocks, *places, *counts, interpreted
    )


class _OnJax:
    """The product of one grid and its gradients, each the gradient of the two others.

    `x` is `(n, inputs)`, `y` `(n, outputs)`, both with padding, and blocks are `(N, r, c)`.
    """

    def __init__(self, grid: BlockGrid, interpreted: bool) -> None:
        self._grid = grid
        self._interpreted = interpreted
        from keras_sparse_ortho.layers import _pallas_products

        self._kernels = _pallas_products

    def product(
        self, x: Tensor, blocks: Tensor, places: Tensor, slots: Tensor
    ) -> Tensor:
        """`Y[j] = sum_l X[places[j, l]] W[j, l]`."""

        def gradient(
            x: Tensor,
            blocks: Tensor,
            places: Tensor,
            slots: Tensor,
            upstream: Tensor,
        ) -> tuple[Tensor, Tensor]:
            of_x = self.inputs_gradient(upstream, blocks, places, slots)
            return of_x, self.blocks_gradient(x, upstream, places, slots)

        return with_gradient(
            self._product, gradient, [x, blocks], [places, slots]
        )

    def inputs_gradient(
        self, y: Tensor, blocks: Tensor, places: Tensor, slots: Tensor
    ) -> Tensor:
        """`dX[i] = sum_s dY[j(s)] W[s]^T` over the slots of each block of inputs."""

        def gradient(
            y: Tensor,
            blocks: Tensor,
            places: Tensor,
            slots: Tensor,
            upstream: Tensor,
        ) -> tuple[Tensor, Tensor]:
            of_y = self.product(upstream, blocks, places, slots)
            return of_y, self.blocks_gradient(upstream, y, places, slots)

        return with_gradient(
            self._inputs_gradient, gradient, [y, blocks], [places, slots]
        )

    def blocks_gradient(
        self, x: Tensor, y: Tensor, places: Tensor, slots: Tensor
    ) -> Tensor:
        """`dW[j, l] = X[places[j, l]]^T dY[j]`."""

        def gradient(
            x: Tensor,
            y: Tensor,
            places: Tensor,
            slots: Tensor,
            upstream: Tensor,
        ) -> tuple[Tensor, Tensor]:
            of_x = self.inputs_gradient(y, upstream, places, slots)
            return of_x, self.product(x, upstream, places, slots)

        return with_gradient(
            self._blocks_gradient, gradient, [x, y], [places, slots]
        )

    def _product(
        self, x: Tensor, blocks: Tensor, places: Tensor, slots: Tensor
    ) -> Tensor:
        return self._kernels.line_products(
            x,
            blocks,
            places,
            ops.arange(self._grid.live_blocks, dtype="int32"),
            ops.convert_to_tensor(self._grid.of_outputs.first_and_count),
            transposed=False,
            interpret=self._interpreted,
        )

    def _inputs_gradient(
        self, y: Tensor, blocks: Tensor, places: Tensor, slots: Tensor
    ) -> Tensor:
        return self._kernels.line_products(
            y,
            blocks,
            outputs_of_slots(self._grid, slots),
            slots,
            ops.convert_to_tensor(self._grid.of_inputs.first_and_count),
            transposed=True,
            interpret=self._interpreted,
        )

    def _blocks_gradient(
        self, x: Tensor, y: Tensor, places: Tensor, slots: Tensor
    ) -> Tensor:
        lines = ops.convert_to_tensor(self._grid.of_outputs.of_slots)
        return self._kernels.block_gradients(
            x,
            y,
            places,
            reshape(lines, (-1,)),
            shape=(self._grid.rows, self._grid.cols),
            interpret=self._interpreted,
        )
