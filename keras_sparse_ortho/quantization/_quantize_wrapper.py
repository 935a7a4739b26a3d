"""`QuantizeWrapper`: a layer with rounded inputs and outputs."""

import contextlib
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import as_text, check_config, check_integer
from keras_sparse_ortho._interception import with_settings
from keras_sparse_ortho._keras_internals import WrapperBuiltByCalls, restored
from keras_sparse_ortho.quantization._fake_quantize import FakeQuantize

# LiteRT computes these in one operation with the product before them.
FUSED = (keras.activations.linear, keras.activations.relu, keras.activations.relu6)

_MOST_INPUTS = 64  # each has variables: a damaged file must not ask for millions


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class QuantizeWrapper(WrapperBuiltByCalls):
    """Rounds the inputs and the output of a layer by `FakeQuantize`.

        y = q_out(layer(q_in(x)))

    An activation that LiteRT does not fuse with the product before it (all but linear, ReLU and
    ReLU6) gets rounded inputs, too. `inputs` is 0, or the number of the layer's input tensors.
    """

    transparent_path = True
    momentum = 0.99  # its own, also around a BatchNormalization

    def __init__(
        self,
        layer: keras.layers.Layer,
        inputs: int = 0,
        output: bool = True,
        momentum: float = 0.99,
        **kwargs: Any,
    ) -> None:
        if not isinstance(layer, keras.layers.Layer):
            raise ValueError(
                f"`layer` of a QuantizeWrapper must be a Keras layer. Received: {layer!r:.200}"
            )
        if check_integer("inputs", inputs, 0) > _MOST_INPUTS:
            raise ValueError(
                f"`inputs` must be {_MOST_INPUTS} at most. Received: {as_text(inputs)}"
            )
        # A wrapper inside has another policy, as it leaves casts to its layer.
        policy = innermost(layer).dtype_policy
        own = {"name": layer.name, "dtype": policy, "trainable": layer.trainable}
        super().__init__(layer, **{**own, **kwargs})
        self.momentum = momentum

        def rounding(name: str) -> FakeQuantize:
            return FakeQuantize(momentum, name=name, dtype=policy)

        self.of_inputs = [rounding(f"input_{k}") for k in range(inputs)]
        self.of_output = rounding("output") if output else None
        apart = activation_of(layer) not in (None, *FUSED)
        self.of_activation = rounding("activation") if apart else None

    def build(self, input_shape: Any = None) -> None:
        with self.building():
            super().build(input_shape)
        for own in self._ranges():
            if not own.built:
                own.build()

    def _ranges(self) -> list[FakeQuantize]:
        all_of_them = (*self.of_inputs, self.of_activation, self.of_output)
        return [own for own in all_of_them if own is not None]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        if self.of_inputs:
            ranges = iter(self.of_inputs)
            count = sum(map(_is_float, keras.tree.flatten((args, kwargs))))
            if count != len(self.of_inputs):
                raise ValueError(
                    f"The layer '{self.name}' has ranges for {len(self.of_inputs)} input tensors. "
                    f"Received: {count}"
                )
            args, kwargs = keras.tree.map_structure(
                lambda x: next(ranges)(x) if _is_float(x) else x, (args, kwargs)
            )
        inner, own = innermost(self.layer), self.of_activation
        apart: Any = contextlib.nullcontext()
        if own is not None:  # the activation gets rounded inputs
            activation = inner.activation
            apart = with_settings(inner, activation=lambda x: activation(own(x)))
        with apart:
            result = self.layer(*args, **kwargs)
        return result if self.of_output is None else self.of_output(result)

    def __getattr__(self, name: str) -> Any:
        inherited = getattr(super(), "__getattr__", None)  # where torch has submodules
        if inherited is not None:
            with contextlib.suppress(AttributeError):
                return inherited(name)
        if name.startswith("_") or name == "layer" or "momentum" not in vars(self):
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        return getattr(self.layer, name)

    @property
    def prunable_weights(self) -> list[Any]:
        return getattr(self.layer, "prunable_weights", [])

    def wrapper_config(self) -> dict[str, Any]:
        return {
            **keras.layers.Layer.get_config(self),
            "inputs": len(self.of_inputs),
            "output": self.of_output is not None,
            "momentum": self.momentum,
        }

    # Keras would pass over ranges of a file that the configuration does not have.
    def save_own_variables(self, store: Any) -> None:
        store["ranges"] = np.array(len(self._ranges()))

    def load_own_variables(self, store: Any) -> None:
        own = len(self._ranges())
        saved = int(store["ranges"][()]) if "ranges" in store else own
        if saved != own:
            raise ValueError(
                f"The file has the ranges of {saved} tensors for layer '{self.name}'; its "
                f"configuration must have as many. Received: {own}"
            )

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> "QuantizeWrapper":
        check_config("QuantizeWrapper", config, "layer")
        layer = config["layer"]
        if not isinstance(layer, keras.layers.Layer):
            layer = restored(layer, custom_objects)
        return cls(**{**config, "layer": layer})


def innermost(layer: Any) -> Any:
    while getattr(type(layer), "transparent_path", False):
        layer = layer.layer
    return layer


def activation_of(layer: Any) -> Any:
    """The activation that a layer with kernels applies itself, or `None`."""
    inner = innermost(layer)
    if isinstance(inner, keras.layers.Activation) or not inner.weights:
        return None
    return vars(inner).get("activation")


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and keras.backend.is_float_dtype(
        keras.backend.standardize_dtype(x.dtype)
    )
