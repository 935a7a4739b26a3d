"""`Snapshot`: a model as it is, to put it back if a change in place fails."""

import keras

from keras_sparse_ortho._interception import without_dispatchers
from keras_sparse_ortho._keras_internals._object_graph import (
    CONTAINERS,
    Container,
    children,
    content_of,
    is_ours,
    refill,
    tracker_class,
)
from keras_sparse_ortho._types import Tensor

Attributes = dict[str, object]


class Snapshot:
    """A model as it is now: classes, attributes, contents of containers, values of variables.

    Args:
        model: Model or layer. Everything that it leads to is noted.
    """

    def __init__(self, model: keras.layers.Layer) -> None:
        self._classes: list[tuple[object, type]] = []
        self._contents: list[tuple[Container, Container]] = []
        self._attributes: list[tuple[Attributes, Attributes]] = []
        self._values: list[tuple[keras.Variable, Tensor]] = []
        # With the objects, so that no other one gets their id.
        seen: dict[int, object] = {}
        waiting: list[object] = [model]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                value = content_of(value)
            if id(value) in seen:
                continue
            seen[id(value)] = value
            waiting += self._note(value)

    def _note(self, value: object) -> list[object]:
        """Notes one object; returns the objects that it leads to."""
        if isinstance(value, dict):
            self._contents.append((value, dict(dict.items(value))))
        elif isinstance(value, set):
            self._contents.append((value, set(value)))
        elif isinstance(value, list):
            # A list that tells Keras what is put into it is noted in a plain one.
            self._contents.append((value, list(value)))
        elif isinstance(value, keras.Variable):
            self._note_attributes(value)
            # On JAX arrays are not changed, but replaced.
            if value._value is not None and keras.backend.backend() != "jax":
                self._values.append((value, keras.ops.copy(value.value)))
            return []
        elif _has_state(value):
            self._note_attributes(value)
        elif not isinstance(value, CONTAINERS):
            return []
        return children(value)

    def _note_attributes(self, value: object) -> None:
        attributes: Attributes = vars(value)
        self._classes.append((value, type(value)))
        self._attributes.append((attributes, without_dispatchers(attributes)))

    def restore(self) -> None:
        """Puts the model back."""
        for owner, kind in self._classes:
            if type(owner) is not kind:
                owner.__class__ = kind
        for attributes, values in self._attributes:
            attributes.clear()
            attributes.update(values)
        for container, contents in self._contents:
            refill(container, contents)
        for variable, value in self._values:
            variable.assign(value)


def _has_state(value: object) -> bool:
    """Whether an object has attributes that a change in place may replace."""
    if isinstance(value, keras.layers.Layer | tracker_class()):
        return True
    return is_ours(value)
