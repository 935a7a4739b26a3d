"""Gradients of whole kernels, of live entries and dead ones."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._data import Batch, samples
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho._workers import Workers
from keras_sparse_ortho.callbacks._block_moves import block_layer
from keras_sparse_ortho.callbacks._mask_moves import fixed_mask, moves_on_device
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.layers import BlockSparseLayer
from keras_sparse_ortho.models import StatelessLoss
from keras_sparse_ortho.parametrizations import CompactMask


class DenseGradients:
    """`dL/dw_e` of kernels with fixed masks, at what they are now, in dense form.

    A mask is held at all live, so that the gradient of the raw weight is the dense one. Where live
    values or blocks are all that is stored, the layer gets a dense kernel in their place; their own
    gradient, that of regularization, is added.

    Args:
        model: A compiled model.
        weights: Its weights with `FixedMask`, `CompactMask` or live blocks.
    """

    def __init__(self, model: Any, weights: Sequence[PrunableWeight]) -> None:
        self._kernels = [_kernel(weight) for weight in weights]
        self._loss = StatelessLoss(
            model,
            [variable for kernel in self._kernels for variable in kernel.variables],
            held=[pair for kernel in self._kernels for pair in kernel.held],
        )

    def __call__(self, batch: Batch, workers: Workers) -> list[Any]:
        """The gradient for each weight; with live blocks as `(J, I, *taps, r, c)`.

        Of masks that are ranked on a device it is a tensor, unless workers exchange it.

        Args:
            batch: This worker's. The gradient is that of the mean loss over the batches of all.
            workers: The processes that train the model.
        """
        shared = workers.batch(batch)

        def gradients() -> list[Any]:
            values = [value for kernel in self._kernels for value in kernel.values()]
            found = self._loss.gradient_tensors(values, *shared)
            stay = [
                not workers.averages and kernel.stays()
                for kernel in self._kernels
                for _ in kernel.variables
            ]
            pairs = zip(found, stay, strict=True)
            return [gradient if here else to_numpy(gradient) for gradient, here in pairs]

        found = iter(workers.mean(workers.together(gradients), samples(batch)))
        return [kernel.gradient(found) for kernel in self._kernels]


class _Masked:
    """A kernel with a mask."""

    def __init__(self, weight: PrunableWeight) -> None:
        mask = fixed_mask(weight)
        self._weight = weight
        self._mask = mask
        self.variables = [mask.layer_variable]
        self.held = [(mask.mask, np.broadcast_to(True, tuple(mask.mask.shape)))]

    def stays(self) -> bool:
        return moves_on_device(self._weight)

    def values(self) -> list[Any]:
        return [self._mask.effective(self._mask.weight.variable.value)]

    def gradient(self, found: Iterator[Any]) -> Any:
        return next(found)


class _Compact:
    """A kernel of which live values and their indices are stored."""

    def __init__(self, mask: CompactMask) -> None:
        self._mask = mask
        self.variables = [mask.layer_variable, mask.values]
        self.held: list[tuple[Any, Any]] = []

    def stays(self) -> bool:
        return False

    def values(self) -> list[Any]:
        # As arrays: two tensors of which one is computed from the other are not two.
        return [self._mask.value(), to_numpy(self._mask.values)]

    def gradient(self, found: Iterator[np.ndarray]) -> np.ndarray:
        gradient, of_values = next(found).copy(), next(found)
        gradient.reshape(-1)[to_numpy(self._mask.indices)] += of_values
        return gradient


class _Blocks:
    """A kernel of which live blocks and their places are stored."""

    def __init__(self, layer: BlockSparseLayer) -> None:
        self._layer = layer
        self.variables = [layer.whole_kernel, layer.blocks]
        self.held: list[tuple[Any, Any]] = []

    def stays(self) -> bool:
        return False

    def values(self) -> list[Any]:
        blocks = to_numpy(self._layer.blocks)
        return [self._whole(blocks), blocks]

    def gradient(self, found: Iterator[np.ndarray]) -> np.ndarray:
        gradient, of_blocks = next(found), next(found)
        return gradient + self._whole(of_blocks)

    def _whole(self, blocks: np.ndarray) -> np.ndarray:
        pattern = to_numpy(self._layer.inputs_of)
        return self._layer.grid.whole(blocks, pattern)


def _kernel(weight: PrunableWeight) -> _Masked | _Compact | _Blocks:
    layer = block_layer(weight)
    if layer is not None:
        return _Blocks(layer)
    mask = fixed_mask(weight)
    return _Compact(mask) if isinstance(mask, CompactMask) else _Masked(weight)
