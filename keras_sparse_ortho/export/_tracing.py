"""Float32 LiteRT files of Keras models, by TensorFlow's converter, or litert-converter on JAX."""

import contextlib
import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_sparse_ortho._interception import intercepted, with_settings
from keras_sparse_ortho.export._blocks import as_convolutions
from keras_sparse_ortho.export._flatbuffer import MARK
from keras_sparse_ortho.export._task import leaves, pack
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.quantization import fixed_ranges

SIGNATURE = "serving_default"


class _Trace:
    """A model as a function of flat inputs; names of marked outputs hold ranges.

    A range whose number is in `apart` is that of an operation of its own, which no converter moves:
    it would multiply the kernel behind by a scaling of channels, and leave the range without a
    tensor. `_marks.py` takes that operation out of the file.
    """

    def __init__(
        self, model: Any, nesting: Any, names: Sequence[str], apart: Sequence[int]
    ) -> None:
        self.model, self.nesting, self._names, self._apart = model, nesting, names, apart
        self._marks: list[tuple[Any, float, float]] = []

    def __call__(self, *flat: Any) -> list[Any]:
        self._marks.clear()
        outputs = leaves(self.model(pack(self.nesting, flat), training=False))
        return [*(tensor for _, tensor in outputs), *(tensor for tensor, *_ in self._marks)]

    @property
    def names(self) -> list[str]:
        ends = (struct.pack("<dd", *own).hex() for _, *own in self._marks)
        return [*self._names, *(f"{MARK}{k}_{end}" for k, end in enumerate(ends))]

    def mark(self, x: Any, low: float, high: float) -> Any:
        others = [own for known, *own in self._marks if known is x]
        if others and [low, high] not in others:  # from one range to another, in floats
            for start, end in (*others, (low, high)):
                step = (end - start) / 255
                least = round(start / step)
                x = keras.ops.clip(keras.ops.round(x / step), least, least + 255) * step
        if len(self._marks) in self._apart:
            # Below every value of the range. As -1 or less it is no bound of a ReLU.
            x = keras.ops.maximum(x, low - 1.0)
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
    marks_apart: Sequence[int] = (),
) -> None:
    """Writes a plain model, `marked` with ranges, as a SavedModel, or StableHLO on JAX."""
    model = as_convolutions(model, rows_apart) if of_blocks else model
    traced, part = _Trace(model, nesting, output_names, marks_apart), f"{path}.part"
    by_jax = keras.backend.backend() == "jax"
    with contextlib.ExitStack() as stack:
        stack.enter_context(fixed_ranges(model, traced.mark if marked else None))
        for layer, _ in walk(model, ""):
            if isinstance(layer, keras.layers.RNN):  # on a GPU they would be cuDNN's
                # litert-converter 0.5 lacks loops.
                settings = {"use_cudnn": False, "unroll": by_jax or layer.unroll}
                stack.enter_context(with_settings(layer, **settings))
        write = _write_stablehlo if by_jax else _write_saved_model
        write(traced, inputs, part)
    os.replace(part, path)


def float_file(path: str) -> bytes:
    """The float32 file of a model that `write_traced` has written."""
    converted = Path(f"{path}.tflite")
    if not converted.exists():
        by_jax = Path(path).is_file()
        converted.write_bytes(_by_jax(path) if by_jax else by_tensorflow(path, "float32", False))
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


def _write_stablehlo(traced: _Trace, inputs: list[dict[str, Any]], file: str) -> None:
    import jax

    shapes = [jax.ShapeDtypeStruct(tuple(spec["shape"]), spec["dtype"]) for spec in inputs]
    with intercepted(jax.nn, "gelu", _gelu):
        # An input that nothing reads would be dropped.
        found = jax.jit(traced, keep_unused=True).trace(*shapes)
    lowered = found.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")
    text = lowered.operation.get_asm(enable_debug_info=False)
    names = [spec["name"] for spec in inputs], traced.names
    Path(file).write_text(json.dumps([text, *names]))


def _by_jax(file: str) -> bytes:
    from litert_converter.mlir import ir, passmanager
    from litert_converter.mlir._mlir_libs import converter_api_ext as converter

    text, *names = json.loads(Path(file).read_text())
    context = ir.Context()
    converter.prepare_mlir_context(context)
    with context:
        module = ir.Module.parse(text)
        converter.set_signature(module.operation, SIGNATURE, *names)
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
