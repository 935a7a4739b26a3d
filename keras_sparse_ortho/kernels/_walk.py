"""The walk over a model that finds its kernels."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping

import keras

from keras_sparse_ortho._keras_internals import (
    created_trainable,
    sublayers,
)
from keras_sparse_ortho.kernels._layer_kinds import (
    LayerWrapper,
    WholeLayer,
    storages_of,
)
from keras_sparse_ortho.kernels._layouts import (
    Layouts,
    constants,
    declares_kernels,
    kernel_layouts,
)
from keras_sparse_ortho.kernels._storage import PrunableWeight
from keras_sparse_ortho.orthogonal import KernelLayout

L = keras.layers


Child = tuple[keras.layers.Layer, str]
"""A layer and its name or path."""

Children = Callable[[keras.layers.Layer], Iterable[Child]]


def _children(layer: keras.layers.Layer) -> Iterator[Child]:
    """The layers inside a layer, with their names; wrappers add none to a path."""
    if isinstance(layer, WholeLayer):
        return
    for child in sublayers(layer):
        if isinstance(layer, LayerWrapper):
            yield child, ""
        else:
            yield child, child.name


def walk(
    layer: keras.layers.Layer,
    path: str,
    children: Children = _children,
) -> Iterator[Child]:
    """Yields `layer` and every layer inside it with its path, each layer once, depth first."""
    seen: set[int] = set()

    def visit(
        current: keras.layers.Layer, current_path: str
    ) -> Iterator[Child]:
        if id(current) in seen:
            return
        seen.add(id(current))
        yield current, current_path
        for child, name in children(current):
            child_path = current_path
            if name:
                child_path = _join(current_path, name)
            yield from visit(child, child_path)

    yield from visit(layer, path)


def _join(path: str, name: str) -> str:
    if not path:
        return str(name)
    return f"{path}/{name}"


def own_kernels(layer: keras.layers.Layer, path: str) -> list[PrunableWeight]:
    """The kernels that a built layer itself owns; first those in its storages."""
    kernels = []
    for name, storage in storages_of(layer).items():
        kernel_path = _join(path, name)
        kernels.append(
            dataclasses.replace(
                storage.weight, path=kernel_path, storage=storage
            )
        )
    excluded_ids = {id(kernel.variable) for kernel in kernels}
    for child in sublayers(layer):
        excluded_ids |= {id(variable) for variable in child.weights}
    if hasattr(layer, "get_prunable_weights"):  # the duck type of TFMOT
        names = [variable.name for variable in layer.get_prunable_weights()]
        layouts: Layouts = dict.fromkeys(names, None)
    else:
        layouts = kernel_layouts(layer)
        excluded_ids |= constants(layer)
    for variable in layer.weights:
        name = variable.name
        if name in layouts and id(variable) not in excluded_ids:
            kernels.append(
                PrunableWeight(
                    _join(path, name), variable, layer, layouts[name]
                )
            )
    return kernels


def own_unregistered(
    layer: keras.layers.Layer, path: str
) -> list[PrunableWeight]:
    """The matrices that a layer itself owns and that are not known to be kernels.

    They are created as trainable, with at least two axes longer than 1, and no `bias` or `*_bias`.
    """
    if declares_kernels(layer):
        return []
    layouts = kernel_layouts(layer)
    matrices = []
    for variable in created_trainable(layer):
        name = variable.name
        is_bias = name == "bias" or name.endswith("_bias")
        long_axes = sum(size > 1 for size in variable.shape)
        if name in layouts or is_bias or long_axes < 2:
            continue
        *batch, inputs, outputs = range(len(variable.shape))  # likeliest
        layout = KernelLayout(
            inputs=(inputs,), outputs=(outputs,), batch=tuple(batch)
        )
        matrix = PrunableWeight(
            _join(path, name), variable, layer, layout, registered=False
        )
        matrices.append(matrix)
    return matrices


def find_kernels(
    layer: keras.layers.Layer,
    path: str,
    *,
    unregistered: bool = False,
) -> list[PrunableWeight]:
    """All kernels at any depth of a layer, each once; then, if asked for, `unregistered` ones."""
    kernels: dict[int, PrunableWeight] = {}
    layers = list(walk(layer, path))
    kinds: dict[str, list[type]] = {}
    for inner, inner_path in layers:
        kinds.setdefault(inner_path, []).append(type(inner))
    finders = [own_kernels]
    if unregistered:
        finders.append(own_unregistered)
    for find in finders:
        for inner, inner_path in layers:
            kinds_around = _kinds_around(inner_path, kinds)
            for kernel in find(inner, inner_path):
                kernel = dataclasses.replace(kernel, inside=kinds_around)
                kernels.setdefault(id(kernel.variable), kernel)
    return list(kernels.values())


def _kinds_around(
    path: str, kinds: Mapping[str, list[type]]
) -> tuple[type, ...]:
    """The classes of the layers on the way to a path, the outermost first."""
    names = path.split("/")
    kinds_around: list[type] = []
    for count in range(len(names) + 1):
        outer_path = "/".join(names[:count])
        kinds_around += kinds.get(outer_path, [])
    return tuple(kinds_around)
