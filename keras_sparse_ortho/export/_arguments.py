"""The arguments of an export, checked before any time is spent, and what follows from them."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho.export._candidates import Task
from keras_sparse_ortho.export._execution import keras_outputs
from keras_sparse_ortho.export._plain import plain_model
from keras_sparse_ortho.export._route import Route
from keras_sparse_ortho.export._signature import Signature, signature_of
from keras_sparse_ortho.export._twin import float32_twin


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
    """What all routes share; its folder is still to be set.

    Args:
        model: The user's model.
        batch_size: Rows of one call.
        sample: Rows to compare on, or None.
        representative_data: Rows to calibrate on, or None.
        data_for: The route that `representative_data` must suit; None if static int8 is one of
            several.
        tolerance: The largest error to allow, or None for each route's own.
        seed: Seed of the random sample.
        timeout: Seconds for each subprocess.

    Raises:
        ValueError: if an argument does not fit.
    """
    batch_size = check_positive("batch_size", batch_size)
    if tolerance is not None:
        tolerance = check_tolerance(tolerance)
    signature = signature_of(model, batch_size, sample)
    representative = _representative(data_for, representative_data, signature)
    compared = _sample(signature, sample, representative, seed)
    stripped = plain_model(model)
    plain = float32_twin(stripped)
    names, want = keras_outputs(model if plain is stripped else plain, signature, compared)
    return Task(plain, signature, names, want, compared, representative, tolerance, Path(), timeout)


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


def check_path(path: str | os.PathLike[str]) -> Path:
    """The path of a file to write, in a folder that exists."""
    target = Path(path)
    if target.is_dir() or not target.parent.is_dir():
        raise ValueError(
            f"`path` must name a file in a folder that exists. Received: path={str(path)!r}"
        )
    return target


def check_positive(name: str, value: int) -> int:
    """A whole number of at least 1."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(f"`{name}` must be a positive integer. Received: {name}={value!r}")
    return int(value)


def check_tolerance(tolerance: float) -> float:
    """A number of at least 0."""
    if not tolerance >= 0:  # also refuses NaN, with which every comparison would fail or pass
        raise ValueError(f"`tolerance` must be 0 or more. Received: tolerance={tolerance!r}")
    return float(tolerance)


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
