"""Which model a model was made from, while both are there."""

import weakref

import keras

Reference = weakref.ref[keras.Model]

_ORIGINS: weakref.WeakKeyDictionary[keras.Model, Reference] = (
    weakref.WeakKeyDictionary()
)


def remember_origin(model: keras.Model, source: keras.Model) -> None:
    """Notes that `model` was made from `source`, or from the origin of `source`."""
    origin = origin_of(source)
    if origin is None:
        origin = source
    _ORIGINS[model] = weakref.ref(origin)


def origin_of(model: keras.Model) -> keras.Model | None:
    """The first model that this one was made from; `None` if there is none, or it is gone."""
    reference = _ORIGINS.get(model)
    if reference is None:
        return None
    return reference()
