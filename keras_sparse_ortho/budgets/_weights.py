"""The weights that a budget is shared out among."""

from typing import Any

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import prunable_weights


def weights_of(model: Any) -> list[PrunableWeight]:
    """The prunable weights of a model, or the given ones where they are listed already.

    Lists come from models that are not Keras 3's, as `keras_sparse_ortho.tfmot` makes them.
    """
    if isinstance(model, list | tuple):
        return list(model)
    return prunable_weights(model, flops=False)


def refuse_unfit(model: Any, weights: list[PrunableWeight], lack: str) -> None:
    """Raises if there are no weights, or some are wrapped or not finite."""
    if not weights:
        raise NotPrunableError(
            f"The model has {lack}. Received: model={getattr(model, 'name', model)!r}"
        )
    wrapped = [weight.path for weight in weights if weight.parametrization is not None]
    if wrapped:
        raise NotPrunableError(
            "These weights are wrapped already; strip the model first, or `exclude` them. "
            f"Received: {wrapped}"
        )
    for weight in weights:
        weight.finite_raw_value()
