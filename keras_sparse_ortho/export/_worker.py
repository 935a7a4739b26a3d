"""A worker process: it runs jobs in turn, one line of JSON each, and ends when its parent does.

`_process.py` starts it by path with `python -P`: no other folder hides installed packages. Only
`trace` and `convert` load TensorFlow, or JAX where there is none, and this package.
"""

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import queue
import signal
import struct
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

InputDict: TypeAlias = dict[str, Any]
"""Name, shape and dtype of an input, as JSON has them."""

TensorDetails: TypeAlias = dict[str, Any]
"""The interpreter's own words on a tensor: dtype, shape, scale and zero point."""

# Bytes for LiteRT Micro, far more than its networks take: it crashes with some that are too few.
_ARENA = 1 << 26
# Linux' number of arch_prctl, and its arguments.
_ARCH_PRCTL = 158
_REQUEST_PERMISSION = 0x1023
_TILE_DATA = 18
# Arguments of prctl.
_NO_NEW_PRIVILEGES = 38
_SECCOMP = 22
_FILTER = 2
# Offsets in seccomp_data.
_NUMBER = 0
_FIRST_ARGUMENT = 16
# Instructions of Berkeley packet filters, and their answers.
_LOAD = 0x20
_EQUAL = 0x15
_RETURN = 0x06
_FAIL = 0x00050000 | 22  # with EINVAL
_ALLOW = 0x7FFF0000
_AMX_IS_REFUSED = (  # code, steps to skip if true and if false, value
    (_LOAD, 0, 0, _NUMBER),
    (_EQUAL, 0, 3, _ARCH_PRCTL),
    (_LOAD, 0, 0, _FIRST_ARGUMENT),
    (_EQUAL, 0, 1, _REQUEST_PERMISSION),
    (_RETURN, 0, 0, _FAIL),
    (_RETURN, 0, 0, _ALLOW),
)


def trace(keras_file: str, modules: list[str], **traced: Any) -> None:
    """Writes what the converter takes of a `.keras` file."""
    _load_converter()
    import keras

    from keras_sparse_ortho.export._tracing import write_traced

    keras.utils.clear_session()  # of the previous job
    write_traced(_load(keras_file, modules), **traced)


def convert(
    path: str,
    inputs: list[InputDict],
    storage: str,
    sparse: bool,
    ends: list[str],
    result: str,
    representative: str | None = None,
    choosing: str | None = None,
    choice: dict[str, Any] | None = None,
) -> list[int]:
    """Writes a file; or numbers the ranges that need an operation of their own in the trace.

    Args:
        path: str. The output of `trace`.
        inputs: Name, shape and dtype of each input.
        storage: str. Such as "int8".
        sparse: bool. Whether TensorFlow's sparse encoding is used.
        ends: Types of inputs and outputs.
        result: str. Where to write.
        representative: str. An NPZ file with rows to calibrate on.
        choosing: str. An NPZ file with rows to choose remedies on.
        choice: The other fields of a `Choice`, in files with remedies.
    """
    _load_converter()
    from keras_sparse_ortho.export._integers import (
        calibration_of,
        in_storage,
    )
    from keras_sparse_ortho.export._marks import ScalingMoved
    from keras_sparse_ortho.export._remedied_file import (
        Choice,
        remedied_file,
    )
    from keras_sparse_ortho.export._sparse_encoding import (
        with_densify,
    )
    from keras_sparse_ortho.export._tracing import (
        by_tensorflow,
        float_file,
    )

    if sparse:
        content = with_densify(by_tensorflow(path, storage, sparse))
        Path(result).write_bytes(content)
        return []
    content = float_file(path)
    calibration = None
    batches: list[dict[str, np.ndarray]] = []
    if representative is not None and storage in ("int8", "int4"):
        batches = list(_batches(representative, inputs))
        calibration = calibration_of(content, batches)
    try:
        if calibration is None or choice is None:
            content = in_storage(content, storage, calibration, ends)
        else:
            rows: list[dict[str, np.ndarray]] = []
            if choosing is not None:
                rows = list(_batches(choosing, inputs))
            remedies = Choice(batches, rows, **choice)
            content = remedied_file(
                content, storage, calibration, ends, remedies
            )
    except ScalingMoved as moved:
        return moved.numbers
    Path(result).write_bytes(content)
    return []


def measure(
    path: str,
    inputs: list[InputDict],
    representative: str,
    held: str,
    layers: str,
    kernels: str,
    ends: list[str],
) -> dict[str, Any]:
    """The errors of all tensors of a file of int8, each rounded alone.

    Args:
        path: str. The output of `trace`.
        inputs: Name, shape and dtype of each input.
        representative: str. An NPZ file with rows to calibrate on.
        held: str. An NPZ file with rows to measure on.
        layers: str. A file of `write_layer_outputs`.
        kernels: str. An NPZ file of kernels, by path.
        ends: Types of inputs and outputs.
    """
    _load_converter()
    from keras_sparse_ortho.export._tensor_errors import named_errors
    from keras_sparse_ortho.export._tracing import float_file

    with np.load(kernels) as arrays:
        header, *values = [arrays[name] for name in arrays.files]
    paths = json.loads(str(header))
    by_path = {path: [value] for path, value in zip(paths, values, strict=True)}
    return named_errors(
        float_file(path),
        list(_batches(representative, inputs)),
        list(_batches(held, inputs)),
        layers,
        by_path,
    )


def run(
    file: str,
    sample: str,
    inputs: list[InputDict],
    output_names: list[str],
    result: str,
) -> None:
    """Writes the outputs of a file on rows as an NPZ file.

    Args:
        file: str. The LiteRT file.
        sample: str. An NPZ file with the rows, whole batches.
        inputs: Name, shape and dtype of each input.
        output_names: The outputs in order.
        result: str. Where to write.
    """
    runner = interpreter_of(model_path=file).get_signature_runner(
        "serving_default"
    )
    input_details = runner.get_input_details()
    output_details = runner.get_output_details()
    for spec in inputs:
        # The interpreter would silently resize the file's input.
        shape = input_details[spec["name"]]["shape"].tolist()
        if spec["shape"] != shape:
            raise ValueError(
                f"input {spec['name']} must have shape {spec['shape']}. Received: {shape=}"
            )
    batches = []
    for batch in _batches(sample, inputs):
        integers = {}
        for name, value in batch.items():
            integers[name] = to_integers(value, input_details[name])
        answers = runner(**integers)
        batches.append(
            [
                to_floats(answers[name], output_details[name])
                for name in output_names
            ]
        )
    np.savez(result, *map(np.concatenate, zip(*batches, strict=True)))


def inspect(file: str) -> dict[str, Any]:
    """Checks that all buffers end within the file, runs it once on zeros, and reads its names."""
    _limit_memory()
    from ai_edge_litert import schema_py_generated as schema

    content = Path(file).read_bytes()
    model = schema.Model.GetRootAs(content, 0)
    for index in range(model.BuffersLength()):
        buffer = model.Buffers(index)
        if buffer.DataLength():
            buffer.DataAsNumpy()  # raises where the data would end beyond the file
        if buffer.Offset() + buffer.Size() > len(content):
            raise ValueError(f"buffer {index} ends beyond the file")
    runner = runner_of(interpreter_of(model_path=file))
    zeros = {}
    for name, details in runner.get_input_details().items():
        zeros[name] = np.zeros(details["shape"], details["dtype"])
    outputs = runner(**zeros)
    return {"input_names": [*zeros], "output_names": [*outputs]}


def bench(file: str, threads: int, calls: int, amx: bool = True) -> list[float]:
    """Milliseconds of some calls of a file, which stays loaded for the next job."""
    if not amx:
        refuse_amx()
    # One process per file: after XNNPACK's int8 layers LiteRT's kernels take three times as long.
    interpreter = _warm_interpreter(file, threads)
    interpreter.invoke()  # the other files have used the caches since
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        interpreter.invoke()
        seconds = time.perf_counter() - start
        times.append(1e3 * seconds)
    return times


def allocations(file: str) -> str:
    """The memory that an array takes, as LiteRT Micro's interpreter prints it."""
    from tflite_micro.python.tflite_micro import runtime

    interpreter = runtime.Interpreter.from_file(file, arena_size=_ARENA)
    # It prints from C++, to the standard error of the process.
    standard_error = os.dup(2)
    with tempfile.TemporaryFile() as stream:
        os.dup2(stream.fileno(), 2)
        try:
            interpreter.print_allocations()
        finally:
            os.dup2(standard_error, 2)
            os.close(standard_error)
        stream.seek(0)
        return stream.read().decode(errors="replace")


TASKS: dict[str, Callable[..., Any]] = {
    task.__name__: task
    for task in (trace, convert, measure, run, inspect, bench, allocations)
}


def serve() -> None:
    """Answers jobs until standard input ends; an exception in a job is its answer."""
    _take_own_signals()
    # Libraries print to standard output, so the answers go to a private copy of it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        job = json.loads(jobs.get())
        answer = {"number": job["number"]}
        try:
            task = TASKS[job["task"]]
            answer["answer"] = task(**job["arguments"])
            text = json.dumps(answer)
        except Exception as error:
            failure = {
                "number": job["number"],
                "error": f"{type(error).__name__}: {error}",
            }
            text = json.dumps(failure)
        answers.write(f"\x1e{text}\n")
        answers.flush()


def _take_own_signals() -> None:
    """Undoes what the parent's thread has blocked, and leaves Ctrl-C to the parent.

    A terminal sends it to both. A process that died of it while it had no job would be taken for
    one that a job has killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _read(jobs: "queue.SimpleQueue[str]") -> None:
    """Queues the lines of standard input; exits at its end, also that of a killed parent."""
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


@functools.cache
def _load_converter() -> None:
    """Imports what conversions need, and exempts it from garbage collection, as that is slow."""
    importlib.import_module(os.environ["KERAS_BACKEND"])
    importlib.import_module("keras_sparse_ortho.export._tracing")
    gc.collect()
    gc.freeze()


def _load(keras_file: str, modules: list[str]) -> Any:
    import keras

    load = functools.partial(
        keras.saving.load_model, compile=False, safe_mode=False
    )
    with contextlib.suppress(Exception):
        return load(keras_file)
    # Registered objects need their module; importing a user's module may have side effects.
    for name in modules:
        importlib.import_module(name)
    return load(keras_file)


def _batches(
    file: str, inputs: list[InputDict]
) -> Iterator[dict[str, np.ndarray]]:
    """Whole batches of the rows in an NPZ file, by name."""
    with np.load(file) as data:
        arrays = {
            spec["name"]: data[f"arr_{index}"]
            for index, spec in enumerate(inputs)
        }
    size = inputs[0]["shape"][0]
    rows = len(arrays[inputs[0]["name"]])
    for start in range(0, rows - size + 1, size):
        yield {
            name: array[start : start + size] for name, array in arrays.items()
        }


def to_integers(value: np.ndarray, details: TensorDetails) -> np.ndarray:
    """Floats as an input takes them; inputs without a scale take them as they are."""
    scale, zero_point = details["quantization"]
    if not scale:
        return value
    ends = np.iinfo(details["dtype"])
    steps = np.rint(value / scale) + zero_point
    return np.clip(steps, ends.min, ends.max).astype(details["dtype"])


def to_floats(value: np.ndarray, details: TensorDetails) -> np.ndarray:
    """A copy of an output, in floats if it is quantized; the interpreter reuses its memory."""
    scale, zero_point = details["quantization"]
    if not scale:
        return np.array(value)
    return (value.astype("float32") - zero_point) * np.float32(scale)


def interpreter_of(**options: Any) -> Any:
    """An interpreter of LiteRT, with XNNPACK, its default."""
    from ai_edge_litert.interpreter import Interpreter

    return Interpreter(**options)


class PlainRunner:
    """Calls a file without a signature by the names of its tensors, as a runner of LiteRT does.

    Args:
        interpreter: The interpreter of the file.
    """

    def __init__(self, interpreter: Any) -> None:
        interpreter.allocate_tensors()
        self._interpreter = interpreter

    def get_input_details(self) -> dict[str, TensorDetails]:
        return _by_name(self._interpreter.get_input_details())

    def get_output_details(self) -> dict[str, TensorDetails]:
        return _by_name(self._interpreter.get_output_details())

    def __call__(self, **values: np.ndarray) -> dict[str, np.ndarray]:
        for name, details in self.get_input_details().items():
            self._interpreter.set_tensor(details["index"], values[name])
        self._interpreter.invoke()
        outputs = {}
        for name, details in self.get_output_details().items():
            outputs[name] = self._interpreter.get_tensor(details["index"])
        return outputs


def _by_name(details: list[TensorDetails]) -> dict[str, TensorDetails]:
    """The details of tensors by name; a name that is taken gets the index of its tensor."""
    by_name: dict[str, TensorDetails] = {}
    for tensor in details:
        name = tensor["name"]
        if name in by_name:
            name = f"{name}_{tensor['index']}"
        by_name[name] = tensor
    return by_name


def runner_of(interpreter: Any) -> Any:
    """A runner that calls a file by names: LiteRT's, where the file has a signature."""
    if interpreter.get_signature_list():
        return interpreter.get_signature_runner()
    return PlainRunner(interpreter)


@functools.cache
def _warm_interpreter(file: str, threads: int) -> Any:
    """An interpreter that has run on normal values, or on zeros where integers are asked for."""
    interpreter = interpreter_of(model_path=file, num_threads=threads)
    interpreter.allocate_tensors()
    rng = np.random.default_rng(0)
    for details in interpreter.get_input_details():
        values = np.zeros(details["shape"])
        if np.issubdtype(details["dtype"], np.floating):
            values = rng.standard_normal(details["shape"])
        interpreter.set_tensor(
            details["index"], values.astype(details["dtype"])
        )
    for _ in range(3):
        interpreter.invoke()
    return interpreter


@functools.cache
def refuse_amx() -> None:
    """Refuses the tiles of an Intel processor to this process, for good; OSError if it cannot."""
    cpu = Path("/proc/cpuinfo")
    if not cpu.exists() or "amx_int8" not in cpu.read_text():
        return
    code = b"".join(struct.pack("HBBI", *step) for step in _AMX_IS_REFUSED)
    instructions = ctypes.create_string_buffer(code, len(code))
    program = struct.pack(
        "HQ", len(_AMX_IS_REFUSED), ctypes.addressof(instructions)
    )
    system = ctypes.CDLL(None, use_errno=True)
    failed = system.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    if not failed:
        failed = system.prctl(_SECCOMP, _FILTER, program)
    if failed:
        raise OSError(ctypes.get_errno(), "The system takes no seccomp filter")
    if system.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0:
        raise OSError("AMX was allowed in spite of the filter")


def _limit_memory() -> None:
    """Lets allocations beyond half of the free memory fail; only on Linux."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        lines = Path("/proc/meminfo").read_text().splitlines()
        (available,) = [
            line for line in lines if line.startswith("MemAvailable:")
        ]
        free_bytes = 1024 * int(available.split()[1])
        used_pages = int(Path("/proc/self/statm").read_text().split()[0])
        used_bytes = used_pages * resource.getpagesize()
        _, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
        limits = (used_bytes + free_bytes // 2, hard_limit)
        resource.setrlimit(resource.RLIMIT_AS, limits)


if __name__ == "__main__":
    serve()
