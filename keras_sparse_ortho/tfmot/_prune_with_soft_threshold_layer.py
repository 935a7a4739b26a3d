"""`PruneWithSoftThreshold`: TFMOT's wrapper with learnt thresholds."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_sparse_ortho.tfmot._imports import tf_keras
from keras_sparse_ortho.tfmot._soft_threshold_state import FUNCTIONS, SoftThresholdState
from keras_sparse_ortho.tfmot._tf_keras_internals import in_replica, own_weights, track
from keras_sparse_ortho.tfmot._weights import TfKerasWeight
from keras_sparse_ortho.tfmot._wrapper import EffectiveWeightWrapper, WeightState, check_finite


@tf_keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class PruneWithSoftThreshold(EffectiveWeightWrapper):
    """Wraps a tf_keras layer so that its kernels are `w_e = sign(w) * relu(|w| - t)`, `t = g(s)`.

    What `parametrizations.SoftThreshold` (STR) is on Keras 3. The raw weight `w` and `s` are
    variables of the wrapper, and trained; gradients are

        dL/dw = dL/dw_e where w_e is not 0, else 0
        dL/ds = -g'(s) * sum(dL/dw_e * sign(w_e))

    The kernel of the layer is not trained. It holds `w_e`: optimizers of tf_keras bring it up to
    date in every step, as they apply constraints, and so do TFMOT's `UpdatePruningStep`, saving,
    and whoever asks for the attribute `layer`. So TFMOT's `strip_pruning` returns the plain layer
    with the effective weight, however it was trained. A regularizer of the kernel acts on `w`, and
    so does its constraint.

    Args:
        layer: A tf_keras layer, built or not: one that TFMOT knows or any other.
        granularity: `"layer"`: one `s` for each kernel; `"channel"`: one for each output.
        g: `"sigmoid"` (the paper's), `"exp"` or `"softplus"`.
        s_init: What `s` starts from.
        weight_decay: Strength `lambda` of the L2 that is added to the loss,
            `lambda / 2 * (sum(w ** 2) + sum(s ** 2))`.
        selected: Which of the layer's kernels, as indices into the list of them; `None` for all.
        **kwargs: As for tf_keras' `Layer`. The name is `prune_with_soft_threshold_` and the
            layer's, in TFMOT's manner.

    Raises:
        ValueError: An unknown granularity or function, a negative strength.
        NotPrunableError: When built: a layer without kernels, or weights that are not finite.

    Limits: the weight is stored four times (raw, effective, TFMOT's mask, and in the optimizer
    what it keeps). Under a `tf.distribute.Strategy`, and in training loops without an optimizer of
    tf_keras, a kernel that is at hand is not brought up to date in every step, but by
    `UpdatePruningStep` at the end of each epoch, by `get_weights` and by `wrapper.layer`.

    Example:

    >>> import numpy as np
    >>> import keras_sparse_ortho as kso
    >>> tf_keras = kso.tfmot.register_initializers()
    >>> dense = tf_keras.layers.Dense(1, use_bias=False)
    >>> layer = kso.tfmot.PruneWithSoftThreshold(dense, s_init=0.0)
    >>> layer.build((None, 3))
    >>> layer.states[0].raw.assign([[0.25], [1.5], [-2.0]]) is not None
    True
    >>> layer(np.eye(3)).numpy().ravel().tolist()  # t = sigmoid(0) = 0.5
    [0.0, 1.0, -1.5]

    Reference:

    - Kusupati et al., "Soft Threshold Weight Reparameterization for Learnable Sparsity" (ICML
      2020), arXiv 2002.03231
    """

    def __init__(
        self,
        layer: Any,
        granularity: str = "layer",
        g: str = "sigmoid",
        s_init: float = -8.0,
        weight_decay: float = 0.0,
        *,
        selected: Sequence[int] | None = None,
        **kwargs: Any,
    ) -> None:
        check_arguments(granularity, g, s_init, weight_decay)
        self.granularity = granularity
        self.g = g
        self.s_init = float(s_init)
        self.weight_decay = float(weight_decay)
        super().__init__(layer, selected, **kwargs)

    @property
    def layer(self) -> Any:
        """The layer inside, whose kernels hold the effective weights."""
        if tf.executing_eagerly() and not in_replica():
            for state in self._soft():
                state.settle()
        return vars(self)["layer"]

    @layer.setter
    def layer(self, layer: Any) -> None:
        self.__dict__["layer"] = layer
        track(self, layer)

    @property
    def trainable_weights(self) -> list[Any]:
        """Those of the layer, with raw weights in the place of kernels, and the thresholds."""
        states = self._soft()
        raw = {id(state.weight.variable): state.raw for state in states}
        own = [raw.get(id(v), v) for v in self._inner.trainable_weights]
        return [*own, *(state.s for state in states)] if own else []

    @property
    def non_trainable_weights(self) -> list[Any]:
        """The kernels, which follow the raw weights, and what else is not trained."""
        trained = {id(v) for v in self.trainable_weights}
        return [v for v in [*self._inner.weights, *own_weights(self)] if id(v) not in trained]

    def _soft(self) -> list[SoftThresholdState]:
        return [state for state in self.states if isinstance(state, SoftThresholdState)]

    def _new_state(
        self, index: int, weight: TfKerasWeight, variable: Any, mask: Any, threshold: Any
    ) -> WeightState:
        value = check_finite(weight)
        suffix = f"_{index}" if index else ""
        dtype = getattr(variable, "true_dtype", variable.dtype)

        def add(name: str, shape: Sequence[int], value: float, **options: Any) -> Any:
            start = tf_keras.initializers.Constant(value)
            options = {"aggregation": tf.VariableAggregation.MEAN, "trainable": False, **options}
            return self.add_weight(
                f"{name}{suffix}", shape=shape, initializer=start, dtype=dtype, **options
            )

        raw = add("raw", weight.shape, 0.0, trainable=True, constraint=variable.constraint)
        shape = weight.outputs_shape if self.granularity == "channel" else ()
        # Constraints are applied after the raw weight's update: it comes first. (A replica of a
        # strategy could not assign to the kernel.)
        renewing = None if tf.distribute.has_strategy() else _Renewing()
        s = add("s", shape, self.s_init, trainable=True, constraint=renewing)
        offset, active = add("s_offset", (), 0.0), add("s_active", (), 1.0)
        state = SoftThresholdState(weight, raw, self.g, s, offset, active, (mask, threshold))
        if renewing is not None:
            renewing.show = state.show
        raw.assign(value)
        state.settle()
        self._add_losses(weight, variable, state)
        return state

    def _add_losses(self, weight: TfKerasWeight, variable: Any, state: SoftThresholdState) -> None:
        regularizer = weight.regularizer
        if regularizer is not None:
            # The layer adds that of the kernel, which has no gradient.
            self.add_loss(lambda: regularizer(state.raw) - tf.stop_gradient(regularizer(variable)))
        if self.weight_decay:
            decay = tf_keras.regularizers.L2(self.weight_decay / 2)
            self.add_loss(lambda: decay(state.raw) + decay(state.s))

    def _adopt(self) -> None:
        for state in self._soft():
            state.adopt_effective()

    def get_config(self) -> dict[str, Any]:
        """The layer and the arguments; raw weights and thresholds are saved as variables."""
        return {
            **super().get_config(),
            "granularity": self.granularity,
            "g": self.g,
            "s_init": self.s_init,
            "weight_decay": self.weight_decay,
        }


class _Renewing:
    """A constraint that leaves `s` as it is, and renews the kernel after the optimizer's step."""

    def __init__(self) -> None:
        self.show: Callable[[], Any] | None = None

    def __call__(self, s: Any) -> Any:
        if self.show is not None:
            self.show()
        return s


def check_arguments(granularity: str, g: str, s_init: float, weight_decay: float) -> None:
    """Raises ValueError for settings of soft thresholds that there are not."""
    if granularity not in ("layer", "channel"):
        raise ValueError(
            f"`granularity` must be 'layer' or 'channel'. Received: granularity={granularity!r}"
        )
    if g not in FUNCTIONS:
        raise ValueError(f"`g` must be one of {sorted(FUNCTIONS)}. Received: g={g!r}")
    if not np.isfinite(s_init):
        raise ValueError(f"`s_init` must be finite. Received: s_init={s_init!r}")
    if not weight_decay >= 0:
        raise ValueError(
            f"`weight_decay` must not be negative. Received: weight_decay={weight_decay!r}"
        )
