"""Variables without arrays: they get their value later, or others stand in their place."""

import contextlib
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import keras
from keras.src.backend.common import global_state
from keras.src.backend.common.symbolic_scope import in_symbolic_scope

from keras_sparse_ortho._keras_internals._assignments import check_stored
from keras_sparse_ortho._keras_internals._distribution import (
    along_mesh,
    create_along,
    initialize_layout,
)
from keras_sparse_ortho._keras_internals._layers import (
    created_trainable,
    in_stateless_scope,
)
from keras_sparse_ortho._keras_internals._tracking import (
    track_variable,
    untrack_variable,
)
from keras_sparse_ortho._types import Tensor, TensorLike

_SAVING = ("save_own_variables", "load_own_variables")


class DeferredVariables:
    """Variables created without values, so that a kernel that is not stored is never allocated."""

    def __init__(self) -> None:
        self._created: list[keras.Variable] = []
        self._updates: list[tuple[keras.Variable, Tensor]] = []

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

    def initialize(
        self, layer: keras.layers.Layer, but: list[keras.Variable]
    ) -> None:
        """Gives the variables of a layer their values, now or when the enclosing scope ends.

        Args:
            layer: Layer that the variables were created in.
            but: list of variables that go on waiting for a value.
        """
        waiting_ids = {id(variable) for variable in but}
        trained_ids: set[int] = set()
        for inner in layer._flatten_layers():
            trained_ids |= {
                id(variable) for variable in created_trainable(inner)
            }
        without_values = [
            variable for variable in self._created if variable._value is None
        ]
        self._created = []
        ready = []
        for variable in without_values:
            if id(variable) in waiting_ids:
                self._created.append(variable)
            else:
                ready.append(variable)
        if in_stateless_scope():
            _pending().extend(ready)
        else:
            for variable in ready:
                value = variable._initializer(
                    variable.shape, dtype=variable.dtype
                )
                give_value(variable, value, watched=id(variable) in trained_ids)
        for variable, value in self._updates:
            variable.assign(value)
        self._updates = []


def _pending() -> list[keras.Variable]:
    """The variables that get their values when the enclosing scope of Keras ends."""
    return cast(
        list[keras.Variable],
        global_state.get_global_attribute(
            "uninitialized_variables", [], set_to_default=True
        ),
    )


class _Deferring(keras.StatelessScope):
    """Inside, variables are created without values, and assignments are noted."""

    def __init__(self) -> None:
        super().__init__(initialize_variables=False)
        self.updates: list[tuple[keras.Variable, Tensor]] = []

    def add_update(self, update: tuple[keras.Variable, Tensor]) -> None:
        super().add_update(update)
        self.updates.append(update)


def _constant(value: TensorLike) -> Callable[..., Any]:
    return lambda shape, dtype=None: value


class _Awaited(keras.initializers.Zeros):
    """The initializer of a variable that waits for its value."""

    def __init__(self, watched: bool) -> None:
        super().__init__()
        self.watched = watched


def is_watched(variable: keras.Variable) -> bool:
    """Whether a variable can be trained once it is `trainable`, which it may not be now.

    TensorFlow's tapes never watch a `tf.Variable` that was created with `trainable=False`. Keras
    creates the weights of frozen layers as trainable and freezes them afterwards.
    """
    return bool(getattr(variable._value, "trainable", variable.trainable))


def initialize(
    variable: keras.Variable, value: TensorLike, *, watched: bool
) -> None:
    """Gives a variable its first value; `is_watched` is then as said, `trainable` as before."""
    trainable = variable.trainable
    variable.trainable = watched
    variable._initialize(value)
    variable.trainable = trainable


def await_value(variable: keras.Variable, *, watched: bool) -> None:
    """Lets a variable without a value wait for `give_value`."""
    variable._initializer = _Awaited(watched)


def awaits_value(variable: keras.Variable) -> bool:
    """Whether a variable waits for `give_value`; on JAX it has its layout from then on."""
    if not isinstance(getattr(variable, "_initializer", None), _Awaited):
        return False
    if keras.backend.backend() == "jax":
        initialize_layout(variable)
    return True


def give_value(
    variable: keras.Variable, value: TensorLike, *, watched: bool | None = None
) -> None:
    """Gives a variable that waits for it its first value.

    Args:
        variable: Variable without a value.
        value: Array or tensor of its shape.
        watched: bool. See `is_watched`. Default: the `watched` of `await_value`.
    """
    if watched is None:
        watched = variable._initializer.watched
    tensor = keras.ops.convert_to_tensor(value, dtype=variable.dtype)
    initialize(variable, tensor, watched=watched)
    variable._initializer = None


def value_source(variable: keras.Variable) -> tuple[Callable[[], Any], bool]:
    """A function for the value that a variable has or will get, and whether it has it already."""
    if variable._value is not None:
        return functools.partial(
            keras.ops.convert_to_tensor, variable._value
        ), True
    shape = tuple(variable.shape)
    return functools.partial(
        variable._initializer, shape, dtype=variable.dtype
    ), False


class StandIns:
    """Puts variables in the place of another one among the variables of a layer.

    The old one stays an attribute, but holds no array and is no weight: it is not trained, saved or
    given an optimizer slot. Reading it works where a scope answers for it or only shapes are
    traced; other uses raise RuntimeError with the `message`.
    """

    def __init__(
        self, layer: keras.layers.Layer, variable: keras.Variable, message: str
    ) -> None:
        self._layer = layer
        self._variable = variable
        self._message = message
        self._stand_ins: list[keras.Variable] = []

    @property
    def trained(self) -> bool:
        """Whether the layer created the replaced variable as trainable; it may be frozen now."""
        return _is_among(created_trainable(self._layer), self._variable)

    def create(self, name: str, **kwargs: Any) -> keras.Variable:
        """A new vector with a path beside that of the replaced variable."""
        variable = self._variable
        parent, _, variable_name = variable.path.rpartition("/")
        outer_path, _, scope_name = parent.rpartition("/")
        scope: contextlib.AbstractContextManager[object] = (
            contextlib.nullcontext()
        )
        if parent:
            scope = keras.name_scope(scope_name, override_parent=outer_path)
        axes = along_mesh(kwargs["shape"][0], variable)
        with scope:
            return create_along(
                lambda: keras.Variable(
                    name=f"{variable_name}_{name}", **kwargs
                ),
                axes,
            )

    def put(self, stand_in: keras.Variable, *further: keras.Variable) -> None:
        """Replaces the variable by a stand-in; further ones go to the end."""
        layer = self._layer
        variable = self._variable
        _exchange(layer, variable, stand_in)
        for further_variable in further:
            _take_in(layer, further_variable)
        self._stand_ins = [stand_in, *further]
        variable._value = None
        variable._initializer = self._placeholder
        vars(variable)["assign"] = self._refuse
        _SavedByNumber.of(layer).replaced.add(variable.name)

    def take_away(self, value: TensorLike) -> None:
        """Puts the variable back, with a value; the stand-ins leave the layer."""
        layer = self._layer
        variable = self._variable
        del vars(variable)["assign"]
        stand_in, *further = self._stand_ins
        watched = _is_among(created_trainable(layer), stand_in)
        give_value(variable, value, watched=watched)
        _exchange(layer, stand_in, variable)
        for further_variable in further:
            untrack_variable(layer, further_variable)
        _SavedByNumber.of(layer).remove(variable.name)

    def _placeholder(self, shape: Any, dtype: Any = None) -> Any:
        if in_symbolic_scope():
            return keras.ops.zeros(shape, dtype=dtype)
        return self._refuse()

    def _refuse(self, *_: Any) -> Any:
        raise RuntimeError(self._message)


def _exchange(
    layer: keras.layers.Layer,
    old: keras.Variable,
    new: keras.Variable,
) -> None:
    """Puts a variable in the place of another one in a layer, as trainable as that one is.

    Regularizer and constraint are those of the other one, too.
    """
    trainable = old.trainable
    trained = layer._trainable_variables
    store = layer._non_trainable_variables
    if _is_among(trained, old):
        store = trained
    (place,) = [
        number for number, variable in enumerate(store) if variable is old
    ]
    untrack_variable(layer, old)
    # Keras chooses the store by `trainable`. Unfreezing a layer reaches one of the stores only.
    new.trainable = store is trained
    _take_in(layer, new)
    store.insert(place, store.pop())
    new.trainable = trainable
    new.regularizer = old.regularizer
    new.constraint = old.constraint


def _is_among(
    variables: Sequence[keras.Variable], variable: keras.Variable
) -> bool:
    return any(member is variable for member in variables)


def _take_in(layer: keras.layers.Layer, variable: keras.Variable) -> None:
    locked = layer._tracker.locked
    layer._tracker.unlock()
    layer._track_variable(variable)
    layer._tracker.locked = locked
    track_variable(layer, variable)


class _SavedByNumber:
    """Saves and loads a layer by number, not what its `kernel` has, with checks before loading."""

    def __init__(self, layer: keras.layers.Layer) -> None:
        self._layer = layer
        self.replaced: set[str] = set()

    @classmethod
    def of(cls, layer: keras.layers.Layer) -> "_SavedByNumber":
        """The one of a layer, which gets one if it has none."""
        by_number = vars(layer).get("load_own_variables")
        if not isinstance(by_number, cls):
            by_number = cls(layer)
            # Bypass `__setattr__`: Keras would track the value.
            vars(layer)["save_own_variables"] = types.MethodType(
                keras.layers.Layer.save_own_variables, layer
            )
            vars(layer)["load_own_variables"] = by_number
        return by_number

    def remove(self, name: str) -> None:
        """Notes that a variable is back; after the last the layer saves as its class does."""
        self.replaced.remove(name)
        if not self.replaced:
            for name in _SAVING:
                del vars(self._layer)[name]

    def __call__(self, store: Any) -> None:
        check_stored(self._layer, store)
        keras.layers.Layer.load_own_variables(self._layer, store)


def saves_by_itself(layer: keras.layers.Layer) -> bool:
    """Whether the class of a layer, and not Keras' or ours, says how its variables are saved."""
    for kind in type(layer).__mro__:
        package = kind.__module__.partition(".")[0]
        if package in ("keras", "keras_sparse_ortho"):
            continue
        if any(name in vars(kind) for name in _SAVING):
            return True
    return False
