"""A Keras model to a LiteRT file that was run and compared before it is handed over."""

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
from rich.console import Console

from keras_sparse_ortho.export._comparison import Comparison, compare
from keras_sparse_ortho.export._conversion import convert
from keras_sparse_ortho.export._errors import ExportVerificationError
from keras_sparse_ortho.export._execution import keras_outputs, litert_outputs
from keras_sparse_ortho.export._plain import plain_model
from keras_sparse_ortho.export._registry import route_for
from keras_sparse_ortho.export._report import ExportReport
from keras_sparse_ortho.export._requirements import require_litert, versions
from keras_sparse_ortho.export._route import Route
from keras_sparse_ortho.export._signature import Signature, signature_of
from keras_sparse_ortho.export._sizes import gzip_size, zstd_size
from keras_sparse_ortho.export._twin import float32_twin
from keras_sparse_ortho.export._weights import lost_zeros, read_weights, sparse_kernels


def export_litert(
    model: keras.Model,
    path: str | os.PathLike[str],
    *,
    quantization: str | None = None,
    representative_data: Any = None,
    batch_size: int = 1,
    sample: Any = None,
    tolerance: float | None = None,
    seed: int = 0,
    timeout: float = 600.0,
    verbose: int = 0,
) -> ExportReport:
    """Export a model as a LiteRT (TFLite) file, verified.

    The model is stripped (its effective weights baked into a plain Keras model), converted with a
    static batch, and the file is run by ai-edge-litert's interpreter with its default settings
    (XNNPACK) and compared with Keras on sample data. The file appears at `path` only if it
    agrees and no zero of a kernel was lost; otherwise what stood there before stays as it was.

    Conversion and run happen in subprocesses, on CPU, because both are known to crash. The
    conversion rebuilds the model on the TensorFlow backend, whatever backend is in use.

    Args:
        model: A built functional, Sequential or subclassed Keras model, with or without our
            wrappers. Every dimension of its inputs but the batch must be known.
        path: Where to write the file, by custom ending in `.tflite`; its folder must exist.
        quantization: How the weights are stored. `None`: float32. `"float16"`: half the size.
            `"dynamic_int8"`: weights of 1024 and more entries as int8, activations quantized on
            the fly. `"int8"`: weights and activations as int8, with float32 inputs and outputs.
        representative_data: For `"int8"` only, and needed there: arrays of shape
            `(rows, *input shape)`, nested like the inputs or a dict by input name, to calibrate
            the activations on. 100 to 500 rows of real data are usual. Rows that do not fill a
            last batch are left out.
        batch_size: Rows that one call of the file takes.
        sample: Arrays of shape `(rows, *input shape)` to compare on, nested likewise. Default:
            the first rows of `representative_data`, else 8 standard normal rows (more for a
            larger batch). Needed where an input is of integers, and for subclassed models.
        tolerance: The largest error that is let through, in the measure of the route. Let d be
            the difference of one output y. float32: max|d| / max(1, max|y|), default 1e-5. The
            others: sqrt(mean d^2) / sqrt(mean y^2), the error relative to the output as a whole,
            default 5e-3 for float16, 0.1 for dynamic int8, 0.25 for int8. On MLPs, CNNs,
            LSTMs and transformers at density 0.1 we measured at most 6e-4, 0.014 and 0.12; a
            wrong file has 1 or more.
        seed: Seed of the random sample.
        timeout: Seconds that the conversion, and then the run, may take.
        verbose: 0 is silent; 1 says each step and prints the report.

    Returns:
        The `ExportReport`: sizes, zeros of each weight, differences, versions.

    Raises:
        ImportError: if TensorFlow or ai-edge-litert is missing.
        ValueError: if an argument does not fit the model, the model is not built or has dynamic
            dimensions, or the route is known to fail on it.
        ExportConversionError: if the converter refuses the model (with the operations that LiteRT
            lacks) or crashes.
        ExportVerificationError: if the file crashes, disagrees, or lost zeros.

    Limits: The whole model must run on LiteRT's built-in operations; there is no fallback to
    TensorFlow operations, since a plain interpreter cannot run those (`keras.Model.export` with
    `format="litert"` takes converter options for that). Models of mixed or half precision are
    exported, and compared, in float32. A model written as a class is to be stripped first, since
    that changes it in place. Full int8 needs recurrent layers with `unroll=True`.
    Zeros are stored like other values: the file itself shrinks by quantization only, and
    sparsity shows in its compressed size. On a GPU, Keras may compute in TF32 and so differ by
    more than 1e-5; raise `tolerance` there. Custom layers must be importable in a new process,
    except on the TensorFlow backend.

    Example:
    >>> import keras, tempfile, pathlib
    >>> from keras_sparse_ortho.export import export_litert
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "tiny.tflite"
    >>> report = export_litert(model, path)
    >>> report.total_weights, report.max_abs_diff < 1e-5, path.stat().st_size == report.bytes
    (8, True, True)

    Reference:
        [LiteRT: post-training quantization](
        https://ai.google.dev/edge/litert/models/post_training_quantization)
    """
    require_litert()
    target = _check_path(path)
    route = route_for(quantization)
    batch_size = _check_positive("batch_size", batch_size)
    allowed = route.tolerance if tolerance is None else _check_tolerance(tolerance)
    signature = signature_of(model, batch_size, sample)
    route.check(model)
    representative = _representative(route, representative_data, signature)
    compared = _sample(signature, sample, representative, seed)
    console = Console(quiet=not verbose)

    console.print("Stripping, and asking Keras for the outputs to compare with")
    stripped = plain_model(model)
    plain = float32_twin(stripped)
    names, want = keras_outputs(model if plain is stripped else plain, signature, compared)

    # Aside, but on the same file system, so that the last step is one atomic rename.
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        console.print(f"Converting ({route.name})")
        file = convert(plain, route, signature, names, representative, staging, timeout)
        console.print("Running the file and comparing")
        got = litert_outputs(file, signature, names, compared, staging, timeout)
        result = _verify(names, want, got, route, allowed)
        content = file.read_bytes()
        weights = read_weights(content)
        lost = lost_zeros(sparse_kernels(plain.weights), weights)
        if lost is not None:
            raise ExportVerificationError(f"The conversion must keep every zero. Received: {lost}")
        report = ExportReport(
            path=str(target),
            quantization=quantization,
            batch_size=batch_size,
            bytes=len(content),
            gzip_bytes=gzip_size(content),
            zstd_bytes=zstd_size(content),
            weights=weights,
            max_abs_diff=result.max_abs_diff,
            mean_abs_diff=result.mean_abs_diff,
            argmax_agreement=result.argmax_agreement,
            error=result.error,
            tolerance=allowed,
            measure=route.measure,
            sample_rows=len(compared[0]),
            versions=versions(),
        )
        os.replace(file, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    console.print(report)
    return report


def _check_path(path: str | os.PathLike[str]) -> Path:
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(
            f"`path` must name a file in a folder that exists. Received: path={str(path)!r}"
        )
    return target


def _check_positive(name: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer. Received: {name}={value!r}")
    return int(value)


def _check_tolerance(tolerance: float) -> float:
    if not tolerance >= 0:  # also refuses NaN, with which every comparison would fail or pass
        raise ValueError(f"`tolerance` must be 0 or more. Received: tolerance={tolerance!r}")
    return float(tolerance)


def _representative(route: Route, data: Any, signature: Signature) -> list[np.ndarray] | None:
    if route.needs_representative_data != (data is not None):
        rule = "is needed" if route.needs_representative_data else "has no use"
        raise ValueError(
            f"`representative_data` {rule} with quantization={route.quantization!r}. "
            f"Received: representative_data={'None' if data is None else type(data).__name__}"
        )
    if data is None:
        return None
    arrays = signature.flatten(data, "representative_data")
    if len(arrays[0]) < signature.batch_size:
        raise ValueError(
            "`representative_data` must fill at least one batch. Received: "
            f"{len(arrays[0])} rows with batch_size={signature.batch_size}"
        )
    return arrays


def _sample(
    signature: Signature, sample: Any, representative: list[np.ndarray] | None, seed: int
) -> list[np.ndarray]:
    if sample is not None:
        return signature.flatten(sample, "sample")
    if representative is not None:
        return [array[: signature.default_rows] for array in representative]
    return signature.random_sample(seed)


def _verify(
    names: list[str], want: list[np.ndarray], got: list[np.ndarray], route: Route, allowed: float
) -> Comparison:
    try:
        result = compare(names, want, got, route.measure)
    except ValueError as error:
        raise ExportVerificationError(str(error)) from error
    if not result.error <= allowed:
        raise ExportVerificationError(
            f"The file must agree with Keras to {allowed:g} ({route.measure} error, see "
            f"`tolerance`). Received: error={result.error:.3g} at output "
            f"`{result.worst_output}`, maximal difference {result.max_abs_diff:.3g}"
        )
    return result
