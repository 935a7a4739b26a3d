"""Which model a model was made from, while both are there."""

import weakref
from typing import Any

_ORIGINS: weakref.WeakKeyDictionary[Any, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def remember_origin(model: Any, source: Any) -> None:
    """Notes that `model` was made from `source`, or from the origin of `source`."""
    origin = origin_of(source)
    _ORIGINS[model] = weakref.ref(source if origin is None else origin)


def origin_of(model: Any) -> Any:
    """The first model that this one was made from; `None` if there is none, or it is gone."""
    origin = _ORIGINS.get(model)
    return None if origin is None else origin()
