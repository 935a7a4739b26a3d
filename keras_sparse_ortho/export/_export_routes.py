"""Every route of a model at once, for comparing them."""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import keras

from keras_sparse_ortho._workplace import workplace
from keras_sparse_ortho.export._arguments import accepted, make_task, require_litert
from keras_sparse_ortho.export._candidates import candidates
from keras_sparse_ortho.export._outcome import RouteOutcome
from keras_sparse_ortho.export._report import ExportReport, report_on
from keras_sparse_ortho.export._routes import ROUTES, route_named


def export_routes(
    model: keras.Model,
    folder: str | os.PathLike[str],
    routes: Sequence[str] | None = None,
    *,
    representative_data: Any = None,
    batch_size: int = 1,
    sample: Any = None,
    tolerance: float | None = None,
    seed: int = 0,
    timeout: float = 600.0,
) -> dict[str, ExportReport | RouteOutcome]:
    """Export a model by many routes, each file verified as by `export_litert`.

    Args:
        model: As for `export_litert`.
        folder: An existing folder; the file of a route is `<folder>/<route>.tflite`.
        routes: Names of routes. `None`: all, the static int8 ones only if there is
            `representative_data`.
        representative_data: As for `export_litert`.
        batch_size: Likewise.
        sample: Likewise.
        tolerance: Likewise.
        seed: Likewise.
        timeout: Likewise.

    Returns:
        By the name of the route: the report, or the outcome with the `reason` that there is no
        file.

    Raises:
        ValueError: if an argument does not fit the model, or the folder does not exist.
        OSError: if nothing can be written there, or the disk is full.

    Limits: Nothing is timed; see `latencies`, or `export_litert(mode="fast")`.

    Example:
    >>> import keras, tempfile
    >>> from keras_sparse_ortho.export import export_routes
    >>> model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
    >>> found = export_routes(model, tempfile.mkdtemp(), ["float32", "float32+csr"])
    >>> found["float32"].bytes > 0, found["float32+csr"].reason is None
    (True, False)
    """
    require_litert()
    target = Path(folder)
    if not target.is_dir():
        raise ValueError(f"`folder` must exist. Received: folder={str(folder)!r}")
    if routes is None:
        has_data = representative_data is not None
        chosen = [route for route in ROUTES if has_data or not route.needs_representative_data]
    else:
        chosen = [route_named(name) for name in routes]
    needs = [route for route in chosen if route.needs_representative_data]
    task = make_task(
        model,
        batch_size,
        sample,
        representative_data,
        data_for=needs[0] if needs else None,
        tolerance=tolerance,
        seed=seed,
        timeout=timeout,
    )
    results: dict[str, ExportReport | RouteOutcome] = {}
    with workplace(target, "routes") as staging:
        task = dataclasses.replace(task, folder=staging)
        for candidate in candidates(task, accepted(chosen, model)):
            name = candidate.route.name
            results[name] = candidate.outcome
            if candidate.file is not None:
                path = target / f"{name}.tflite"
                results[name] = report_on(candidate, [candidate.outcome], task, path)
                os.replace(candidate.file, path)
    return results
