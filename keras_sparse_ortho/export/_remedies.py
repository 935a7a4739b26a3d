"""Remedies of static integers: which there are, a task with one, and the first that is enough."""

import dataclasses
from collections.abc import Iterator

from keras_sparse_ortho.errors import (
    ExportVerificationError,
    NotPrunableError,
)
from keras_sparse_ortho.export._candidates import Candidate, candidates, failed
from keras_sparse_ortho.export._reference import kernels_of
from keras_sparse_ortho.export._routes import Route
from keras_sparse_ortho.export._signature import pack
from keras_sparse_ortho.export._task import (
    Remedy,
    Task,
    Workspace,
)
from keras_sparse_ortho.quantization import equalize

REMEDIES = (
    Remedy(fits_ranges=True),
    Remedy(fits_ranges=True, equalizes=True),
    Remedy(fits_ranges=True, floats="auto"),
)
"""By their cost; the last one needs a device that computes floats."""


def with_remedy(task: Task, remedy: Remedy) -> Task:
    """A task of the same model with a remedy.

    Raises:
        NotPrunableError: The remedy equalizes channels, and the model is no functional one.
    """
    task = dataclasses.replace(task, remedy=remedy)
    if not remedy.equalizes:
        return task
    assert task.rows.calibrating is not None
    # A tuple `(x,)`: the inputs of a model may be a list of one.
    calibrating = pack(task.signature.nesting, task.rows.calibrating)
    equalized = equalize(task.model, (calibrating,))
    return dataclasses.replace(
        task, model=equalized, kernels=kernels_of(equalized)
    )


def tried_remedies(
    task: Task, route: Route, workspace: Workspace
) -> list[Candidate]:
    """The files of one remedy after the other, the cheapest first, until one is good enough.

    Args:
        task: The task, without a remedy, and with the largest error as its tolerance.
        route: A route of static integers.
        workspace: Where files are made.

    Raises:
        ExportVerificationError: None is good enough, with the error of each.
    """
    tried: list[Candidate] = []
    for remedy in _by_cost(task, tried):
        workspace.say(f"{route.name}: {remedy.name}")
        folder = workspace.folder / f"remedy_{len(tried)}"
        folder.mkdir()
        try:
            remedied = with_remedy(task, remedy)
            (candidate,) = candidates(
                remedied, [route], Workspace(folder, workspace.say)
            )
        except NotPrunableError as refusal:
            candidate = failed(route, refusal)
        outcome = candidate.outcome
        candidate.outcome = dataclasses.replace(outcome, remedy=remedy.name)
        tried.append(candidate)
        if candidate.file is not None:
            return tried
    raise _not_enough(task, tried)


def _by_cost(task: Task, tried: list[Candidate]) -> Iterator[Remedy]:
    """The remedies in their order; `tried` has the files of those before.

    A device that takes integers at the ends has no floats, so none stay.
    """
    fitted, equalized, partly_in_floats = REMEDIES
    yield Remedy()
    yield fitted
    yield equalized
    if task.ends == ("float32", "float32"):
        is_better = _error_of(tried[2]) < _error_of(tried[1])
        yield dataclasses.replace(partly_in_floats, equalizes=is_better)


def _error_of(candidate: Candidate) -> float:
    error = candidate.outcome.error
    if error is None:
        return float("inf")
    return error


def _not_enough(task: Task, tried: list[Candidate]) -> ExportVerificationError:
    """The error where no remedy is enough."""
    texts = []
    for candidate in tried:
        outcome = candidate.outcome
        if outcome.error is None:
            texts.append(f"{outcome.remedy}: {outcome.reason}")
        else:
            texts.append(f"{outcome.remedy}: error {outcome.error:.3g}")
    return ExportVerificationError(
        f"The file must have an error of at most `max_loss`, {task.tolerance:g}, on rows that made "
        "nothing of it, and no remedy is enough. Raise `max_loss`, train with "
        'quantize_aware(model), or use mode="dynamic_int8", which computes activations in floats. '
        f"Received: {'; '.join(texts)}"
    )
