"""The loss that saliencies are derivatives of: that of `compile`, without weight decay."""

from typing import Any

import keras

L = keras.losses
_ON_CLASSES = (L.CategoricalCrossentropy, L.SparseCategoricalCrossentropy)
_ON_BITS = (L.BinaryCrossentropy,)
_NAMES = {
    "categorical_crossentropy": "classes",
    "sparse_categorical_crossentropy": "classes",
    "binary_crossentropy": "bits",
}


class DataLoss:
    """`objective(model, x, y, sample_weight, training)` for `StatelessLoss`.

    The compiled loss with its `add_loss` terms, but without the regularizers of weights, whose
    gradient says how large a weight is, and nothing of the data.

    Args:
        temperature: What the logits are divided by. Probabilities `p` are those of the logits
            `log p`, so they become `p^(1/T)`, normalized.
    """

    def __init__(self, temperature: float = 1.0) -> None:
        self.temperature = float(temperature)

    def __call__(self, model: Any, x: Any, y: Any, sample_weight: Any, training: bool) -> Any:
        y_pred = model(x, training=training)
        if self.temperature != 1:
            y_pred = self._tempered(model, y_pred)
        loss = model.compute_loss(
            x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
        )
        for variable in model.trainable_weights:
            if variable.regularizer is not None:
                loss = loss - keras.ops.cast(variable.regularizer(variable.value), loss.dtype)
        return loss

    def _tempered(self, model: Any, y_pred: Any) -> Any:
        loss = model.loss
        if isinstance(loss, dict) and not isinstance(y_pred, dict):
            loss = [loss[name] for name in model.output_names]
        losses = keras.tree.flatten(loss)
        outputs = keras.tree.flatten(y_pred)
        if len(losses) == 1:
            losses = losses * len(outputs)
        if len(losses) != len(outputs):
            raise ValueError(
                "The temperature needs to know the loss of every output. "
                f"Received: {len(losses)} losses for {len(outputs)} outputs, "
                f"temperature={self.temperature}"
            )
        cooled = [self._cool(*pair) for pair in zip(outputs, losses, strict=True)]
        return keras.tree.pack_sequence_as(y_pred, cooled)

    def _cool(self, output: Any, loss: Any) -> Any:
        kind = kind_of(loss)
        if kind is None:
            raise ValueError(
                "A temperature acts on logits: the loss must be a cross-entropy; else give "
                f"`temperature=1`. Received: loss={loss!r}, temperature={self.temperature}"
            )
        what, logits = kind
        if logits:
            return output / self.temperature
        # As cross-entropies of Keras clip them, so that log is finite.
        p = keras.ops.clip(output, keras.config.epsilon(), 1 - keras.config.epsilon())
        if what == "classes":
            return keras.ops.softmax(keras.ops.log(p) / self.temperature, axis=-1)
        return keras.ops.sigmoid((keras.ops.log(p) - keras.ops.log(1 - p)) / self.temperature)


def kind_of(loss: Any) -> tuple[str, bool] | None:
    """Whether a loss is on classes or bits, and on logits; `None` if it is no cross-entropy."""
    if isinstance(loss, _ON_CLASSES + _ON_BITS):
        what = "classes" if isinstance(loss, _ON_CLASSES) else "bits"
        return what, bool(loss.get_config().get("from_logits", False))
    name = loss if isinstance(loss, str) else getattr(loss, "__name__", None)
    return (_NAMES[name], False) if name in _NAMES else None


def default_temperature(model: Any) -> float:
    """200, as in the paper, where every loss is a cross-entropy; else 1."""
    losses = [loss for loss in keras.tree.flatten(getattr(model, "loss", None)) if loss is not None]
    return 200.0 if losses and all(kind_of(loss) for loss in losses) else 1.0
