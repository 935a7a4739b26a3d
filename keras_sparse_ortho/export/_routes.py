"""The routes from a traced model to a LiteRT file, and which of them a mode tries.

A new route is a small subclass of `Route`, listed in `ROUTES`. Everything else (static shapes, the
worker processes, the comparison, the check of zeros, the report) is the same for all routes.
"""

import abc
import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import keras
import numpy as np

from keras_sparse_ortho.export._model import all_layers
from keras_sparse_ortho.export._process import converter_backend
from keras_sparse_ortho.export._sparse_encoding import (
    BLOCK_1X4,
    BLOCK_1X16,
    CSR,
    Encoded,
    Encoding,
    encode,
)
from keras_sparse_ortho.export._tracing import quantized
from keras_sparse_ortho.export._trained_ranges import without_marks

Batches = Callable[[], Iterator[dict[str, np.ndarray]]]

MODES = ("small", "fast", "sparse", "auto")


class ExportRouteError(ValueError):
    """A route that cannot work on this model, or on any, with the reason and the alternative."""


class Route(abc.ABC):
    """How a traced model becomes the bytes of a LiteRT file, and how exact the file must be."""

    name: str  # storage and encoding, such as "dynamic_int8+1x16"
    quantization: str | None  # the storage, as the argument of `export_litert`
    encoding: str = "dense"
    needs_representative_data: bool = False  # to calibrate activations
    # Whether the model is converted with its block convolutions, and with rows apart in these.
    of_blocks: bool = False
    rows_apart: bool = False
    measure: str = "rms"  # of the error, see `compare`
    tolerance: float  # the largest error that passes by default
    keeps_ranges: bool = False  # whether the file has trained ranges of activations
    needs_tensorflow: bool = False  # whether only TensorFlow's converter has it

    @property
    def converted_as(self) -> "Route":
        """The route whose converted file `finish` takes; most routes have their own."""
        return self

    def finish(self, content: bytes) -> Encoded:
        """The rewritten file; ExportRouteError if it has no weight that this route is for."""
        return Encoded(content, (), {})

    def check(self, model: keras.Model) -> None:
        """Raise ValueError for a model that this route is known to fail on."""
        if not self.is_there():
            raise ExportRouteError(
                f"Route '{self.name}' is one of TensorFlow's converter; use another one, or "
                'install it: pip install "keras-sparse-ortho[litert]". '
                "Received: an environment without TensorFlow"
            )

    def is_there(self) -> bool:
        """Whether what converts by this route is installed."""
        return not self.needs_tensorflow or converter_backend() == "tensorflow"

    def convert(self, saved_model: str, batches: Batches | None) -> bytes:
        """Convert a SavedModel (in the worker); `batches` gives the representative data."""
        import tensorflow as tf

        converter = tf.lite.TFLiteConverter.from_saved_model(saved_model)
        self.configure(converter, batches)
        return bytes(converter.convert())

    @abc.abstractmethod
    def configure(self, converter: Any, batches: Batches | None) -> None:
        """Set the options of a `tf.lite.TFLiteConverter`."""

    @abc.abstractmethod
    def convert_floats(self, content: bytes, batches: Batches | None) -> bytes:
        """The same without TensorFlow, from the float32 file (in the worker)."""


class Float32(Route):
    """All weights as float32. Differs from Keras by the order of summation only."""

    name = "float32"
    quantization = None
    measure = "max"
    tolerance = 1e-5

    def configure(self, converter: Any, batches: Batches | None) -> None:
        """Leave the converter's defaults, which are float32."""

    def convert_floats(self, content: bytes, batches: Batches | None) -> bytes:
        """The file as it is."""
        return content


class DynamicInt8(Route):
    """Weights of 1024 and more entries as int8; measured errors up to 0.014."""

    name = "dynamic_int8"
    quantization = "dynamic_int8"
    tolerance = 0.1
    # For ai-edge-quantizer: of weights, of activations, and of all operations.
    weights: dict[str, Any] = {  # noqa: RUF012 - never changed
        "num_bits": 8,
        "symmetric": True,
        "granularity": "CHANNELWISE",
        "dtype": "INT",
    }
    activations: dict[str, Any] | None = None
    algorithm = "min_max_uniform_quantize"
    computes = "INTEGER"
    least = 1024  # entries of a weight, as TensorFlow's converter has it

    def configure(self, converter: Any, batches: Batches | None) -> None:
        """Turn on the converter's default optimization."""
        import tensorflow as tf

        converter.optimizations = [tf.lite.Optimize.DEFAULT]

    def convert_floats(self, content: bytes, batches: Batches | None) -> bytes:
        """The same by ai-edge-quantizer."""
        return quantized(content, self.recipe(), batches)

    def recipe(self) -> list[dict[str, Any]]:
        """What ai-edge-quantizer is to do with which operations; later entries go first."""
        config = {
            "weight_tensor_config": self.weights,
            "compute_precision": self.computes,
            "explicit_dequantize": self.computes == "FLOAT",
            "skip_checks": False,
            "min_weight_elements": self.least,
        }
        if self.activations is not None:
            config["activation_tensor_config"] = self.activations
        entries = [("*", self.algorithm, config)]
        if self.activations is not None:  # inputs and outputs of the file stay floats
            entries += [(end, "no_quantize", {}) for end in ("INPUT", "OUTPUT")]
        return [
            {"regex": ".*", "operation": name, "algorithm_key": algorithm, "op_config": settings}
            for name, algorithm, settings in entries
        ]


class Float16(DynamicInt8):
    """Weights stored as float16 and widened at load. Measured errors: up to 6e-4."""

    name = "float16"
    quantization = "float16"
    tolerance = 5e-3
    weights = DynamicInt8.weights | {"num_bits": 16, "dtype": "FLOAT"}
    algorithm, computes, least = "float_casting", "FLOAT", 0

    def configure(self, converter: Any, batches: Batches | None) -> None:
        """Store the weights as float16."""
        import tensorflow as tf

        super().configure(converter, batches)
        converter.target_spec.supported_types = [tf.float16]


class Int8(DynamicInt8):
    """Weights and activations as int8; measured errors 0.005 to 0.05, 0.12 for a transformer."""

    name = "int8"
    quantization = "int8"
    needs_representative_data = keeps_ranges = True
    tolerance = 0.25
    activations = DynamicInt8.weights | {"symmetric": False, "granularity": "TENSORWISE"}
    least = 0

    def check(self, model: keras.Model) -> None:
        """Refuse recurrent loops: TensorFlow's calibrator dies on them (seen in 2.21)."""
        if converter_backend() != "tensorflow":
            return
        for layer in all_layers(model):
            if isinstance(layer, keras.layers.RNN) and not layer.unroll:
                raise ValueError(
                    "Full int8 quantization of a recurrent loop crashes TensorFlow's calibrator. "
                    "Build the layer with `unroll=True`, or use quantization='dynamic_int8'. "
                    f"Received: quantization='int8' with layer '{layer.name}' "
                    f"({type(layer).__name__}, unroll=False)"
                )

    def convert_floats(self, content: bytes, batches: Batches | None) -> bytes:
        """The same, where activations have trained ranges in those."""
        recipe = self.recipe()
        found = without_marks(content, recipe)
        if found is None:
            return super().convert_floats(content, batches)
        if batches is None:
            floats = {"regex": found.floats, "operation": "*", "algorithm_key": "no_quantize"}
            recipe.append(floats | {"op_config": {}})
        return quantized(found.content, recipe, batches, found.ranges)

    def configure(self, converter: Any, batches: Batches | None) -> None:
        """Calibrate the activations on the representative data, if there is any."""
        import tensorflow as tf

        super().configure(converter, batches)
        if batches is None:  # the ranges are those of training
            return
        converter.representative_dataset = batches
        converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]


class _SparseRoute(Route):
    """A sparse encoding with the storage, measure and tolerance of a dense route."""

    def __init__(self, base: Route, encoding: str) -> None:
        self.base, self.encoding = base, encoding
        self.name = f"{base.name}+{encoding}"
        self.quantization = base.quantization
        self.needs_representative_data = base.needs_representative_data
        self.keeps_ranges = base.keeps_ranges
        self.measure, self.tolerance = base.measure, base.tolerance

    def check(self, model: keras.Model) -> None:
        super().check(model)
        self.base.check(model)

    def configure(self, converter: Any, batches: Batches | None) -> None:
        self.base.configure(converter, batches)

    def convert_floats(self, content: bytes, batches: Batches | None) -> bytes:
        return self.base.convert_floats(content, batches)


class ConverterSparsity(_SparseRoute):
    """The converter's own option `EXPERIMENTAL_SPARSITY`, for all weights of rank 2 and 4.

    Weights with more than 30% zeros are stored in blocks (1x4 of floats, 1x16 of int8) or entry by
    entry, with a DENSIFY operation that restores the dense weight at load. Known failures, which
    running the file finds: float16 with 1x4 blocks in a Dense layer, int8 with XNNPACK, and 1x4
    blocks of inputs that are not divisible by 4.
    """

    needs_tensorflow = True

    def __init__(self, base: Route) -> None:
        super().__init__(base, "sp")

    def configure(self, converter: Any, batches: Batches | None) -> None:
        """Add the converter's option to those of the storage."""
        import tensorflow as tf

        super().configure(converter, batches)
        options = list(converter.optimizations or [])
        converter.optimizations = [*options, tf.lite.Optimize.EXPERIMENTAL_SPARSITY]


class SparseFullyConnected(_SparseRoute):
    """A dense route whose file is rewritten: FULLY_CONNECTED gets sparse weights."""

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
                f"{self.layout.name}; use the dense route '{self.base.name}'. "
                f"Received: {'; '.join(reasons) or 'no FULLY_CONNECTED operation in the file'}"
            )
        return encoded


class LiveBlocks(_SparseRoute):
    """Whole blocks gathered, and one grouped convolution: see `_block_convolutions.py`.

    The only sparse route that saves time at any batch, and in convolutions.
    """

    of_blocks = True

    def __init__(self, base: Route) -> None:
        super().__init__(base, "blocks")
        self.rows_apart = base.name == "dynamic_int8"


_F32, _F16, _DYNAMIC, _INT8 = DENSE_ROUTES = (Float32(), Float16(), DynamicInt8(), Int8())

ROUTES: Final[tuple[Route, ...]] = (
    *DENSE_ROUTES,
    *(ConverterSparsity(route) for route in DENSE_ROUTES),
    SparseFullyConnected(_F32, CSR),
    SparseFullyConnected(_F32, BLOCK_1X4),
    SparseFullyConnected(_DYNAMIC, BLOCK_1X16),
    SparseFullyConnected(_INT8, BLOCK_1X16),
    *(LiveBlocks(route) for route in DENSE_ROUTES),
)

# Why the other sparse encodings of a storage cannot work.
_UNSUPPORTED: Final[dict[str, str]] = {
    "float32": "the kernel takes float32 blocks of 1x4 only; use 'float32+1x4'",
    "float16": "LiteRT widens float16 weights by a DEQUANTIZE operation, so that no kernel gets "
    "the sparse ones; use 'float16+sp', 'float32+csr' or 'float32+1x4'",
    "dynamic_int8": "the kernel reads every sparse int8 weight as blocks of 1x16 and answers "
    "wrongly; use 'dynamic_int8+1x16'",
    "int8": "the kernel refuses int8 weights in any blocks but 1x16; use 'int8+1x16'",
}


def route_for(quantization: str | None) -> Route:
    """The dense route of a storage; `ValueError` if there is none."""
    for route in DENSE_ROUTES:
        if quantization in (route.quantization, route.name):
            return route
    raise ValueError(
        f"`quantization` must be one of {[route.quantization for route in DENSE_ROUTES]}. "
        f"Received: quantization={quantization!r}"
    )


def route_named(name: str) -> Route:
    """The route with a name; `ExportRouteError` or `ValueError` if there is none."""
    for route in ROUTES:
        if route.name == name:
            return route
    storage, _, encoding = name.partition("+")
    if storage in _UNSUPPORTED and encoding in ("csr", "1x4", "1x16"):
        reason = _UNSUPPORTED[storage]
        raise ExportRouteError(f"Route '{name}' cannot work: {reason}. Received: {name!r}")
    raise ValueError(
        f"A route must be one of {[route.name for route in ROUTES]}. Received: {name!r}"
    )


def routes_of(mode: str | None, quantization: str | None, has_data: bool) -> list[Route]:
    """The routes that a mode tries, see `export_litert`; without data no static int8."""
    if mode is None and quantization is None:
        return [route for route in ROUTES if route.quantization is None and route.is_there()]
    if mode is None:
        return [route_for(quantization)]
    if mode not in MODES:
        if mode.split("+")[0] not in {route.name for route in ROUTES}:
            raise ValueError(
                f"`mode` must be one of {list(MODES)} or the name of a route, one of "
                f"{[route.name for route in ROUTES]}. Received: mode={mode!r}"
            )
        named = route_named(mode)
        if quantization is not None and route_for(quantization).quantization != named.quantization:
            raise ValueError(
                f"`mode` names a route of quantization={named.quantization!r}; leave "
                f"`quantization` out. Received: mode={mode!r}, quantization={quantization!r}"
            )
        return [named]
    routes = [route for route in ROUTES if route.is_there()]
    if quantization is not None or mode == "sparse":
        storage = route_for(quantization).quantization
        routes = [route for route in routes if route.quantization == storage]
    elif not has_data:
        routes = [route for route in routes if not route.needs_representative_data]
    return [route for route in routes if mode != "sparse" or route.encoding != "dense"]


def accepted(routes: Sequence[Route], model: keras.Model) -> list[Route]:
    """The routes that are not known to fail on the model; raises if all are."""
    passed = []
    for route in routes:
        with contextlib.suppress(ValueError):
            route.check(model)
            passed.append(route)
    if not passed:
        routes[0].check(model)
    return passed
