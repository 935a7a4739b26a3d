"""The routes from a SavedModel to a LiteRT file: dense ones, sparse ones, and all by name.

The seam for further encodings: a new route is a small subclass of `Route`, listed in `ROUTES`.
Everything else (static shapes, the worker processes, the comparison, the zero count, the report)
is the same for all routes.
"""

import abc
from collections.abc import Callable, Iterator
from typing import Any, Final

import keras
import numpy as np

from keras_sparse_ortho.export._errors import ExportRouteError
from keras_sparse_ortho.export._plain_model import all_layers
from keras_sparse_ortho.export._sparse_encoding import (
    BLOCK_1X4,
    BLOCK_1X16,
    CSR,
    Encoded,
    Encoding,
    encode,
)

Batches = Callable[[], Iterator[dict[str, np.ndarray]]]


class Route(abc.ABC):
    """How a SavedModel becomes the bytes of a LiteRT file, and how exact the file must be."""

    name: str
    quantization: str | None
    encoding: str = "dense"
    needs_representative_data: bool = False
    measure: str
    tolerance: float

    @property
    def converted_as(self) -> "Route":
        """The route whose conversion `finish` starts from: itself, unless it rewrites another's."""
        return self

    def finish(self, content: bytes) -> Encoded:
        """What is done to the converted file; routes that the converter writes do nothing.

        Raises:
            ExportRouteError: if the file has no weight that this route is for.
        """
        return Encoded(content, (), {})

    def check(self, model: keras.Model) -> None:  # noqa: B027 - most routes take every model
        """Refuse a model this route is known to fail on, before any time is spent.

        Raises:
            ValueError: with the reason and the way out.
        """

    def convert(self, saved_model: str, batches: Batches | None) -> bytes:
        """Convert a SavedModel; runs in the worker process, on the TensorFlow backend.

        Args:
            saved_model: Folder of the SavedModel, with static shapes.
            batches: Gives the representative data, one call of the model at a time, by name.
        """
        import tensorflow as tf

        converter = tf.lite.TFLiteConverter.from_saved_model(saved_model)
        self.configure(converter, batches)
        return bytes(converter.convert())

    @abc.abstractmethod
    def configure(self, converter: Any, batches: Batches | None) -> None:
        """Set the options of a `tf.lite.TFLiteConverter`."""


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


class _Derived(Route):
    """A route with the storage, measure and tolerance of another."""

    def __init__(self, base: Route, encoding: str) -> None:
        self.base = base
        self.name = f"{base.name}+{encoding}"
        self.quantization = base.quantization
        self.encoding = encoding
        self.needs_representative_data = base.needs_representative_data
        self.measure = base.measure
        self.tolerance = base.tolerance

    def check(self, model: keras.Model) -> None:
        self.base.check(model)

    def configure(self, converter: Any, batches: Batches | None) -> None:
        self.base.configure(converter, batches)


class ConverterSparsity(_Derived):
    """What the converter's own `EXPERIMENTAL_SPARSITY` makes of the weights.

    Rank 2 and 4, more than 30% zeros: elementwise behind a DENSIFY operation, which restores the
    dense weight at load; or, where the zeros come in blocks, 1x4 (float) and 1x16 (int8). Known
    to go wrong: float16 where a Dense turns out 1x4 (crash), dynamic int8 with XNNPACK (refused
    or crash), 1x4 where the inputs are not divisible by 4 (wrong answers). All of it is found by
    running the file.
    """

    def __init__(self, base: Route) -> None:
        super().__init__(base, "sp")

    def configure(self, converter: Any, batches: Batches | None) -> None:
        """Add the converter's option to those of the storage."""
        import tensorflow as tf

        super().configure(converter, batches)
        options = list(converter.optimizations or [])
        converter.optimizations = [*options, tf.lite.Optimize.EXPERIMENTAL_SPARSITY]


class SparseFullyConnected(_Derived):
    """Dense layers' weights given sparsely to FULLY_CONNECTED, by our own rewriting.

    Only the weights of matrix products are encoded: LiteRT has no kernel for sparse convolutions.
    """

    def __init__(self, base: Route, layout: Encoding) -> None:
        super().__init__(base, layout.name)
        self.layout = layout

    @property
    def converted_as(self) -> Route:
        """The dense route of the same storage."""
        return self.base

    def finish(self, content: bytes) -> Encoded:
        """Encode the weights that gain by it."""
        encoded = encode(content, self.layout)
        if not encoded.encoded:
            reasons = [f"'{name}': {why}" for name, why in list(encoded.kept.items())[:5]]
            raise ExportRouteError(
                f"Route '{self.name}' needs a weight of a Dense layer that can be stored as "
                f"{self.layout.name}; take the dense route '{self.base.name}'. "
                f"Received: {'; '.join(reasons) or 'no FULLY_CONNECTED operation in the file'}"
            )
        return encoded


_F32, _F16, _DYNAMIC, _INT8 = DENSE_ROUTES = (Float32(), Float16(), DynamicInt8(), Int8())

ROUTES: Final[tuple[Route, ...]] = (
    *DENSE_ROUTES,
    *(ConverterSparsity(route) for route in DENSE_ROUTES),
    SparseFullyConnected(_F32, CSR),
    SparseFullyConnected(_F32, BLOCK_1X4),
    SparseFullyConnected(_DYNAMIC, BLOCK_1X16),
    SparseFullyConnected(_INT8, BLOCK_1X16),
)

_FLOAT16 = (
    "LiteRT widens float16 weights by a DEQUANTIZE operation, so that no kernel sees the sparse "
    "ones, and the converter's 1x4 blocks of float16 crash the interpreter; take 'float16+sp', "
    "'float32+csr' or 'float32+1x4'"
)
_DYNAMIC_INT8 = (
    "the kernel takes every sparse int8 weight for blocks of 1x16 and answers wrongly; take "
    "'dynamic_int8+1x16'"
)
_STATIC_INT8 = "the kernel refuses int8 weights in any blocks but 1x16; take 'int8+1x16'"

TRAPS: Final[dict[str, str]] = {
    "float16+csr": _FLOAT16,
    "float16+1x4": _FLOAT16,
    "float16+1x16": _FLOAT16,
    "float32+1x16": "the kernel takes float32 blocks of 1x4 only; take 'float32+1x4'",
    "dynamic_int8+csr": _DYNAMIC_INT8,
    "dynamic_int8+1x4": _DYNAMIC_INT8,
    "int8+csr": _STATIC_INT8,
    "int8+1x4": _STATIC_INT8,
}


def route_for(quantization: str | None) -> Route:
    """The dense route that a value of `quantization` asks for.

    Raises:
        ValueError: if there is none.
    """
    for route in DENSE_ROUTES:
        if quantization in (route.quantization, route.name):
            return route
    raise ValueError(
        f"`quantization` must be one of {[route.quantization for route in DENSE_ROUTES]}. "
        f"Received: quantization={quantization!r}"
    )


def route_named(name: str) -> Route:
    """The route of a name, such as `"dynamic_int8+1x16"`.

    Raises:
        ExportRouteError: if it is one that cannot work, with the reason.
        ValueError: if there is none.
    """
    for route in ROUTES:
        if route.name == name:
            return route
    if name in TRAPS:
        raise ExportRouteError(f"Route '{name}' cannot work: {TRAPS[name]}. Received: {name!r}")
    raise ValueError(
        f"A route must be one of {[route.name for route in ROUTES]}. Received: {name!r}"
    )
