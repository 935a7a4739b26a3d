"""Gradients of whole kernels, of live entries and dead ones."""

from collections.abc import Sequence
from typing import Any

from keras_sparse_ortho._data import Batch, samples
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho._workers import Workers
from keras_sparse_ortho.callbacks._mask_moves import moves_on_device
from keras_sparse_ortho.kernels import DenseGradient, PrunableWeight
from keras_sparse_ortho.models import StatelessLoss


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
        self._kernels = [_dense_gradient(weight) for weight in weights]
        self._stay = [moves_on_device(weight) for weight in weights]
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
                not workers.averages and stays
                for kernel, stays in zip(self._kernels, self._stay, strict=True)
                for _ in kernel.variables
            ]
            pairs = zip(found, stay, strict=True)
            return [gradient if here else to_numpy(gradient) for gradient, here in pairs]

        found = iter(workers.mean(workers.together(gradients), samples(batch)))
        return [
            kernel.collect(*(next(found) for _ in kernel.variables)) for kernel in self._kernels
        ]


def _dense_gradient(weight: PrunableWeight) -> DenseGradient:
    assert weight.storage is not None
    return weight.storage.dense_gradient()
