"""Float32 LiteRT files of Keras models, by TensorFlow's converter or by litert-converter.

Without TensorFlow the worker rebuilds the model on JAX, whatever backend it was trained on, and
litert-converter makes the file of its StableHLO.
"""

import functools
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import replaced
from keras_sparse_ortho.export._blocks import as_convolutions
from keras_sparse_ortho.export._flatbuffer import MARK
from keras_sparse_ortho.export._model import leaves, pack
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.quantization import fixed_ranges

SIGNATURE = "serving_default"


class _Trace:
    """A model as a function of flat inputs whose outputs have names.

    Tensors that are marked are outputs whose names hold their ranges.
    """

    def __init__(self, model: Any, nesting: Any, names: Sequence[str]) -> None:
        self.model, self.nesting, self._names = model, nesting, names
        self._marks: list[tuple[Any, float, float]] = []

    def __call__(self, *flat: Any) -> list[Any]:
        """The outputs, in the order of `names`."""
        self._marks.clear()
        outputs = leaves(self.model(pack(self.nesting, flat), training=False))
        return [*(tensor for _, tensor in outputs), *(tensor for tensor, *_ in self._marks)]

    @property
    def names(self) -> list[str]:
        ends = (struct.pack("<dd", *own).hex() for _, *own in self._marks)
        return [*self._names, *(f"{MARK}{k}_{end}" for k, end in enumerate(ends))]

    def mark(self, x: Any, low: float, high: float) -> Any:
        """Notes that a file of integers has a tensor in a range."""
        others = [own for known, *own in self._marks if known is x]
        if others and [low, high] not in others:  # from one range to another, in floats
            for start, end in (*others, (low, high)):
                step = (end - start) / 255
                least = round(start / step)
                x = keras.ops.clip(keras.ops.round(x / step), least, least + 255) * step
        self._marks.append((x, low, high))
        return x


def write_traced(
    model: keras.Model,
    inputs: list[dict[str, Any]],
    nesting: Any,
    output_names: list[str],
    path: str,
    of_blocks: bool,
    rows_apart: bool,
    marked: bool,
) -> None:
    """Writes a plain model as a SavedModel on TensorFlow, on JAX as a float32 LiteRT file.

    Shapes are static. For `of_blocks` and `rows_apart` see `as_convolutions`. With `marked`, what
    `FakeQuantize` would round has its range in the file.
    """
    model = as_convolutions(model, rows_apart) if of_blocks else model
    traced, part = _Trace(model, nesting, output_names), f"{path}.part"
    with fixed_ranges(model, traced.mark if marked else None):
        if keras.backend.backend() == "tensorflow":
            _write_saved_model(traced, inputs, part)
        else:
            Path(part).write_bytes(_by_jax(traced, inputs))
    os.replace(part, path)


def float_file(path: str) -> bytes:
    """The float32 file of what `write_traced` has written."""
    if Path(path).is_file():
        return Path(path).read_bytes()
    converted = Path(path, "float.tflite")
    if not converted.exists():
        converted.write_bytes(by_tensorflow(path, "float32", sparse=False))
    return converted.read_bytes()


def by_tensorflow(saved_model: str, storage: str, sparse: bool) -> bytes:
    """A file by TensorFlow's converter, of weights in a storage, with its own sparsity or not."""
    import tensorflow as tf

    converter = tf.lite.TFLiteConverter.from_saved_model(saved_model)
    wanted = {"DEFAULT": storage != "float32", "EXPERIMENTAL_SPARSITY": sparse}
    converter.optimizations = [tf.lite.Optimize[name] for name in wanted if wanted[name]]
    if storage == "float16":
        converter.target_spec.supported_types = [tf.float16]
    return bytes(converter.convert())


def _write_saved_model(traced: _Trace, inputs: list[dict[str, Any]], folder: str) -> None:
    import tensorflow as tf

    def serve(*flat: Any) -> dict[str, Any]:
        outputs = traced(*flat)
        return dict(zip(traced.names, outputs, strict=True))

    archive = keras.export.ExportArchive()
    archive.track(traced.model)
    specs = [tf.TensorSpec(spec["shape"], spec["dtype"], name=spec["name"]) for spec in inputs]
    archive.add_endpoint(SIGNATURE, serve, input_signature=specs)
    archive.write_out(folder, verbose=False)


def _by_jax(traced: _Trace, inputs: list[dict[str, Any]]) -> bytes:
    """The float32 file by litert-converter 0.5, which lacks loops: they are unrolled."""
    import jax
    from litert_converter.mlir import ir, passmanager
    from litert_converter.mlir._mlir_libs import converter_api_ext as converter

    for layer, _ in walk(traced.model, ""):
        if isinstance(layer, keras.layers.RNN):
            layer.unroll = True
    shapes = [jax.ShapeDtypeStruct(tuple(spec["shape"]), spec["dtype"]) for spec in inputs]
    # An input that nothing reads would be dropped.
    with replaced(jax.nn, "gelu", functools.partial(_gelu, jax.nn.gelu)):
        lowered = jax.jit(traced, keep_unused=True).lower(*shapes)
    text = lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=False)
    context = ir.Context()
    converter.prepare_mlir_context(context)
    with context:
        module = ir.Module.parse(text)
        names = [spec["name"] for spec in inputs]
        converter.set_signature(module.operation, SIGNATURE, names, traced.names)
        config = converter.ConvertToTFLConfig()
        converter.run_convert_to_tfl_passes(module, passmanager.PassManager(), config)
        return bytes(converter.export_flatbuffer_to_bytes(module.operation))


def _gelu(plain: Any, x: Any, approximate: bool = True) -> Any:
    """JAX's GELU as one operation, which LiteRT has, not as its 60 parts."""
    import jax

    marked = jax.lax.composite(
        lambda x, **_: plain(x, approximate=approximate), name="aten.gelu.default"
    )
    return marked(x, approximate="tanh" if approximate else "none")
