"""Float32 LiteRT files of Keras models, by TensorFlow's converter, or litert-converter on JAX."""

import contextlib
import json
import os
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras

from keras_sparse_ortho._interception import intercepted
from keras_sparse_ortho._types import Tensor
from keras_sparse_ortho.export._blocks import as_convolutions
from keras_sparse_ortho.export._flatbuffer import MARK
from keras_sparse_ortho.export._lstms import (
    LSTM_MARK,
    TracedLstm,
    placeholders,
    read_lstms,
    save_lstms,
)
from keras_sparse_ortho.export._recurrent_steps import with_short_steps
from keras_sparse_ortho.export._signature import Nesting, leaves, pack
from keras_sparse_ortho.quantization import fixed_ranges

SIGNATURE = "serving_default"
_STEPS = 255  # of a range


class _Mark(NamedTuple):
    """A tensor, and its range."""

    tensor: Tensor
    low: float
    high: float


class _Trace:
    """A model as a function of flat inputs; names of marked outputs hold ranges.

    A range whose number is in `apart` is that of an operation of its own, which no converter moves:
    it would multiply the kernel behind by a scaling of channels, and leave the range without a
    tensor. `_marks.py` takes that operation out of the file.

    Args:
        model: The model.
        nesting: Positions of the inputs.
        names: Names of the outputs.
        apart: Numbers of ranges.
    """

    def __init__(
        self,
        model: keras.Model,
        nesting: Nesting,
        names: Sequence[str],
        apart: Sequence[int],
    ) -> None:
        self.model = model
        self.nesting = nesting
        self._names = names
        self._apart = apart
        self._marks: list[_Mark] = []
        self.lstms: list[TracedLstm] = []  # of the last call, if fused

    def __call__(self, *flat: Tensor) -> list[Tensor]:
        self._marks.clear()
        self.lstms.clear()
        outputs = leaves(self.model(pack(self.nesting, flat), training=False))
        tensors = [tensor for _, tensor in outputs]
        tensors += [mark.tensor for mark in self._marks]
        for lstm in self.lstms:
            tensors += [lstm.sequences, lstm.output]
        return tensors

    @property
    def names(self) -> list[str]:
        """The names of all outputs of the last call."""
        names = list(self._names)
        for number, mark in enumerate(self._marks):
            ends = struct.pack("<dd", mark.low, mark.high)
            names.append(f"{MARK}{number}_{ends.hex()}")
        for number in range(len(self.lstms)):
            for end in ("sequences", "output"):
                names.append(f"{LSTM_MARK}{number}_{end}")
        return names

    def mark(self, x: Tensor, low: float, high: float) -> Tensor:
        """Notes the range of a tensor; returns the tensor, or one that has that range only."""
        ranges = [
            (mark.low, mark.high) for mark in self._marks if mark.tensor is x
        ]
        # From one range to another, in floats.
        if ranges and (low, high) not in ranges:
            for start, end in (*ranges, (low, high)):
                x = _rounded(x, start, end)
        if len(self._marks) in self._apart:
            # Below every value of the range. As -1 or less it is no bound of a ReLU.
            x = keras.ops.maximum(x, low - 1.0)
        self._marks.append(_Mark(x, low, high))
        return x


def _rounded(x: Tensor, low: float, high: float) -> Tensor:
    """A tensor in the steps of a range."""
    step = (high - low) / _STEPS
    least = round(low / step)
    rounded = keras.ops.round(x / step)
    return keras.ops.clip(rounded, least, least + _STEPS) * step


def write_traced(
    model: keras.Model,
    inputs: list[dict[str, Any]],
    nesting: Nesting,
    output_names: list[str],
    path: str,
    of_blocks: bool,
    rows_apart: bool,
    marked: bool,
    fused: bool,
    marks_apart: Sequence[int] = (),
) -> None:
    """Writes a plain model as a SavedModel, or StableHLO on JAX.

    Args:
        model: The plain model.
        inputs: Name, shape and dtype of each input.
        nesting: Positions of the inputs in the model's own.
        output_names: Names of the outputs.
        path: str. Where to write.
        of_blocks: bool. Whether layers on live blocks become grouped convolutions.
        rows_apart: bool. Whether their rows are quantized apart, see `as_convolutions`.
        marked: bool. Whether outputs name the trained ranges.
        fused: bool. Whether placeholders stand for LSTMs that LiteRT's operator computes.
        marks_apart: Numbers of ranges with an operation of their own.
    """
    if of_blocks:
        model = as_convolutions(model, rows_apart)
    traced = _Trace(model, nesting, output_names, marks_apart)
    part = f"{path}.part"
    with contextlib.ExitStack() as stack:
        ranges = fixed_ranges(model, traced.mark if marked else None)
        stack.enter_context(ranges)
        stack.enter_context(with_short_steps(model))
        if fused:
            stack.enter_context(placeholders(model, traced.lstms))
        if keras.backend.backend() == "jax":
            _write_stablehlo(traced, inputs, part)
        else:
            _write_saved_model(traced, inputs, part)
    if traced.lstms:
        save_lstms(traced.lstms, _file_of_lstms(path))
    os.replace(part, path)


def _file_of_lstms(path: str) -> Path:
    """The file with the weights of fused LSTMs beside what was traced to `path`."""
    return Path(f"{path}.lstms.npz")


def float_file(path: str) -> bytes:
    """The float32 file of a model that `write_traced` has written."""
    converted = Path(f"{path}.tflite")
    if not converted.exists():
        is_of_jax = Path(path).is_file()
        content = (
            _by_jax(path)
            if is_of_jax
            else by_tensorflow(path, "float32", False)
        )
        lstms = _file_of_lstms(path)
        if lstms.exists():
            from keras_sparse_ortho.export._fused_lstm import with_lstms

            content = with_lstms(content, read_lstms(lstms))
        converted.write_bytes(content)
    return converted.read_bytes()


def by_tensorflow(saved_model: str, storage: str, sparse: bool) -> bytes:
    """A file by TensorFlow's converter, of weights in a storage, with its own sparsity or not."""
    import tensorflow as tf

    optimizations = []
    if storage != "float32":
        optimizations.append(tf.lite.Optimize.DEFAULT)
    if sparse:
        optimizations.append(tf.lite.Optimize.EXPERIMENTAL_SPARSITY)
    converter = tf.lite.TFLiteConverter.from_saved_model(saved_model)
    converter.optimizations = optimizations
    if storage == "float16":
        converter.target_spec.supported_types = [tf.float16]
    return bytes(converter.convert())


def _write_saved_model(
    traced: _Trace, inputs: list[dict[str, Any]], folder: str
) -> None:
    import tensorflow as tf

    def serve(*flat: Tensor) -> dict[str, Tensor]:
        outputs = traced(*flat)
        return dict(zip(traced.names, outputs, strict=True))

    specs = [
        tf.TensorSpec(spec["shape"], spec["dtype"], name=spec["name"])
        for spec in inputs
    ]
    archive = keras.export.ExportArchive()
    archive.track(traced.model)
    archive.add_endpoint(SIGNATURE, serve, input_signature=specs)
    archive.write_out(folder, verbose=False)


def _write_stablehlo(
    traced: _Trace, inputs: list[dict[str, Any]], file: str
) -> None:
    """Writes the text of StableHLO, and the names of inputs and outputs, as JSON."""
    import jax

    shapes = [
        jax.ShapeDtypeStruct(tuple(spec["shape"]), spec["dtype"])
        for spec in inputs
    ]
    with intercepted(jax.nn, "gelu", _gelu):
        # An input that nothing reads would be dropped.
        staged = jax.jit(traced, keep_unused=True).trace(*shapes)
    lowered = staged.lower(lowering_platforms=("cpu",))
    operation = lowered.compiler_ir("stablehlo").operation
    text = operation.get_asm(enable_debug_info=False)
    input_names = [spec["name"] for spec in inputs]
    Path(file).write_text(json.dumps([text, input_names, traced.names]))


def _by_jax(file: str) -> bytes:
    """The float32 file of a model that `_write_stablehlo` has written."""
    from litert_converter.mlir import ir, passmanager
    from litert_converter.mlir._mlir_libs import (
        converter_api_ext as converter,
    )

    text, input_names, output_names = json.loads(Path(file).read_text())
    context = ir.Context()
    converter.prepare_mlir_context(context)
    with context:
        module = ir.Module.parse(text)
        converter.set_signature(
            module.operation, SIGNATURE, input_names, output_names
        )
        config = converter.ConvertToTFLConfig()
        converter.run_convert_to_tfl_passes(
            module, passmanager.PassManager(), config
        )
        return bytes(converter.export_flatbuffer_to_bytes(module.operation))


def _gelu(
    plain: Callable[..., Tensor], x: Tensor, approximate: bool = True
) -> Tensor:
    """JAX's GELU as one operation, which LiteRT has, not as its 60 parts."""
    import jax

    composite = jax.lax.composite(
        lambda x, **_: plain(x, approximate=approximate),
        name="aten.gelu.default",
    )
    return composite(x, approximate="tanh" if approximate else "none")
