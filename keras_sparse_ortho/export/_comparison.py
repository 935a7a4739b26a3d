"""Compares a LiteRT file with Keras: its outputs, and the zeros of its kernels."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from keras_sparse_ortho.errors import ExportVerificationError
from keras_sparse_ortho.export._process import JobError, shared_worker
from keras_sparse_ortho.export._signature import full_batches
from keras_sparse_ortho.export._task import Task
from keras_sparse_ortho.export._weight_zeros import WeightZeros

_LOST_SHARE = (
    0.01  # of a kernel's zeros: a tensor that lacks more is not the kernel
)


class Comparison(NamedTuple):
    """The difference of two lists of outputs; `error` is the largest, that of `worst_output`."""

    max_abs_diff: float
    argmax_agreement: float | None
    cosine: float
    error: float
    worst_output: str


def litert_outputs(file: Path, task: Task) -> list[np.ndarray]:
    """The outputs of a file on the rows of a task, from LiteRT's interpreter in a subprocess."""
    compared = task.rows.compared
    batches = full_batches(compared, task.signature.batch_size)
    sample = file.with_suffix(".sample.npz")
    result = file.with_suffix(".outputs.npz")
    np.savez(
        sample,
        *[np.concatenate(pieces) for pieces in zip(*batches, strict=True)],
    )
    try:
        shared_worker().run(
            "run",
            task.timeout,
            file=str(file),
            sample=str(sample),
            inputs=task.signature.specs,
            output_names=task.names,
            result=str(result),
        )
    except JobError as error:
        raise ExportVerificationError(
            f"The file must run in ai-edge-litert's interpreter, in a subprocess. Received: {error}"
        ) from None
    rows = len(compared[0])
    with np.load(result) as arrays:
        return [
            arrays[f"arr_{number}"][:rows] for number in range(len(task.names))
        ]


def compare(
    names: Sequence[str],
    expected: Sequence[np.ndarray],
    actual: Sequence[np.ndarray],
    measure: str,
) -> Comparison:
    """Compares Keras' outputs with those of a file.

    Args:
        names: Names of the outputs.
        expected: Keras' outputs.
        actual: The outputs of the file. The error is infinite if any is not finite.
        measure: str. "max" or "rms", see `export_litert`.
    """
    differences = []
    errors = []
    agreements = []
    cosines = []
    for name, y, z in zip(names, expected, actual, strict=True):
        if y.shape != z.shape:
            raise ExportVerificationError(
                f"Output `{name}` of the file must have the shape that Keras gives, {y.shape}. "
                f"Received: shape={z.shape}"
            )
        y = y.astype(np.float64)
        z = z.astype(np.float64)
        difference = np.abs(z - y)
        differences.append(float(difference.max()))
        errors.append(_error(y, difference, measure))
        cosines.append(_cosine(y, z))
        if y.ndim == 2 and y.shape[1] > 1:
            agreements.append(float(np.mean(y.argmax(1) == z.argmax(1))))
    worst = int(np.argmax(errors))
    agreement = min(agreements) if agreements else None
    return Comparison(
        max_abs_diff=max(differences),
        argmax_agreement=agreement,
        cosine=min(cosines),
        error=errors[worst],
        worst_output=names[worst],
    )


def _cosine(y: np.ndarray, z: np.ndarray) -> float:
    """The cosine of one output on all rows; 0 where one of the two is 0, or not finite."""
    norms = float(np.linalg.norm(y)) * float(np.linalg.norm(z))
    if not 0.0 < norms < math.inf:
        return 0.0
    return float(np.sum(y * z)) / norms


def _error(y: np.ndarray, difference: np.ndarray, measure: str) -> float:
    """The error of one output, relative to its size."""
    if not np.all(np.isfinite(difference)):
        return float("inf")
    if measure == "max":
        return float(difference.max() / max(1.0, np.abs(y).max()))
    scale = float(np.sqrt(np.mean(y**2)))
    return float(np.sqrt(np.mean(difference**2))) / (scale or 1.0)


def find_zeros(
    kernels: Mapping[str, np.ndarray], weights: Iterable[WeightZeros]
) -> tuple[str, ...]:
    """Returns the kernels whose zeros no tensor of a file has; raises if one has lost some."""
    zeros = {}
    for path, value in kernels.items():
        count = value.size - int(np.count_nonzero(value))
        if count:
            zeros[path] = count
    unmatched: dict[int, list[int]] = {}  # zeros of tensors by size
    for weight in weights:
        unmatched.setdefault(weight.size, []).append(weight.zeros)
    without_tensor = []
    for path in sorted(zeros, key=lambda path: -zeros[path]):
        of_size = unmatched.setdefault(kernels[path].size, [])
        enough = [count for count in of_size if count >= zeros[path]]
        if enough:
            of_size.remove(min(enough))
        else:
            without_tensor.append(path)
    for path in without_tensor:
        size = kernels[path].size
        lost = zeros[path] - max(unmatched[size], default=-math.inf)
        if lost <= max(1, _LOST_SHARE * zeros[path]):
            raise ExportVerificationError(
                "The conversion must keep every zero. Received: "
                f"kernel {path!r} has {zeros[path]} zeros of {size}, of which {lost} "
                "are not zero in the file"
            )
    return tuple(without_tensor)
