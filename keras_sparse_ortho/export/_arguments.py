"""The arguments of an export, checked before any time is spent, and what follows from them."""

import dataclasses
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._data import first_batches, is_batched
from keras_sparse_ortho.export._plain_model import plain_model
from keras_sparse_ortho.export._routes import ROUTES, Route, route_for, route_named
from keras_sparse_ortho.export._sidecar import sidecar_path
from keras_sparse_ortho.export._signature import Signature, leaves, signature_of
from keras_sparse_ortho.export._verification import keras_outputs

# Of a data set as many are taken, which is enough to calibrate on.
_BATCHES = 16


MODES = ("small", "fast", "sparse", "auto")


@dataclasses.dataclass(frozen=True)
class Task:
    """What all routes of an export share.

    Attributes:
        model: The plain float32 model.
        signature: Its inputs.
        names: Names of its outputs.
        want: Keras' outputs on `sample`.
        sample: Rows to compare on, one array an input.
        representative: Rows to calibrate on, or None.
        tolerance: The user's, or None for each route's own.
        timeout: Seconds for each job of a subprocess.
        folder: For the files on the way; to be set before anything is converted.
    """

    model: keras.Model
    signature: Signature
    names: list[str]
    want: list[np.ndarray]
    sample: list[np.ndarray]
    representative: list[np.ndarray] | None
    tolerance: float | None
    timeout: float
    folder: Path = Path()

    def allowed(self, route: Route) -> float:
        """The largest error that is let through."""
        return route.tolerance if self.tolerance is None else self.tolerance


def make_task(
    model: keras.Model,
    batch_size: int,
    sample: Any,
    representative_data: Any,
    data_for: Route | None,
    tolerance: float | None,
    seed: int,
    timeout: float,
) -> Task:
    """Check the model and its data, strip the model and ask it for its outputs.

    Args:
        model: The user's model.
        batch_size: Rows of one call.
        sample: Rows to compare on, or None.
        representative_data: Rows to calibrate on, or None.
        data_for: The route that `representative_data` must suit; None if static int8 is one of
            several.
        tolerance: The largest error to allow, or None for each route's own.
        seed: Seed of the random sample.
        timeout: Seconds for each job of a subprocess.

    Raises:
        ValueError: if an argument does not fit.
    """
    batch_size = check_positive("batch_size", batch_size)
    if tolerance is not None and not tolerance >= 0:  # `not` refuses NaN as well
        raise ValueError(f"`tolerance` must be 0 or more. Received: tolerance={tolerance!r}")
    signature = signature_of(model, batch_size, sample)
    representative = _representative(data_for, representative_data, signature)
    compared = _sample(signature, sample, representative, seed)
    plain, reference = plain_model(model)
    names, want = keras_outputs(reference, signature, compared)
    allowed = None if tolerance is None else float(tolerance)
    return Task(plain, signature, names, want, compared, representative, allowed, timeout)


def routes_of(mode: str | None, quantization: str | None, has_data: bool) -> list[Route]:
    """The routes that a mode tries; a route's own name is a mode of one.

    Args:
        mode: One of `MODES`, the name of a route, or None: the dense one of the storage.
        quantization: Only routes of this storage; None: all, but for "sparse", where it means
            float32.
        has_data: Whether there is representative data, without which static int8 is left out.

    Raises:
        ExportRouteError: for a route that cannot work, with the reason.
        ValueError: if there is no such mode, route or storage.
    """
    if mode is None:
        return [route_for(quantization)]
    if mode not in MODES:
        return [_named_by(mode, quantization)]
    storage = None if quantization is None else route_for(quantization)
    if mode == "sparse":
        wanted = storage or route_for(None)
        routes = [r for r in ROUTES if r.quantization == wanted.quantization]
        return [r for r in routes if r.encoding != "dense"]
    routes = [r for r in ROUTES if storage is None or r.quantization == storage.quantization]
    if storage is None and not has_data:
        routes = [r for r in routes if not r.needs_representative_data]
    return routes


def accepted(routes: Sequence[Route], model: keras.Model) -> list[Route]:
    """The routes that are not known to fail on the model.

    Raises:
        ValueError: if all are, with the reason of the first.
    """
    passed = []
    for route in routes:
        try:
            route.check(model)
        except ValueError:
            continue
        passed.append(route)
    if not passed:
        routes[0].check(model)
    return passed


def check_path(path: str | os.PathLike[str], sidecar: str | None = None) -> Path:
    """The path of a file to write, in a folder that exists, and its compressed copy beside it.

    Raises:
        ValueError: if there is no such folder, a folder stands where a file is to stand, or the
            name is too long or that of another kind of file.
    """
    target = Path(path)
    if not target.name or not target.parent.is_dir():
        raise ValueError(
            "`path` must name a file in a folder that exists; make the folder first. "
            f"Received: path={str(path)!r}"
        )
    if target.suffix in (".h5", ".hdf5", ".keras", ".onnx", ".pb"):
        raise ValueError(
            "What is written is a LiteRT file, which by custom ends in `.tflite`; other kinds "
            f"`model.save` and `model.export` write. Received: path={str(path)!r}"
        )
    files = [target] if sidecar is None else [target, sidecar_path(target, sidecar)]
    for file in files:
        length, longest = len(os.fsencode(file.name)), _longest_name(target.parent)
        if length > longest:
            raise ValueError(
                f"A file's name may have {longest} bytes there. Received: {length} bytes, "
                f"{file.name[:40]!r}..."
            )
        if file.exists() and not file.is_file():
            kind = "a folder" if file.is_dir() else "a device, pipe or socket"
            raise ValueError(
                f"`path` must name a file: {kind} stands where it is to be written; choose "
                f"another name. Received: path={str(path)!r}, {file.name!r}"
            )
    # A link keeps pointing where it does.
    return target.resolve() if target.is_symlink() else target


def _longest_name(folder: Path) -> int:
    try:
        return os.pathconf(folder, "PC_NAME_MAX")
    except (AttributeError, OSError, ValueError):  # Windows; some network file systems
        return 255


def check_positive(name: str, value: int) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer. Received: {name}={value!r}")
    return int(value)


def require_litert() -> None:
    """Raise if TensorFlow or ai-edge-litert is missing, without importing either.

    Raises:
        ImportError: naming the extra to install.
    """
    for name in ("tensorflow", "ai_edge_litert"):
        if not _is_installed(name):
            raise ImportError(
                "`export_litert` converts with TensorFlow and runs the file with ai-edge-litert. "
                'Install both with: pip install "keras-sparse-ortho[litert]". '
                f"Received: no module named '{name}'",
                name=name,
            )


def require_interpreter() -> None:
    """Raise if ai-edge-litert is missing: opening a file needs no TensorFlow.

    Raises:
        ImportError: naming the package to install.
    """
    if not _is_installed("ai_edge_litert"):
        raise ImportError(
            "`load_litert` runs the file with ai-edge-litert. Install it with: pip install "
            "ai-edge-litert. Received: no module named 'ai_edge_litert'",
            name="ai_edge_litert",
        )


def _is_installed(name: str) -> bool:
    if name in sys.modules:
        return sys.modules[name] is not None  # None is how Python marks a blocked import
    return importlib.util.find_spec(name) is not None


def _named_by(mode: str, quantization: str | None) -> Route:
    try:
        route = route_named(mode)
    except ValueError as error:
        if mode.split("+")[0] not in {route.name for route in ROUTES}:
            raise ValueError(
                f"`mode` must be one of {list(MODES)} or the name of a route, one of "
                f"{[route.name for route in ROUTES]}. Received: mode={mode!r}"
            ) from None
        raise error
    if quantization is not None and route_for(quantization).quantization != route.quantization:
        raise ValueError(
            f"`mode` names a route of quantization={route.quantization!r}; leave "
            f"`quantization` out. Received: mode={mode!r}, quantization={quantization!r}"
        )
    return route


def _representative(
    route: Route | None, data: Any, signature: Signature
) -> list[np.ndarray] | None:
    if route is not None and route.needs_representative_data != (data is not None):
        rule = "is needed" if route.needs_representative_data else "has no use"
        raise ValueError(
            f"`representative_data` {rule} with quantization={route.quantization!r}. "
            f"Received: representative_data={'None' if data is None else type(data).__name__}"
        )
    if data is None:
        return None
    arrays = signature.flatten(inputs_of(data, signature), "representative_data")
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
        return signature.flatten(inputs_of(sample, signature), "sample")
    if representative is not None:
        return [array[: signature.default_rows] for array in representative]
    return signature.random_sample(seed)


def inputs_of(data: Any, signature: Signature) -> Any:
    """The inputs alone of data that come with targets, as a tuple for `fit` or as batches."""
    if isinstance(data, tuple) and len(leaves(data)) != len(signature.inputs):
        return data[0]
    if is_batched(data):
        inputs = [x for x, _, _ in first_batches(data, batches=_BATCHES)]
        return keras.tree.map_structure(lambda *parts: np.concatenate(parts), *inputs)
    return data
