"""From routes to verified files: convert, run, compare with Keras, check the zeros."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from keras_sparse_ortho._files import disk_full, is_full
from keras_sparse_ortho._text import printable
from keras_sparse_ortho.errors import (
    ExportRouteError,
    ExportVerificationError,
)
from keras_sparse_ortho.export._blocks import (
    BlockPlan,
    kernels_of_blocks,
)
from keras_sparse_ortho.export._comparison import (
    compare,
    find_zeros,
    litert_outputs,
)
from keras_sparse_ortho.export._conversion import convert
from keras_sparse_ortho.export._flatbuffer import (
    has_lstms,
    operations_in_floats,
    read_model,
)
from keras_sparse_ortho.export._kernel_names import name_kernels
from keras_sparse_ortho.export._lstms import NO_LSTMS, LstmPlan
from keras_sparse_ortho.export._record import with_record
from keras_sparse_ortho.export._routes import Route, RouteOutcome
from keras_sparse_ortho.export._short_names import shorten_names
from keras_sparse_ortho.export._task import Task, Workspace
from keras_sparse_ortho.export._unread import drop_unread
from keras_sparse_ortho.export._weight_zeros import (
    WeightZeros,
    read_weights,
)


@dataclasses.dataclass
class Candidate:
    """One route and its verified file, or its failure."""

    route: Route
    outcome: RouteOutcome
    file: Path | None = None
    failure: Exception | None = None


def candidates(
    task: Task,
    routes: Sequence[Route],
    workspace: Workspace,
    size: Callable[[bytes], int] | None = None,
) -> list[Candidate]:
    """Tries each route, and keeps failures.

    Args:
        task: `Task`. The model and its rows.
        routes: The routes.
        workspace: `Workspace`. Where files are made.
        size: callable. The bytes that a file counts as. With it the smallest file is compared
            first, and the others only until one agrees.
    """
    fitting = [
        route
        for route in routes
        if (task.blocks.found or not route.of_blocks)
        and (task.lstms.quarters or not route.of_lstms)
    ]
    if not fitting:
        return [failed(routes[0], _no_use(task, routes[0]))]
    tried = []
    converted = {}
    for route, file in convert(task, fitting, workspace).items():
        if isinstance(file, Path):
            converted[route] = file
        else:
            tried.append(failed(route, file))
    order = list(converted)
    if size is not None:
        sizes = {
            route: size(file.read_bytes()) for route, file in converted.items()
        }
        order.sort(key=lambda route: sizes[route])
    for route in order:
        with workspace.timed(route, "compared"):
            try:
                tried.append(_candidate(task, route, converted[route]))
            except ExportVerificationError as failure:
                tried.append(failed(route, failure))
        if size is not None and tried[-1].file is not None:
            break
    for candidate in tried:
        seconds = workspace.seconds[candidate.route.name]
        candidate.outcome = dataclasses.replace(
            candidate.outcome, seconds=seconds
        )
    failures = [
        str(candidate.failure)
        for candidate in tried
        if candidate.failure is not None
    ]
    if failures and is_full(workspace.folder, failures):
        raise disk_full(workspace.folder.parent, failures[0])
    return tried


def failed(
    route: Route, failure: Exception, error: float | None = None
) -> Candidate:
    outcome = RouteOutcome(route.name, str(failure), error=error)
    return Candidate(route, outcome, failure=failure)


def _no_use(task: Task, route: Route) -> ExportRouteError:
    """The error of a route whose encoding a model has no use for."""
    if route.of_lstms:
        reasons = _listed(task.lstms.loops)
        return ExportRouteError(
            f"Route {route.name!r} needs a keras.layers.LSTM with tanh and sigmoid, without masks "
            f"and states that outlive a call; use mode={route.storage!r}. "
            f"Received: {reasons or 'a model without LSTMs'}"
        )
    reasons = _listed(task.blocks.kept)
    return ExportRouteError(
        f"Route {route.name!r} needs a kernel whose zeros are in whole blocks, as drawn with "
        "structure=Block(32, 32, regular=True); use another route. "
        f"Received: {reasons or 'a model without kernels'}"
    )


def _listed(kept: dict[str, str]) -> str:
    """The first few paths with their reasons."""
    reasons = [f"{path!r}: {reason}" for path, reason in list(kept.items())[:5]]
    return "; ".join(reasons)


def _candidate(task: Task, route: Route, converted: Path) -> Candidate:
    """The file of a route with its record, compared with Keras."""
    content, weights = _with_names(task, route, converted.read_bytes())
    file = converted.with_name(f"{route.name}.verified.tflite")
    file.write_bytes(content)
    outputs = litert_outputs(file, task)
    comparison = compare(task.names, task.outputs, outputs, route.measure)
    allowed = task.allowed(route)
    if not comparison.error <= allowed:
        failure = ExportVerificationError(
            f"The file must agree with Keras to {allowed:g} ({route.measure} error, see "
            f"`tolerance`). Received: error={comparison.error:.3g} at output "
            f"`{comparison.worst_output}`, maximal difference {comparison.max_abs_diff:.3g}, on "
            f"{len(task.rows.compared[0])} rows ({task.rows.origin})"
        )
        return failed(route, failure, comparison.error)
    blocks = task.blocks if route.of_blocks else BlockPlan({}, {})
    lstms = _lstms_in(task, content)
    # The file lacks the zeros between blocks.
    whole = {
        path: value
        for path, value in task.kernels.items()
        if path not in blocks.found and path not in lstms.quarters
    }
    for path, quarters in lstms.quarters.items():
        for number, quarter in enumerate(quarters, start=1):
            whole[f"{path} ({number} of {len(quarters)})"] = quarter
    left_out = 0
    for path, zero_blocks in blocks.found.items():
        left_out += task.kernels[path].size - zero_blocks.stored
    outcome = RouteOutcome(
        route.name,
        bytes=len(content),
        error=comparison.error,
        tolerance=allowed,
        max_abs_diff=comparison.max_abs_diff,
        argmax_agreement=comparison.argmax_agreement,
        cosine=comparison.cosine,
        kept={**blocks.kept, **lstms.loops},
        left_out=left_out,
        folded=find_zeros(whole, weights),
        in_floats=operations_in_floats(content) if route.needs_data else (),
    )
    return Candidate(route, outcome, file)


def _lstms_in(task: Task, content: bytes) -> LstmPlan:
    """The plan of the fused LSTMs of a file; an empty one if it has none."""
    if task.lstms.quarters and has_lstms(content):
        return task.lstms
    return NO_LSTMS


def _with_names(
    task: Task, route: Route, content: bytes
) -> tuple[bytes, tuple[WeightZeros, ...]]:
    """A converted file with the names of kernels and our record; and its weights."""
    record = {
        "route": route.name,
        "model": printable(task.model.name),
        "inputs": task.signature.specs,
        "outputs": [{"name": name} for name in task.names],
    }
    kernels = {path: [value] for path, value in task.kernels.items()}
    if route.of_blocks:
        kernels |= kernels_of_blocks(task.model, task.blocks)
    try:
        kernels |= _lstms_in(task, content).quarters
        model = read_model(content)
        shorten_names(model)
        name_kernels(model, kernels)
        drop_unread(model)
        named = with_record(model, record)
        return named, read_weights(named)
    except Exception as error:  # of the schema's reader
        text = f"The converted file must be readable. Received: {type(error).__name__}: {error}"
        raise ExportVerificationError(text) from None
