"""The weights that a budget is shared out among."""

from typing import Any

from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.parametrizations import PrunableWeight


def weights_of(model: Any) -> list[PrunableWeight]:
    """The prunable weights of a model, or the given ones where they are listed already.

    Lists come from models that are not Keras 3's, as `keras_sparse_ortho.tfmot` makes them.
    """
    if isinstance(model, list | tuple):
        return list(model)
    return prunable_weights(model, flops=False)
