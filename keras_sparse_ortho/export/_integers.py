"""Float32 LiteRT files to float16, or to integers by ai-edge-quantizer (AEQ) in trained ranges."""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from ai_edge_quantizer import quantizer
from ai_edge_quantizer.utils import tfl_flatbuffer_utils as files

from keras_sparse_ortho.export._flatbuffer import (
    ModelT,
    OperatorT,
    SubGraphT,
    name_of,
    read_model,
    write_model,
)
from keras_sparse_ortho.export._graph_changes import (
    aeq_operations,
    part_outputs,
    round_floats,
    with_plain_gathers,
    with_slices,
)
from keras_sparse_ortho.export._integer_kernels import (
    LEAST_OF_FEW_BITS,
    IntegerKernel,
    integer_kernels,
)
from keras_sparse_ortho.export._integer_lstm import (
    Peaks,
    measured_peaks,
    peaks_in_ranges,
    range_of_output,
    with_dynamic_lstms,
    with_integer_lstms,
)
from keras_sparse_ortho.export._marks import Range, take_marks
from keras_sparse_ortho.export._narrowed import narrowed
from keras_sparse_ortho.export._ranges import (
    Batches,
    calibrated,
    fit_steps,
    implied_ranges,
    wide_enough,
)

Rule: TypeAlias = dict[str, Any]
"""JSON values: a rule of a recipe of AEQ."""

_LEAST_DYNAMIC = 1024  # entries of a kernel that is quantized in dynamic files
# Bits of Dense kernels by storage, where possible. XNNPACK takes no others: convolutions of 4 bits
# are slow in LiteRT and differ from Keras, those of 2 compute infinities.
_FEW_BITS = {"dynamic_int4": (2, 4), "int4": (4,)}


class Calibration(NamedTuple):
    """The ranges in a file of floats on rows that calibrate.

    Attributes:
        ranges: The ranges of tensors, by name.
        peaks: Those inside of LSTMs.
    """

    ranges: Mapping[str, Range]
    peaks: Mapping[str, Peaks]

    def narrowed(self, shares: Mapping[str, float]) -> "Calibration":
        """The same with a share of the range of each tensor that is named."""
        ranges = dict(self.ranges)
        for name, share in shares.items():
            if name in ranges:
                low, high = ranges[name]
                ranges[name] = share * low, share * high
        return Calibration(ranges, self.peaks)


def calibration_of(content: bytes, batches: Batches) -> Calibration:
    """The ranges in a file of floats on batches of inputs.

    Raises:
        ValueError: A tensor is infinite on some row, so that no step of integers fits it.
    """
    batches = list(batches)
    peaks = measured_peaks(content, batches)
    ranges = calibrated(content, batches)
    for name, peaks_of_lstm in peaks.items():
        ranges[name] = range_of_output(peaks_of_lstm)
    infinite = [
        name for name, bounds in ranges.items() if not np.isfinite(bounds).all()
    ]
    if infinite:
        raise ValueError(
            "Every tensor must be finite on the rows that calibrate a file of static integers; use "
            "a bounded form, such as the sigmoid of Keras for a quotient of exponentials, or "
            f"mode='dynamic_int8'. Received: infinite tensors {infinite[:5]}"
        )
    return Calibration(ranges, peaks)


class IntegerPlan(NamedTuple):
    """The arguments of AEQ for one file.

    Attributes:
        model: The file of floats, changed so that AEQ can quantize more of it.
        recipe: Rules of AEQ.
        ranges: The ranges of tensors, by name.
        peaks: Those inside of LSTMs.
        in_floats: The operations that stay in floats, each with its graph.
        kernels: The kernels that become integers.
    """

    model: ModelT
    recipe: list[Rule]
    ranges: dict[str, Range]
    peaks: Mapping[str, Peaks]
    in_floats: list[tuple[SubGraphT, OperatorT]]
    kernels: list[IntegerKernel]


def in_storage(
    content: bytes,
    storage: str,
    calibration: Calibration | None,
    ends: Sequence[str] = ("float32", "float32"),
    floats: Collection[str] = (),
) -> bytes:
    """A float32 file in another storage.

    Args:
        content: bytes. The file, with marks of trained ranges or without.
        storage: str. Such as "int8".
        calibration: Ranges of static integers that rows show, or the states inside of LSTMs where
            ranges were trained; None without rows.
        ends: Types of inputs and outputs.
        floats: Names of tensors. Operations that write one stay in floats.

    Raises:
        ScalingMoved: Trained ranges need their own operation in the float32 file.
        ValueError: Kernels of 4 bits were asked for, and none fits.
    """
    if storage == "float32":
        return content
    if storage == "float16":
        return narrowed(content, "float16")
    plan = integer_plan(content, storage, calibration, ends, floats)
    precise = set()
    for graph, operator in _writers_of(plan.model, floats, ()):
        precise |= {name_of(graph.tensors[index]) for index in operator.inputs}
    table = _table(plan.model, plan.kernels, plan.ranges)
    aeq = quantizer.Quantizer(bytearray(write_model(plan.model)), plan.recipe)
    result = aeq.quantize(table or None, enable_progress_report=False)
    quantized = bytes(result.quantized_model)
    kind = _kind_of(storage)
    if kind == "static":
        quantized = with_integer_lstms(quantized, plan.ranges, plan.peaks)
    else:
        quantized = with_dynamic_lstms(quantized)
    return narrowed(quantized, kind, precise)


def _kind_of(storage: str) -> str:
    return "dynamic" if storage.startswith("dynamic") else "static"


def integer_plan(
    content: bytes,
    storage: str,
    calibration: Calibration | None,
    ends: Sequence[str] = ("float32", "float32"),
    floats: Collection[str] = (),
) -> IntegerPlan:
    """The plan of a file of integers; arguments as for `in_storage`."""
    kind = _kind_of(storage)
    model = read_model(content)
    recipe = [_rule(".*", "*", _settings(kind))]
    ranges: dict[str, Range] = {}
    peaks: Mapping[str, Peaks] = {}
    in_floats: list[tuple[SubGraphT, OperatorT]] = []
    if kind == "static":
        # LiteRT multiplies stacks of matrices with one scale; with others it computes zeros.
        recipe.append(
            _rule(
                ".*",
                "BATCH_MATMUL",
                _settings(kind, granularity="TENSORWISE"),
            )
        )
        with_plain_gathers(model)
        with_slices(model)
        trained = take_marks(model)
        measured: Mapping[str, Range] = trained
        if calibration is not None:
            peaks = calibration.peaks
            if not trained:
                measured = calibration.ranges
        part_outputs(model)
        ranges, in_floats = implied_ranges(model, measured, recipe)
        if trained and calibration is not None:
            peaks = peaks_in_ranges(model, peaks, ranges, calibration.ranges)
        in_floats += _writers_of(model, floats, in_floats)
        ranges = {name: wide_enough(bounds) for name, bounds in ranges.items()}
        round_floats(model, trained, ranges, _without_lstms(in_floats, peaks))
        recipe += _rules_of_ends(ends)
    kernels = integer_kernels(model, kind, _FEW_BITS.get(storage, ()))
    fit_steps(model, ranges, {kernel.name: kernel for kernel in kernels})
    recipe += _rules_of_few_bits(kernels, storage, kind)
    recipe += [
        _rule(_scope(graph, operator), "*", None)
        for graph, operator in in_floats
    ]
    return IntegerPlan(model, recipe, ranges, peaks, in_floats, kernels)


def _without_lstms(
    operations: Sequence[tuple[SubGraphT, OperatorT]],
    peaks: Mapping[str, Peaks],
) -> list[tuple[SubGraphT, OperatorT]]:
    """The operations but the LSTMs with peaks, which become integers after AEQ."""
    others = []
    for graph, operator in operations:
        outputs = {name_of(graph.tensors[index]) for index in operator.outputs}
        if not outputs & peaks.keys():
            others.append((graph, operator))
    return others


def _writers_of(
    model: ModelT,
    names: Collection[str],
    in_floats: Sequence[tuple[SubGraphT, OperatorT]],
) -> list[tuple[SubGraphT, OperatorT]]:
    """The operations that write tensors of these names, except those already in floats."""
    ids = {id(operator) for _, operator in in_floats}
    writers = []
    for graph, operator, _ in aeq_operations(model):
        outputs = {name_of(graph.tensors[index]) for index in operator.outputs}
        if outputs.intersection(names) and id(operator) not in ids:
            writers.append((graph, operator))
    return writers


def _rule(scope: str, kind: str, settings: dict[str, Any] | None) -> Rule:
    """The rule for operations of a kind whose outputs match a scope; None leaves them in floats."""
    key = "no_quantize" if settings is None else "min_max_uniform_quantize"
    return {
        "regex": scope,
        "operation": kind,
        "algorithm_key": key,
        "op_config": settings or {},
    }


def _settings(
    kind: str,
    bits: int = 8,
    dtype: str = "INT",
    granularity: str = "CHANNELWISE",
) -> dict[str, Any]:
    """The settings of a rule.

    Args:
        kind: str. "static" or "dynamic".
        bits: int. Bits of the weights.
        dtype: str. Type of the activations.
        granularity: str. "CHANNELWISE" or "TENSORWISE": what has a scale, of weights.
    """
    settings: dict[str, Any] = {
        "weight_tensor_config": {
            "num_bits": bits,
            "symmetric": True,
            "granularity": granularity,
            "dtype": "INT",
        },
        "compute_precision": "INTEGER",
        "explicit_dequantize": False,
        "skip_checks": False,
    }
    if kind == "dynamic":
        settings["min_weight_elements"] = _LEAST_DYNAMIC
        return settings
    settings["min_weight_elements"] = 0
    settings["activation_tensor_config"] = {
        "num_bits": 8,
        "symmetric": False,
        "granularity": "TENSORWISE",
        "dtype": dtype,
    }
    return settings


def _scope(graph: SubGraphT, operator: OperatorT) -> str:
    """The pattern of the outputs of one operation."""
    return f"^{re.escape(files.get_op_scope(operator, graph.tensors))}$"


def _rules_of_ends(dtypes: Sequence[str]) -> list[Rule]:
    """The rules for inputs and outputs of these types."""
    rules = []
    for end, dtype in zip(("INPUT", "OUTPUT"), dtypes, strict=True):
        settings = None
        if dtype != "float32":
            settings = _settings(
                "static", dtype=dtype.removesuffix("8").upper()
            )
        rules.append(_rule(".*", end, settings))
    return rules


def _rules_of_few_bits(
    kernels: Sequence[IntegerKernel], storage: str, kind: str
) -> list[Rule]:
    """The rules for kernels of fewer than 8 bits; ValueError if a storage needs one."""
    rules = []
    for kernel in kernels:
        if kernel.bits < 8:
            scope = _scope(kernel.graph, kernel.operator)
            rules.append(
                _rule(
                    scope,
                    "FULLY_CONNECTED",
                    _settings(kind, kernel.bits),
                )
            )
    if storage in _FEW_BITS and not rules:
        raise ValueError(
            f"{storage} needs a Dense kernel stored in fewer than 8 bits: "
            f"{_obstacle_to_few_bits(kernels, kind)}"
        )
    return rules


def _obstacle_to_few_bits(kernels: Sequence[IntegerKernel], kind: str) -> str:
    """Why no kernel of a model has fewer than 8 bits."""
    dense_kernels = [kernel for kernel in kernels if kernel.is_dense]
    if not dense_kernels:
        return "the model has none"
    least = LEAST_OF_FEW_BITS[kind]
    if all(kernel.values.size < least for kernel in dense_kernels):
        return f"all have fewer than {least:,} entries"
    return "the large ones were trained in 8 bits"


def _table(
    model: ModelT,
    kernels: Sequence[IntegerKernel],
    ranges: dict[str, Range],
) -> dict[str, Any]:
    """The least and largest values of kernels and activations, by name, as AEQ takes them."""
    table = {}
    for kernel in kernels:
        table[kernel.name] = {
            "min": -kernel.bounds,
            "max": kernel.bounds,
        }
    for graph in model.subgraphs:
        for tensor in graph.tensors:
            name = name_of(tensor)
            if name not in ranges:
                continue
            # With the rank of the tensor: constants beside it, as in a concatenation, are rounded
            # so.
            shape = [1] * max(len(tensor.shape), 1)
            low, high = ranges[name]
            table[name] = {
                "min": np.full(shape, low, np.float32),
                "max": np.full(shape, high, np.float32),
            }
    return table
