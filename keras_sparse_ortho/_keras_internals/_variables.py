"""Variables: on several devices, without arrays, tracked by TensorFlow, checked when assigned."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_sparse_ortho._interception import intercepted
from keras_sparse_ortho._keras_internals._layers import (
    created_trainable,
    in_stateless_scope,
    own_variables,
)

Axes = tuple[str | None, ...]
"""For each axis of a variable the axis of the device mesh that it is cut along; `None` for none."""


def layout_of(variable: Any) -> Any:
    """The `jax.sharding.Sharding` of a variable; `None` where it lies on one device."""
    if keras.backend.backend() != "jax":
        return None
    layout = getattr(variable, "_layout", None)
    return getattr(layout, "backend_layout", layout)


def initialize_layout(variable: Any) -> None:
    """Gives a variable on JAX that has no value yet the layout of the current distribution."""
    distribution = _distribution()
    if distribution is not None and variable._layout is None:
        layout = distribution.get_variable_layout(variable)
        variable._layout = getattr(layout, "backend_layout", layout)


def axes_of(variable: Any) -> Axes | None:
    """The axes of a variable under the current distribution; `None` where there is none."""
    distribution = _distribution()
    if distribution is None:
        return None
    layout = distribution.get_variable_layout(variable)
    given = tuple(layout.axes if hasattr(layout, "axes") else layout.spec)
    return given + (None,) * (len(variable.shape) - len(given))


def axes_at(path: str) -> Axes | None:
    """The axes that the map of the current distribution has for a path; `None` for none."""
    distribution = _distribution()
    layout = None if distribution is None else distribution.get_tensor_layout(path)
    return None if layout is None else tuple(layout.axes)


def mesh_size(axis: str) -> int:
    mesh = keras.distribution.distribution().device_mesh
    return int(mesh.shape[list(mesh.axis_names).index(axis)])


def layout_entries(distribution: Any) -> dict[str, str]:
    """The patterns and axes in the map of a distribution, and its mesh."""
    mesh = distribution.device_mesh
    entries = {"mesh": f"{tuple(mesh.shape)} {list(mesh.axis_names)}"}
    for value in vars(distribution).values():
        if isinstance(value, keras.distribution.LayoutMap):
            entries |= {pattern: str(layout.axes) for pattern, layout in value.items()}
    return entries


def create_along(create: Callable[[], Any], axes: Sequence[str | None] | None) -> Any:
    """The variable that `create` makes, along given axes, whatever a map has for its path."""
    # With `None` the axes are left to the distribution.
    distribution = _distribution()
    if distribution is None or axes is None:
        return create()
    layout = keras.distribution.TensorLayout(tuple(axes), distribution.device_mesh)
    with intercepted(distribution, "get_variable_layout", lambda original, variable: layout):
        variable = create()
    if variable._layout is None:  # one that gets its value later
        variable._layout = layout
    return variable


def along_kernel(shape: Sequence[int], kernel: Any) -> Axes | None:
    """Axes for a mask, or for a number for each channel: cut where they have a kernel's axes."""
    # Anything else, such as a scalar, is whole on every device.
    own = axes_of(kernel)
    if own is None:
        return None
    if len(shape) != len(own):
        return (None,) * len(shape)
    pairs = zip(shape, kernel.shape, own, strict=True)
    return tuple(axis if size == whole else None for size, whole, axis in pairs)


def along_mesh(size: int, kernel: Any) -> Axes | None:
    """Axes for a vector of live entries: the first of the kernel's whose devices divide it."""
    # Else it is whole on every device.
    own = axes_of(kernel)
    if own is None:
        return None
    fitting = [axis for axis in own if axis is not None and size % mesh_size(axis) == 0]
    return (fitting[0] if fitting else None,)


def _distribution() -> Any:
    return keras.distribution.distribution() if keras.backend.backend() == "jax" else None


def track_variable(layer: Any, variable: Any) -> None:
    _track(layer, variable.name, variable)


def untrack_variable(layer: Any, variable: Any) -> None:
    layer._untrack_variable(variable)
    for name in [name for name, child in _dependencies(layer) if child is variable]:
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
    """The variables and layers that TensorFlow saves with a layer, each with its name."""
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


Read = Callable[[Any], np.ndarray]
"""Gives the array that a variable has, or is to get."""


def check_assignments(variable: Any, check: Callable[[Read], None]) -> None:
    """Lets a variable check arrays assigned to it; `check` gets a reader, and raises ValueError."""
    # Keras' `set_weights` and `load_own_variables` ask no layer. Tensors are not checked: they are
    # the package's own, or of a compiled step.
    vars(variable)["assign"] = _CheckedAssignment(variable, check)


def check_given(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Checks the arrays for all variables of a layer before the first is assigned."""
    if len(variables) != len(values):
        return  # Keras says so
    given = {id(v): value for v, value in zip(variables, values, strict=True)}
    for variable in variables:
        if (check := check_of(variable)) is not None:
            check(lambda other: _array(given[id(other)]))


def check_stored(layer: Any, store: Any) -> None:
    """The same for a file in which the layer's own variables are numbered."""
    own = own_variables(layer)
    numbers = [str(number) for number in range(len(own))]
    found = list(store.keys())
    if len(found) != len(own):
        return  # Keras says so
    if set(found) != set(numbers):
        raise ValueError(
            f"The file must have the variables {', '.join(numbers)} for the layer '{layer.name}'; "
            f"it is damaged. Received: {', '.join(found)}"
        )
    check_given(own, [store[number] for number in numbers])


def check_of(variable: Any) -> Callable[[Read], None] | None:
    checked = vars(variable).get("assign")
    return checked.check if isinstance(checked, _CheckedAssignment) else None


class _CheckedAssignment:
    """The `assign` of one variable. An object, which copies of models can copy."""

    def __init__(self, variable: Any, check: Callable[[Read], None]) -> None:
        self.variable = variable
        self.check = check

    def __call__(self, value: Any) -> Any:
        if not (keras.ops.is_tensor(value) or isinstance(value, keras.Variable)):
            array = np.asarray(value)
            self.check(lambda other: array if other is self.variable else _array(other))
        return type(self.variable).assign(self.variable, value)


def _array(value: Any) -> np.ndarray:
    is_held = keras.ops.is_tensor(value) or isinstance(value, keras.Variable)
    return keras.ops.convert_to_numpy(value) if is_held else np.asarray(value)


_SAVING = ("save_own_variables", "load_own_variables")


class DeferredVariables:
    """Variables created without values, so that a kernel that is not stored is never allocated."""

    def __init__(self) -> None:
        self._created: list[Any] = []
        self._updates: list[tuple[Any, Any]] = []

    @contextlib.contextmanager
    def creating(self) -> Iterator[None]:
        before = len(_pending())
        with _Deferring() as scope:
            yield
        self._created += _pending()[before:]
        del _pending()[before:]
        for variable, value in scope.updates:
            # A layer may set in `build` what it has just created.
            if any(variable is created for created in self._created):
                variable._initializer = _constant(value)
            else:
                self._updates.append((variable, value))

    def initialize(self, layer: Any, but: list[Any]) -> None:
        """Gives the variables of a layer their values, now or when the enclosing scope ends.

        Args:
            layer: Layer that the variables were created in.
            but: list of variables that go on waiting for a value.
        """
        left = {id(variable) for variable in but}
        trained = {id(v) for inner in layer._flatten_layers() for v in created_trainable(inner)}
        waiting = [variable for variable in self._created if variable._value is None]
        created = [variable for variable in waiting if id(variable) not in left]
        self._created = [variable for variable in waiting if id(variable) in left]
        if in_stateless_scope():
            _pending().extend(created)
        else:
            for variable in created:
                value = variable._initializer(variable.shape, dtype=variable.dtype)
                give_value(variable, value, watched=id(variable) in trained)
        for variable, value in self._updates:
            variable.assign(value)
        self._updates = []


def _pending() -> list[Any]:
    found: list[Any] = global_state.get_global_attribute(
        "uninitialized_variables", [], set_to_default=True
    )
    return found


class _Deferring(keras.StatelessScope):
    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
        self.updates: list[tuple[Any, Any]] = []

    def add_update(self, update: tuple[Any, Any]) -> None:
        super().add_update(update)
        self.updates.append(update)


def _constant(value: Any) -> Callable[..., Any]:
    return lambda shape, dtype=None: value


class _Awaited(keras.initializers.Zeros):
    """The initializer of a variable that waits for its value."""

    def __init__(self, watched: bool) -> None:
        super().__init__()
        self.watched = watched


def is_watched(variable: Any) -> bool:
    """Whether a variable can be trained once it is `trainable`, which it may not be now.

    TensorFlow's tapes never watch a `tf.Variable` that was created with `trainable=False`. Keras
    creates the weights of frozen layers as trainable and freezes them afterwards.
    """
    return bool(getattr(variable._value, "trainable", variable.trainable))


def initialize(variable: Any, value: Any, *, watched: bool) -> None:
    """Gives a variable its first value; `is_watched` is then as said, `trainable` as before."""
    trainable = variable.trainable
    variable.trainable = watched
    variable._initialize(value)
    variable.trainable = trainable


def await_value(variable: Any, *, watched: bool) -> None:
    """Lets a variable without a value wait for `give_value`."""
    variable._initializer = _Awaited(watched)


def awaits_value(variable: Any) -> bool:
    """Whether a variable waits for `give_value`; on JAX it has its layout from then on."""
    if not isinstance(getattr(variable, "_initializer", None), _Awaited):
        return False
    if keras.backend.backend() == "jax":
        initialize_layout(variable)
    return True


def give_value(variable: Any, value: Any, *, watched: bool | None = None) -> None:
    """Gives a variable that waits for it its first value.

    Args:
        variable: Variable without a value.
        value: Array or tensor of its shape.
        watched: bool. See `is_watched`. Default: as `await_value` has it.
    """
    if watched is None:
        watched = variable._initializer.watched
    initialize(variable, keras.ops.convert_to_tensor(value, dtype=variable.dtype), watched=watched)
    variable._initializer = None


def value_source(variable: Any) -> tuple[Callable[[], Any], bool]:
    """A function for the value that a variable has or will get, and whether it has it already."""
    if variable._value is not None:
        return functools.partial(keras.ops.convert_to_tensor, variable._value), True
    shape, dtype = tuple(variable.shape), variable.dtype
    return functools.partial(variable._initializer, shape, dtype=dtype), False


class StandIns:
    """Puts variables in the place of another one among the variables of a layer.

    The old one stays an attribute, but holds no array and is no weight: it is not trained, saved or
    given an optimizer slot. Reading it works where a scope answers for it or only shapes are
    traced; other uses raise RuntimeError with the `message`.
    """

    def __init__(self, layer: Any, variable: Any, message: str) -> None:
        self._layer = layer
        self._variable = variable
        self._message = message
        self._stand_ins: list[Any] = []

    @property
    def trained(self) -> bool:
        """Whether the layer created the replaced variable as trainable; it may be frozen now."""
        return _is_among(created_trainable(self._layer), self._variable)

    def create(self, name: str, **kwargs: Any) -> Any:
        """A new vector with a path beside that of the replaced variable."""
        variable = self._variable
        parent, _, own = variable.path.rpartition("/")
        above, _, last = parent.rpartition("/")
        scope = keras.name_scope(last, override_parent=above)
        with scope if parent else contextlib.nullcontext():
            return create_along(
                lambda: keras.Variable(name=f"{own}_{name}", **kwargs),
                along_mesh(kwargs["shape"][0], variable),
            )

    def put(self, first: Any, *others: Any) -> None:
        """Replaces the variable by the first one; the others go to the end."""
        layer, variable = self._layer, self._variable
        _exchange(layer, variable, first)
        for other in others:
            _take_in(layer, other)
        self._stand_ins = [first, *others]
        variable._value = None
        variable._initializer = self._placeholder
        vars(variable)["assign"] = self._refuse
        _SavedByNumber.of(layer).replaced.add(variable.name)

    def take_away(self, value: Any) -> None:
        layer, variable = self._layer, self._variable
        del vars(variable)["assign"]
        first, *others = self._stand_ins
        give_value(variable, value, watched=_is_among(created_trainable(layer), first))
        _exchange(layer, first, variable)
        for other in others:
            untrack_variable(layer, other)
        _SavedByNumber.of(layer).remove(variable.name)

    def _placeholder(self, shape: Any, dtype: Any = None) -> Any:
        if in_symbolic_scope():
            return keras.ops.zeros(shape, dtype=dtype)
        return self._refuse()

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(self._message)


def _exchange(layer: Any, old: Any, new: Any) -> None:
    """Puts a variable in the place of another one in a layer, as trainable as that one is.

    Regularizer and constraint are those of the other one, too.
    """
    trainable = old.trainable
    trained = layer._trainable_variables
    store = trained if _is_among(trained, old) else layer._non_trainable_variables
    (place,) = [number for number, variable in enumerate(store) if variable is old]
    untrack_variable(layer, old)
    # Keras chooses the store by `trainable`. Unfreezing a layer reaches one of the stores only.
    new.trainable = store is trained
    _take_in(layer, new)
    store.insert(place, store.pop())
    new.trainable = trainable
    new.regularizer, new.constraint = old.regularizer, old.constraint


def _is_among(variables: Sequence[Any], variable: Any) -> bool:
    return any(each is variable for each in variables)


def _take_in(layer: Any, variable: Any) -> None:
    locked = layer._tracker.locked
    layer._tracker.unlock()
    layer._track_variable(variable)
    layer._tracker.locked = locked
    track_variable(layer, variable)


class _SavedByNumber:
    """Saves and loads a layer by number, not what its `kernel` has, with checks before loading."""

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.replaced: set[str] = set()

    @classmethod
    def of(cls, layer: Any) -> "_SavedByNumber":
        found = vars(layer).get("load_own_variables")
        if not isinstance(found, cls):
            found = cls(layer)
            # Bypass `__setattr__`: Keras would track the value.
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
