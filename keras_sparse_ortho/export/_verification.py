"""Whether a file does what Keras does: both outputs, their difference, and the zeros."""

import dataclasses
from collections.abc import Iterable
from pathlib import Path

import keras
import numpy as np

from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.export._errors import ExportVerificationError
from keras_sparse_ortho.export._process import Worker, WorkerError
from keras_sparse_ortho.export._signature import Signature, leaves, unique_names


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The disagreement of two lists of outputs, over all outputs and rows.

    `error` is in the measure asked for, the largest over the outputs, and `worst_output` is the
    output that has it.
    """

    max_abs_diff: float
    mean_abs_diff: float
    argmax_agreement: float | None
    error: float
    worst_output: str


def compare(
    names: list[str], want: list[np.ndarray], got: list[np.ndarray], measure: str
) -> Comparison:
    """Compare Keras' outputs with those of the file.

    With d the difference of one output y, the measure `"max"` is max|d| / max(1, max|y|), and
    `"rms"` is sqrt(mean d^2) / sqrt(mean y^2). Rounding to int8 now and then clips a single
    value by much, so only the second is steady there; a wrong file has 1 or more in it.
    A value that is not finite makes the error infinite.
    """
    diffs, errors, agreements = [], [], []
    for name, y, z in zip(names, want, got, strict=True):
        if y.shape != z.shape:
            raise ValueError(
                f"Output `{name}` of the file must have the shape that Keras gives, {y.shape}. "
                f"Received: shape={z.shape}"
            )
        y, z = y.astype(np.float64), z.astype(np.float64)
        diff = np.abs(z - y)
        diffs.append(diff.ravel())
        errors.append(_error(y, diff, measure))
        if y.ndim == 2 and y.shape[1] > 1:
            agreements.append(float(np.mean(y.argmax(1) == z.argmax(1))))
    worst = int(np.argmax(errors))
    joined = np.concatenate(diffs)
    return Comparison(
        max_abs_diff=float(joined.max()),
        mean_abs_diff=float(joined.mean()),
        argmax_agreement=min(agreements) if agreements else None,
        error=errors[worst],
        worst_output=names[worst],
    )


def verify(
    names: list[str], want: list[np.ndarray], got: list[np.ndarray], measure: str, allowed: float
) -> Comparison:
    """The comparison, if the error is allowed.

    Raises:
        ExportVerificationError: if it is not, or a shape differs.
    """
    try:
        result = compare(names, want, got, measure)
    except ValueError as error:
        raise ExportVerificationError(str(error)) from error
    if not result.error <= allowed:
        raise ExportVerificationError(
            f"The file must agree with Keras to {allowed:g} ({measure} error, see "
            f"`tolerance`). Received: error={result.error:.3g} at output "
            f"`{result.worst_output}`, maximal difference {result.max_abs_diff:.3g}"
        )
    return result


def keras_outputs(
    model: keras.Model, signature: Signature, sample: list[np.ndarray]
) -> tuple[list[str], list[np.ndarray]]:
    """Names and values of the model's outputs on all rows, one batch at a time.

    Raises:
        ValueError: if an output is not finite, as nothing could be compared with it.
    """
    pieces: list[list[np.ndarray]] = []
    keys: list[str | None] = []
    for batch in _full_batches(sample, signature.batch_size):
        inputs = [keras.ops.convert_to_tensor(array) for array in batch]
        answers = leaves(model(signature.pack(inputs), training=False))
        keys = [key for key, _ in answers]
        pieces.append([np.asarray(to_numpy(tensor)) for _, tensor in answers])
    known = getattr(model, "output_names", None) or []
    if len(known) == len(keys):
        keys = [key or name for key, name in zip(keys, known, strict=True)]
    names = unique_names(keys, "output")
    rows = len(sample[0])
    outputs = [np.concatenate(piece)[:rows] for piece in zip(*pieces, strict=True)]
    for name, output in zip(names, outputs, strict=True):
        if not np.all(np.isfinite(output)):
            raise ValueError(
                "Keras' own outputs must be finite on the sample, or nothing can be compared. "
                f"Received: non-finite values in output `{name}` of model '{model.name}'"
            )
    return names, outputs


def litert_outputs(
    worker: Worker,
    file: Path,
    signature: Signature,
    names: list[str],
    sample: list[np.ndarray],
    timeout: float,
    xnnpack: bool,
) -> tuple[list[np.ndarray], int | None]:
    """The outputs of a LiteRT file on all rows, run by ai-edge-litert in a worker.

    Returns:
        The outputs, and the bytes by which loading the file raised the peak of the worker's
        memory: of the file itself only in a fresh worker; None where the system does not tell.

    Raises:
        ExportVerificationError: if the interpreter refuses the file or dies on it.
    """
    batches = _full_batches(sample, signature.batch_size)
    rows, result = file.with_suffix(".sample.npz"), file.with_suffix(".outputs.npz")
    np.savez(rows, *[np.concatenate(pieces) for pieces in zip(*batches, strict=True)])
    try:
        load_bytes: int | None = worker.run(
            "run",
            timeout,
            file=str(file),
            xnnpack=xnnpack,
            sample=str(rows),
            input_names=[spec.name for spec in signature.inputs],
            output_names=names,
            batch_size=signature.batch_size,
            result=str(result),
        )
    except WorkerError as error:
        raise ExportVerificationError(
            "The file must run in ai-edge-litert's interpreter, in a subprocess. Received: "
            f"{error} ({'with' if xnnpack else 'without'} XNNPACK)"
        ) from None
    with np.load(result) as data:
        outputs = [data[f"arr_{i}"][: len(sample[0])] for i in range(len(names))]
    return outputs, load_bytes


def sparse_kernels(weights: Iterable[keras.Variable]) -> list[tuple[str, np.ndarray]]:
    """Path and value of the weights whose zeros must not be lost: kernels, by name or by looks.

    A bias can have rank 2 as well (GRU, MultiHeadAttention), and the converter may fold it away.
    A weight of any other name (of a custom layer) counts as a kernel if some but not all of it is
    zero.
    """
    kernels = []
    for variable in weights:
        if len(variable.shape) < 2 or "bias" in variable.name:
            continue
        value = np.asarray(to_numpy(variable.value))
        live = np.count_nonzero(value)
        if any(part in variable.name for part in ("kernel", "embedding")) or 0 < live < value.size:
            kernels.append((variable.path, value))
    return kernels


def paths_in_use(
    model: keras.Model, signature: Signature, sample: list[np.ndarray], paths: Iterable[str]
) -> tuple[str, ...]:
    """Those of the weights that the outputs depend on: the converter leaves the others out.

    Such are those of a pooling layer under a head that takes the sequence. Found by trying: NaN in
    their place changes nothing.
    """
    first = [array[: signature.batch_size] for array in sample]
    _, before = keras_outputs(model, signature, first)

    def matters(variable: keras.Variable) -> bool:
        value = keras.ops.copy(variable.value)
        try:
            assign(variable, keras.ops.full_like(value, float("nan")))
            _, after = keras_outputs(model, signature, first)
        except ValueError:  # outputs that are not finite
            return True
        finally:
            assign(variable, value)
        return not all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))

    known = {variable.path: variable for variable in model.weights}
    return tuple(path for path in paths if matters(known[path]))


def _error(y: np.ndarray, diff: np.ndarray, measure: str) -> float:
    if not np.all(np.isfinite(diff)):
        return float("inf")
    if measure == "max":
        return float(diff.max() / max(1.0, np.abs(y).max()))
    scale = float(np.sqrt(np.mean(y**2)))
    return float(np.sqrt(np.mean(diff**2))) / (scale or 1.0)


def _full_batches(sample: list[np.ndarray], rows: int) -> list[list[np.ndarray]]:
    """Batches of the static size; the last one is filled up with copies of the last row."""
    missing = -len(sample[0]) % rows
    full = [np.concatenate([array, *[array[-1:]] * missing]) for array in sample]
    starts = range(0, len(full[0]), rows)
    return [[array[start : start + rows] for array in full] for start in starts]
