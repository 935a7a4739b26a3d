"""The variables and layers that TensorFlow saves with a layer, in checkpoints and SavedModels.

TensorFlow follows attributes. It misses variables that no attribute of a layer holds, such as
masks, and layers in a list or dict, because Keras has its own classes of lists and dicts.
On the other backends the functions here do nothing.
"""

from typing import Any

import keras


def track_variable(layer: Any, variable: Any) -> None:
    """Makes TensorFlow save a variable with a layer."""
    _track(layer, variable.name, variable)


def untrack_variable(layer: Any, variable: Any) -> None:
    """Makes TensorFlow save a layer without a variable."""
    names = [name for name, child in _dependencies(layer) if child is variable]
    for name in names:
        layer._delete_tracking(name)


def track_layers(layer: Any) -> None:
    """Makes TensorFlow save all layers that a layer holds, also those in lists and dicts."""
    graph = getattr(layer, "_functional", None)  # of a Sequential model
    found = {id(child) for one in (layer, graph) for _, child in _dependencies(one)}
    held = layer._flatten_layers(include_self=False, recursive=False)
    for number, inner in enumerate(held):
        if id(inner) not in found:
            _track(layer, f"layers[{number}]", inner)


def _track(layer: Any, name: str, child: Any) -> None:
    if keras.backend.backend() == "tensorflow":
        layer._track_trackable(child, name, overwrite=True)


def _dependencies(layer: Any) -> list[tuple[str, Any]]:
    """What TensorFlow saves with a layer: its name for each variable and layer, and the object."""
    waiting = [
        (reference.name, reference.ref)
        for reference in getattr(layer, "_self_unconditional_checkpoint_dependencies", [])
    ]
    found = []
    while waiting:
        name, child = waiting.pop()
        child = getattr(child, "__wrapped__", child)  # a dict in TensorFlow's own module
        if isinstance(child, dict):
            waiting += [(name, inner) for inner in child.values()]
        elif isinstance(child, list | tuple):
            waiting += [(name, inner) for inner in child]
        else:
            found.append((name, child))
    return found
