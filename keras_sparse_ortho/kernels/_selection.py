"""Choosing among the kernels of a model: by path, layer, class, index or predicate."""

import re
from collections.abc import Callable, Sequence
from typing import TypeAlias, cast

import keras

from keras_sparse_ortho._checks import is_integer
from keras_sparse_ortho.errors import UnknownWeightError
from keras_sparse_ortho.kernels._storage import PrunableWeight
from keras_sparse_ortho.kernels._walk import walk

Match = Callable[[str, str], object]

Name: TypeAlias = str | int | keras.layers.Layer | type[keras.layers.Layer]

Selection: TypeAlias = (
    Name | Sequence[Name] | Callable[[PrunableWeight], bool] | None
)
"""Weight paths, layer paths, regular expressions, layers, classes of layers, indices (one or a
list); a predicate."""


def select(
    weights: Sequence[PrunableWeight],
    selection: Selection,
    argument: str,
    unregistered: Sequence[PrunableWeight] = (),
) -> list[PrunableWeight]:
    """Returns the weights that a selection names, all for `None`; UnknownWeightError if none.

    A string is the path of a weight or of a layer, or a regular expression that matches the whole
    path or, if anchored by `^` or `$`, a part of it. A layer names all weights in it, a class of
    layers those in all its layers, an integer the weight at this index of `prunable_weights`.
    """
    if selection is None:
        return list(weights)
    names = names_in(selection)
    if names is None:
        return [weight for weight in weights if selection(weight)]  # type: ignore[operator]
    selected: set[str] = set()
    for name in names:
        paths = _named_paths(weights, name)
        if not paths:
            raise _names_nothing(weights, name, argument, unregistered)
        selected |= paths
    return [weight for weight in weights if weight.path in selected]


def _names_nothing(
    weights: Sequence[PrunableWeight],
    name: object,
    argument: str,
    unregistered: Sequence[PrunableWeight],
) -> UnknownWeightError:
    """The error of a name that selects no weight."""
    paths = [weight.path for weight in weights]
    known_paths = ", ".join(paths) or "none"
    if not isinstance(name, str):
        return UnknownWeightError(
            f"`{argument}` takes paths of weights and layers, regular expressions, layers "
            "of the model with prunable weights, their classes, and indices of these "
            f"weights, or a predicate. There are: {known_paths}. Received: {argument}={name!r}"
        )
    hint = ""
    matches = [path for path in paths if _matches(re.search, name, path)]
    if matches:
        and_others = " and others" if len(matches) > 1 else ""
        hint = (
            " A regular expression must match the whole path: "
            f"r'.*{name}.*' names {matches[0]!r}{and_others}."
        )
    if any(_is_named(name, weight.path) for weight in unregistered):
        hint += " It names an unregistered matrix: give its full path, or register it."
    return UnknownWeightError(
        f"`{argument}` names no prunable weight. There are: {known_paths}.{hint} "
        f"Received: {argument}={name!r}"
    )


def names_in(selection: Selection) -> list[Name] | None:
    """The names in a selection; `None` for a predicate."""
    if isinstance(selection, str | keras.layers.Layer | type) or is_integer(
        selection
    ):
        return [cast(Name, selection)]
    if callable(selection):
        return None
    return list(cast(Sequence[Name], selection))


def _named_paths(weights: Sequence[PrunableWeight], name: object) -> set[str]:
    """The paths of the weights that a name stands for."""
    if isinstance(name, str):
        return {
            weight.path for weight in weights if _is_named(name, weight.path)
        }
    if isinstance(name, keras.layers.Layer):
        layer_ids = {id(layer) for layer, _ in walk(name, "")}
        return {
            weight.path for weight in weights if id(weight.owner) in layer_ids
        }
    if isinstance(name, type):
        return {weight.path for weight in weights if _is_inside(weight, name)}
    registered = [weight.path for weight in weights if weight.registered]
    if is_integer(name) and -len(registered) <= name < len(registered):
        return {registered[name]}
    return set()


def _is_inside(weight: PrunableWeight, kind: type) -> bool:
    """Whether a weight's layer, or one around it, is of a class."""
    kinds = (type(weight.owner), *weight.inside)
    return any(issubclass(kind_around, kind) for kind_around in kinds)


def _is_named(name: str, path: str) -> bool:
    """Whether a text is a path, the path of a layer around it, or an expression that matches it."""
    if path == name or path.startswith(f"{name}/"):
        return True
    match: Match = re.fullmatch
    if name.startswith("^") or name.endswith("$"):
        match = re.search
    return _matches(match, name, path)


def _matches(match: Match, name: str, path: str) -> bool:
    try:
        return match(name, path) is not None
    except re.error:
        return False


def choose(
    weights: Sequence[PrunableWeight],
    include: Selection,
    exclude: Selection,
    others: Sequence[PrunableWeight] = (),
) -> list[PrunableWeight]:
    """The weights that `include` selects, without those (or `others`) that `exclude` does."""
    included = select(weights, include, "include", others)
    if exclude is None:
        return included
    excluded = select([*weights, *others], exclude, "exclude")
    excluded_paths = {weight.path for weight in excluded}
    return [weight for weight in included if weight.path not in excluded_paths]
