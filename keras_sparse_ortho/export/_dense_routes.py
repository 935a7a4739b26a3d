"""The routes that store every weight, zeros included: float32, float16 and int8."""

from typing import Any

import keras

from keras_sparse_ortho.export._layers import all_layers
from keras_sparse_ortho.export._route import Batches, Route


class Float32(Route):
    """All weights as float32. Differs from Keras by the order of summation only."""

    name = "float32"
    quantization = None
    measure = "max"
    tolerance = 1e-5

    def configure(self, converter: Any, batches: Batches | None) -> None:
        """Leave the converter's defaults, which are float32."""


class _Optimized(Route):
    measure = "rms"

    def configure(self, converter: Any, batches: Batches | None) -> None:
        import tensorflow as tf

        converter.optimizations = [tf.lite.Optimize.DEFAULT]


class Float16(_Optimized):
    """Weights stored as float16 and widened at load. Measured errors: up to 6e-4."""

    name = "float16"
    quantization = "float16"
    tolerance = 5e-3

    def configure(self, converter: Any, batches: Batches | None) -> None:
        """Store the weights as float16."""
        import tensorflow as tf

        super().configure(converter, batches)
        converter.target_spec.supported_types = [tf.float16]


class DynamicInt8(_Optimized):
    """Weights of 1024 and more entries as int8, activations quantized on the fly.

    Measured errors: up to 0.014.
    """

    name = "dynamic_int8"
    quantization = "dynamic_int8"
    tolerance = 0.1


class Int8(_Optimized):
    """Weights and activations as int8, float32 at the file's inputs and outputs.

    Measured errors: 0.005 to 0.05, and 0.12 for a two-block transformer.
    """

    name = "int8"
    quantization = "int8"
    needs_representative_data = True
    tolerance = 0.25

    def check(self, model: keras.Model) -> None:
        """Refuse recurrent loops: TensorFlow's calibrator dies on them (seen in 2.21)."""
        for layer in all_layers(model):
            if isinstance(layer, keras.layers.RNN) and not layer.unroll:
                raise ValueError(
                    "Full int8 quantization of a recurrent loop crashes TensorFlow's calibrator. "
                    "Build the layer with `unroll=True`, or use quantization='dynamic_int8'. "
                    f"Received: quantization='int8' with layer '{layer.name}' "
                    f"({type(layer).__name__}, unroll=False)"
                )

    def configure(self, converter: Any, batches: Batches | None) -> None:
        """Calibrate the activations on the representative data."""
        import tensorflow as tf

        super().configure(converter, batches)
        converter.representative_dataset = batches
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
