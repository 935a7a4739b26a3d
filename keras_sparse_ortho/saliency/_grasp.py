"""`grasp`: what an entry adds to the squared norm of the gradient."""

import dataclasses
from typing import ClassVar, NamedTuple

import keras
import numpy as np

from keras_sparse_ortho._checks import other_keywords
from keras_sparse_ortho._data import Batch
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.kernels import PrunableWeight, Selection
from keras_sparse_ortho.saliency._loss_derivatives import LossDerivatives
from keras_sparse_ortho.saliency._saliency import Saliency
from keras_sparse_ortho.saliency._score import LossScore, register_score

_TEMPERATURE = 200.0  # of the logits
_LABELS = {  # of cross-entropies, by the names of their functions
    "categorical_crossentropy": "classes",
    "sparse_categorical_crossentropy": "classes",
    "binary_crossentropy": "bits",
}


@register_score
@dataclasses.dataclass(frozen=True)
class Grasp(LossScore):
    """The score `w * (H g)`, with gradient `g` and Hessian `H` of the loss."""

    name: ClassVar[str] = "grasp"
    label: ClassVar[str | None] = "GraSP"
    for_untrained: ClassVar[bool] = True
    refits: ClassVar[bool] = False

    def scores(
        self,
        model: keras.Model,
        weights: list[PrunableWeight],
        density: float,
        batches: list[Batch],
    ) -> list[np.ndarray]:
        change = None
        if _has_cross_entropies_only(model):
            change = _softened
        derivatives = LossDerivatives(model, weights, batches, change)
        products = derivatives.hessian_times_gradient()
        return [
            weight.raw_value() * product
            for weight, product in zip(weights, products, strict=True)
        ]


@other_keywords
def grasp(
    model: keras.Model,
    density: float,
    data: object,
    *,
    batch_size: int = 128,
    batches: int | None = 1,
    shuffle: bool = True,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
    on_collapse: str = "error",
) -> Saliency:
    """Score `w * (H g)`, with gradient `g` and Hessian `H` of the loss: the highest are kept.

    Removing `w` changes the squared norm of the gradient by about `-2 w (H g)`, so the highest `w
    (H g)` preserve the gradient flow best. `g` and `H` are over all selected weights and all
    batches together. If all losses are cross-entropies, logits (of probabilities, too) are divided
    by 200 as in the paper: the softmax does not saturate. Arguments and errors are those of `snip`.

    Limits: second derivatives take about three times the memory of a training step; use a smaller
    `batch_size` and more `batches`. With piecewise linear activations, the Hessian comes from the
    loss and from products of weights only.

    Examples:
        >>> import keras, numpy as np
        >>> model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, name="a")])
        >>> model.compile(loss="mse")
        >>> model.layers[0].set_weights([np.array([[1.0], [3.0]]), np.zeros(1)])
        >>> saliency = grasp(model, 0.5, (np.array([[1.0, 1.0]]), np.array([[2.0]])))
        >>> saliency.scores["a/kernel"].tolist()  # g = [4, 4], H = [[2, 2], [2, 2]]
        [[16.0], [48.0]]

    Reference: Wang, Zhang and Grosse (ICLR 2020), arXiv 2002.07376.
    """
    return Grasp(batch_size, batches, shuffle, seed).saliency(
        model,
        density,
        data,
        include=include,
        exclude=exclude,
        on_collapse=on_collapse,
    )


class _CrossEntropy(NamedTuple):
    """A loss with labels that are `"classes"` or `"bits"`."""

    labels: str
    from_logits: bool


def _has_cross_entropies_only(model: keras.Model) -> bool:
    losses = keras.tree.flatten(getattr(model, "loss", None))
    losses = [loss for loss in losses if loss is not None]
    if not losses:
        return False
    return all(_cross_entropy(loss) is not None for loss in losses)


def _cross_entropy(loss: object) -> _CrossEntropy | None:
    """The kind of a cross-entropy; `None` for another loss."""
    function = getattr(loss, "fn", loss)  # an instance wraps one
    if isinstance(function, str):
        name = function
    else:
        name = getattr(function, "__name__", "")
    if name not in _LABELS:
        return None
    from_logits = False
    if isinstance(loss, keras.losses.Loss):
        from_logits = bool(loss.get_config().get("from_logits"))
    return _CrossEntropy(_LABELS[name], from_logits)


def _softened(model: keras.Model, y_pred: Tensor) -> Tensor:
    """Outputs whose logits are divided by the temperature, so that softmax does not saturate."""
    loss = model.loss
    if isinstance(loss, dict) and not isinstance(y_pred, dict):
        loss = [loss[name] for name in model.output_names]
    losses = keras.tree.flatten(loss)
    outputs = keras.tree.flatten(y_pred)
    if len(losses) == 1:
        losses = losses * len(outputs)
    if len(losses) != len(outputs):
        raise ValueError(
            "GraSP needs the loss of every output. "
            f"Received: {len(losses)} losses for {len(outputs)} outputs"
        )
    scaled = [
        _scaled(output, _cross_entropy(loss))
        for output, loss in zip(outputs, losses, strict=True)
    ]
    return keras.tree.pack_sequence_as(y_pred, scaled)


def _scaled(output: Tensor, loss: _CrossEntropy | None) -> Tensor:
    """Probabilities `p` count as the logits `log p`, so they become `p^(1/T)`, normalized."""
    if loss is None:  # an output without a loss
        return output
    if loss.from_logits:
        return output / _TEMPERATURE
    # Clipped as in the cross-entropies of Keras, so that log is finite.
    epsilon = keras.config.epsilon()
    p = keras.ops.clip(output, epsilon, 1 - epsilon)
    if loss.labels == "classes":
        logits = keras.ops.log(p)
        return keras.ops.softmax(logits / _TEMPERATURE, axis=-1)
    logits = keras.ops.log(p) - keras.ops.log(1 - p)
    return keras.ops.sigmoid(logits / _TEMPERATURE)
