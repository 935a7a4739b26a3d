"""Float32 LiteRT files to float16, or to integers by ai-edge-quantizer (AEQ) in trained ranges."""

import collections
import contextlib
import copy
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from ai_edge_quantizer import quantizer, recipe_manager
from ai_edge_quantizer.utils import tfl_flatbuffer_utils as files

from keras_sparse_ortho.export._flatbuffer import (
    add_code,
    name_of,
    read_model,
    write_model,
)
from keras_sparse_ortho.export._marks import MOVING, Range, range_before, take_marks

Batches = Iterable[dict[str, np.ndarray]]

_EXACT = 1e-3  # of a step, by which a rounded weight may differ from a multiple of it
_FEW = 256  # entries: smaller kernels may be whole steps by chance
# The range of a tensor that was always 0, as behind a ReLU that never fires. Any step does, but
# ai-edge-quantizer's own, 4e-12: LiteRT cannot run with it.
_OF_ZEROS = (0.0, 1.0)
_NARROWEST = 1e-6  # a range
# In steps of products: a bias, for which 32 bits are few once sums are added to it, and an output's
# step, 256 at most in XNNPACK.
_MOST_BIAS, _MOST_RATIO = 2**30, 128
_LEAST = {"float16": 128, "dynamic": 1024, "static": 256}  # entries of a constant
# Bits of Dense kernels by storage, where possible. XNNPACK takes no others: convolutions of 4 bits
# are slow in LiteRT and differ from Keras, those of 2 compute infinities.
_NARROW = {"dynamic_int4": (2, 4), "int4": (4,)}
# Operations whose output has the range of their input, and those whose range LiteRT knows.
_PASS_ON = (*MOVING, "SPLIT", "MAX_POOL_2D", "AVERAGE_POOL_2D")
# Operations whose input may be clipped, and rounded, in place of their output.
_BACKWARD = (*MOVING, "CONCATENATION", "MAX_POOL_2D")
_FIXED = {"SOFTMAX": (0, 255 / 256), "LOGISTIC": (0, 255 / 256), "TANH": (-1, 127 / 128)}


def in_storage(
    content: bytes, storage: str, batches: Batches | None, ends: Sequence[str] = ("float32",) * 2
) -> bytes:
    """A float32 file in another storage, with ranges from `batches` or marks, else in floats."""
    if storage == "float32":
        return content
    if storage == "float16":
        return _narrowed(content, storage)
    kind = "dynamic" if storage.startswith("dynamic") else "static"
    recipe = [_entry(".*", "*", _settings(kind))]
    model = read_model(content)
    ranges: dict[str, Range] = {}
    floats: list[tuple[Any, Any]] = []
    if kind == "static":
        _plain_gathers(model)
        trained = take_marks(model)
        known = trained if batches is None else _calibrated(content, batches)
        _part_outputs(model)
        ranges, floats = _spread(model, known, recipe)
        ranges = {name: _wide_enough(own) for name, own in ranges.items()}
        _round_floats(model, trained, ranges, floats)
        for end, dtype in zip(("INPUT", "OUTPUT"), ends, strict=True):
            settings = None if dtype == "float32" else _settings(kind, dtype=dtype[:-1].upper())
            recipe.append(_entry(".*", end, settings))
    scales, levels, narrow = _scales(model, kind, _NARROW.get(storage, ()))
    _fit_steps(model, ranges, scales, levels)
    if storage in _NARROW and not narrow:
        raise ValueError(f"no weight of a Dense layer that fits fewer than 8 bits in {storage}")
    table: dict[str, Any] = {name: {"min": -bound, "max": bound} for name, bound in scales.items()}
    ranks = {name_of(one): len(one.shape) for graph in model.subgraphs for one in graph.tensors}
    for name, own in ranges.items():
        # With the rank of the tensor: constants beside it, as in a concatenation, are rounded so.
        low, high = np.array(own, "float32").reshape(2, *[1] * max(ranks[name], 1))
        table[name] = {"min": low, "max": high}
    recipe += [*narrow, *(_entry(_scope(*one), "*", None) for one in floats)]
    made = quantizer.Quantizer(bytearray(write_model(model)), recipe)
    made = made.quantize(table or None, enable_progress_report=False)
    return _narrowed(bytes(made.quantized_model), kind)


def _settings(kind: str, bits: int = 8, dtype: str = "INT") -> dict[str, Any]:
    weights = {"num_bits": 8, "symmetric": True, "granularity": "CHANNELWISE", "dtype": "INT"}
    settings: dict[str, Any] = {"weight_tensor_config": weights | {"num_bits": bits}}
    settings |= {"compute_precision": "INTEGER", "explicit_dequantize": False, "skip_checks": False}
    if kind == "dynamic":
        return settings | {"min_weight_elements": _LEAST[kind]}
    own = weights | {"symmetric": False, "granularity": "TENSORWISE", "dtype": dtype}
    return settings | {"activation_tensor_config": own, "min_weight_elements": 0}


def _entry(scope: str, kind: str, settings: dict[str, Any] | None) -> dict[str, Any]:
    key = "no_quantize" if settings is None else "min_max_uniform_quantize"
    return {"regex": scope, "operation": kind, "algorithm_key": key, "op_config": settings or {}}


def _scope(graph: Any, op: Any) -> str:
    return f"^{re.escape(files.get_op_scope(op, graph.tensors))}$"


def _wide_enough(own: Range) -> Range:
    """A range in which LiteRT can compute."""
    low, high = own
    return _widened(own, _NARROWEST) if high - low > 0.0 else _OF_ZEROS


def _scales(
    model: Any, kind: str, widths: Sequence[int]
) -> tuple[dict[str, np.ndarray], dict[str, int], list[Any]]:
    """Bounds and largest integers of weights by name; recipes of weights that fit `widths` bits."""
    found = []
    for graph, op, code in _operations(model):
        name = files.TFL_OP_CODE_TO_NAME.get(code)
        axis = files.TFL_OP_TO_WEIGHT_QUANTIZED_DIM.get(name)
        tensor = None if axis is None else graph.tensors[op.inputs[1]]
        values = None if tensor is None else files.get_tensor_data(tensor, model.buffers)
        if values is not None and values.dtype == np.float32:
            steps = steps_of(_rows(values, axis))
            own = widths if name == "FULLY_CONNECTED" and values.size >= _LEAST[kind] else ()
            found.append((name_of(tensor), values, axis, steps, own, _scope(graph, op)))
    trained = any(steps.min() >= 0 for _, values, _, steps, *_ in found if values.size >= _FEW)
    scales, levels, recipe = {}, {}, []
    for key, values, axis, steps, own, scope in found:
        most = int(steps.max()) if steps.min() >= 0 else 127 if trained else 7
        bits = next((bits for bits in own if most < 2 ** (bits - 1)), 8)
        levels[key] = 2 ** (bits - 1) - 1
        scales[key] = _bounds(values, axis, steps, levels[key])
        if bits < 8:
            recipe.append(_entry(scope, "FULLY_CONNECTED", _settings(kind, bits)))
    return scales, levels, recipe


def _fit_steps(
    model: Any, ranges: dict[str, Range], scales: dict[str, np.ndarray], levels: dict[str, int]
) -> None:
    """Widens steps where products would not fit their integers, in place.

    LiteRT adds up products in steps of the input's step times the kernel's scale. In these a bias
    must fit 32 bits, and they must be less than 256 steps of the output. Channels of nearly zeros
    break the one, outputs of nearly zeros, behind ReLUs that never fire, the other.

    Args:
        model: The file.
        ranges: The ranges of tensors, by name.
        scales: The largest values of kernels that integers reach, by channel and by name.
        levels: The largest integers of kernels, by name.
    """
    before = dict(ranges)
    for graph, op, code in _operations(model):
        name = files.TFL_OP_CODE_TO_NAME.get(code)
        output = name_of(graph.tensors[op.outputs[0]])
        if name in _PASS_ON:
            for source in _varying(model, graph, op.inputs):
                if output in ranges and before.get(source) == before[output]:
                    ranges[output] = ranges[source]
            continue
        # The first input of a transposed convolution is a shape.
        first = 1 if name == "CONV_2D_TRANSPOSE" else 0
        places = [int(k) for k in op.inputs]
        if name not in files.TFL_OP_TO_WEIGHT_QUANTIZED_DIM or len(places) < 2 + first:
            continue
        source = name_of(graph.tensors[places[2 * first]])
        kernel = name_of(graph.tensors[places[1]])
        if source not in ranges or kernel not in scales:
            continue
        low, high = ranges[source]
        step = (high - low) / 255
        bound = scales[kernel]
        bias = _values_at(model, graph, places[2 + first :])
        if bias is not None and bias.size == bound.size:
            least = levels[kernel] * np.abs(bias) / (step * _MOST_BIAS)
            bound = np.maximum(bound, least.reshape(bound.shape)).astype(np.float32)
            scales[kernel] = bound
        if output in ranges:
            least_width = step * float(bound.max()) / levels[kernel] / _MOST_RATIO * 255
            ranges[output] = _widened(ranges[output], least_width)


def _widened(own: Range, width: float) -> Range:
    """A range of at least a width, 0 in the same place."""
    low, high = own
    if high - low >= width:
        return own
    return low * width / (high - low), high * width / (high - low)


def _values_at(model: Any, graph: Any, places: Sequence[int]) -> np.ndarray | None:
    """The values of the first of the tensors if there is one, a constant of floats."""
    if not places or places[0] < 0:
        return None
    values = files.get_tensor_data(graph.tensors[places[0]], model.buffers)
    return None if values is None or values.dtype != np.float32 else values.reshape(-1)


def _rows(values: np.ndarray, axis: int) -> np.ndarray:
    return np.abs(np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1))


def _bounds(values: np.ndarray, axis: int, steps: np.ndarray, most: int = 127) -> np.ndarray:
    """The largest value of each channel that `most` steps reach, in a shape that broadcasts.

    Trained channels get the finest step of whole integers, in which biases are rounded, those of
    zeros the widest bound: in AEQ's, 1e-9, no bias fits 32 bits.
    """
    peak = _rows(values, axis).max(1, initial=0).astype(np.float64)
    fine = np.where((steps > 0) & (steps <= most), most // np.maximum(steps, 1) * steps, most)
    bound = np.where(peak > 0, peak * most / fine, peak.max() or 1.0).astype(np.float32)
    return bound.reshape([-1 if k == axis % values.ndim else 1 for k in range(values.ndim)])


def steps_of(rows: np.ndarray) -> np.ndarray:
    """The least `m <= 127` with multiples of `max|row| / m` by row; 0 for zeros, -1 for none."""
    rows = np.abs(rows).astype(np.float64)
    peak = rows.max(1, keepdims=True, initial=0)
    parts = rows / np.where(peak > 0, peak, 1)
    found = np.where(peak[:, 0] > 0, -1, 0)
    for m in (*range(1, 8), 127, *range(8, 127)):
        left = np.flatnonzero(found < 0)
        for some in (parts[:, :: -(-parts.shape[1] // 64)], parts):  # a few first
            wide = some[left] * m
            left = left[np.all(np.abs(wide - np.rint(wide)) <= _EXACT, 1)]
        found[left] = m
    return found


def _calibrated(content: bytes, batches: Batches) -> dict[str, Range]:
    """The ranges of tensors. AEQ's own way is 10 times as slow, and fails on unrolled GRUs."""
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    options = {"experimental_op_resolver_type": plain, "experimental_preserve_all_tensors": True}
    own = Interpreter(model_content=content, **options)
    runner, model = own.get_signature_runner(), read_model(content)
    graph = model.subgraphs[0]
    ranges: dict[str, Range] = {}
    for batch in batches:
        runner(**batch)
        for k in range(len(graph.tensors)):
            for name in _varying(model, graph, [k]):
                with contextlib.suppress(ValueError):  # nothing has written to it
                    value = own.get_tensor(k)
                    low, high = ranges.get(name, (0.0, 0.0))
                    ranges[name] = min(low, float(value.min())), max(high, float(value.max()))
    return ranges


def _spread(
    model: Any, ranges: dict[str, Range], recipe: list[Any]
) -> tuple[dict[str, Range], list[tuple[Any, Any]]]:
    """The ranges, with implied ones; and graph and operation of tensors that lack one."""
    manager = recipe_manager.RecipeManager()
    manager.load_quantization_recipe(recipe)
    everything = [
        (graph, op, files.TFL_OP_CODE_TO_NAME.get(kind)) for graph, op, kind in _operations(model)
    ]
    known, floats = dict(ranges), []
    readers = collections.Counter(
        one for graph, op, _ in everything for one in _varying(model, graph, op.inputs)
    )
    for graph, op, name in reversed(everything):  # before what is only moved about
        after = name_of(graph.tensors[op.outputs[0]])
        if name in _BACKWARD and after in known:
            for before in _varying(model, graph, op.inputs):
                if readers[before] == 1 or name in ("RESHAPE", "TRANSPOSE"):
                    known.setdefault(before, known[after])
        sources = _varying(model, graph, op.inputs)
        if after in known and len(sources) == 1 and readers[sources[0]] == 1:
            own = range_before(model, graph, op, known[after])
            if own is not None:
                known.setdefault(sources[0], own)
    read = {(id(graph), k) for graph, op, _ in everything for k in (*op.inputs, *graph.outputs)}
    for graph, op, name in everything:
        taken, given = (_varying(model, graph, places) for places in (op.inputs, op.outputs))
        if taken and all(one in known for one in taken) and name in (*_PASS_ON, *_FIXED):
            known.update(dict.fromkeys(given, _FIXED.get(name) or known[taken[0]]))
        if taken and taken[0] in known and name == "RELU":
            known.setdefault(given[0], (0.0, max(known[taken[0]][1], 0.0)))
        whole = (
            taken
            and name is not None
            and manager.get_quantization_configs(name, ";")[0] != "no_quantize"
            and all(one in known for one in (*taken, *given))
            and all((id(graph), k) in read for k in op.outputs)  # AEQ leaves others in floats
        )
        if not whole or (name in _PASS_ON and known[given[0]] != known[taken[0]]):
            floats.append((graph, op))
    return known, floats


def _part_outputs(model: Any) -> None:
    """Gives outputs that operations read as well their own tensors; AEQ confuses the two."""
    graph = model.subgraphs[0]
    read = {int(k) for op in graph.operators for k in op.inputs}
    for k in sorted(read & {int(k) for k in graph.outputs}):
        new = _copy_of(graph, k, "output")
        graph.operators.append(_reshape(model, graph, k, new))
        graph.outputs = [new if j == k else j for j in graph.outputs]
        for signature in model.signatureDefs:
            for end in signature.outputs:
                end.tensorIndex = new if end.tensorIndex == k else end.tensorIndex


def _round_floats(
    model: Any, trained: dict[str, Range], ranges: dict[str, Range], floats: list[tuple[Any, Any]]
) -> None:
    """Rounds trained ranges around float operations, by a RESHAPE that AEQ does in integers."""
    graph = model.subgraphs[0]
    own = [op for other, op in floats if other is graph]
    read = {int(k) for op in own for k in op.inputs} | {int(k) for k in graph.outputs}
    for op in own:
        for k in map(int, list(op.outputs)):
            name = name_of(graph.tensors[k])
            if k not in read or name not in trained:
                continue
            before = _copy_of(graph, k, "before")
            ranges[name_of(graph.tensors[before])] = ranges[name]
            op.outputs = [before if j == k else j for j in op.outputs]
            place = graph.operators.index(op) + 1
            graph.operators.insert(place, _reshape(model, graph, before, k))


def _copy_of(graph: Any, index: int, name: str) -> int:
    made = copy.copy(graph.tensors[index])
    made.name = f"{name_of(made)}/{name}".encode()
    graph.tensors.append(made)
    return len(graph.tensors) - 1


def _plain_gathers(model: Any) -> None:
    """Replaces JAX's GATHER_ND along the first axis, which AEQ does not know, by GATHER."""
    for graph, op, kind in list(_operations(model)):
        if kind != schema.BuiltinOperator.GATHER_ND:
            continue
        indices = graph.tensors[int(op.inputs[1])]
        if len(indices.shape) != 2 or indices.shape[1] != 1:
            continue
        flat = _copy_of(graph, int(op.inputs[1]), "flat")
        graph.tensors[flat].shape = [int(indices.shape[0])]
        graph.tensors[flat].shapeSignature = None
        op.inputs = [int(op.inputs[0]), flat]
        op.opcodeIndex = add_code(model, "GATHER", 1)
        op.builtinOptionsType = schema.BuiltinOptions.GatherOptions
        op.builtinOptions = schema.GatherOptionsT()


def _reshape(model: Any, graph: Any, taken: int, given: int) -> Any:
    made = schema.OperatorT()
    made.opcodeIndex = add_code(model, "RESHAPE", 1)
    made.inputs, made.outputs = [taken], [given]
    made.builtinOptionsType = schema.BuiltinOptions.ReshapeOptions
    made.builtinOptions = schema.ReshapeOptionsT()
    made.builtinOptions.newShape = graph.tensors[given].shape
    return made


def _narrowed(content: bytes, storage: str) -> bytes:
    """The file with large float constants narrowed, and restored by DEQUANTIZE at load."""
    model, types = read_model(content), schema.TensorType
    code = add_code(model, "DEQUANTIZE", 3)
    moved: dict[int, int] = {}  # buffers
    for graph in model.subgraphs:
        read = {int(k) for op in graph.operators for k in op.inputs}
        for k in sorted(read - {-1, *map(int, graph.outputs)}):
            tensor = graph.tensors[k]
            data = model.buffers[tensor.buffer].data
            if tensor.type != types.FLOAT32 or data is None or tensor.sparsity is not None:
                continue
            values = np.asarray(data).view("<f4").reshape(tensor.shape)
            if values.size < _LEAST[storage] or (storage != "float16" and values.ndim < 2):
                continue
            narrow, widen = schema.TensorT(), schema.OperatorT()
            narrow.name, narrow.shape = name_of(tensor).encode() + b"/narrow", tensor.shape
            if storage == "float16":
                narrow.type = types.FLOAT16
                with np.errstate(over="ignore"):  # the comparison with Keras refuses infinities
                    stored = values.astype("<f2")
            else:
                rows = _rows(values, -1) if values.ndim == 5 else np.abs(values).reshape(1, -1)
                step = rows.max(1) / np.float32(127)
                step = np.where(step > 0, step, np.float32(1))
                narrow.type, about = types.INT8, schema.QuantizationParametersT()
                stored = np.rint(values / step).astype("i1")
                about.scale, about.quantizedDimension = step, values.ndim - 1
                about.zeroPoint = np.zeros(step.size, np.int64)
                narrow.quantization = about
            if tensor.buffer not in moved:
                moved[tensor.buffer] = len(model.buffers)
                model.buffers.append(schema.BufferT())
                model.buffers[-1].data = stored.reshape(-1).view(np.uint8)
            narrow.buffer, tensor.buffer = moved[tensor.buffer], 0  # the first one is empty
            widen.opcodeIndex = code
            widen.inputs, widen.outputs = [len(graph.tensors)], [k]
            graph.tensors.append(narrow)
            graph.operators.insert(0, widen)
    return write_model(model)


def _operations(model: Any) -> Iterator[tuple[Any, Any, int]]:
    for graph in model.subgraphs:
        for op in graph.operators:
            yield graph, op, model.operatorCodes[op.opcodeIndex].builtinCode


def _varying(model: Any, graph: Any, places: Iterable[int]) -> list[str]:
    own = [graph.tensors[k] for k in places if k >= 0 and graph.tensors[k].type == 0]
    return [name_of(one) for one in own if model.buffers[one.buffer].data is None]
