"""What a model is like at a moment, so that it can be put back."""

import collections
from collections.abc import Iterable
from typing import Any

import keras

from keras_sparse_ortho._keras_internals._object_copy import tracker_class

_PACKAGE = __name__.partition(".")[0]


class Snapshot:
    """A model as it is now: classes, attributes, contents of containers, values of variables.

    Layers are changed in many places where they are changed in place: attributes, lists in which
    Keras tracks layers and variables, variables that give up their arrays. So nothing is undone
    step by step. Everything that a model leads to is noted, and put back as it was: the same
    objects with the same contents.

    Args:
        model: The model.
    """

    def __init__(self, model: keras.layers.Layer) -> None:
        self._attributes: list[tuple[Any, type, dict[str, Any]]] = []
        self._containers: list[tuple[Any, Any]] = []
        self._values: list[tuple[Any, Any]] = []
        seen: dict[int, Any] = {}  # with the objects, so that no other one gets their id
        waiting: list[Any] = [model]
        while waiting:
            value = waiting.pop()
            if id(value) not in seen:
                seen[id(value)] = value
                waiting.extend(self._note(value))

    def _note(self, value: Any) -> Iterable[Any]:
        """Notes one object; gives those that it leads to."""
        if isinstance(value, dict) and not issubclass(type(value), dict):
            proxy: Any = value  # TensorFlow's own modules keep dicts so
            value = proxy.__wrapped__
        if isinstance(value, list | set):
            # A list that tells Keras what is put into it is noted in a plain one.
            self._containers.append((value, [*value] if isinstance(value, list) else {*value}))
            return value
        if isinstance(value, dict):
            self._containers.append((value, dict(dict.items(value))))
            return dict.values(value)
        if isinstance(value, tuple | frozenset):
            return value
        if isinstance(value, keras.Variable):
            # On JAX arrays are not changed, but replaced.
            if value._value is not None and keras.backend.backend() != "jax":
                self._values.append((value, keras.ops.copy(value.value)))
        elif not isinstance(value, keras.layers.Layer | tracker_class()) and not (
            type(value).__module__.partition(".")[0] == _PACKAGE and hasattr(value, "__dict__")
        ):
            return ()
        attributes = dict(vars(value))
        self._attributes.append((value, type(value), attributes))
        return () if isinstance(value, keras.Variable) else attributes.values()

    def restore(self) -> None:
        """Puts everything back."""
        for owner, kind, attributes in self._attributes:
            if type(owner) is not kind:
                owner.__class__ = kind
            # Not by setattr, with which Keras and its backends look at what is set.
            _refill(vars(owner), attributes)
        for container, contents in self._containers:
            _refill(container, contents)
        for variable, value in self._values:
            variable.assign(value)


def _refill(container: Any, contents: Any) -> None:
    """Gives a container its contents, past what its class does with them, if it has others."""
    if isinstance(container, list):
        if not _same(container, contents):
            list.__setitem__(container, slice(None), contents)
    elif isinstance(container, set):
        if {id(item) for item in container} != {id(item) for item in contents}:
            set.clear(container)
            set.update(container, contents)
    elif not (
        list(dict.keys(container)) == list(contents)
        and _same(list(dict.values(container)), list(contents.values()))
    ):
        ordered = isinstance(container, collections.OrderedDict)
        kind: Any = collections.OrderedDict if ordered else dict
        kind.clear(container)
        for key, value in contents.items():
            kind.__setitem__(container, key, value)


def _same(these: list[Any], those: list[Any]) -> bool:
    return len(these) == len(those) and all(
        one is other for one, other in zip(these, those, strict=True)
    )
