"""The layers of a model with their paths, the kernels that they own, and choosing among these."""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras

from keras_sparse_ortho._checks import is_integer
from keras_sparse_ortho._keras_internals import created_trainable, sublayers
from keras_sparse_ortho.errors import UnknownWeightError
from keras_sparse_ortho.kernels._kernel_layouts import declares_kernels, kernel_layouts
from keras_sparse_ortho.kernels._storage import PrunableWeight, storages_of
from keras_sparse_ortho.orthogonal import KernelLayout

Selection: TypeAlias = (
    str
    | int
    | keras.layers.Layer
    | type[keras.layers.Layer]
    | Sequence[str | int | keras.layers.Layer | type[keras.layers.Layer]]
    | Callable[[PrunableWeight], bool]
    | None
)
"""Weight paths, layer paths, regular expressions, layers, classes of layers, indices (one or a
list); a predicate."""


def _children(layer: Any) -> Iterator[tuple[Any, str]]:
    """The layers in a layer, with the names that they have below it."""
    # Layers inside one whose class is `in_one` are parts of it, and left out.
    for child in () if getattr(type(layer), "in_one", False) else sublayers(layer):
        # A wrapper of ours stands for the layer inside it.
        yield child, "" if getattr(layer, "transparent_path", False) else child.name


def walk(
    layer: Any,
    path: str,
    children: Callable[[Any], Iterable[tuple[Any, str]]] = _children,
) -> Iterator[tuple[Any, str]]:
    """Yields `layer` and every layer inside it with its path, each layer once, depth first."""
    seen: set[int] = set()

    def visit(current: Any, here: str) -> Iterator[tuple[Any, str]]:
        if id(current) in seen:
            return
        seen.add(id(current))
        yield current, here
        for child, name in children(current):
            yield from visit(child, _join(here, name) if name else here)

    yield from visit(layer, path)


def _join(path: str, name: Any) -> str:
    return f"{path}/{name}" if path else str(name)


def own_kernels(layer: Any, path: str) -> list[PrunableWeight]:
    """The kernels that a built layer itself owns, without those of its sublayers.

    Those that the layer holds in a storage come first, with it.
    """
    found = [
        dataclasses.replace(storage.weight, path=_join(path, name), storage=storage)
        for name, storage in storages_of(layer).items()
    ]
    held = {id(weight.variable) for weight in found}
    held |= {id(v) for child in sublayers(layer) for v in child.weights}
    if hasattr(layer, "get_prunable_weights"):  # the duck type of TFMOT
        layouts = dict.fromkeys((v.name for v in layer.get_prunable_weights()), None)
    else:
        layouts = kernel_layouts(layer)
    return found + [
        PrunableWeight(_join(path, v.name), v, layer, layouts[v.name])
        for v in layer.weights
        if v.name in layouts and id(v) not in held
    ]


def own_unregistered(layer: Any, path: str) -> list[PrunableWeight]:
    """The matrices that a layer itself owns and that are not known to be kernels.

    A matrix is a weight created as trainable, with at least two axes longer than 1, and not called
    `bias` or `*_bias`. Keras' own layers, registered ones and ours declare their kernels.
    """
    if declares_kernels(layer):
        return []
    known = kernel_layouts(layer)
    found = []
    for v in created_trainable(layer):
        is_bias = v.name == "bias" or v.name.endswith("_bias")
        if v.name in known or is_bias or sum(size > 1 for size in v.shape) < 2:
            continue
        # The likeliest meaning of the axes: `(*batch, in, out)`.
        *batch, inputs, outputs = range(len(v.shape))
        layout = KernelLayout(inputs=(inputs,), outputs=(outputs,), batch=tuple(batch))
        found.append(PrunableWeight(_join(path, v.name), v, layer, layout, registered=False))
    return found


def find_kernels(layer: Any, path: str, *, unregistered: bool = False) -> list[PrunableWeight]:
    """All kernels in a built layer, those of layers inside it included; shared ones once.

    With `unregistered` all other matrices come after them; see `own_unregistered`.
    """
    found: dict[int, PrunableWeight] = {}
    layers = list(walk(layer, path))
    kinds: dict[str, list[type]] = {}
    for inner, here in layers:
        kinds.setdefault(here, []).append(type(inner))
    for own in (own_kernels, own_unregistered) if unregistered else (own_kernels,):
        for inner, here in layers:
            names = here.split("/")
            above = [kinds.get("/".join(names[:k]), []) for k in range(len(names) + 1)]
            for weight in own(inner, here):
                inside = tuple(kind for listed in above for kind in listed)
                found.setdefault(id(weight.variable), dataclasses.replace(weight, inside=inside))
    return list(found.values())


def select(
    weights: Sequence[PrunableWeight],
    selection: Selection,
    argument: str,
    unregistered: Sequence[PrunableWeight] = (),
) -> list[PrunableWeight]:
    """The weights that a selection names; `None` selects all.

    A string names a weight by its path, all weights of a layer by the layer's path, or all whose
    path it matches as a regular expression: the whole path (`re.fullmatch`), or, where it is
    anchored by `^` or `$`, a part of it (`re.search`). A layer names all weights in it, a class of
    layers those in all its layers, an integer the weight at this index of
    `prunable_weights(model)`. Errors tell the `argument` that the selection was given as, and
    whether it names `unregistered` matrices.

    Raises:
        UnknownWeightError: A string, layer, class or index that names nothing.
    """
    if selection is None:
        return list(weights)
    names = names_in(selection)
    if names is None:
        return [weight for weight in weights if selection(weight)]  # type: ignore[operator]
    chosen: set[str] = set()
    for name in names:
        found = _named(weights, name)
        if not found:
            known = ", ".join(weight.path for weight in weights) or "none"
            if not isinstance(name, str):
                raise UnknownWeightError(
                    f"`{argument}` takes paths of weights and layers, regular expressions, layers "
                    "of the model with prunable weights, their classes, and indices of these "
                    f"weights, or a predicate. There are: {known}. Received: {argument}={name!r}"
                )
            parts = [weight.path for weight in weights if _matches(re.search, name, weight.path)]
            hint = (
                f" A regular expression must match the whole path: r'.*{name}.*' names {parts[0]!r}"
                f"{' and others' if len(parts) > 1 else ''}."
                if parts
                else ""
            )
            if any(_names(name, weight.path) for weight in unregistered):
                hint += (
                    " It names a matrix that is not registered: give its full path, or register it."
                )
            raise UnknownWeightError(
                f"`{argument}` names no prunable weight. There are: {known}.{hint} "
                f"Received: {argument}={name!r}"
            )
        chosen |= found
    return [weight for weight in weights if weight.path in chosen]


def names_in(selection: Any) -> list[Any] | None:
    """The parts of a selection; `None` for a predicate."""
    if isinstance(selection, str | keras.layers.Layer | type) or is_integer(selection):
        return [selection]
    return None if callable(selection) else list(selection)


def _named(weights: Sequence[PrunableWeight], name: Any) -> set[str]:
    """The paths of the weights that one part of a selection names."""
    if isinstance(name, str):
        return {weight.path for weight in weights if _names(name, weight.path)}
    if isinstance(name, keras.layers.Layer):
        inside = {id(layer) for layer, _ in walk(name, "")}
        return {weight.path for weight in weights if id(weight.owner) in inside}
    if isinstance(name, type):
        kinds = {weight.path: (type(weight.owner), *weight.inside) for weight in weights}
        return {path for path, found in kinds.items() if any(issubclass(k, name) for k in found)}
    listed = [weight.path for weight in weights if weight.registered]
    if is_integer(name) and -len(listed) <= name < len(listed):
        return {listed[name]}
    return set()


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

    `exclude` may name `others`, matrices that are not registered, as well.
    """
    chosen = select(weights, include, "include", others)
    if exclude is None:
        return chosen
    left_out = {weight.path for weight in select([*weights, *others], exclude, "exclude")}
    return [weight for weight in chosen if weight.path not in left_out]
