"""`BestAtDensity`: callbacks that look for the best epoch, among those at the density asked for."""

from typing import Any

import keras

from keras_sparse_ortho.models import model_gap


def _passed_on(name: str) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> None:
        getattr(self.callback, name)(*args, **kwargs)

    hook.__name__, hook.__doc__ = name, "Passes it on."
    return hook


class BestAtDensity(keras.callbacks.Callback):
    """Hides from a callback the epochs that end before the density asked for is reached.

    While masks are renewed and thresholds rise the loss is best at first, when the model is dense.
    So `EarlyStopping` stops there, and restores the dense weights; `ModelCheckpoint` keeps them as
    the best ones; `ReduceLROnPlateau` lowers the learning rate too soon. With this around them they
    begin to look when an epoch ends with every weight at its final density: all masks as sparse as
    their schedules end, thresholds fixed at what `TargetDensity` was asked for. For models of which
    no density is to be reached in training (`FixedMask`, SET, RigL) it changes nothing.

    Args:
        callback: A Keras callback, such as `EarlyStopping(restore_best_weights=True)`,
            `ModelCheckpoint(save_best_only=True)` or `ReduceLROnPlateau()`. Its `on_epoch_end`
            and `on_train_batch_end` are left out before; everything else is passed on.

    Raises:
        ValueError: Something that is no callback.

    Limits: epochs, not batches, are looked at: a checkpoint after a number of batches waits for the
    next epoch. `EarlyStopping(start_from_epoch=n)` does the same where it is known in which epoch
    the schedule ends. What `ReduceLROnPlateau` adds to the logs is missing in the epochs before.

    Example:

    >>> import keras, numpy as np
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32)])
    >>> model = kso.parametrize(dense, kso.SoftThreshold)
    >>> model.compile("sgd", "mse")
    >>> stop = keras.callbacks.EarlyStopping("loss", patience=1, restore_best_weights=True)
    >>> history = model.fit(np.ones((64, 64)), np.ones((64, 32)), verbose=0, epochs=4,
    ...                     callbacks=[kso.callbacks.TargetDensity(0.125), BestAtDensity(stop)])
    >>> kso.prunable_weights(model)
    [<dense/kernel shape=(64, 32), density=0.125>]
    """

    def __init__(self, callback: keras.callbacks.Callback) -> None:
        super().__init__()
        if not isinstance(callback, keras.callbacks.Callback):
            raise ValueError(
                "`callback` must be a Keras callback, such as EarlyStopping(). "
                f"Received: callback={callback!r}"
            )
        self.callback = callback
        # Keras looks at the class to know whether a step must wait for a callback; this one's
        # methods for batches do nothing more than those of the callback inside.
        kind, base = type(callback), keras.callbacks.Callback
        self.async_safe = getattr(callback, "async_safe", False) or (
            kind.on_train_batch_end is base.on_train_batch_end
            and kind.on_test_batch_end is base.on_test_batch_end
            and kind.on_predict_batch_end is base.on_predict_batch_end
            and kind.on_batch_end is base.on_batch_end
        )
        self._reached = False

    def set_params(self, params: dict[str, Any]) -> None:
        """Passes them on."""
        super().set_params(params)
        self.callback.set_params(params)

    def set_model(self, model: Any) -> None:
        """Passes it on."""
        super().set_model(model)
        self.callback.set_model(model)
        self._reached = False

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Passes it on if the model is at the density asked for."""
        self._reached = model_gap(self.model) is None
        if self._reached:
            self.callback.on_epoch_end(epoch, logs)

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Passes it on if the last epoch has ended at the density asked for."""
        if self._reached:
            self.callback.on_train_batch_end(batch, logs)

    on_train_begin = _passed_on("on_train_begin")
    on_train_end = _passed_on("on_train_end")
    on_epoch_begin = _passed_on("on_epoch_begin")
    on_train_batch_begin = _passed_on("on_train_batch_begin")
    on_test_begin = _passed_on("on_test_begin")
    on_test_end = _passed_on("on_test_end")
    on_test_batch_begin = _passed_on("on_test_batch_begin")
    on_test_batch_end = _passed_on("on_test_batch_end")
    on_predict_begin = _passed_on("on_predict_begin")
    on_predict_end = _passed_on("on_predict_end")
    on_predict_batch_begin = _passed_on("on_predict_batch_begin")
    on_predict_batch_end = _passed_on("on_predict_batch_end")
