"""Variables of a layer that hold no array, and the variables that stand in for them."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_sparse_ortho._keras_internals._checked_assignments import check_stored
from keras_sparse_ortho._keras_internals._layouts import (
    along_mesh,
    create_along,
    initialize_layout,
)
from keras_sparse_ortho._keras_internals._scopes import in_stateless_scope
from keras_sparse_ortho._keras_internals._tf_tracking import track_variable, untrack_variable

_SAVING = ("save_own_variables", "load_own_variables")


class DeferredVariables:
    """Variables that are created without values, and get them later, or never.

    Keras does the same where it builds layers only to learn shapes. So a large kernel that is not
    to be stored is never allocated.
    """

    def __init__(self) -> None:
        self._created: list[Any] = []
        self._updates: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        """Inside, new variables get no values."""
        before = len(_pending())
        with _Deferring() as scope:
            yield
        self._created += _pending()[before:]
        del _pending()[before:]
        for variable, value in scope.updates:
            # A layer may set in `build` what it has just created.
            if any(variable is created for created in self._created):
                variable._initializer = _Constant(value)
            else:
                self._updates.append((variable, value))

    def initialize(self, but: list[Any]) -> None:
        """Gives all variables their values but some, at once or when the enclosing scope ends.

        These may still get theirs, by another call.
        """
        left = {id(variable) for variable in but}
        waiting = [variable for variable in self._created if variable._value is None]
        created = [variable for variable in waiting if id(variable) not in left]
        self._created = [variable for variable in waiting if id(variable) in left]
        if in_stateless_scope():
            _pending().extend(created)
        else:
            for variable in created:
                give_value(variable, variable._initializer(variable.shape, dtype=variable.dtype))
        for variable, value in self._updates:
            variable.assign(value)
        self._updates = []


def _pending() -> list[Any]:
    """The variables that Keras has yet to initialize."""
    found: list[Any] = global_state.get_global_attribute(
        "uninitialized_variables", [], set_to_default=True
    )
    return found


class _Deferring(keras.StatelessScope):
    """A scope at whose end no variable gets its value."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
        self.updates: list[tuple[Any, Any]] = []

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        self.updates.append(update)


class _Constant:
    """An initializer that gives one tensor."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __call__(self, shape: Any, dtype: Any = None) -> Any:
        return self.value


class _Awaited(keras.initializers.Zeros):
    """The initializer of a variable that is given its value later."""


def await_value(variable: Any) -> None:
    """Lets a variable that has no value wait for `give_value`."""
    variable._initializer = _Awaited()


def awaits_value(variable: Any) -> bool:
    """Whether a variable has been left without a value, to be given one.

    On JAX it has its layout from then on.
    """
    if not isinstance(getattr(variable, "_initializer", None), _Awaited):
        return False
    if keras.backend.backend() == "jax":
        initialize_layout(variable)
    return True


def give_value(variable: Any, value: Any) -> None:
    """Gives a variable that waits for it its first value, an array or tensor of its shape."""
    variable._initialize(keras.ops.convert_to_tensor(value, dtype=variable.dtype))
    variable._initializer = None


def value_source(variable: Any) -> tuple[Callable[[], Any], bool]:
    """What gives the value that a variable has or is to get, and whether it has it already."""
    if variable._value is not None:
        return functools.partial(keras.ops.convert_to_tensor, variable._value), True
    shape, dtype = tuple(variable.shape), variable.dtype
    return functools.partial(variable._initializer, shape, dtype=dtype), False


class StandIns:
    """Puts one variable in the place of another among the variables of a layer, and more after it.

    The one replaced stays an attribute of its layer, with shape, dtype and path, but it holds no
    array, and is no weight: it is not trained, saved or given an optimizer slot. Its value can be
    read where a scope answers for it, and a placeholder where only shapes are traced; any other
    use raises RuntimeError with the `message`. The layer saves and loads all its variables by
    number, as the base class does.
    """

    def __init__(self, layer: Any, variable: Any, message: str) -> None:
        self._layer = layer
        self._variable = variable
        self._message = message
        self._stand_ins: list[Any] = []

    def create(self, name: str, **kwargs: Any) -> Any:
        """A new vector with a path beside that of the one that is replaced."""
        variable = self._variable
        parent, _, own = variable.path.rpartition("/")
        scopes = contextlib.ExitStack()
        if parent:
            above, _, last = parent.rpartition("/")
            scopes.enter_context(keras.name_scope(last, override_parent=above))
        with scopes:
            return create_along(
                lambda: keras.Variable(name=f"{own}_{name}", **kwargs),
                along_mesh(kwargs["shape"][0], variable),
            )

    def put(self, first: Any, *others: Any) -> None:
        """Replaces the variable by what takes its place, and others that go to the end."""
        layer, variable = self._layer, self._variable
        _exchange(layer, variable, first)
        for other in others:
            _track(layer, other)
        self._stand_ins = [first, *others]
        variable._value = None
        variable._initializer = self._placeholder
        vars(variable)["assign"] = self._refuse
        _SavedByNumber.of(layer).replaced.add(variable.name)

    def take_away(self, value: Any) -> None:
        """Undoes `put`: the variable has a value again, and is one of the layer's."""
        layer, variable = self._layer, self._variable
        del vars(variable)["assign"]
        variable._initializer = None
        variable._initialize(keras.ops.convert_to_tensor(value, dtype=variable.dtype))
        first, *others = self._stand_ins
        variable.trainable = first.trainable
        _exchange(layer, first, variable)
        for other in others:
            _untrack(layer, other)
        _SavedByNumber.of(layer).remove(variable.name)

    def _placeholder(self, shape: Any, dtype: Any = None) -> Any:
        if in_symbolic_scope():
            return keras.ops.zeros(shape, dtype=dtype)
        return self._refuse()

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(self._message)


def _exchange(layer: Any, old: Any, new: Any) -> None:
    """Puts `new` in the place of `old` among the variables that a layer tracks."""
    held = (layer._trainable_variables, layer._non_trainable_variables)
    [(store, place)] = [(s, k) for s in held for k, variable in enumerate(s) if variable is old]
    _untrack(layer, old)
    _track(layer, new)
    store.insert(place, store.pop())


def _untrack(layer: Any, variable: Any) -> None:
    layer._untrack_variable(variable)
    untrack_variable(layer, variable)


def _track(layer: Any, variable: Any) -> None:
    locked = layer._tracker.locked
    layer._tracker.unlock()
    layer._track_variable(variable)
    layer._tracker.locked = locked
    track_variable(layer, variable)


class _SavedByNumber:
    """Saving and loading of a layer as its base class has it, with all checks before loading.

    Dense and others save what their attribute `kernel` has, which here is nothing.
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.replaced: set[str] = set()

    @classmethod
    def of(cls, layer: Any) -> "_SavedByNumber":
        """That of a layer, which is made if there is none."""
        found = vars(layer).get("load_own_variables")
        if not isinstance(found, cls):
            found = cls(layer)
            # Not by setattr, with which Keras and its backends look at what is set.
            vars(layer)["save_own_variables"] = types.MethodType(
                keras.layers.Layer.save_own_variables, layer
            )
            vars(layer)["load_own_variables"] = found
        return found

    def remove(self, name: str) -> None:
        """Notes that a variable is back; after the last the layer saves as its class does."""
        self.replaced.remove(name)
        if not self.replaced:
            for name in _SAVING:
                del vars(self._layer)[name]

    def __call__(self, store: Any) -> None:
        """The `load_own_variables` of the layer."""
        check_stored(self._layer, store)
        keras.layers.Layer.load_own_variables(self._layer, store)


def saves_by_itself(layer: Any) -> bool:
    """Whether the class of a layer, and not Keras' or ours, says how its variables are saved."""
    return any(
        name in vars(kind)
        and kind.__module__.partition(".")[0] not in ("keras", "keras_sparse_ortho")
        for kind in type(layer).__mro__
        for name in _SAVING
    )
