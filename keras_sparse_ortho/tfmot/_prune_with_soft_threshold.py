"""Learnt thresholds (STR): `PruneWithSoftThreshold`, and `TargetDensity`, which steers them."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.callbacks import (
    DEFAULT_FLOOR,
    ThresholdSteering,
    warn_not_finite,
)
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import Selection
from keras_sparse_ortho.parametrizations import SoftThreshold, critical_offsets
from keras_sparse_ortho.schedules import as_schedule
from keras_sparse_ortho.tfmot._tf_keras_internals import (
    in_strip_pruning,
    own_weights,
    tf_keras,
    track,
    zero_slots,
)
from keras_sparse_ortho.tfmot._weights import (
    TfKerasWeight,
    as_numpy,
    prunable_weights,
    rewrite,
    select_weights,
)
from keras_sparse_ortho.tfmot._wrapper import EffectiveWeightWrapper

# In TensorFlow, whatever the backend of Keras 3.
_FUNCTIONS = {"sigmoid": tf.sigmoid, "exp": tf.exp, "softplus": tf.nn.softplus}


# A kernel that nothing has pruned: its density, and how far its `s` has moved.
_ALMOST_DENSE = 0.9
_HARDLY_MOVED = 0.5


def _shrink(value: Any, threshold: Any) -> Any:
    """`sign(w) * relu(|w| - t)`, with the gradients given in `PruneWithSoftThreshold`."""
    axes = [
        k for k, size in enumerate(threshold.shape) if size != value.shape[k]
    ]

    @tf.custom_gradient
    def shrunk(w: Any, t: Any) -> tuple[Any, Callable[[Any], tuple[Any, Any]]]:
        # By subtraction, so that w = t = 0 gives 0: an entry frozen at 0 gets no gradient.
        effective = w - tf.clip_by_value(w, -t, t)

        def gradient(upstream: Any) -> tuple[Any, Any]:
            live = tf.where(effective != 0, upstream, tf.zeros((), w.dtype))
            terms = upstream * tf.sign(effective)
            scalar = len(t.shape) == 0
            total = tf.reduce_sum(
                terms, None if scalar else axes, keepdims=not scalar
            )
            return live, -total

        return effective, gradient

    return shrunk(tf.convert_to_tensor(value), threshold)


@dataclasses.dataclass(eq=False, repr=False)
class SoftThresholdState:
    """As `Masked`, with `sign(w) * relu(|w| - t)`, which `ThresholdSteering` can steer."""

    weight: TfKerasWeight
    raw: Any
    g: str
    s: Any
    offset: Any
    active: Any  # 1, or 0 once frozen
    kept: tuple[Any, Any]  # TFMOT's mask and threshold
    counted = "entries"

    def effective(self) -> Any:
        shrunk = _shrink(self.raw, tf.cast(self.threshold(), self.raw.dtype))
        # Once frozen TFMOT's mask says what is dead: an optimizer that the callback does not know
        # still moves these entries.
        live = tf.logical_or(self.active > 0, tf.cast(self.kept[0], "bool"))
        return tf.where(live, shrunk, tf.zeros((), shrunk.dtype))

    def mask(self) -> np.ndarray:
        return as_numpy(self.effective()) != 0

    def show(self) -> Any:
        effective = self.effective()
        self.weight.variable.assign(effective)
        return effective

    def settle(self) -> None:
        effective, (_, threshold) = self.show(), self.kept
        self._assign_mask(effective != 0)
        threshold.assign(
            tf.cast(tf.reduce_mean(self.threshold()), threshold.dtype)
        )

    def _assign_mask(self, live: Any) -> None:
        mask = self.kept[0]
        mask.assign(tf.cast(live, mask.dtype))

    def adopt_effective(self) -> None:
        """Sets the raw weight so that the kernel is effective: `w = w_e + sign(w_e) * t`."""
        value = tf.convert_to_tensor(self.weight.variable)
        self._assign_mask(value != 0)
        self.raw.assign(
            value + tf.sign(value) * tf.cast(self.threshold(), value.dtype)
        )
        self.settle()

    @property
    def frozen(self) -> bool:
        return not float(as_numpy(self.active))

    def scales(self) -> np.ndarray:
        return np.asarray(np.abs(as_numpy(self.raw)))

    def critical_offsets(self) -> np.ndarray:
        return critical_offsets(self.g, self.scales(), as_numpy(self.s))

    def freeze(self, mask: np.ndarray) -> np.ndarray:
        """Fixes the live entries: `w` becomes `w_e` on the mask and 0 elsewhere, `t` becomes 0."""
        raw, value = as_numpy(self.raw), as_numpy(self.effective())
        # An entry of the mask at the threshold may round to 0: it keeps its sign.
        value = np.where(
            value == 0, np.finfo(np.float32).tiny * np.sign(raw), value
        )
        tf_keras.backend.set_value(self.raw, np.where(mask, value, 0))
        self._assign_mask(mask)
        self.active.assign(0.0)
        self.settle()
        return mask

    def threshold(self) -> Any:
        t = _FUNCTIONS[self.g](self.s + self.offset)
        # Unlike a product: 0 for an inactive threshold even if g overflows.
        return tf.where(self.active > 0, t, tf.zeros((), t.dtype))


@tf_keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class PruneWithSoftThreshold(EffectiveWeightWrapper):
    """Wraps a tf_keras layer so that its kernels are `w_e = sign(w) * relu(|w| - t)`, `t = g(s)`.

    Soft threshold reparameterization (STR), with the gradients of `parametrizations.SoftThreshold`.
    The raw weight `w` and `s` are trainable variables of the wrapper. The layer's kernel holds
    `w_e`: optimizers of tf_keras update it in every step (as a constraint), as do TFMOT's
    `UpdatePruningStep`, saving, and reading the attribute `layer`. The kernel's regularizer and
    constraint act on `w`.

    Args:
        layer: tf_keras Layer, built or not, whether or not TFMOT supports it.
        granularity: `"layer"`: one `s` per kernel; `"channel"`: one per output.
        g: `"sigmoid"` (as in the paper), `"exp"` or `"softplus"`.
        s_init: float. Initial value of `s`.
        weight_decay: float. Strength `lambda` of an L2 penalty in the loss,
            `lambda / 2 * (sum(w ** 2) + sum(s ** 2))`.
        selected: list of int. Indices of kernels in the list of the layer's; `None` for all.
        **kwargs: As for tf_keras' `Layer`.

    Warns:
        UserWarning: In TFMOT's `strip_pruning`, of kernels that are almost dense and that no
            `TargetDensity` has steered.

    Raises:
        ValueError: An unknown granularity or function, a negative strength.
        NotPrunableError: When built: a layer without kernels, or weights that are not finite.

    Limits: the weight is stored as raw and effective weight, and as TFMOT's mask. Under a
    `tf.distribute.Strategy`, and in training loops without a tf_keras optimizer, no step updates
    the kernel: `UpdatePruningStep`, `get_weights` and `wrapper.layer` do.

    Examples:
        >>> import numpy as np, keras_sparse_ortho as kso
        >>> dense = kso.tfmot.register_initializers().layers.Dense(1, use_bias=False)
        >>> layer = kso.tfmot.PruneWithSoftThreshold(dense, s_init=0.0)
        >>> layer.build((None, 3))
        >>> _ = layer.states[0].raw.assign([[0.25], [1.5], [-2.0]])
        >>> layer(np.eye(3)).numpy().ravel().tolist()  # t = sigmoid(0) = 0.5
        [0.0, 1.0, -1.5]
    """

    has_warned_of_thresholds = False

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
        if granularity not in ("layer", "channel"):
            raise ValueError(
                f"`granularity` is 'layer' or 'channel'. Received: {granularity=}"
            )
        checked = SoftThreshold(granularity, g, s_init, weight_decay)
        self.granularity, self.g = granularity, g
        self.s_init, self.weight_decay = checked.s_init, checked.weight_decay
        super().__init__(layer, selected, **kwargs)

    @property
    def layer(self) -> Any:
        # One replica of a strategy must not assign to all.
        distribute = tf.distribute
        in_replica = (
            distribute.has_strategy()
            and not distribute.in_cross_replica_context()
        )
        if tf.executing_eagerly() and not in_replica:
            for state in self.states:
                state.settle()
        if in_strip_pruning():
            self._warn_of_low_thresholds()
        return vars(self)["layer"]

    @layer.setter
    def layer(self, layer: Any) -> None:
        self.__dict__["layer"] = layer
        track(self, layer)

    def _warn_of_low_thresholds(self) -> None:
        """Warns once of kernels that no `TargetDensity` has pruned and training has left dense."""
        lines = [
            f"{state.weight.path!r}: {state.mask().mean():.4g} at threshold "
            f"{np.mean(as_numpy(state.threshold())):.3g}"
            for state in self.states
            if not self.has_warned_of_thresholds
            and not state.frozen
            and not float(as_numpy(state.offset))
            and state.mask().mean() > _ALMOST_DENSE
            and abs(np.mean(as_numpy(state.s)) - self.s_init) < _HARDLY_MOVED
        ]
        if not lines:
            return
        self.__dict__["has_warned_of_thresholds"] = True
        warn_user(
            "These kernels are stripped almost dense: training has hardly moved their thresholds. "
            "To end at a density, train with the callback keras_sparse_ortho.tfmot.TargetDensity; "
            "else raise `s_init` or `weight_decay`. Received: densities "
            f"{', '.join(lines)}"
        )

    @property
    def trainable_weights(self) -> list[Any]:
        raw = {id(state.weight.variable): state.raw for state in self.states}
        own = [raw.get(id(v), v) for v in self._inner.trainable_weights]
        return [*own, *(state.s for state in self.states)] if own else []

    @property
    def non_trainable_weights(self) -> list[Any]:
        trained = {id(v) for v in self.trainable_weights}
        return [
            v
            for v in [*self._inner.weights, *own_weights(self)]
            if id(v) not in trained
        ]

    def _new_state(
        self, index: int, weight: TfKerasWeight, mask: Any, threshold: Any
    ) -> Any:
        """The threshold of one kernel, with its variables."""
        value, variable = weight.finite_raw_value(), weight.variable
        add = functools.partial(self._add, index, weight)
        raw = add(
            "raw",
            0.0,
            shape=weight.shape,
            trainable=True,
            constraint=variable.constraint,
        )
        shape = weight.outputs_shape if self.granularity == "channel" else ()

        def show_kernel(s: Any) -> Any:
            state.show()
            return s

        # The constraint of `s` runs after the update of the raw weight, which comes first. (A
        # replica of a strategy could not assign to the kernel.)
        update = None if tf.distribute.has_strategy() else show_kernel
        s = add(
            "s", self.s_init, shape=shape, trainable=True, constraint=update
        )
        offset, active = add("s_offset", 0.0), add("s_active", 1.0)
        state = SoftThresholdState(
            weight, raw, self.g, s, offset, active, (mask, threshold)
        )
        raw.assign(value)
        state.settle()
        regularizer = weight.of_owner("regularizer")
        if regularizer is not None:
            # Replaces the penalty that the layer adds for the kernel, which has no gradient.
            self.add_loss(
                lambda: (
                    regularizer(state.raw)
                    - tf.stop_gradient(regularizer(variable))
                )
            )
        if self.weight_decay:
            decay = tf_keras.regularizers.L2(self.weight_decay / 2)
            self.add_loss(lambda: decay(state.raw) + decay(state.s))
        return state

    def get_config(self) -> dict[str, Any]:
        names = ("granularity", "g", "s_init", "weight_decay")
        return super().get_config() | {
            name: getattr(self, name) for name in names
        }


def prune_with_soft_threshold(
    model: Any,
    granularity: str = "layer",
    g: str = "sigmoid",
    s_init: float = -8.0,
    weight_decay: float = 0.0,
    *,
    include: Selection = None,
    exclude: Selection = None,
) -> Any:
    """Wraps the layers of a tf_keras model so that their kernels get learnt thresholds (STR).

    The counterpart of `keras_sparse_ortho.parametrize(model, SoftThreshold(...))`. `granularity`,
    `g`, `s_init` and `weight_decay` are as in `PruneWithSoftThreshold`, the wrapper; `model`,
    `include` and `exclude` as in `prune_with_mask`. With `tfmot.TargetDensity` training ends at a
    given density. The result is new and not compiled; the given weights are its raw weights.

    Examples:
        >>> import numpy as np, keras_sparse_ortho as kso
        >>> tf_keras = kso.tfmot.register_initializers()
        >>> hidden = tf_keras.layers.Dense(34, name="a")
        >>> dense = tf_keras.Sequential([tf_keras.Input((64,)), hidden])
        >>> model = kso.tfmot.prune_with_soft_threshold(dense)
        >>> model.compile("sgd", "mse")
        >>> history = model.fit(np.ones((64, 64)), np.ones((64, 34)), verbose=0, batch_size=4,
        ...                     callbacks=[kso.tfmot.TargetDensity(0.125, frequency=4)])
        >>> kso.tfmot.prunable_weights(model)
        [<a/kernel shape=(64, 34), density=0.125>]
    """

    def wrap(
        copy: Any, indices: list[int], kernels: Any
    ) -> PruneWithSoftThreshold:
        return PruneWithSoftThreshold(
            copy, granularity, g, s_init, weight_decay, selected=indices
        )

    result, wrapped = rewrite(
        model, select_weights(model, include, exclude), wrap
    )
    for wrapper, *_ in wrapped:
        for state in wrapper.states:
            state.raw.assign(tf.convert_to_tensor(state.weight.variable))
            state.settle()
    return result


def _thresholds(weights: Sequence[Any]) -> list[SoftThresholdState]:
    return [w.state for w in weights if isinstance(w.state, SoftThresholdState)]


class TargetDensity(tf_keras.callbacks.Callback):
    """`keras_sparse_ortho.callbacks.TargetDensity` for models of `prune_with_soft_threshold`.

    With its arguments; `frequency` is 100 by default, and a `schedule` may be one of TFMOT's, whose
    density is replaced. It may come before or after `UpdatePruningStep`. Logs of every epoch get
    `density`, the live fraction of all kernels, and `threshold`, the mean over thresholds. When
    training begins, raises NotPrunableError if no weight has a soft threshold; ValueError without a
    schedule in a custom training loop.
    """

    def __init__(
        self,
        density: float,
        schedule: Any = None,
        *,
        frequency: int = 100,
        freeze: bool = True,
        floor: float = DEFAULT_FLOOR,
    ) -> None:
        super().__init__()
        plan = None if schedule is None else as_schedule(schedule)
        self._steering = ThresholdSteering(
            density, plan, frequency, freeze, floor
        )
        self._last: int | None = None  # step that began
        self._calls = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        thresholds = _thresholds(prunable_weights(self.model))
        if not thresholds:
            raise NotPrunableError(
                "TargetDensity needs weights with soft thresholds, see keras_sparse_ortho.tfmot."
                f"prune_with_soft_threshold. Received: model={self.model.name!r} without any"
            )
        params = getattr(self, "params", None) or {}  # none in a custom loop
        epochs, steps = params.get("epochs"), params.get("steps")
        self._steering.take(thresholds)
        self._steering.resolve(epochs * steps if epochs and steps else None)
        self._last, self._calls = None, 0

    def on_train_batch_begin(
        self, batch: int, logs: dict[str, Any] | None = None
    ) -> None:
        step = self._step()
        self._calls += 1
        executed = 1 if self._last is None else step - self._last
        if executed:  # no update after a step that loss scaling skipped
            self._last = step
            if self._steering.is_due(step, executed):
                self._steer(step)

    def on_epoch_end(
        self, epoch: int = -1, logs: Any = None, *, batch: int = -1
    ) -> None:
        # Loops of one's own have no `on_train_end`; TFMOT's guide calls the argument `batch`.
        step = self._step()
        if self._steering.freeze and self._steering.has_ended(step):
            self._steer_at_end(step)
        if logs is not None:
            weights = prunable_weights(self.model)
            means = [
                np.mean(as_numpy(state.threshold()))
                for state in _thresholds(weights)
            ]
            logs["density"] = sum(w.live for w in weights) / sum(
                w.size for w in weights
            )
            logs["threshold"] = float(np.mean(means))

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        step = self._step()
        if self._steering.is_due_at_end(step, step - (self._last or 0)):
            self._steer_at_end(step)

    def _steer_at_end(self, step: int) -> None:
        try:
            self._steer(step)
        # An error here would cost `fit` its History.
        except NotPrunableError as error:
            warn_not_finite("TargetDensity", error)

    def _step(self) -> int:
        made = getattr(
            getattr(self.model, "optimizer", None), "iterations", self._calls
        )
        return int(tf_keras.backend.get_value(made))

    def _steer(self, step: int) -> None:
        state: Any
        for state, _ in self._steering.steer(step):
            zero_slots(
                self.model.optimizer, state.raw, as_numpy(state.raw) == 0
            )
        for state in self._steering.thresholds:  # frozen ones are up to date
            state.settle()
