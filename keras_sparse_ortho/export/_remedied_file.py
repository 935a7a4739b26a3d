"""A file of static integers with its remedies: fitted ranges, a stretch of operations in floats."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from keras_sparse_ortho.export._flatbuffer import (
    kind_of,
    name_of,
    write_model,
)
from keras_sparse_ortho.export._integers import (
    Calibration,
    IntegerPlan,
    in_storage,
    integer_plan,
)
from keras_sparse_ortho.export._layer_tensors import tensors_of_layers
from keras_sparse_ortho.export._ranges import FIXED
from keras_sparse_ortho.export._stretch import shortest_stretch
from keras_sparse_ortho.export._tensor_errors import (
    Batch,
    errors_by_output,
    outputs_of,
    rounded_tensor,
    rounded_tensors,
    tensor_errors,
)

_SHARE = 0.9  # of the error, that a stretch in floats takes away
# Shares that are tried until a file is good enough.
_SHARES = (0.0, 0.5, 0.75, _SHARE, 0.97, 0.99, 1.0)
# Shares of a measured range that are tried.
_SHARES_OF_RANGE = (0.9, 0.8, 0.7, 0.6, 0.5)
_FAR_WORSE = 2.0  # times the least error: narrower ranges clip more still
_FITTING = 96  # rows. On fewer, values that others reach are clipped.


class Choice(NamedTuple):
    """The remedies of a file of integers, and the rows on which they are chosen.

    Attributes:
        calibrating: Inputs to fit ranges on.
        choosing: Inputs to choose a stretch on.
        layers: str. A file of `write_layer_outputs`, where `floats` has names.
        fits_ranges: bool. Whether ranges are fitted.
        floats: Names of layers that stay in floats, "auto" for the shortest stretch of operations,
            or None.
        tolerance: float. The largest root of the relative squared error of an output of a file
            with `floats="auto"`, if there is one.
    """

    calibrating: Sequence[Batch]
    choosing: Sequence[Batch]
    layers: str | None
    fits_ranges: bool
    floats: list[str] | str | None
    tolerance: float | None


def remedied_file(
    content: bytes,
    storage: str,
    calibration: Calibration,
    ends: Sequence[str],
    choice: Choice,
) -> bytes:
    """A file of static integers; `in_storage` explains the other arguments.

    Args:
        content: bytes. The file of floats.
        storage: str. "int8" or "int4".
        calibration: The measured ranges.
        ends: Types of inputs and outputs.
        choice: The remedies.
    """
    if choice.fits_ranges:
        rows = choice.calibrating
        calibration = _fitted(content, storage, calibration, rows)
    names: list[str] = []
    if choice.floats == "auto":
        names = _chosen_floats(content, storage, calibration, choice)
    elif choice.layers is not None and choice.floats is not None:
        names = tensors_of_layers(content, choice.layers, choice.floats)
    return in_storage(content, storage, calibration, ends, names)


def _fitted(
    content: bytes,
    storage: str,
    calibration: Calibration,
    batches: Sequence[Batch],
) -> Calibration:
    """Ranges in which the outputs lose least: a share of the measured one for each tensor.

    A smaller range clips the largest values and rounds all others in finer steps. With the outputs
    `y_k(t, r)` of the file of floats in which tensor `t` alone is rounded, in the range `r`,

        r_t = argmin over s of sum over k of |y_k(t, s * measured_t) - y_k|^2 / |y_k|^2,

    s in 1, 0.9, ... 0.5.
    """
    size = len(next(iter(batches[0].values())))
    stride = math.ceil(len(batches) * size / _FITTING)
    batches = batches[::stride]
    plan = integer_plan(content, storage, calibration)
    expected = outputs_of(write_model(plan.model), batches)
    graph = plan.model.subgraphs[0]
    shares = {}
    for index, operators in rounded_tensors(plan).items():
        writes = index in map(int, operators[0].outputs)
        # LiteRT fixes these ranges.
        if writes and kind_of(plan.model, operators[0]) in FIXED:
            continue
        name = name_of(graph.tensors[index])
        low, high = plan.ranges[name]
        least_error = math.inf
        for share in (1.0, *_SHARES_OF_RANGE):
            with rounded_tensor(plan, index, (share * low, share * high)):
                outputs = outputs_of(write_model(plan.model), batches)
            error = sum(errors_by_output(outputs, expected))
            if error < least_error:
                least_error = error
                shares[name] = share
            elif error > _FAR_WORSE * least_error:
                break
    return calibration.narrowed(shares)


def _chosen_floats(
    content: bytes, storage: str, calibration: Calibration, choice: Choice
) -> list[str]:
    """The outputs of the shortest stretch of operations that a good file needs in floats.

    It holds nine tenths of the error, or as much of it as leaves the tolerance.
    """
    plan = integer_plan(content, storage, calibration)
    errors = tensor_errors(plan, choice.choosing)
    count = len(plan.model.subgraphs[0].operators)
    if choice.tolerance is None:
        return _written_in(plan, shortest_stretch(errors, count, _SHARE))
    expected = outputs_of(content, choice.choosing)
    names: list[str] = []
    for share in _SHARES:
        names = _written_in(plan, shortest_stretch(errors, count, share))
        file = in_storage(content, storage, calibration, floats=names)
        outputs = outputs_of(file, choice.choosing)
        error = max(errors_by_output(outputs, expected))
        if math.sqrt(error) <= choice.tolerance:
            break
    return names


def _written_in(plan: IntegerPlan, stretch: range) -> list[str]:
    """The names of the tensors that the operations of a stretch write."""
    graph = plan.model.subgraphs[0]
    names = []
    for place in stretch:
        for index in graph.operators[place].outputs:
            names.append(name_of(graph.tensors[index]))
    return names
