"""The variables and layers that TensorFlow saves with a layer."""

import keras

Dependency = tuple[str, object]


def track_variable(layer: keras.layers.Layer, variable: keras.Variable) -> None:
    """Lets TensorFlow save a variable with a layer."""
    _track(layer, variable.name, variable)


def untrack_variable(
    layer: keras.layers.Layer, variable: keras.Variable
) -> None:
    """Takes a variable out of a layer, for Keras and for TensorFlow."""
    layer._untrack_variable(variable)
    for name, child in _dependencies(layer):
        if child is variable:
            layer._delete_tracking(name)


def track_layers(layer: keras.layers.Layer) -> None:
    """Makes TensorFlow save all layers that a layer holds, also those in lists and dicts."""
    graph = getattr(layer, "_functional", None)  # of a Sequential model
    tracked_ids: set[int] = set()
    for owner in (layer, graph):
        for _, child in _dependencies(owner):
            tracked_ids.add(id(child))
    inner_layers = layer._flatten_layers(include_self=False, recursive=False)
    for number, inner in enumerate(inner_layers):
        if id(inner) not in tracked_ids:
            _track(layer, f"layers[{number}]", inner)


def _track(layer: keras.layers.Layer, name: str, child: object) -> None:
    if keras.backend.backend() == "tensorflow":
        layer._track_trackable(child, name, overwrite=True)


def _dependencies(layer: keras.layers.Layer | None) -> list[Dependency]:
    """The variables and layers that TensorFlow saves with a layer, each with its name."""
    references = getattr(
        layer, "_self_unconditional_checkpoint_dependencies", []
    )
    waiting: list[Dependency] = []
    for reference in references:
        waiting.append((reference.name, reference.ref))
    dependencies: list[Dependency] = []
    while waiting:
        name, child = waiting.pop()
        # A dict in TensorFlow's own module.
        child = getattr(child, "__wrapped__", child)
        if isinstance(child, dict):
            child = list(child.values())
        if isinstance(child, list | tuple):
            for inner in child:
                waiting.append((name, inner))
        else:
            dependencies.append((name, child))
    return dependencies
