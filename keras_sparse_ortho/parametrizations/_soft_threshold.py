"""`SoftThreshold`: learnt thresholds (STR)."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.parametrizations._parametrization import Parametrization
from keras_sparse_ortho.parametrizations._prunable_weight import PrunableWeight
from keras_sparse_ortho.parametrizations._regularization import add_weight_decay
from keras_sparse_ortho.parametrizations._shrink import shrink
from keras_sparse_ortho.parametrizations._threshold_functions import (
    ThresholdFunction,
    threshold_function,
)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class SoftThreshold(Parametrization):
    """Effective weight `w_e = sign(w) * relu(|w| - t)` with the learnt threshold `t = g(s)`.

    Soft threshold reparameterization (STR): `s` is trained with the weights, so that each layer
    finds its own density. Gradients are

        dL/dw = dL/dw_e where w_e is not 0, else 0
        dL/ds = -g'(s) * sum(dL/dw_e * sign(w_e))

    As in the paper L2 of the same strength acts on `w` and `s`: it shrinks weights and, as `s` is
    negative, raises thresholds, until the loss pushes back. Where the density ends can be steered
    only by searching over the strength and `s_init`; `callbacks.TargetDensity` ends at the density
    asked for.

    Args:
        granularity: `"layer"`: one `s` for the weight; `"channel"`: one for each output; or
            `"global"`: one for all weights of the wrapper. To share it in a whole model, wrap the
            model: `PrunableLayer(model, SoftThreshold("global"))` is a layer for another model.
        g: `"sigmoid"` (the paper's), `"exp"`, `"softplus"`, or a `ThresholdFunction`.
        s_init: What `s` starts from. The more negative, the later thresholds rise; the paper
            takes -3200 and less for ResNet-50, where `g` is 0 in float32 and L2 alone moves `s`.
        weight_decay: Strength `lambda` of the L2 that is added to the loss,
            `lambda / 2 * (sum(w ** 2) + sum(s ** 2))`: the paper's coupled weight decay. A
            decoupled one instead is that of the optimizer (`AdamW`, or `weight_decay=` of any);
            it acts on `s` and `w` alike as well, so do not exclude `s` from it.

    Raises:
        ValueError: An unknown granularity or function, a negative strength.
        NotPrunableError: When built, if the weight is not finite.

    Limits: `g` must reach the magnitudes that are to be pruned: a sigmoid is below 1. The live
    weights are biased towards 0 by `t`; the network learns to make up for it. `mask_value` is what
    is not 0 at the moment.

    Example:

    >>> import keras, numpy as np
    >>> from keras_sparse_ortho import PrunableLayer
    >>> layer = PrunableLayer(keras.layers.Dense(1, use_bias=False), SoftThreshold(s_init=0.0))
    >>> layer.build((None, 3))
    >>> layer.layer.kernel.assign([[0.25], [1.5], [-2.0]]) is not None
    True
    >>> keras.ops.convert_to_numpy(layer(np.eye(3))).ravel().tolist()  # t = sigmoid(0) = 0.5
    [0.0, 1.0, -1.5]

    Reference:

    - Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity" (ICML
      2020), arXiv 2002.03231
    """

    def __init__(
        self,
        granularity: str = "layer",
        g: str | ThresholdFunction = "sigmoid",
        s_init: float = -8.0,
        weight_decay: float = 0.0,
    ) -> None:
        if granularity not in ("layer", "channel", "global"):
            raise ValueError(
                "`granularity` must be 'layer', 'channel' or 'global'. "
                f"Received: granularity={granularity!r}"
            )
        if isinstance(g, dict):  # from a configuration
            g = keras.saving.deserialize_keras_object(g)
        if not np.isfinite(s_init):
            raise ValueError(f"`s_init` must be finite. Received: s_init={s_init!r}")
        if not weight_decay >= 0:
            raise ValueError(
                f"`weight_decay` must not be negative. Received: weight_decay={weight_decay!r}"
            )
        self.granularity = granularity
        self.g = g
        self.s_init = float(s_init)
        self.weight_decay = float(weight_decay)
        self._function = threshold_function(g)
        self._weight: PrunableWeight | None = None
        self.s: Any = None
        self.offset: Any = None
        self.active: Any = None

    @property
    def weight(self) -> PrunableWeight:
        """The weight it was built for."""
        if self._weight is None:
            raise ValueError("This SoftThreshold is not built: wrap a layer with it and build that")
        return self._weight

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        """Creates `s`, and the offset and switch by which `TargetDensity` steers it."""
        weight.finite_raw_value()
        self._weight = weight
        self.s = add_weight(
            name="s",
            shared=self.granularity == "global",
            shape=self._threshold_shape(weight),
            initializer=keras.initializers.Constant(self.s_init),
            trainable=True,
        )
        # Non-trainable: t = g(s + offset) while active, and 0 once frozen.
        self.offset = add_weight(name="s_offset", shape=(), initializer="zeros", trainable=False)
        self.active = add_weight(name="s_active", shape=(), initializer="ones", trainable=False)
        if self.weight_decay:
            add_weight_decay(weight.variable, self.weight_decay)
            if self.s.regularizer is None:  # a shared one decays once
                add_weight_decay(self.s, self.weight_decay)

    def effective(self, value: Any) -> Any:
        """`sign(w) * relu(|w| - t)`, exactly 0 where `|w| <= t`."""
        return shrink(value, keras.ops.cast(self._threshold(), value.dtype))

    def mask_value(self) -> np.ndarray:
        """Which entries are not 0 at the moment."""
        value = self.effective(keras.ops.convert_to_tensor(self.weight.variable))
        return keras.ops.convert_to_numpy(value != 0)

    def threshold_value(self) -> np.ndarray:
        """The threshold `t`: one value, or one for each output."""
        return np.ravel(keras.ops.convert_to_numpy(self._threshold()))

    def get_config(self) -> dict[str, Any]:
        """The arguments."""
        g = self.g if isinstance(self.g, str) else keras.saving.serialize_keras_object(self.g)
        return {
            "granularity": self.granularity,
            "g": g,
            "s_init": self.s_init,
            "weight_decay": self.weight_decay,
        }

    def twin(self) -> "SoftThreshold":
        """An unbuilt SoftThreshold with the same settings, for another weight."""
        return SoftThreshold(self.granularity, self.g, self.s_init, self.weight_decay)

    @property
    def frozen(self) -> bool:
        """Whether the threshold is 0 for good, and the live entries are fixed."""
        return not float(keras.ops.convert_to_numpy(self.active))

    def critical_offsets(self) -> np.ndarray:
        """For every entry the offset `g^-1(|w|) - s` at which it dies, as a NumPy array.

        An entry is live while the offset is below its critical one. So the offset between the
        k-th and the next largest, over all weights, leaves exactly k entries live.
        """
        magnitude = np.abs(self.weight.finite_raw_value())
        return self._function.inverse(magnitude) - keras.ops.convert_to_numpy(self.s)

    def freeze(self, mask: np.ndarray) -> None:
        """Fixes which entries are live: `w` becomes `w_e` on the mask and 0 elsewhere, `t` 0.

        From here on `w_e = w`; entries that are 0 get no gradient and stay 0.
        """
        raw = self.weight.variable
        value = keras.ops.convert_to_numpy(self.effective(keras.ops.convert_to_tensor(raw)))
        # Within rounding of the threshold an entry of the mask may be 0: it keeps its sign.
        least = np.finfo(np.float32).tiny * np.sign(self.weight.raw_value())
        raw.assign(np.where(mask, np.where(value == 0, least, value), 0).astype(value.dtype))
        self.active.assign(0.0)

    def _threshold(self) -> Any:
        t = self._function.forward(self.s.value + self.offset.value)
        # Not a product: an inactive threshold is 0 even where g overflows.
        return keras.ops.where(self.active.value > 0, t, keras.ops.zeros((), dtype=t.dtype))

    def _threshold_shape(self, weight: PrunableWeight) -> tuple[int, ...]:
        if self.granularity != "channel":
            return ()
        rank = len(weight.shape)
        layout = weight.layout
        axes = (-1,) if layout is None else (*layout.batch, *layout.outputs)
        own = {axis % rank for axis in axes}
        return tuple(size if k in own else 1 for k, size in enumerate(weight.shape))
