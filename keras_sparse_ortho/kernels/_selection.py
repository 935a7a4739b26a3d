"""Choosing weights by path, layer, regular expression or predicate."""

import re
from collections.abc import Callable, Sequence

from keras_sparse_ortho.errors import UnknownWeightError
from keras_sparse_ortho.kernels._prunable_weight import PrunableWeight

Selection = str | Sequence[str] | Callable[[PrunableWeight], bool] | None
"""Weight paths, layer paths or regular expressions (one or a list), or a predicate."""


def select(
    weights: Sequence[PrunableWeight],
    selection: Selection,
    argument: str,
    unregistered: Sequence[PrunableWeight] = (),
) -> list[PrunableWeight]:
    """The weights that a selection names; `None` selects all.

    A string names a weight by its path, all weights of a layer by the layer's path, or all whose
    path it matches as a regular expression: the whole path (`re.fullmatch`), or, where it is
    anchored by `^` or `$`, a part of it (`re.search`).

    Args:
        weights: What there is to choose from.
        selection: What to choose.
        argument: Name of the argument that the selection was given as, for errors.
        unregistered: Matrices that are not to be chosen from, for errors.

    Raises:
        UnknownWeightError: A string that names nothing.
    """
    if selection is None:
        return list(weights)
    if callable(selection):
        return [weight for weight in weights if selection(weight)]
    names = [selection] if isinstance(selection, str) else list(selection)
    chosen: set[str] = set()
    for name in names:
        found = {weight.path for weight in weights if _names(name, weight.path)}
        if not found:
            known = ", ".join(weight.path for weight in weights) or "none"
            parts = [weight.path for weight in weights if _matches(re.search, name, weight.path)]
            hint = (
                f" A regular expression must match the whole path: r'.*{name}.*' names {parts[0]!r}"
                f"{' and others' if len(parts) > 1 else ''}."
                if parts
                else ""
            )
            if any(_names(name, weight.path) for weight in unregistered):
                hint += (
                    ' It names a matrix that is not registered; unregistered="guess" takes it in.'
                )
            raise UnknownWeightError(
                f"`{argument}` names no prunable weight. There are: {known}.{hint} "
                f"Received: {argument}={name!r}"
            )
        chosen |= found
    return [weight for weight in weights if weight.path in chosen]


def _names(name: str, path: str) -> bool:
    if path == name or path.startswith(f"{name}/"):
        return True
    anchored = name.startswith("^") or name.endswith("$")
    return _matches(re.search if anchored else re.fullmatch, name, path)


def _matches(how: Callable[[str, str], object], name: str, path: str) -> bool:
    try:
        return how(name, path) is not None
    except re.error:
        return False


def choose(
    weights: Sequence[PrunableWeight],
    include: Selection,
    exclude: Selection,
    others: Sequence[PrunableWeight] = (),
) -> list[PrunableWeight]:
    """The weights that `include` selects, without those that `exclude` does.

    Args:
        weights: What there is to choose from.
        include: What to choose.
        exclude: What not.
        others: Matrices that are not registered, which `exclude` may name as well.
    """
    chosen = select(weights, include, "include", others)
    if exclude is None:
        return chosen
    left_out = {weight.path for weight in select([*weights, *others], exclude, "exclude")}
    return [weight for weight in chosen if weight.path not in left_out]
