"""Gradients of whole kernels, of live entries and dead ones."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.callbacks._dynamic_sparse_training import fixed_mask
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import StatelessLoss
from keras_sparse_ortho.parametrizations import CompactMask


class DenseGradients:
    """`dL/dw_e` of kernels with fixed masks, at what they are now, in dense form.

    A mask is held at all live, so that the gradient of the raw weight is the dense one. In compact
    storage the layer gets a dense kernel in the place of the one of its live values, whose own
    gradient, that of regularization, is added.

    Args:
        model: A compiled model.
        weights: Its weights with `FixedMask` or `CompactMask`.
    """

    def __init__(self, model: Any, weights: Sequence[PrunableWeight]) -> None:
        self._masks = [fixed_mask(weight) for weight in weights]
        variables, held = [], []
        for own in self._masks:
            variables.append(own.layer_variable)
            if isinstance(own, CompactMask):
                variables.append(own.values)
            else:
                held.append((own.mask, np.broadcast_to(True, tuple(own.mask.shape))))
        self._loss = StatelessLoss(model, variables, held=held)

    def __call__(self, x: Any, y: Any, sample_weight: Any) -> list[np.ndarray]:
        """The gradient for each weight, for a batch."""
        values = []
        for own in self._masks:
            if isinstance(own, CompactMask):
                # As arrays: two tensors of which one is computed from the other are not two.
                values += [own.value(), keras.ops.convert_to_numpy(own.values)]
            else:
                values.append(own.effective(own.weight.variable.value))
        found = iter(self._loss.gradients(values, x, y, sample_weight))
        gradients = []
        for own in self._masks:
            gradient = next(found)
            if isinstance(own, CompactMask):
                of_values = next(found)
                gradient = gradient.copy()
                indices = keras.ops.convert_to_numpy(own.indices)
                gradient.reshape(-1)[indices] += of_values
            gradients.append(gradient)
        return gradients
