"""A raw weight, its threshold, and the kernel that holds the effective weight."""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from keras_sparse_ortho.parametrizations import threshold_function
from keras_sparse_ortho.tfmot._imports import tf_keras
from keras_sparse_ortho.tfmot._weights import TfKerasWeight, as_numpy
from keras_sparse_ortho.tfmot._wrapper import WeightState

# Of TensorFlow, whatever the backend of Keras 3 is.
FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "sigmoid": tf.sigmoid,
    "exp": tf.exp,
    "softplus": tf.nn.softplus,
}


def shrink(value: Any, threshold: Any) -> Any:
    """`sign(w) * relu(|w| - t)`, as `SoftThreshold` computes it on Keras 3."""
    axes = [k for k, size in enumerate(threshold.shape) if size != value.shape[k]]

    @tf.custom_gradient
    def shrunk(w: Any, t: Any) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
        # Subtracting, not comparing, gives 0 for w = t = 0: an entry frozen at 0 gets no gradient.
        effective = w - tf.clip_by_value(w, -t, t)

        def gradient(upstream: Any) -> tuple[Any, Any]:
            live = tf.where(effective != 0, upstream, tf.zeros((), w.dtype))
            terms = upstream * tf.sign(effective)
            scalar = len(t.shape) == 0
            total = tf.reduce_sum(terms, None if scalar else axes, keepdims=not scalar)
            return live, -total

        return effective, gradient

    return shrunk(tf.convert_to_tensor(value), threshold)


class SoftThresholdState(WeightState):
    """Effective weight `sign(w) * relu(|w| - t)`, `t = g(s + offset)`; `t = 0` once frozen.

    It answers as `parametrizations.LearntThreshold` does on Keras 3, so that `ThresholdSteering`
    steers both.

    Args:
        weight: The kernel of the layer, which holds the effective weight.
        raw: The raw weight.
        g: Name of the threshold function.
        s: The trainable variable of the threshold.
        offset: What `TargetDensity` adds to it.
        active: 1, or 0 once frozen.
        kept: TFMOT's variables for the mask and the threshold, brought up to date by `settle`.
    """

    counted = "entries"

    def __init__(
        self,
        weight: TfKerasWeight,
        raw: Any,
        g: str,
        s: Any,
        offset: Any,
        active: Any,
        kept: tuple[Any, Any],
    ) -> None:
        super().__init__(weight, raw)
        self.s = s
        self.offset = offset
        self.active = active
        self._kept = kept
        self._forward = FUNCTIONS[g]
        self._inverse = threshold_function(g).inverse

    def effective(self) -> Any:
        return shrink(self.raw, tf.cast(self._threshold(), self.raw.dtype))

    def mask(self) -> np.ndarray:
        return as_numpy(self.effective()) != 0

    def show(self) -> Any:
        """Makes the kernel hold the effective weight."""
        effective = self.effective()
        self.weight.variable.assign(effective)
        return effective

    def settle(self) -> None:
        effective = self.show()
        mask, threshold = self._kept
        mask.assign(tf.cast(effective != 0, mask.dtype))
        threshold.assign(tf.cast(tf.reduce_mean(self._threshold()), threshold.dtype))

    def adopt_raw(self) -> None:
        """Takes the kernel for the raw weight."""
        self.raw.assign(tf.convert_to_tensor(self.weight.variable))
        self.settle()

    def adopt_effective(self) -> None:
        """Takes the kernel for the effective weight: `w = w_e + sign(w_e) * t`."""
        value = tf.convert_to_tensor(self.weight.variable)
        self.raw.assign(value + tf.sign(value) * tf.cast(self._threshold(), value.dtype))
        self.settle()

    def threshold_value(self) -> np.ndarray:
        """The threshold `t`: one value, or one for each output."""
        return np.ravel(as_numpy(self._threshold()))

    @property
    def frozen(self) -> bool:
        """Whether the threshold is 0 for good, and the live entries are fixed."""
        return not float(as_numpy(self.active))

    @property
    def steered(self) -> Any:
        """The variable whose entries `critical_offsets` and `freeze` are about."""
        return self.raw

    def critical_offsets(self) -> np.ndarray:
        """For every entry the offset `g^-1(|w|) - s` at which it dies."""
        return np.asarray(self._inverse(np.abs(as_numpy(self.raw))) - as_numpy(self.s))

    def freeze(self, mask: np.ndarray) -> np.ndarray:
        """Fixes which entries are live: `w` becomes `w_e` on the mask and 0 elsewhere, `t` 0."""
        raw, value = as_numpy(self.raw), as_numpy(self.effective())
        # Within rounding of the threshold an entry of the mask may be 0: it keeps its sign.
        value = np.where(value == 0, np.finfo(np.float32).tiny * np.sign(raw), value)
        tf_keras.backend.set_value(self.raw, np.where(mask, value, 0))
        self.active.assign(0.0)
        self.settle()
        return mask

    def _threshold(self) -> Any:
        t = self._forward(self.s + self.offset)
        # Not a product: an inactive threshold is 0 even where g overflows.
        return tf.where(self.active > 0, t, tf.zeros((), t.dtype))
