"""A LiteRT file, opened with the interpreter's settings that it needs."""

import os
import tempfile
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.export._errors import LiteRTFileError
from keras_sparse_ortho.export._foreign import inspect_foreign
from keras_sparse_ortho.export._litert_model import LiteRTModel
from keras_sparse_ortho.export._metadata import read_record
from keras_sparse_ortho.export._plain import plain_model
from keras_sparse_ortho.export._requirements import require_interpreter
from keras_sparse_ortho.export._sidecar import read_packed
from keras_sparse_ortho.export._signature import InputSpec, signature_of
from keras_sparse_ortho.export._twin import float32_twin


def load_litert(
    path: str | os.PathLike[str],
    *,
    model: keras.Model | None = None,
    sample: Any = None,
    threads: int = 1,
    timeout: float = 60.0,
) -> LiteRTModel:
    """Open a LiteRT file for prediction, with the settings that it needs.

    A file of `export_litert` carries its settings and a SHA-256 of itself: one that is corrupted,
    truncated or edited is refused before the interpreter, which it could crash, sees it. A file
    of another origin is first tried in a subprocess, with and without XNNPACK.

    Args:
        path: A `.tflite` file, or its sidecar `.tflite.zst` or `.tflite.gz`.
        model: The Keras model that the file should be of: inputs, and outputs on `sample`, are
            compared within the tolerance of its export (0.1 by the rms measure for foreign
            files). `None`: not checked.
        sample: Rows to compare on, nested like the model's inputs. Default: random rows.
        threads: Threads of the interpreter.
        timeout: Seconds that the trial of a foreign file may take.

    Returns:
        A `LiteRTModel`, whose `predict(x)` runs any number of rows.

    Raises:
        ImportError: if ai-edge-litert is missing.
        FileNotFoundError: if there is no such file.
        LiteRTFileError: if the file is corrupted, truncated, no LiteRT file, crashes the
            interpreter, or is not of `model`.

    Limits: A foreign file is tried on zeros only; it may still fail on other values. The checksum
    is against accidents: it is no signature. A file of ours to which another tool added something
    counts as edited; open such a file with ai-edge-litert itself.

    Example:
    >>> import keras, numpy as np, tempfile, pathlib
    >>> from keras_sparse_ortho.export import export_litert, load_litert
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "tiny.tflite"
    >>> report = export_litert(model, path)
    >>> file = load_litert(path, model=model)
    >>> file.predict(np.ones((5, 4))).shape, file.route
    ((5, 2), 'float32')
    """
    require_interpreter()
    content = _read(Path(path))
    name = str(path)
    record = read_record(content, name)
    if record is None:
        with tempfile.TemporaryDirectory() as folder:
            record = inspect_foreign(content, name, Path(folder), timeout)
    opened = LiteRTModel(content, record, threads)
    if model is not None:
        _compare(opened, model, sample, name)
    return opened


def _read(path: Path) -> bytes:
    if not path.is_file():
        raise FileNotFoundError(f"`path` must name a LiteRT file. Received: path={str(path)!r}")
    content = read_packed(path)
    if content[4:8] != b"TFL3":
        raise LiteRTFileError(
            "A LiteRT file has 'TFL3' in bytes 4 to 7. Received: "
            f"{str(path)!r} with {len(content)} bytes and {content[4:8]!r} there"
        )
    return content


def _compare(opened: LiteRTModel, model: keras.Model, sample: Any, path: str) -> None:
    # Imported here: both need what only this check needs.
    from keras_sparse_ortho.export._comparison import compare
    from keras_sparse_ortho.export._execution import keras_outputs

    signature = signature_of(model, opened.batch_size, sample)
    if _described(signature.inputs) != _described(opened.inputs):
        raise LiteRTFileError(
            f"The file must be of model '{model.name}', with inputs "
            f"{_described(signature.inputs)}. Received: {path!r} with inputs "
            f"{_described(opened.inputs)}"
        )
    arrays = signature.random_sample(0) if sample is None else signature.flatten(sample, "sample")
    stripped = plain_model(model)
    plain = float32_twin(stripped)
    names, want = keras_outputs(model if plain is stripped else plain, signature, arrays)
    if sorted(names) != sorted(opened.output_names):
        raise LiteRTFileError(
            f"The file must be of model '{model.name}', with outputs {sorted(names)}. "
            f"Received: {path!r} with outputs {sorted(opened.output_names)}"
        )
    got = opened.predict_dict(dict(zip(opened.input_names, arrays, strict=True)))
    try:
        result = compare(names, want, [got[n] for n in names], opened.measure)
    except ValueError as error:
        raise LiteRTFileError(
            f"The file must be of model '{model.name}'. Received: {path!r}; {error}"
        ) from error
    if not result.error <= opened.tolerance:
        raise LiteRTFileError(
            f"The file must be of model '{model.name}' with its present weights, and agree with "
            f"it to {opened.tolerance:g} ({opened.measure} error). Received: {path!r}, made of "
            f"model {opened.model_name!r}, with error={result.error:.3g} at output "
            f"`{result.worst_output}`, maximal difference {result.max_abs_diff:.3g}"
        )


def _described(inputs: tuple[InputSpec, ...]) -> list[tuple[str, tuple[int, ...], str]]:
    return [(spec.name, tuple(spec.shape), np.dtype(spec.dtype).name) for spec in inputs]
