"""What routes convert: a SavedModel or, without TensorFlow, a float32 LiteRT file.

Without TensorFlow the worker rebuilds the model on JAX, whatever backend it was trained on;
litert-converter makes a float32 file of its StableHLO, and ai-edge-quantizer makes integers and
float16 of that.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.export._litert_file import read_model
from keras_sparse_ortho.export._model import all_layers, leaves, pack
from keras_sparse_ortho.export._trained_ranges import mark
from keras_sparse_ortho.quantization import fix_ranges, keep_floats

CONVERTER = ("jax", "litert_converter", "ai_edge_quantizer")
"""The packages that take TensorFlow's place, as they are imported."""

SIGNATURE = "serving_default"


def write_traced(
    model: keras.Model,
    inputs: list[dict[str, Any]],
    nesting: Any,
    output_names: list[str],
    path: str,
    in_integers: bool,
) -> None:
    """Trace a plain model: to a SavedModel on TensorFlow, on JAX to a float32 LiteRT file.

    With `in_integers` for a file of integers with trained ranges: on JAX these are marked
    (`_trained_ranges.py`).
    """
    if keras.backend.backend() == "tensorflow":
        write_saved_model(model, inputs, nesting, output_names, path, in_integers)
    else:
        Path(path).write_bytes(float_file(model, inputs, nesting, output_names, in_integers))


def write_saved_model(
    model: keras.Model,
    inputs: list[dict[str, Any]],
    nesting: Any,
    output_names: list[str],
    folder: str,
    in_integers: bool = False,
) -> None:
    """Trace a plain model for inference, with static shapes; needs the TensorFlow backend."""
    import tensorflow as tf

    def serve(*flat: Any) -> dict[str, Any]:
        outputs = model(pack(nesting, flat), training=False)
        return dict(zip(output_names, (tensor for _, tensor in leaves(outputs)), strict=True))

    fix_ranges(model, in_integers)
    if in_integers:
        keep_floats(model)
    archive = keras.export.ExportArchive()
    archive.track(model)
    archive.add_endpoint(
        "serving_default",
        serve,
        input_signature=[
            tf.TensorSpec(spec["shape"], spec["dtype"], name=spec["name"]) for spec in inputs
        ],
    )
    archive.write_out(folder, verbose=False)


def float_file(
    model: keras.Model,
    inputs: list[dict[str, Any]],
    nesting: Any,
    output_names: list[str],
    in_integers: bool = False,
) -> bytes:
    """A plain model as a float32 file of static shapes; needs the JAX backend.

    Recurrent layers are unrolled: their loops cannot be written (litert-converter 0.5).
    """
    import jax
    from litert_converter.mlir import ir, passmanager
    from litert_converter.mlir._mlir_libs import converter_api_ext as converter

    def serve(*flat: Any) -> tuple[Any, ...]:
        outputs = model(pack(nesting, flat), training=False)
        return tuple(tensor for _, tensor in leaves(outputs))

    fix_ranges(model, in_integers, mark if in_integers else None)
    for layer in all_layers(model):
        if isinstance(layer, keras.layers.RNN):
            layer.unroll = True
    shapes = [jax.ShapeDtypeStruct(tuple(spec["shape"]), spec["dtype"]) for spec in inputs]
    # An input that nothing reads would be dropped.
    with _marked_gelu():
        lowered = jax.jit(serve, keep_unused=True).lower(*shapes)
    text = lowered.compiler_ir("stablehlo").operation.get_asm(enable_debug_info=False)
    context = ir.Context()
    converter.prepare_mlir_context(context)
    with context:
        module = ir.Module.parse(text)
        names = [spec["name"] for spec in inputs]
        converter.set_signature(module.operation, SIGNATURE, names, output_names)
        config = converter.ConvertToTFLConfig()
        converter.run_convert_to_tfl_passes(module, passmanager.PassManager(), config)
        return bytes(converter.export_flatbuffer_to_bytes(module.operation))


@contextlib.contextmanager
def _marked_gelu() -> Iterator[None]:
    """Inside, JAX's GELU is traced as one operation, which LiteRT has, not as its 60 parts."""
    import jax

    plain = jax.nn.gelu

    def gelu(x: Any, approximate: bool = True) -> Any:
        marked = jax.lax.composite(
            lambda x, **_: plain(x, approximate=approximate), name="aten.gelu.default"
        )
        return marked(x, approximate="tanh" if approximate else "none")

    jax.nn.gelu = gelu
    try:
        yield
    finally:
        jax.nn.gelu = plain


def quantized(
    content: bytes,
    recipe: Any,
    batches: Callable[[], Iterator[dict[str, np.ndarray]]] | None,
    trained: dict[str, tuple[float, float]] | None = None,
) -> bytes:
    """A float32 file with other numbers, as ai-edge-quantizer makes them.

    Args:
        content: The file.
        recipe: A recipe of ai-edge-quantizer.
        batches: Gives the representative data, where activations are to be calibrated.
        trained: Lowest and highest values of tensors that are not.
    """
    from ai_edge_quantizer import quantizer

    made = quantizer.Quantizer(bytearray(content))
    made.load_quantization_recipe(recipe)
    static = batches is not None or bool(trained)
    ranges: dict[str, dict[str, Any]] = {}
    for batch in () if batches is None else batches():
        # One by one: over several the quantizer averages, and most values are out of range.
        found = made.calibrate({SIGNATURE: [batch]}, num_threads=1)
        for name, own in found.items():
            known = ranges.setdefault(name, own)
            for key, wider in (("min", np.minimum), ("max", np.maximum)):
                if key in own:
                    known[key] = wider(known[key], own[key])
    for name, (low, high) in (trained or {}).items():
        ranges[name] = {"min": np.array([low], np.float32), "max": np.array([high], np.float32)}
    ranges |= _of_dead_channels(content) if static else {}
    return bytes(made.quantize(ranges or None, enable_progress_report=False).quantized_model)


def _of_dead_channels(content: bytes) -> dict[str, dict[str, np.ndarray]]:
    """Ranges for the channels of weights that have dead ones, which get the range of the widest.

    ai-edge-quantizer gives a channel of zeros the scale 1e-9 / 127. Its bias, an integer in steps
    of that, does not fit 32 bits and is lost.
    """
    from ai_edge_quantizer.utils import tfl_flatbuffer_utils as files

    model = read_model(content)
    found = {}
    for graph in model.subgraphs:
        for one in graph.operators:
            kind = files.TFL_OP_CODE_TO_NAME.get(model.operatorCodes[one.opcodeIndex].builtinCode)
            axis = files.TFL_OP_TO_WEIGHT_QUANTIZED_DIM.get(kind)
            tensor = None if axis is None else graph.tensors[one.inputs[1]]
            values = None if tensor is None else files.get_tensor_data(tensor, model.buffers)
            if values is None:
                continue
            others = tuple(k for k in range(values.ndim) if k != axis)
            most = np.abs(values).max(axis=others, keepdims=True, initial=0)
            if not most.all():
                most = np.where(most > 0, most, most.max() or 1).astype(np.float32)
                found[files.get_tensor_name(tensor)] = {"min": -most, "max": most}
    return found
