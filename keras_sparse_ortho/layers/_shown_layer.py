"""What is read of a layer through its wrapper."""

import functools
import inspect
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import keras


class ShownLayer:
    """A wrapped layer, or one inside it, as it is read through the wrapper.

    A weight is shown by its `effective` value, a tensor, by the `id` of its variable. Methods of
    the layer compute in a `scope` with effective weights, and so do layers inside it, and lists,
    tuples and dicts of them; everything else is shown as it is.
    """

    def __init__(
        self,
        layer: keras.layers.Layer,
        effective: Mapping[int, Callable[[], Any]],
        scope: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._shown = layer, effective, scope

    def __getattr__(self, name: str) -> Any:
        return self._show(getattr(self._shown[0], name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer, _, scope = self._shown
        with scope():
            return layer(*args, **kwargs)

    def _show(self, value: Any) -> Any:
        layer, effective, scope = self._shown
        if isinstance(value, keras.Variable):
            return effective[id(value)]() if id(value) in effective else value
        if isinstance(value, keras.layers.Layer):
            masked = any(id(variable) in effective for variable in value.variables)
            return ShownLayer(value, effective, scope) if masked else value
        if inspect.ismethod(value) and value.__self__ is layer:

            @functools.wraps(value)
            def method(*args: Any, **kwargs: Any) -> Any:
                with scope():
                    return value(*args, **kwargs)

            return method
        if isinstance(value, dict):
            table = {key: self._show(item) for key, item in value.items()}
            return table if any(table[key] is not item for key, item in value.items()) else value
        if isinstance(value, list | tuple) and not hasattr(value, "_fields"):
            items = [self._show(item) for item in value]
            if any(new is not old for new, old in zip(items, value, strict=True)):
                return tuple(items) if isinstance(value, tuple) else items
        return value
