"""`load_litert`: a LiteRT file, opened; `latencies` of files."""

import contextlib
import dataclasses
import gzip
import hashlib
import os
import statistics
import tempfile
import threading
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from keras_sparse_ortho._checks import (
    check_integer,
    check_number,
    other_keywords,
)
from keras_sparse_ortho._files import check_unpacked_size, path_of
from keras_sparse_ortho._foreign_names import Answering, not_callable
from keras_sparse_ortho.errors import (
    ExportVerificationError,
    LiteRTFileError,
)
from keras_sparse_ortho.export._packed_zeros import OPERATOR
from keras_sparse_ortho.export._process import (
    JobError,
    Worker,
    require,
)
from keras_sparse_ortho.export._record import Record, read_record
from keras_sparse_ortho.export._signature import (
    InputSpec,
    Signature,
    full_batches,
)
from keras_sparse_ortho.export._worker import (
    interpreter_of,
    runner_of,
    to_floats,
    to_integers,
)

_PIECE = 1 << 24  # bytes that are read at once
# The first bytes of a file, and the second half of them.
_HEAD, _IDENTIFIER = (
    8,
    b"TFL3",
)
_LARGEST = 2**31  # a flatbuffer's offsets have 31 bits
_CALLS = 5  # of one file before the next one's turn
_LEAST_ROUNDS, _ROUNDS = 3, 200
# By SHA-256 the signatures of files that ran in a subprocess before.
_tried: dict[bytes, Record] = {}


class LiteRTModel(Answering):
    """An open LiteRT file, as `load_litert` returns it.

    `route` and `model_name` are those of its export (None for files of other tools), `inputs` have
    name, static shape and dtype each; `predict` takes and gives floats for integers with a scale.
    Threads that share an instance wait for each other; for speed open the file once per thread. A
    pickle holds the file, and opens it again with as many threads.
    """

    def __init__(
        self, content: bytes, record: Record, threads: int = 1
    ) -> None:
        _check_names(record)
        self._opened_with = content, record, threads
        self.route: str | None = record.get("route")
        self.model_name: str | None = record.get("model")
        self.output_names: list[str] = record["output_names"]
        input_names: list[str] = record["input_names"]
        try:
            interpreter = interpreter_of(
                model_content=content, num_threads=threads
            )
            interpreter.allocate_tensors()
            self._runner = runner_of(interpreter)
            self._inputs = self._runner.get_input_details()
            self._outputs = self._runner.get_output_details()
            if {*self._inputs} != {*input_names} or {*self._outputs} != {
                *self.output_names
            }:
                raise ValueError(
                    f"inputs {sorted(self._inputs)} and outputs {sorted(self._outputs)}"
                )
        except (RuntimeError, ValueError) as error:
            raise LiteRTFileError(
                "The record in the file must have its inputs and outputs, and ai-edge-litert's "
                "interpreter must run it. Received: a record of "
                f"{input_names}, {self.output_names}; {error}"
            ) from error
        specs = []
        float_specs = []
        for name in input_names:
            details = self._inputs[name]
            shape = tuple(details["shape"].tolist())
            spec = InputSpec(name, shape, details["dtype"].__name__)
            specs.append(spec)
            scale, _ = details["quantization"]
            float_specs.append(
                dataclasses.replace(spec, dtype="float32") if scale else spec
            )
        self.inputs = tuple(specs)
        self._lock = threading.Lock()
        # In the order of the record, for any nesting of the Keras model.
        nesting = list(range(len(specs))) if len(specs) > 1 else 0
        self._signature = Signature(tuple(float_specs), nesting)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._opened_with

    @property
    def batch_size(self) -> int:
        """Rows of one call of the file; `predict` takes any number."""
        return self._signature.batch_size

    @other_keywords
    def predict(self, x: Any) -> Any:
        """The outputs on any number of rows: an array `(rows, *output shape)`, or a dict by name.

        Args:
            x: array `(rows, *input shape)`; several inputs as a dict by name or a list in order.
        """
        arrays = self._signature.flatten(x, "x")
        batches = []
        for batch in full_batches(arrays, self.batch_size):
            batches.append(self._outputs_on(batch))
        outputs = {}
        for name, pieces in zip(
            self.output_names, zip(*batches, strict=True), strict=True
        ):
            outputs[name] = np.concatenate(pieces)[: len(arrays[0])]
        if len(outputs) == 1:
            return outputs[self.output_names[0]]
        return outputs

    def _outputs_on(self, batch: list[np.ndarray]) -> list[np.ndarray]:
        """The outputs in order on one whole batch, the inputs in order."""
        integers = {}
        for spec, value in zip(self.inputs, batch, strict=True):
            integers[spec.name] = to_integers(value, self._inputs[spec.name])
        with self._lock:
            answers = self._runner(**integers)
            return [
                to_floats(answers[name], self._outputs[name])
                for name in self.output_names
            ]

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        raise not_callable(self)

    def __repr__(self) -> str:
        texts = [
            f"{spec.name}: {spec.dtype}{list(spec.shape)}"
            for spec in self.inputs
        ]
        inputs = ", ".join(texts)
        return f"LiteRTModel(route={self.route!r}, inputs=[{inputs}], outputs={self.output_names})"


def _check_names(record: Record) -> None:
    """Refuses names that a terminal would obey, or that would end a line: nobody writes these."""
    names = (record.get("route"), record.get("model"))
    for name in (
        *names,
        *record["input_names"],
        *record["output_names"],
    ):
        if name is not None and not name.isprintable():
            raise LiteRTFileError(
                "The names in a LiteRT file must be printable, without line breaks and control "
                f"characters. Received: {name!r}"
            )


@other_keywords
def load_litert(
    path: str | os.PathLike[str],
    *,
    threads: int = 1,
    timeout: float = 60.0,
) -> LiteRTModel:
    """Opens a LiteRT file for prediction.

    A file of `export_litert` holds its own SHA-256 and is refused if it was corrupted, truncated or
    edited. The interpreter itself checks little, and a damaged or hostile graph can crash it or run
    forever. So a process first tries each new file in a subprocess, about 0.5 CPU seconds.

    Args:
        path: str or path. A `.tflite` file, or a compressed one: `.tflite.gz`.
        threads: int. Threads of the interpreter.
        timeout: float. Seconds for a trial of the file in a subprocess.

    Returns:
        A `LiteRTModel`, whose `predict(x)` runs any number of rows.

    Raises:
        ImportError, FileNotFoundError: if ai-edge-litert, or the file, is missing.
        LiteRTFileError: if the file is corrupted, truncated, not a LiteRT file, crashes the
            interpreter, or does not run within `timeout` and half of the free memory.

    Limits: the trial, on zeros, protects loading, not `predict`, where a graph can behave
    otherwise. The checksum detects accidents; it is not a signature. Our files count as edited when
    another tool adds to them; open those with ai-edge-litert itself.

    Examples:
        >>> import keras, numpy as np, tempfile, pathlib
        >>> from keras_sparse_ortho.export import export_litert, load_litert
        >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "tiny.tflite"
        >>> report, file = export_litert(model, path), load_litert(path)
        >>> file.predict(np.ones((5, 4))).shape, file.route
        ((5, 2), 'float32')
    """
    use = "`load_litert` runs the file with ai-edge-litert"
    require(("ai_edge_litert",), use, "ai-edge-litert")
    threads, timeout = (
        check_integer("threads", threads),
        check_number("timeout", timeout),
    )
    name = str(path)
    if not path_of("path", path).is_file():
        raise FileNotFoundError(
            f"`path` must name a LiteRT file. Received: path={name!r}"
        )
    content = read_packed(Path(path))
    record = read_record(content, name)
    digest = hashlib.sha256(content).digest()
    if digest not in _tried:
        _tried[digest] = _inspect(content, name, timeout)
    return LiteRTModel(content, record or _tried[digest], threads)


def read_packed(path: Path) -> bytes:
    """The content of a LiteRT file, decompressed if its name ends in `.gz`."""
    try:
        content = _unpacked(path)
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise LiteRTFileError(
            "gzip cannot decompress the file: it is corrupted or truncated. "
            f"Received: {str(path)!r}, {type(error).__name__}: {error}"
        ) from error
    except ValueError as error:
        raise LiteRTFileError(str(error)) from None
    if content[4:8] != _IDENTIFIER or len(content) > _LARGEST:
        raise LiteRTFileError(
            f"A LiteRT file has 'TFL3' in bytes 4 to 7, and less than {_LARGEST} bytes. Received: "
            f"{str(path)!r} with {content[4:8]!r} there"
        )
    return content


def _unpacked(path: Path) -> bytes:
    """The content of a file, or the start of one that is no LiteRT file."""
    packed = path.stat().st_size
    pieces = []
    size = 0
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        # Decompress no more than may be a LiteRT file.
        while size <= _LARGEST:
            piece = stream.read(_PIECE if size else _HEAD)
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
            if pieces[0][4:] != _IDENTIFIER:
                break
            check_unpacked_size(str(path), packed, size)
    return b"".join(pieces)


def _inspect(content: bytes, path: str, timeout: float) -> Record:
    """The names of inputs and outputs of a file, which runs in a subprocess for it."""
    with tempfile.TemporaryDirectory() as folder, Worker() as worker:
        file = Path(folder) / "tried.tflite"
        file.write_bytes(content)
        try:
            return dict(worker.run("inspect", timeout, file=str(file)))
        except JobError as error:
            if OPERATOR.decode() in str(error):
                raise LiteRTFileError(
                    "LiteRT runs files whose filters are dense. The operator "
                    f"{OPERATOR.decode()} unpacks filters in this one, and LiteRT Micro alone has "
                    "it, from 2025-10-23 on: in C++ where the program registers Decode, in Python "
                    "in the package tflite-micro. Open the file of `export_litert`, which has "
                    f"the same outputs. Received: {path!r}"
                ) from None
            raise LiteRTFileError(
                "The file must run in ai-edge-litert's interpreter, which was tried in a "
                "subprocess: it is corrupted, truncated, or no LiteRT file. "
                f"Received: {path!r}; {' '.join(str(error).split())}"
            ) from None


@other_keywords
def latencies(
    files: Sequence[str | os.PathLike[str]],
    threads: int = 1,
    seconds: float = 10.0,
    timeout: float = 600.0,
    target: str | None = None,
) -> list[float]:
    """Median milliseconds of one call of each file, measured in turn, each in its own process.

    Args:
        files: list of str or path. LiteRT files, also compressed.
        threads: int. Threads of the interpreter.
        seconds: float. No new round (five calls of each file) starts later, after the first three.
        timeout: float. Seconds until the measurement is aborted.
        target: `None`, this machine, or `"arm64"`: without AMX, see `export_litert`.

    Raises ExportVerificationError if a process dies, or the timeout is over.
    """
    threads = check_integer("threads", threads)
    seconds = check_number("seconds", seconds)
    deadline = time.monotonic() + check_number("timeout", timeout)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        timed = []
        for number, file in enumerate(files):
            content = read_packed(Path(file))
            read_record(content, str(file))  # raises where the file was damaged
            copy = folder / f"{number}.tflite"
            copy.write_bytes(content)
            worker = stack.enter_context(Worker())
            job = {
                "file": str(copy),
                "threads": threads,
                "amx": target is None,
            }
            timed.append(_TimedFile(str(file), worker, job))
        for timed_file in timed:
            timed_file.measure(0, deadline)  # to load it
        end = time.monotonic() + seconds
        for number in range(_ROUNDS):
            if number >= _LEAST_ROUNDS and time.monotonic() > end:
                break
            for timed_file in timed:
                timed_file.measure(_CALLS, deadline)
    return [statistics.median(timed_file.times) for timed_file in timed]


class _TimedFile:
    """A LiteRT file in a process of its own.

    Args:
        name: str. The path that the user gave.
        worker: `Worker`. The process.
        job: Arguments of its task "bench".
    """

    def __init__(self, name: str, worker: Worker, job: dict[str, Any]) -> None:
        self._name = name
        self._worker = worker
        self._job = job
        self.times: list[float] = []  # milliseconds

    def measure(self, calls: int, deadline: float) -> None:
        """Adds the times of some calls; ExportVerificationError if they fail."""
        timeout = max(deadline - time.monotonic(), 0.0)
        try:
            self.times += self._worker.run(
                "bench", timeout, calls=calls, **self._job
            )
        except JobError as error:
            raise ExportVerificationError(
                f"Every file must run while it is timed. Received: {self._name!r}, {error}"
            ) from None
