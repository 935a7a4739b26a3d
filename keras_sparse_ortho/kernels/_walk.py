"""The layers of a model with their paths, and the kernels that they own."""

from collections.abc import Iterable, Iterator
from typing import Any

from keras_sparse_ortho._keras_internals import sublayers
from keras_sparse_ortho.kernels._kernel_layouts import kernel_layouts
from keras_sparse_ortho.kernels._prunable_weight import PrunableWeight
from keras_sparse_ortho.kernels._unregistered import own_unregistered


def walk(layer: Any, path: str) -> Iterator[tuple[Any, str]]:
    """Yields `layer` and every layer inside it with its path, each layer once, depth first."""
    seen: set[int] = set()

    def visit(current: Any, here: str) -> Iterator[tuple[Any, str]]:
        if id(current) in seen:
            return
        seen.add(id(current))
        yield current, here
        for child in sublayers(current):
            # A wrapper of ours stands for the layer inside it.
            inside = here if getattr(current, "transparent_path", False) else _join(here, child)
            yield from visit(child, inside)

    yield from visit(layer, path)


def _join(path: str, named: Any) -> str:
    return _join_name(path, str(named.name))


def _join_name(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def own_kernels(layer: Any, path: str) -> list[PrunableWeight]:
    """The kernels that a built layer itself owns, without those of its sublayers.

    A layer whose variables do not have the dense form of its kernels says what they are: it has a
    method `stored_kernels()`, which gives a dict from name to `StoredKernel`, or `None` if they
    have it after all.
    """
    stored = layer.stored_kernels() if hasattr(layer, "stored_kernels") else None
    if stored is not None:
        return [
            PrunableWeight(_join_name(path, name), kept.variable, layer, kept.layout, stored=kept)
            for name, kept in stored.items()
        ]
    inherited = {id(v) for child in sublayers(layer) for v in child.weights}
    if hasattr(layer, "get_prunable_weights"):  # the duck type of TFMOT
        layouts = dict.fromkeys((v.name for v in layer.get_prunable_weights()), None)
    else:
        layouts = kernel_layouts(layer)
    return [
        PrunableWeight(_join(path, v), v, layer, layouts[v.name])
        for v in layer.weights
        if v.name in layouts and id(v) not in inherited
    ]


def find_kernels(layer: Any, path: str) -> list[PrunableWeight]:
    """All kernels in a built layer, its sublayers included; what two of them share once."""
    found: dict[int, PrunableWeight] = {}
    for inner, here in walk(layer, path):
        for weight in own_kernels(inner, here):
            found.setdefault(id(weight.variable), weight)
    return list(found.values())


def find_unregistered(
    layer: Any, path: str, known: Iterable[PrunableWeight]
) -> list[PrunableWeight]:
    """All matrices in a built layer that are none of the known ones: see `own_unregistered`."""
    found = {id(weight.variable): weight for weight in known}
    others: dict[int, PrunableWeight] = {}
    for inner, here in walk(layer, path):
        for weight in own_unregistered(inner, here):
            if id(weight.variable) not in found:
                others.setdefault(id(weight.variable), weight)
    return list(others.values())
