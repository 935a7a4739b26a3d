"""Building a layer, and the layers inside it, as its own call would."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_sparse_ortho._keras_internals._graphs import sublayers


def maybe_build(layer: keras.layers.Layer, call_spec: Any) -> None:
    """Builds a layer, and those inside it, as its own call would, with every shape it asks for."""
    with layer._open_name_scope():
        if not layer.built:
            layer._maybe_build(call_spec)
        if any(not inner.built for inner in layer._flatten_layers()):
            keras.Operation.compute_output_spec(layer, **call_spec.arguments_dict)


def is_built_in_calls(layer: keras.layers.Layer) -> bool:
    """Whether shapes may not do to build a layer: no `build`, or not of Keras and layers inside."""
    if type(layer).build is keras.layers.Layer.build:
        return True
    return bool(sublayers(layer)) and not type(layer).__module__.startswith("keras.")


class WrapperBuiltByCalls(keras.layers.Wrapper):
    """A wrapper whose layer is built with what its own call would give `build`.

    Keras' `Wrapper.build` passes the shape of the first input on; others may be needed, or a call.
    """

    _waits_for_call = False

    def building(self) -> contextlib.AbstractContextManager[Any]:
        """To be overridden: a context in which the layer is built."""
        return contextlib.nullcontext()

    def build_from_config(self, config: dict[str, Any]) -> None:
        """As Keras', if shapes are enough; else the first call builds the layer."""
        self._waits_for_call = is_built_in_calls(self.layer)
        if not self._waits_for_call:
            super().build_from_config(config)

    def layer_config(self) -> dict[str, Any]:
        """The serialized layer, without shapes if they do not build it."""
        config: dict[str, Any] = keras.saving.serialize_keras_object(self.layer)
        if is_built_in_calls(self.layer):
            config.pop("build_config", None)
        return config

    def get_build_config(self) -> dict[str, Any] | None:
        """As Keras', if shapes are enough."""
        return None if is_built_in_calls(self.layer) else super().get_build_config()

    def compute_output_spec(self, *args: Any, **kwargs: Any) -> Any:
        """That of the layer."""
        return self.layer.compute_output_spec(*args, **kwargs)

    def compute_output_shape(self, *args: Any, **kwargs: Any) -> Any:
        """That of the layer."""
        return self.layer.compute_output_shape(*args, **kwargs)

    def compute_mask(self, *args: Any, **kwargs: Any) -> Any:
        """That of the layer."""
        return self.layer.compute_mask(*args, **kwargs)

    def _maybe_build(self, call_spec: Any) -> None:
        # Keras says of a layer from a file that it is built, whatever its `build_from_config` did.
        if self._waits_for_call:
            self.built = self._waits_for_call = False
        with outside_of_functions():
            if not self.built:
                with self.building():
                    maybe_build(self.layer, call_spec)
            super()._maybe_build(call_spec)


@contextlib.contextmanager
def outside_of_functions() -> Iterator[None]:
    """Inside, layers can be built from values, also while TensorFlow traces a function.

    Its `fit` traces the training step of a model that is not built yet.
    """
    if keras.backend.backend() != "tensorflow":
        yield
        return
    import tensorflow as tf

    with tf.init_scope():
        yield


def adopt_call_interface(wrapper: keras.layers.Layer, layer: keras.layers.Layer) -> None:
    """Makes Keras pass `wrapper` the call arguments (training, mask, ...) that `layer` takes."""
    for name, value in vars(layer).items():
        if name.startswith("_call_") or name in ("call_signature_parameters", "supports_masking"):
            setattr(wrapper, name, value)
