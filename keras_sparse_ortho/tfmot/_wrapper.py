"""The base of the pruning wrappers for tf_keras: TFMOT's class with effective weights."""

import abc
import types
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.tfmot._tf_keras_internals import (
    PruneLowMagnitude,
    attribute_overrides,
    build_attention,
    build_by_calling,
    every_layer_is_built,
    forget_calls,
    known_to_tfmot,
    serializing_other_initializers,
    smart_cond,
    takes,
    tf_keras,
    tfmot,
)
from keras_sparse_ortho.tfmot._weights import TfKerasWeight, find_kernels

# Arguments by which TFMOT's wrapper ranks magnitudes.
_RANKING = {
    "pruning_schedule",
    "block_size",
    "block_pooling_type",
    "sparsity_m_by_n",
}


class EffectiveWeightWrapper(PruneLowMagnitude):
    """A TFMOT wrapper whose layer sees effective weights in calls; dead entries get no gradient."""

    states: list[Any]  # of the pruned weights; empty before the layer is built

    def __init__(
        self, layer: Any, selected: Sequence[int] | None = None, **kwargs: Any
    ) -> None:
        if ranking_options := {
            name: kwargs[name] for name in sorted(_RANKING.intersection(kwargs))
        }:
            names = list(ranking_options)
            raise ValueError(
                f"{type(self).__name__} does not rank magnitudes, so {names} would have no "
                "effect. For TFMOT's own pruning with a density for each layer use "
                "keras_sparse_ortho.tfmot.prune_by_budget; for blocks or N:M give PruneWithMask "
                "such `masks`, or the layer an initializer ExactOrthogonal(structure=Block(...) "
                f"or NByM(...)). Received: {ranking_options}"
            )
        if isinstance(layer, keras.layers.Layer):
            raise NotPrunableError(
                f"{type(self).__name__} wraps layers of tf_keras; those of Keras 3 are wrapped by "
                f"keras_sparse_ortho.PrunableLayer. Received: layer={layer.name!r} of Keras 3, "
                f"{type(layer).__name__}"
            )
        self._selected = (
            None if selected is None else [int(k) for k in selected]
        )
        # Bypass `Layer.__setattr__`: tf_keras would track the states.
        self.__dict__["states"] = []
        # The layers inside cast inputs and weights; parametrizations see full precision.
        if isinstance(layer, tf_keras.layers.Layer):
            kwargs.setdefault("dtype", layer.dtype)
        # TFMOT's wrapper wants a schedule; masks and thresholds here do not use it.
        never = tfmot.sparsity.keras.ConstantSparsity(0.0, begin_step=0)
        with known_to_tfmot(layer):
            super().__init__(
                layer, pruning_schedule=never, autocast=False, **kwargs
            )
        self.supports_masking = self._inner.supports_masking
        # Before the first call, so that TFMOT's callbacks find it in an unbuilt model.
        self.pruning_step = self.add_weight(
            "pruning_step",
            shape=[],
            initializer=tf_keras.initializers.Constant(-1),
            dtype=tf.int64,
            trainable=False,
            aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA,
        )

    def build(self, input_shape: Any) -> None:
        """Builds the inner layer and the state of each kernel."""
        self._build_layer(input_shape)
        kernels = find_kernels(self._inner, self._inner.name)
        if not kernels:
            raise NotPrunableError(
                f"The layer {self._inner.name!r} has no kernel to prune, or has not created it "
                "yet (call the layer once, then wrap it). "
                f"Received: layer={type(self._inner).__name__}"
            )
        numbers = (
            range(len(kernels)) if self._selected is None else self._selected
        )
        weights = [kernels[k] for k in numbers]
        super(PruneLowMagnitude, self).build(input_shape)
        # Bypass `Layer.__setattr__`: it would track them as the wrapper's own and save them twice.
        self.__dict__["prunable_weights"] = [
            weight.variable for weight in weights
        ]
        del self.pruning_vars
        self.__dict__["pruning_vars"] = []
        for index, weight in enumerate(weights):
            # As TFMOT creates them, but with unique names, which `.h5` files need.
            mask = self._add(index, weight, "mask", 1.0, shape=weight.shape)
            threshold = self._add(index, weight, "threshold", 0.0)
            self.pruning_vars.append((weight.variable, mask, threshold))
            self.states.append(self._new_state(index, weight, mask, threshold))
        self.pruning_obj = types.SimpleNamespace(weight_mask_op=self._settle)

    def _add(
        self,
        index: int,
        weight: TfKerasWeight,
        name: str,
        fill: float,
        **kwargs: Any,
    ) -> Any:
        return self.add_weight(
            f"{name}_{index}" if index else name,
            initializer=tf_keras.initializers.Constant(fill),
            dtype=getattr(weight.variable, "true_dtype", weight.variable.dtype),
            aggregation=tf.VariableAggregation.MEAN,
            **{"shape": (), "trainable": False, **kwargs},
        )

    def _build_layer(self, input_shape: Any) -> None:
        if not self._inner.built:
            self._inner.build(input_shape)
            self._inner.built = True
        build_attention(self._inner)
        kernels = find_kernels(self._inner, self._inner.name)
        if self._selected and max(self._selected) >= len(kernels):
            # A SavedModel makes its blocks from their classes; their layers need a call.
            inputs = tf_keras.Input(batch_shape=tuple(input_shape))
            build_by_calling(self._inner, (inputs,), {})

    def build_from_config(self, config: dict[str, Any]) -> None:
        if config.get("input_shape") is not None:
            # A list where it comes from a file.
            shape = tf.TensorShape(config["input_shape"])
            self._build_layer(shape)
            if find_kernels(self._inner, self._inner.name):
                self.build(shape)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.states and not every_layer_is_built(self._inner):
            build_by_calling(self._inner, args, kwargs)
        return super().__call__(*args, **kwargs)

    @abc.abstractmethod
    def _new_state(
        self, index: int, weight: TfKerasWeight, mask: Any, threshold: Any
    ) -> Any:
        """The state of a weight, given its variables for mask (ones) and threshold (0)."""

    def _settle(self) -> Any:
        """Updates the layer's variables; TFMOT's `UpdatePruningStep` calls it after each epoch."""
        for state in self.states:
            state.settle()
        return tf.no_op()

    @property
    def _inner(self) -> Any:
        """The layer; a subclass' `layer` may have side effects."""
        return vars(self)["layer"]

    def call(
        self,
        inputs: Any,
        *args: Any,
        training: Any = None,
        mask: Any = None,
        **kwargs: Any,
    ) -> Any:
        """Calls the inner layer with effective kernels; in training it counts the step."""
        learning = (
            tf_keras.backend.learning_phase() if training is None else training
        )
        smart_cond(learning, self._count_step, tf.no_op)
        for name, value in {"training": training, "mask": mask}.items():
            if value is not None and takes(self._inner, name):
                kwargs[name] = value
        owned = [(state, state.weight.owner) for state in self.states]
        with attribute_overrides(
            (
                owner,
                state.weight.attribute,
                tf.cast(state.effective(), owner.compute_dtype),
            )
            for state, owner in owned
        ):
            outputs = self._inner(inputs, *args, **kwargs)
        forget_calls(self._inner)
        return outputs

    def _count_step(self) -> Any:
        with tf.control_dependencies([self.pruning_step.assign_add(1)]):
            return tf.no_op()

    @property
    def losses(self) -> list[Any]:
        """Losses of layer and wrapper; TFMOT's property omits those added as functions."""
        return list(super(PruneLowMagnitude, self).losses)

    def compute_mask(self, *args: Any, **kwargs: Any) -> Any:
        return self.layer.compute_mask(*args, **kwargs)

    def get_weights(self) -> list[np.ndarray]:
        self._settle()
        return super().get_weights()

    def set_weights(self, weights: Sequence[np.ndarray]) -> None:
        super().set_weights(weights)
        for state in self.states:
            state.adopt_effective()

    def get_config(self) -> dict[str, Any]:
        with serializing_other_initializers():
            config = super(PruneLowMagnitude, self).get_config()
        return {**config, "selected": self._selected}

    @classmethod
    def from_config(
        cls,
        config: dict[str, Any],
        custom_objects: dict[str, Any] | None = None,
    ) -> "EffectiveWeightWrapper":
        config = dict(config)
        layer = config.pop("layer")
        # The format of `.h5` files and SavedModel.
        legacy = "module" not in layer
        layer = tf_keras.layers.deserialize(
            layer, custom_objects=custom_objects, use_legacy_format=legacy
        )
        return cls(layer, **config)
