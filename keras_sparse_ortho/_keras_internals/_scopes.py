"""Scopes in which variables have other values, or numbers another precision."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import keras
from keras.src.backend.common import dtypes
from keras.src.backend.common.stateless_scope import get_stateless_scope


class VariableOverrides(keras.StatelessScope):
    """Answers for some variables with given tensors, and passes the rest to the enclosing scope.

    Inside, `variable.value` of an overridden variable is its tensor; every other variable has the
    value, and takes the updates (moving averages, seed states), that it would outside. Losses that
    layers add go to the enclosing scope, or are collected in `losses` where there is none.

    Args:
        pairs: `(variable, tensor)` pairs.

    Raises:
        RuntimeError: An assignment to an overridden variable inside the scope.
    """

    def __init__(self, pairs: Iterable[tuple[Any, Any]]) -> None:
        super().__init__()
        # Not through StatelessScope's mapping: that one forgets what it does not hold.
        self._overrides = {id(variable): tensor for variable, tensor in pairs}
        self._updates: dict[int, tuple[Any, Any]] = {}
        self.parent: keras.StatelessScope | None = None

    def __enter__(self) -> "VariableOverrides":
        super().__enter__()
        self.parent = self.original_scope
        self.collect_losses = self.parent is None or self.parent.collect_losses
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        super().__exit__(kind, *exception)
        for variable, value in self._updates.values() if kind is None else ():
            variable.assign(value)

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) in self._overrides:
            return self._overrides[id(variable)]
        if id(variable) in self._updates:
            return self._updates[id(variable)][1]
        return None if self.parent is None else self.parent.get_current_value(variable)

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, _ = update
        if id(variable) in self._overrides:
            raise RuntimeError(
                f"The weight {variable.path} is parametrized, and its layer assigned to it during "
                "the call. Such layers cannot be wrapped."
            )
        if self.parent is None:
            self._updates[id(variable)] = update  # made when the scope ends
        else:
            self.parent.add_update(update)

    def add_loss(self, loss: Any) -> None:
        if self.parent is None:
            self.losses.append(loss)
        else:
            self.parent.add_loss(loss)


def value_in_scope(variable: Any) -> Any:
    """The value that the innermost scope has for a variable; `None` where there is none."""
    scope = get_stateless_scope()
    return None if scope is None else scope.get_current_value(variable)


def in_stateless_scope() -> bool:
    """Whether a scope answers for the values of variables, or shapes are only traced."""
    return get_stateless_scope() is not None


@contextlib.contextmanager
def float64_not_narrowed() -> Iterator[None]:
    """Keeps Keras from casting float64 arguments of its operations to float32."""
    narrowed = dtypes.BIT64_TO_BIT32_DTYPE["float64"]
    dtypes.BIT64_TO_BIT32_DTYPE["float64"] = "float64"
    try:
        yield
    finally:
        dtypes.BIT64_TO_BIT32_DTYPE["float64"] = narrowed


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute of a layer or module has another value.

    Bypasses `__setattr__`: Keras and its backends would track the value.
    """
    own = vars(owner)
    before = own.get(name, own)  # its own dictionary stands for "not there"
    own[name] = value
    try:
        yield
    finally:
        if before is own:
            del own[name]
        else:
            own[name] = before
