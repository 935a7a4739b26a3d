"""`load_litert`: a LiteRT file, opened with the interpreter's settings that it needs."""

import gzip
import hashlib
import os
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._files import path_of
from keras_sparse_ortho.export._compare import compare
from keras_sparse_ortho.export._flatbuffer import LiteRTFileError
from keras_sparse_ortho.export._model import (
    InputSpec,
    Signature,
    full_batches,
    keras_outputs,
    plain_model,
    signature_of,
)
from keras_sparse_ortho.export._process import JobError, Worker, require
from keras_sparse_ortho.export._record import read_record

_LARGEST = 2**31  # a flatbuffer's offsets have 31 bits
_CHUNK = 2**20
# SHA-256 of the files that ran in a subprocess before, and need no second trial.
_tried: set[bytes] = set()


class LiteRTModel:
    """An open LiteRT file, as `load_litert` returns it.

    Attributes:
        route: Name of the route of its export; None for a file that another tool wrote.
        model_name: Name of the Keras model that was exported; likewise.
        xnnpack: Whether the interpreter uses XNNPACK.
        inputs: Name, static shape and dtype of each input.
        output_names: Names of the outputs.
        measure: Measure of the difference from Keras, see `export_litert`.
        tolerance: The largest difference that was allowed.

    Limits: Threads that share an instance wait for each other, as the interpreter is not
    thread-safe; for more speed open the file once per thread.
    """

    def __init__(self, content: bytes, record: dict[str, Any], threads: int = 1) -> None:
        from ai_edge_litert.interpreter import Interpreter, OpResolverType

        self.route: str | None = record.get("route")
        self.model_name: str | None = record.get("model")
        self.xnnpack = bool(record["xnnpack"])
        self.inputs = tuple(
            InputSpec(spec["name"], tuple(spec["shape"]), spec["dtype"])
            for spec in record["inputs"]
        )
        self.output_names: list[str] = [output["name"] for output in record["outputs"]]
        self.measure: str = record.get("measure") or "rms"
        tolerance = record.get("tolerance")
        self.tolerance = 0.1 if tolerance is None else float(tolerance)
        resolver = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
        try:
            interpreter = Interpreter(
                model_content=content,
                num_threads=threads,
                experimental_op_resolver_type=OpResolverType.AUTO if self.xnnpack else resolver,
            )
            self._runner = interpreter.get_signature_runner()
        except (RuntimeError, ValueError) as error:
            raise LiteRTFileError(
                "The file must run in ai-edge-litert's interpreter with the settings in its "
                f"record. Received: xnnpack={self.xnnpack}; {error}"
            ) from error
        found = self._runner.get_input_details()
        shapes = {name: tuple(details["shape"].tolist()) for name, details in found.items()}
        names = set(self._runner.get_output_details())
        if shapes != {s.name: s.shape for s in self.inputs} or names != set(self.output_names):
            raise LiteRTFileError(
                "The record in the file must name the inputs and outputs of its graph, which are "
                f"{shapes} and {sorted(names)}. Received: {self!r}"
            )
        self._lock = threading.Lock()
        # In the order of the record, for any nesting of the Keras model.
        count = len(self.inputs)
        self._signature = Signature(self.inputs, list(range(count)) if count > 1 else 0)

    @property
    def batch_size(self) -> int:
        """Rows of one call of the file; `predict` takes any number."""
        return self.inputs[0].shape[0]

    @property
    def input_names(self) -> list[str]:
        """Names of the inputs, in the order in which `predict` takes them in a list."""
        return [spec.name for spec in self.inputs]

    def predict(self, x: Any) -> Any:
        """The outputs on any number of rows, batch by batch.

        Args:
            x: An array `(rows, *input shape)`; several inputs as a dict by name or as a list in
                the order of `inputs`.

        Returns:
            An array `(rows, *output shape)`, or a dict by name if there are several outputs.

        Raises:
            ValueError: if a name, a shape, a dtype or the number of rows does not fit.
        """
        outputs = self.predict_dict(x)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    def predict_dict(self, x: Any) -> dict[str, np.ndarray]:
        """Like `predict`, but always returns a dict by the name of the output."""
        arrays = self._signature.flatten(x, "x")
        pieces: dict[str, list[np.ndarray]] = {name: [] for name in self.output_names}
        for batch in full_batches(arrays, self.batch_size):
            with self._lock:
                answers = self._runner(**dict(zip(self.input_names, batch, strict=True)))
                for name, collected in pieces.items():
                    collected.append(np.array(answers[name]))  # the interpreter reuses its memory
        rows = len(arrays[0])
        return {name: np.concatenate(collected)[:rows] for name, collected in pieces.items()}

    def __call__(self, x: Any) -> Any:
        """As `predict`."""
        return self.predict(x)

    def evaluate(self, x: Any, y: Any, metrics: Sequence[Any] = ("accuracy",)) -> dict[str, float]:
        """Compares the outputs of a file that has one output with labels.

        Args:
            x: As for `predict`.
            y: Labels, one for each row.
            metrics: `"accuracy"` (the largest output is the label, for integer or one-hot labels),
                and Keras metrics: names, objects, or functions of `(y, outputs)`.

        Returns:
            The value of each metric by its name.

        Raises:
            ValueError: A file with several outputs; labels that are not classes, for the accuracy.
        """
        if len(self.output_names) != 1:
            raise ValueError(
                "`evaluate` is for files with one output; compare those of `predict_dict` with "
                f"your labels. Received: outputs {self.output_names}"
            )
        outputs, labels = np.asarray(self.predict(x)), np.asarray(y)
        found: dict[str, float] = {}
        for given in metrics:
            if given == "accuracy":  # Keras' metric of this name compares outputs with labels
                found["accuracy"] = _accuracy(labels, outputs)
                continue
            metric = keras.metrics.get(given)
            if not isinstance(metric, keras.metrics.Metric):
                metric = keras.metrics.MeanMetricWrapper(metric, metric.__name__)
            metric.reset_state()
            metric.update_state(labels, outputs)
            found[metric.name] = float(metric.result())
        return found

    def __repr__(self) -> str:
        inputs = ", ".join(f"{s.name}: {s.dtype}{list(s.shape)}" for s in self.inputs)
        return (
            f"LiteRTModel(route={self.route!r}, xnnpack={self.xnnpack}, inputs=[{inputs}], "
            f"outputs={self.output_names})"
        )


def _accuracy(labels: np.ndarray, outputs: np.ndarray) -> float:
    classes = outputs.shape[-1]
    given = labels
    if labels.shape == outputs.shape and set(np.unique(labels)) <= {0, 1}:
        labels = labels.argmax(-1)
    elif labels.shape == (*outputs.shape[:-1], 1):
        labels = labels[..., 0]
    if labels.shape != outputs.shape[:-1] or labels.dtype.kind not in "iu" or classes < 2:
        raise ValueError(
            "The accuracy needs integer or one-hot labels, and two or more outputs. Use other "
            '`metrics`, such as ["mean_squared_error"]. '
            f"Received: labels of shape {given.shape} and type {given.dtype}, outputs of shape "
            f"{outputs.shape}"
        )
    return float(np.mean(outputs.argmax(-1) == labels))


def load_litert(
    path: str | os.PathLike[str],
    *,
    model: keras.Model | None = None,
    sample: Any = None,
    threads: int = 1,
    timeout: float = 60.0,
) -> LiteRTModel:
    """Open a LiteRT file for prediction, with the settings that it needs.

    A file of `export_litert` holds its settings and its own SHA-256: if it is corrupted,
    truncated or edited, it is refused before any interpreter sees it. The interpreter itself
    checks little, and a damaged or hostile graph can crash it or run forever. So every file runs
    once in a subprocess before this process opens it: with the settings in its record, or with and
    without XNNPACK for a file of another tool. That adds about 0.5 CPU seconds and one run of the
    graph to the first time a process opens a file, and only a digest to the next times.

    Args:
        path: A `.tflite` file, or a compressed one: `.tflite.zst` or `.tflite.gz`.
        model: The Keras model that was exported, to check the file against: inputs, and outputs
            on `sample`, are compared within the tolerance of its export (0.1 by the rms measure
            for files of other tools). `None`: not checked.
        sample: Rows to compare on, nested like the model's inputs. Default: random rows.
        threads: Threads of the interpreter.
        timeout: Seconds for a trial of the file in a subprocess.

    Returns:
        A `LiteRTModel`, whose `predict(x)` runs any number of rows.

    Raises:
        ImportError: if ai-edge-litert is missing.
        FileNotFoundError: if there is no such file.
        LiteRTFileError: if the file is corrupted, truncated, not a LiteRT file, crashes the
            interpreter, does not run within `timeout` and half of the free memory, or is not of
            `model`.

    Limits: A file is tried on zeros only, and a graph can behave otherwise on other values: the
    trial protects loading, not `predict`. The checksum detects accidents; it is not a signature. A
    file of ours to which another tool added something counts as edited; open it with
    ai-edge-litert itself.

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
    require(
        ("ai_edge_litert",), "`load_litert` runs the file with ai-edge-litert", "ai-edge-litert"
    )
    name = str(path)
    if not path_of("path", path).is_file():
        raise FileNotFoundError(f"`path` must name a LiteRT file. Received: path={name!r}")
    content = read_packed(Path(path))
    record = read_record(content, name)
    if record is None:
        record = _inspect(content, name, timeout, (True, False))
    elif (digest := hashlib.sha256(content).digest()) not in _tried:
        _inspect(content, name, timeout, (record["xnnpack"],))
        _tried.add(digest)
    opened = LiteRTModel(content, record, threads)
    if model is not None:
        _compare(opened, model, sample, name)
    return opened


def read_packed(path: Path) -> bytes:
    """The content of a LiteRT file, decompressed if its name ends in `.gz` or `.zst`."""
    content = _unpacked(path) if path.suffix in (".gz", ".zst") else path.read_bytes()
    if content[4:8] != b"TFL3":
        raise LiteRTFileError(
            "A LiteRT file has 'TFL3' in bytes 4 to 7. Received: "
            f"{str(path)!r} with {content[4:8]!r} there"
        )
    return content


def _unpacked(path: Path) -> bytes:
    """The content of a compressed file, read only as far as it may be a LiteRT file."""
    opened: Any = gzip.open
    if path.suffix == ".zst":
        require(("zstandard",), "zstd needs the package zstandard", '"keras-sparse-ortho[litert]"')
        import zstandard

        opened = zstandard.open
    content = bytearray()
    try:
        with opened(str(path), "rb") as stream:
            while chunk := stream.read(_CHUNK):
                content += chunk
                if content[4:8] != b"TFL3"[: max(0, len(content) - 4)] or len(content) > _LARGEST:
                    break
    except Exception as error:  # gzip, zlib and zstandard have errors of their own
        raise LiteRTFileError(
            f"{path.suffix[1:]} cannot decompress the file: it is corrupted or truncated. "
            f"Received: {str(path)!r}, {type(error).__name__}: {error}"
        ) from error
    if len(content) > _LARGEST:
        raise LiteRTFileError(
            f"A LiteRT file has less than {_LARGEST} bytes. Received: {str(path)!r}, which "
            "decompresses to more"
        )
    return bytes(content)


def _inspect(
    content: bytes, path: str, timeout: float, settings: tuple[bool, ...]
) -> dict[str, Any]:
    """The first of some settings of XNNPACK with which a file runs, and its signature."""
    reasons = []
    with tempfile.TemporaryDirectory() as folder, Worker() as worker:
        file = Path(folder) / "tried.tflite"
        file.write_bytes(content)
        for xnnpack in settings:
            try:
                record: dict[str, Any] = worker.run(
                    "inspect", timeout, file=str(file), xnnpack=xnnpack
                )
            except JobError as error:
                reasons.append(f"{'with XNNPACK' if xnnpack else 'without'}: {error}")
            else:
                return record
    raise LiteRTFileError(
        "The file must run in ai-edge-litert's interpreter, which was tried in a subprocess: it "
        "is corrupted, truncated, or not a LiteRT file with a signature. Received: "
        f"{path!r}; {'; '.join(reasons)}"
    )


def _compare(opened: LiteRTModel, model: keras.Model, sample: Any, path: str) -> None:
    signature = signature_of(model, opened.batch_size, sample)
    if _described(signature.inputs) != _described(opened.inputs):
        raise LiteRTFileError(
            f"The file must be of model '{model.name}', with inputs "
            f"{_described(signature.inputs)}. Received: {path!r} with inputs "
            f"{_described(opened.inputs)}"
        )
    arrays = signature.random_sample(0) if sample is None else signature.flatten(sample, "sample")
    names, want = keras_outputs(plain_model(model)[1], signature, arrays)
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
