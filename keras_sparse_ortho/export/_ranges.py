"""Ranges of the activations of a LiteRT file: measured, implied by others, and wide enough."""

import collections
import contextlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from ai_edge_litert import schema_py_generated as schema
from ai_edge_litert.interpreter import (
    Interpreter,
    OpResolverType,
)
from ai_edge_quantizer import qtyping, recipe_manager
from ai_edge_quantizer.utils import (
    tfl_flatbuffer_utils as files,
)

from keras_sparse_ortho.export._flatbuffer import (
    ModelT,
    OperatorT,
    SubGraphT,
    name_of,
    read_model,
)
from keras_sparse_ortho.export._graph_changes import (
    aeq_operations,
)
from keras_sparse_ortho.export._integer_kernels import (
    IntegerKernel,
)
from keras_sparse_ortho.export._marks import (
    MOVING,
    Range,
    range_before,
)

Batches: TypeAlias = Iterable[dict[str, np.ndarray]]
"""Inputs by name, a batch at a time."""

# The range of a tensor that was always 0, as behind a ReLU that never fires. Any step does, but
# ai-edge-quantizer's own, 4e-12: LiteRT cannot run with it.
_RANGE_OF_ZEROS = (0.0, 1.0)
_LEAST_WIDTH = 1e-6  # of a range
_STEPS = 255  # of a range
# In steps of products: a bias, for which 32 bits are few once sums are added to it, and an output's
# step, 256 at most in XNNPACK.
_MOST_BIAS, _MOST_RATIO = 2**30, 128
# Operations whose output has the range of their input, and those whose range LiteRT knows.
PASS_ON = (
    *MOVING,
    "SPLIT",
    "MAX_POOL_2D",
    "AVERAGE_POOL_2D",
)
FIXED: dict[str, Range] = {
    "SOFTMAX": (0.0, 255 / 256),
    "LOGISTIC": (0.0, 255 / 256),
    "TANH": (-1.0, 127 / 128),
}
# Operations whose input may be clipped, and rounded, in place of their output.
_BACKWARD = (*MOVING, "CONCATENATION", "MAX_POOL_2D")


def calibrated(content: bytes, batches: Batches) -> dict[str, Range]:
    """The ranges of tensors in batches, by name.

    AEQ's own way is 10 times as slow, and fails on unrolled GRUs.
    """
    interpreter = Interpreter(
        model_content=content,
        experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
        experimental_preserve_all_tensors=True,
    )
    runner = interpreter.get_signature_runner()
    model = read_model(content)
    graph = model.subgraphs[0]
    ranges: dict[str, Range] = {}
    for batch in batches:
        runner(**batch)
        for index in range(len(graph.tensors)):
            for name in _float_activations(model, graph, [index]):
                # Nothing has written to it.
                with contextlib.suppress(ValueError):
                    value = interpreter.get_tensor(index)
                    low, high = ranges.get(name, (0.0, 0.0))
                    ranges[name] = (
                        min(low, float(value.min())),
                        max(high, float(value.max())),
                    )
    return ranges


class _Operation(NamedTuple):
    """An operation with the names of the activations that it reads and writes."""

    graph: SubGraphT
    operator: OperatorT
    kind: str
    sources: list[str]
    results: list[str]


def implied_ranges(
    model: ModelT,
    measured: Mapping[str, Range],
    recipe: Sequence[dict[str, Any]],
) -> tuple[dict[str, Range], list[tuple[SubGraphT, OperatorT]]]:
    """All ranges that measured ones imply, and the operations that lack one.

    Args:
        model: The file.
        measured: Ranges by name of a tensor.
        recipe: Rules of AEQ, which say what it does not quantize.

    Returns:
        Ranges by name, and the operations that stay in floats, each with its graph.
    """
    steps = []
    for graph, operator, kind in aeq_operations(model):
        sources = _float_activations(model, graph, operator.inputs)
        results = _float_activations(model, graph, operator.outputs)
        steps.append(_Operation(graph, operator, kind, sources, results))
    ranges = dict(measured)
    _imply_backward(model, steps, ranges)
    manager = recipe_manager.RecipeManager()
    manager.load_quantization_recipe(recipe)
    read = set()
    for graph, operator, *_ in steps:
        read |= {(id(graph), index) for index in operator.inputs}
        read |= {(id(graph), index) for index in graph.outputs}
    in_floats = []
    for step in steps:
        _imply_forward(step, ranges)
        is_read = all(
            (id(step.graph), index) in read for index in step.operator.outputs
        )
        # AEQ leaves outputs that nothing reads in floats.
        if not is_read or not _is_quantizable(step, ranges, manager):
            in_floats.append((step.graph, step.operator))
    return ranges, in_floats


def _imply_backward(
    model: ModelT,
    steps: Sequence[_Operation],
    ranges: dict[str, Range],
) -> None:
    """Adds the ranges of inputs of operations that only move them about, or scale them."""
    readers = collections.Counter(
        name for step in steps for name in step.sources
    )
    for step in reversed(steps):
        if not step.results:  # it may assign a variable
            continue
        result = name_of(step.graph.tensors[step.operator.outputs[0]])
        if result not in ranges:
            continue
        if step.kind in _BACKWARD:
            for source in step.sources:
                if readers[source] == 1 or step.kind in (
                    "RESHAPE",
                    "TRANSPOSE",
                ):
                    ranges.setdefault(source, ranges[result])
        if len(step.sources) == 1 and readers[step.sources[0]] == 1:
            before = range_before(
                model,
                step.graph,
                step.operator,
                ranges[result],
            )
            if before is not None:
                ranges.setdefault(step.sources[0], before)


def _imply_forward(step: _Operation, ranges: dict[str, Range]) -> None:
    """Adds the ranges of outputs of operations that only move them about, or that are known."""
    if not step.sources or step.sources[0] not in ranges:
        return
    first = ranges[step.sources[0]]
    if all(source in ranges for source in step.sources):
        if step.kind in FIXED:
            ranges.update(dict.fromkeys(step.results, FIXED[step.kind]))
        elif step.kind in PASS_ON:
            ranges.update(dict.fromkeys(step.results, first))
    if step.kind == "RELU":
        ranges.setdefault(step.results[0], (0.0, max(first[1], 0.0)))


def _is_quantizable(
    step: _Operation,
    ranges: Mapping[str, Range],
    manager: Any,
) -> bool:
    """Whether AEQ computes an operation in integers, and has all ranges for it."""
    if not step.sources or not step.kind:
        return False
    if any(name not in ranges for name in (*step.sources, *step.results)):
        return False
    key, _ = manager.get_quantization_configs(
        qtyping.TFLOperationName(step.kind), ";"
    )
    if key == "no_quantize":
        return False
    return (
        step.kind not in PASS_ON
        or ranges[step.results[0]] == ranges[step.sources[0]]
    )


def wide_enough(measured: Range) -> Range:
    """A range in which LiteRT can compute."""
    low, high = measured
    if high - low > 0.0:
        return _widened(measured, _LEAST_WIDTH)
    return _RANGE_OF_ZEROS


def _widened(narrow: Range, width: float) -> Range:
    """A range of at least a width, 0 in the same place."""
    low, high = narrow
    if high - low >= width:
        return narrow
    return low * width / (high - low), high * width / (high - low)


def fit_steps(
    model: ModelT,
    ranges: dict[str, Range],
    kernels: Mapping[str, IntegerKernel],
) -> None:
    """Widens steps where products would not fit their integers, in place.

    LiteRT adds up products in steps of the input's step times the kernel's scale. In these a bias
    must fit 32 bits, and they must be less than 256 steps of the output. Channels of nearly zeros
    break the one, outputs of nearly zeros, behind ReLUs that never fire, the other.

    Args:
        model: The file.
        ranges: The ranges of tensors, by name.
        kernels: The kernels, by name.
    """
    before = dict(ranges)
    for graph, operator, kind in aeq_operations(model):
        if len(operator.outputs) == 0:  # it assigns a variable
            continue
        output = name_of(graph.tensors[operator.outputs[0]])
        if kind in PASS_ON:
            for source in _float_activations(model, graph, operator.inputs):
                if output in ranges and before.get(source) == before[output]:
                    ranges[output] = ranges[source]
            continue
        # The first input of a transposed convolution is a shape.
        first = 1 if kind == "CONV_2D_TRANSPOSE" else 0
        places = [int(index) for index in operator.inputs]
        if (
            kind not in files.TFL_OP_TO_WEIGHT_QUANTIZED_DIM
            or len(places) < 2 + first
        ):
            continue
        source = name_of(graph.tensors[places[2 * first]])
        kernel = kernels.get(name_of(graph.tensors[places[1]]))
        if source not in ranges or kernel is None:
            continue
        low, high = ranges[source]
        step = (high - low) / _STEPS
        bias = _float_vector(model, graph, places[2 + first :])
        if bias is not None and bias.size == kernel.bounds.size:
            least = kernel.largest_integer * np.abs(bias) / (step * _MOST_BIAS)
            bounds = np.maximum(
                kernel.bounds,
                least.reshape(kernel.bounds.shape),
            )
            kernel.bounds = bounds.astype(np.float32)
        if output in ranges:
            product_step = (
                step * float(kernel.bounds.max()) / kernel.largest_integer
            )
            least_width = product_step / _MOST_RATIO * _STEPS
            ranges[output] = _widened(ranges[output], least_width)


def _float_vector(
    model: ModelT, graph: SubGraphT, places: Sequence[int]
) -> np.ndarray | None:
    """The values of the first of the tensors if there is one, a constant of floats."""
    if not places or places[0] < 0:
        return None
    values = files.get_tensor_data(graph.tensors[places[0]], model.buffers)
    if values is None or values.dtype != np.float32:
        return None
    return values.reshape(-1)


def _float_activations(
    model: ModelT, graph: SubGraphT, places: Iterable[int]
) -> list[str]:
    """The names of the tensors of floats that are no constants."""
    names = []
    for index in places:
        if index < 0:
            continue
        tensor = graph.tensors[index]
        is_float = tensor.type == schema.TensorType.FLOAT32
        if is_float and model.buffers[tensor.buffer].data is None:
            names.append(name_of(tensor))
    return names
