"""The same object with another content: copies of models, layers that become others, snapshots."""

import collections
import copy
import functools
import types
from collections.abc import Callable, Iterable
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.ops.function import make_node_key

from keras_sparse_ortho._interception import stand_in, without_dispatchers
from keras_sparse_ortho._keras_internals._variables import await_value, initialize, is_watched
from keras_sparse_ortho.errors import NotPrunableError

# Parts of a model: whatever leads to one of these is copied, and everything else shared.
_PARTS = (keras.Operation, keras.KerasTensor, keras.Variable)
_ATOMS = (
    *(type(None), bool, int, float, complex, str, bytes, type, np.dtype, np.generic),
    *(types.ModuleType, types.BuiltinFunctionType, types.CodeType),
)
CONTAINERS = (list, tuple, dict, set, frozenset)


def copy_objects(model: Any, without_values: Iterable[Any] = ()) -> tuple[Any, dict[int, Any]]:
    """Copies a model or layer with all layers, variables and calls; and the copies by `id`.

    Other objects (constants, initializers) are shared. The copy is not compiled. Copies of the
    variables `without_values` wait for `give_value`.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()  # in a `fit` on JAX variables do not have their values
    copier = _Copier(without_values)
    new = copier.copy(model)
    copier.fill()
    return new, copier.copies


class _Copier:
    """Makes empty objects first and fills them from a list, so that depth does not matter."""

    def __init__(self, without_values: Iterable[Any]) -> None:
        self.copies: dict[int, Any] = {}
        self._originals: list[Any] = []  # kept, so that no other object gets their `id`
        self._waiting: collections.deque[Callable[[], None]] = collections.deque()
        self._hashed: list[Callable[[], None]] = []  # their items must be whole to be hashed
        self._empty = {id(variable) for variable in without_values}
        self._plain: set[int] = set()  # objects that are known to lead nowhere
        self._place = ""  # the attribute that is being copied, for errors
        shared, self._states = _kinds_of_backend()
        self._parts = (*_PARTS, tracker_class(), *self._states)
        self._shared = (*_ATOMS, *shared)

    def copy(self, value: Any) -> Any:
        """The copy of an object, perhaps still empty; the object itself where it is shared."""
        if isinstance(value, self._shared):
            return value
        if id(value) in self.copies:
            return self.copies[id(value)]
        if isinstance(value, CONTAINERS):
            return self._container(value)
        if self._leads_to_parts(value):
            return self._made(value)
        return self._object(value) if is_ours(value) else value

    def fill(self) -> None:
        while self._waiting or self._hashed:
            (self._waiting.popleft() if self._waiting else self._hashed.pop(0))()
        for new in self.copies.values():
            if isinstance(new, tracker_class()):
                new.stored_ids = {
                    name: {id(item) for item in store} for name, (_, store) in new.config.items()
                }
            elif isinstance(new, keras.Operation) and hasattr(new, "_nodes_by_depth"):
                nodes = {id(node): node for level in new._nodes_by_depth.values() for node in level}
                operations = {id(node.operation): node.operation for node in nodes.values()}
                new._nodes = {
                    make_node_key(operation, number)
                    for operation in operations.values()
                    for number, node in enumerate(operation._inbound_nodes)
                    if id(node) in nodes
                }

    def _note(self, value: Any, new: Any) -> Any:
        self.copies[id(value)] = new
        self._originals.append(value)
        return new

    def _made(self, value: Any) -> Any:
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(self.copy(value.__func__), self.copy(value.__self__))
        if isinstance(value, functools.partial):
            given = [self.copy(item) for item in value.args]
            named = {key: self.copy(item) for key, item in value.keywords.items()}
            return self._note(value, functools.partial(self.copy(value.func), *given, **named))
        if isinstance(value, self._states):
            state: Any = value
            leaf = getattr(state, "is_leaf", True)  # of torch, where others cannot be copied
            return self._note(value, copy.deepcopy(state if leaf else state.detach()))
        if hasattr(value, "__wrapped__") or not (hasattr(value, "__dict__") or _slots(value)):
            raise NotPrunableError(
                "The model cannot be copied: it holds an uncopyable object that refers to one of "
                "its layers or variables. Keep the layer in an attribute, list or dict instead, or "
                "change the model itself: keras_sparse_ortho.sparsify.in_place(model, 0.1). "
                f"Received: {self._place}, an object of type {type(value).__qualname__}"
            )
        return self._object(value)

    def _object(self, value: Any) -> Any:
        new = self._note(value, object.__new__(type(value)))
        self._waiting.append(lambda: self._fill_object(value, new))
        return new

    def _fill_object(self, value: Any, new: Any) -> None:
        for name, item in _slots(value).items():
            object.__setattr__(new, name, self.copy(item))
        attributes = without_dispatchers(getattr(value, "__dict__", {}))
        if isinstance(value, keras.Model):
            attributes = _uncompiled(attributes)
        if "_torch_params" in (modules := attributes.get("_modules", {})):
            # Keras makes it from the variables when it is asked for.
            attributes["_modules"] = {k: v for k, v in modules.items() if k != "_torch_params"}
        if isinstance(value, keras.Variable):
            attributes["_value"] = None
        elif isinstance(value, keras.Operation):
            attributes["_outbound_nodes"] = []  # calls in other models as well; nobody reads it
        for name, item in attributes.items():
            self._place = f"{type(value).__name__}.{name}"
            # Bypass `__setattr__`: Keras would track the value.
            vars(new)[name] = self.copy(_tracked(item) if name in _TRACKED else item)
        if isinstance(value, keras.Variable) and value._value is not None:
            self._fill_variable(value, new)

    def _fill_variable(self, value: Any, new: Any) -> None:
        watched = is_watched(value)
        if id(value) in self._empty:
            await_value(new, watched=watched)
        elif keras.backend.backend() == "torch":  # where it may be a parameter
            initialize(new, self.copy(value._value), watched=watched)
        else:
            initialize(new, ops.copy(value.value), watched=watched)

    def _container(self, value: Any) -> Any:
        kind: Any = type(value)
        if not issubclass(kind, CONTAINERS):  # a proxy, in which TensorFlow keeps dicts and tuples
            proxy: Any = value
            whole = self.copy(proxy.__wrapped__)
            return self._note(value, kind(whole) if isinstance(value, tuple) else whole)
        if isinstance(value, tuple):
            items = [self.copy(item) for item in value]
            if all(new is old for new, old in zip(items, value, strict=True)):
                return value
            return self._note(value, kind._make(items) if hasattr(kind, "_make") else kind(items))
        if isinstance(value, frozenset):
            return self._note(value, kind(self.copy(item) for item in value))
        new = self._note(value, kind.__new__(kind))
        if hasattr(value, "__dict__"):
            vars(new).update({name: self.copy(item) for name, item in vars(value).items()})

        def fill() -> None:
            if isinstance(value, collections.defaultdict):
                new.default_factory = self.copy(value.default_factory)
            if isinstance(value, dict):
                items = list(dict.items(value))
                refill(new, {self.copy(key): self.copy(item) for key, item in items})
            else:
                refill(new, [self.copy(item) for item in list(value)])

        keys = dict.keys(value) if isinstance(value, dict) else ()
        is_hashed = isinstance(value, set) or any(not isinstance(key, str | int) for key in keys)
        (self._hashed if is_hashed else self._waiting).append(fill)
        return new

    def _function(self, value: Any) -> Any:
        cells = tuple(types.CellType() for _ in value.__closure__ or ())
        new = self._note(value, with_cells(value, cells))

        def fill() -> None:
            new.__defaults__ = self.copy(value.__defaults__)
            new.__kwdefaults__ = self.copy(value.__kwdefaults__)
            vars(new).update({key: self.copy(item) for key, item in vars(value).items()})
            for old, cell in zip(value.__closure__ or (), cells, strict=True):
                for item in contents(old):
                    cell.cell_contents = self.copy(item)

        self._waiting.append(fill)
        return new

    def _leads_to_parts(self, value: Any) -> bool:
        """Whether something can be reached from an object that every model has its own of."""
        seen: dict[int, Any] = {}
        waiting = [value]
        while waiting:
            here = waiting.pop()
            if isinstance(here, self._shared) or id(here) in seen or id(here) in self._plain:
                continue
            if isinstance(here, self._parts):
                return True
            seen[id(here)] = here
            waiting.extend(children(here))
        self._originals.extend(seen.values())
        self._plain.update(seen)
        return False


def children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        value = value if issubclass(type(value), dict) else getattr(value, "__wrapped__", {})
        return [*dict.keys(value), *dict.values(value)]
    if isinstance(value, CONTAINERS):
        return list(value)
    if isinstance(value, types.FunctionType):
        cells = [item for cell in value.__closure__ or () for item in contents(cell)]
        return [value.__defaults__, value.__kwdefaults__, vars(value), *cells]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    return [*getattr(value, "__dict__", {}).values(), *_slots(value).values()]


def _slots(value: Any) -> dict[str, Any]:
    """The attributes of an object that are in slots, as TensorFlow's references to layers are."""
    kinds = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [name for slots in kinds for name in ([slots] if isinstance(slots, str) else slots)]
    names = [name for name in names if name not in ("__dict__", "__weakref__")]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def contents(cell: Any) -> list[Any]:
    """The content of a closure's cell; nothing as long as its variable has not been set."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def with_cells(function: Any, cells: Iterable[Any]) -> Any:
    """A copy of a function that finds other cells where it reads variables from around it."""
    new = types.FunctionType(function.__code__, function.__globals__, closure=tuple(cells))
    for name in (*functools.WRAPPER_ASSIGNMENTS, "__defaults__", "__kwdefaults__"):
        setattr(new, name, getattr(function, name))
    vars(new).update(vars(function))
    return new


def refill(container: Any, items: Any) -> None:
    """Replaces the contents of a list, set or dict, past its own class."""
    if isinstance(container, list):
        list.__setitem__(container, slice(None), items)
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, items)
    else:
        ordered = isinstance(container, collections.OrderedDict)
        kind: Any = collections.OrderedDict if ordered else dict
        kind.clear(container)
        for key, item in items.items():
            kind.__setitem__(container, key, item)


# Where TensorFlow notes what checkpoints of an object depend on.
_TRACKED = ("_self_unconditional_checkpoint_dependencies", "_self_unconditional_dependency_names")


def _tracked(noted: Any) -> Any:
    """Leaves compiled functions out, such as the train function, which a copy makes itself."""
    pairs = noted.items() if isinstance(noted, dict) else enumerate(noted)
    kept = {k: v for k, v in pairs if not hasattr(getattr(v, "ref", v), "python_function")}
    return kept if isinstance(noted, dict) else list(kept.values())


def _uncompiled(attributes: dict[str, Any]) -> dict[str, Any]:
    fresh, compiled = _attributes_of_keras()
    return {
        # A model makes functions such as `train_function` from its layers.
        name: fresh.get(name)
        if name in compiled or (name.endswith("_function") and callable(value))
        else value
        for name, value in attributes.items()
        if name in fresh or name not in compiled
    }


@functools.cache
def _attributes_of_keras() -> tuple[dict[str, Any], frozenset[str]]:
    """The attributes of a new model, and the names of those set by compiling and training."""
    inputs = keras.Input((1,), name="input")
    model = keras.Model(inputs, inputs, name="plain")
    fresh = dict(vars(model))
    model.compile(optimizer=keras.optimizers.SGD(name="sgd"), loss="mse", jit_compile=False)
    changed = {
        name for name, value in vars(model).items() if name not in fresh or fresh[name] is not value
    }
    # The last by `before_save`.
    return fresh, frozenset(changed | {"history", "stop_training", "save_own_variables"})


def is_ours(value: Any) -> bool:
    """Whether an object is of a class of this package, whose state belongs to one layer."""
    return type(value).__module__.startswith("keras_sparse_ortho.") and hasattr(value, "__dict__")


@functools.cache
def tracker_class() -> Any:
    """The class that notes which attributes of a layer are variables and layers."""
    return type(keras.layers.Layer(name="plain")._tracker)


def _kinds_of_backend() -> tuple[tuple[type, ...], tuple[type, ...]]:
    """Classes of the backend: objects with variables of no model, and state that is not Keras'."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return (tf.distribute.Strategy,), (tf.Variable,)
    if keras.backend.backend() == "torch":
        import torch

        return (), (torch.Tensor,)
    return (), ()


# A layer's place in graphs of calls.
_PLACE = ("_inbound_nodes", "_outbound_nodes")


def body_of(layer: keras.layers.Layer) -> Any:
    """Puts a layer into a new object, to stand inside the layer that the first one becomes."""
    # They share variables and layers: use the new one once the first has become another layer.
    body = stand_in(layer, **{name: [] for name in _PLACE})
    _rebind(body, layer)
    return body


def become(layer: keras.layers.Layer, other: keras.layers.Layer) -> None:
    """Gives a layer, wherever it is held, the class and state of another; drop that one."""
    place = {name: vars(layer)[name] for name in _PLACE if name in vars(layer)}
    layer.__class__ = type(other)
    # Bypass `__setattr__`: Keras would track the value.
    vars(layer).clear()
    vars(layer).update({**vars(other), **place})
    _rebind(layer, other)


def track_parameters_anew(model: Any) -> None:
    """Gives a model and its layers their torch parameters, as Keras does when a layer is built."""
    if keras.backend.backend() != "torch":
        return
    for layer in model._flatten_layers():
        for owner in (layer, getattr(layer, "_functional", None)):
            if owner is not None:
                owner._track_variables()


def _rebind(layer: Any, old: Any) -> None:
    """Binds what Keras puts into every layer, such as its `build`, to another object."""

    def bound(value: Any) -> Any:
        if isinstance(value, types.MethodType) and value.__self__ is old:
            return types.MethodType(value.__func__, layer)
        return layer if value is old else value

    for name, value in list(vars(layer).items()):
        if isinstance(value, types.FunctionType) and value.__closure__:
            cells = [types.CellType(*map(bound, contents(cell))) for cell in value.__closure__]
            vars(layer)[name] = with_cells(value, cells)


class Snapshot:
    """A model as it is now: classes, attributes, contents of containers, values of variables."""

    def __init__(self, model: keras.layers.Layer) -> None:
        self._classes: list[tuple[Any, type]] = []
        self._contents: list[tuple[Any, Any]] = []
        self._values: list[tuple[Any, Any]] = []
        seen: dict[int, Any] = {}  # with the objects, so that no other one gets their id
        waiting: list[Any] = [model]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict) and not issubclass(type(value), dict):
                value = value.__wrapped__  # type: ignore[attr-defined]  # TensorFlow's proxy
            if id(value) not in seen:
                seen[id(value)] = value
                waiting.extend(self._note(value))

    def _note(self, value: Any) -> list[Any]:
        """Notes one object; returns the objects that it leads to."""
        if isinstance(value, dict):
            self._contents.append((value, dict(dict.items(value))))
        elif isinstance(value, list | set):
            # A list that tells Keras what is put into it is noted in a plain one.
            self._contents.append((value, {*value} if isinstance(value, set) else [*value]))
        elif isinstance(value, keras.Variable | keras.layers.Layer | tracker_class()) or (
            is_ours(value)
        ):
            self._classes.append((value, type(value)))
            self._contents.append((vars(value), without_dispatchers(vars(value))))
            if isinstance(value, keras.Variable):
                # On JAX arrays are not changed, but replaced.
                if value._value is not None and keras.backend.backend() != "jax":
                    self._values.append((value, keras.ops.copy(value.value)))
                return []
        elif not isinstance(value, CONTAINERS):
            return []
        return children(value)

    def restore(self) -> None:
        for owner, kind in self._classes:
            if type(owner) is not kind:
                owner.__class__ = kind
        for container, contents in self._contents:
            refill(container, contents)
        for variable, value in self._values:
            variable.assign(value)
