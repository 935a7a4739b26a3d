"""What a model is like at a moment, so that it can be put back."""

from typing import Any

import keras

from keras_sparse_ortho._keras_internals._object_copy import (
    CONTAINERS,
    children,
    is_ours,
    refill,
    tracker_class,
)


class Snapshot:
    """A model as it is now: classes, attributes, contents of containers, values of variables.

    Changing layers in place touches too much to undo step by step (lists in which Keras tracks
    layers and variables, variables that give up their arrays): all that a model leads to is noted.
    """

    def __init__(self, model: keras.layers.Layer) -> None:
        self._classes: list[tuple[Any, type]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._values: list[tuple[Any, Any]] = []
        seen: dict[int, Any] = {}  # with the objects, so that no other one gets their id
        waiting: list[Any] = [model]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict) and not issubclass(type(value), dict):
                proxy: Any = value  # TensorFlow's own modules keep dicts so
                value = proxy.__wrapped__
            if id(value) not in seen:
                seen[id(value)] = value
                waiting.extend(self._note(value))

    def _note(self, value: Any) -> list[Any]:
        """Notes one object; gives those that it leads to."""
        if isinstance(value, dict):
            self._contents.append((value, dict(dict.items(value))))
        elif isinstance(value, list | set):
            # A list that tells Keras what is put into it is noted in a plain one.
            self._contents.append((value, {*value} if isinstance(value, set) else [*value]))
        elif isinstance(value, keras.Variable | keras.layers.Layer | tracker_class()) or (
            is_ours(value)
        ):
            self._classes.append((value, type(value)))
            self._contents.append((vars(value), dict(vars(value))))
            if isinstance(value, keras.Variable):
                # On JAX arrays are not changed, but replaced.
                if value._value is not None and keras.backend.backend() != "jax":
                    self._values.append((value, keras.ops.copy(value.value)))
                return []
        elif not isinstance(value, CONTAINERS):
            return []
        return children(value)

    def restore(self) -> None:
        """Puts everything back."""
        for owner, kind in self._classes:
            if type(owner) is not kind:
                owner.__class__ = kind
        for container, contents in self._contents:
            refill(container, contents)
        for variable, value in self._values:
            variable.assign(value)
