"""Copies of models: the same objects with other variables, without configurations."""

import collections
import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar, cast

import keras
import numpy as np
from keras import ops
from keras.src.ops.function import make_node_key

from keras_sparse_ortho._interception import without_dispatchers
from keras_sparse_ortho._keras_internals._object_graph import (
    CONTAINERS,
    children,
    contents,
    is_ours,
    refill,
    slots,
    tracker_class,
    with_cells,
)
from keras_sparse_ortho._keras_internals._variables import (
    await_value,
    initialize,
    is_watched,
)
from keras_sparse_ortho.errors import NotPrunableError

T = TypeVar("T")
AnyObject: TypeAlias = Any
"""An object whose attributes are read without knowing its class."""

# Parts of a model: whatever leads to one of these is copied, and everything else shared.
_PARTS = (keras.Operation, keras.KerasTensor, keras.Variable)
_ATOMS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type,
    np.dtype,
    np.generic,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
)
# Where TensorFlow notes what checkpoints of an object depend on.
_TRACKED = (
    "_self_unconditional_checkpoint_dependencies",
    "_self_unconditional_dependency_names",
)


def copy_objects(
    model: keras.layers.Layer, without_values: Iterable[keras.Variable] = ()
) -> tuple[keras.layers.Layer, dict[int, Any]]:
    """Copies a model or layer with all layers, variables and calls; and the copies by `id`.

    Other objects (constants, initializers) are shared. The copy is not compiled. Copies of the
    variables `without_values` wait for `give_value`.
    """
    if hasattr(model, "jax_state_sync"):
        model.jax_state_sync()  # in a `fit` on JAX variables do not have their values
    copier = _Copier(without_values)
    model_copy = copier.copy(model)
    copier.fill()
    return model_copy, copier.copies


class _Copier:
    """Makes empty objects first and fills them from a list, so that depth does not matter."""

    def __init__(self, without_values: Iterable[keras.Variable]) -> None:
        self.copies: dict[int, Any] = {}
        # Kept, so that no other object gets their `id`.
        self._originals: list[object] = []
        self._waiting: collections.deque[Callable[[], None]] = (
            collections.deque()
        )
        # Their items must be whole to be hashed.
        self._hashed: list[Callable[[], None]] = []
        self._empty = {id(variable) for variable in without_values}
        # of objects that are known to lead nowhere
        self._shared_ids: set[int] = set()
        self._place = ""  # the attribute that is being copied, for errors
        shared_kinds, self._states = _kinds_of_backend()
        self._parts = (*_PARTS, tracker_class(), *self._states)
        self._shared_kinds = (*_ATOMS, *shared_kinds)

    def copy(self, value: T) -> T:
        """The copy of an object, perhaps still empty; the object itself where it is shared."""
        if isinstance(value, self._shared_kinds):
            return value
        if id(value) in self.copies:
            return cast(T, self.copies[id(value)])
        if isinstance(value, CONTAINERS):
            return cast(T, self._container(value))
        if self._leads_to_parts(value):
            return cast(T, self._copy_of_part(value))
        if is_ours(value):
            return self._object(value)
        return value

    def fill(self) -> None:
        """Fills all objects that are still empty."""
        while self._waiting or self._hashed:
            if self._waiting:
                fill_one = self._waiting.popleft()
            else:
                fill_one = self._hashed.pop(0)
            fill_one()
        for value in self.copies.values():
            if isinstance(value, tracker_class()):
                _renew_ids(value)
            elif isinstance(value, keras.Operation) and hasattr(
                value, "_nodes_by_depth"
            ):
                value._nodes = set(_node_keys(value))

    def _note(
        self,
        value: object,
        value_copy: T,
    ) -> T:
        self.copies[id(value)] = value_copy
        self._originals.append(value)
        return value_copy

    def _copy_of_part(self, value: object) -> object:
        """The copy of an object that leads to a part of the model."""
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, types.MethodType):
            return types.MethodType(
                self.copy(value.__func__), self.copy(value.__self__)
            )
        if isinstance(value, functools.partial):
            arguments = [self.copy(item) for item in value.args]
            keywords = {
                key: self.copy(item) for key, item in value.keywords.items()
            }
            function = self.copy(value.func)
            return self._note(
                value, functools.partial(function, *arguments, **keywords)
            )
        if isinstance(value, self._states):
            return self._note(value, _copy_of_state(value))
        has_attributes = hasattr(value, "__dict__") or slots(value)
        if hasattr(value, "__wrapped__") or not has_attributes:
            raise NotPrunableError(
                "The model cannot be copied: it holds an uncopyable object that refers to one of "
                "its layers or variables. Keep the layer in an attribute, list or dict instead, or "
                "change the model itself: keras_sparse_ortho.sparsify.in_place(model, 0.1). "
                f"Received: {self._place}, an object of type {type(value).__qualname__}"
            )
        return self._object(value)

    def _object(self, value: T) -> T:
        value_copy = self._note(value, object.__new__(type(value)))
        self._waiting.append(lambda: self._fill_object(value, value_copy))
        return value_copy

    def _fill_object(
        self,
        value: object,
        value_copy: object,
    ) -> None:
        for name, item in slots(value).items():
            object.__setattr__(value_copy, name, self.copy(item))
        for name, item in _attributes_to_copy(value).items():
            self._place = f"{type(value).__name__}.{name}"
            # Bypass `__setattr__`: Keras would track the value.
            vars(value_copy)[name] = self.copy(item)
        if isinstance(value, keras.Variable) and value._value is not None:
            self._fill_variable(value, value_copy)

    def _fill_variable(
        self,
        variable: keras.Variable,
        variable_copy: keras.Variable,
    ) -> None:
        watched = is_watched(variable)
        if id(variable) in self._empty:
            await_value(variable_copy, watched=watched)
        elif keras.backend.backend() == "torch":  # where it may be a parameter
            initialize(
                variable_copy, self.copy(variable._value), watched=watched
            )
        else:
            initialize(variable_copy, ops.copy(variable.value), watched=watched)

    def _container(self, value: object) -> object:
        """The copy of a list, tuple, dict or set, or of a class of these."""
        if not issubclass(type(value), CONTAINERS):
            return self._proxy(value)
        if isinstance(value, tuple):
            return self._tuple(value)
        if isinstance(value, frozenset):
            return self._note(
                value, type(value)(self.copy(item) for item in value)
            )
        kind = type(value)
        value_copy = self._note(value, kind.__new__(kind))
        if hasattr(value, "__dict__"):
            for name, item in vars(value).items():
                vars(value_copy)[name] = self.copy(item)
        fill = functools.partial(self._fill_container, value, value_copy)
        if _is_hashed(value):
            self._hashed.append(fill)
        else:
            self._waiting.append(fill)
        return value_copy

    def _proxy(self, value: AnyObject) -> object:
        """The copy of an object in which TensorFlow keeps a dict or tuple."""
        content = self.copy(value.__wrapped__)
        if isinstance(value, tuple):
            content = type(value)(content)
        return self._note(value, content)

    def _tuple(self, value: tuple[object, ...]) -> tuple[object, ...]:
        """The copy of a tuple; itself if all of its items are shared."""
        items = [self.copy(item) for item in value]
        if all(
            item is original
            for item, original in zip(items, value, strict=True)
        ):
            return value
        make: Callable[[list[object]], tuple[object, ...]] = type(value)
        make = getattr(make, "_make", make)  # of named tuples
        return self._note(value, make(items))

    def _fill_container(
        self,
        value: object,
        value_copy: Any,
    ) -> None:
        if isinstance(value, collections.defaultdict):
            value_copy.default_factory = self.copy(value.default_factory)
        if isinstance(value, dict):
            pairs = list(dict.items(value))
            refill(
                value_copy,
                {self.copy(key): self.copy(item) for key, item in pairs},
            )
        else:
            items = list(cast(Iterable[object], value))
            refill(value_copy, [self.copy(item) for item in items])

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        originals = function.__closure__ or ()
        cells = tuple(types.CellType() for _ in originals)
        function_copy = self._note(function, with_cells(function, cells))

        def fill() -> None:
            function_copy.__defaults__ = self.copy(function.__defaults__)
            function_copy.__kwdefaults__ = self.copy(function.__kwdefaults__)
            for name, item in vars(function).items():
                vars(function_copy)[name] = self.copy(item)
            for original, cell in zip(originals, cells, strict=True):
                for item in contents(original):
                    cell.cell_contents = self.copy(item)

        self._waiting.append(fill)
        return function_copy

    def _leads_to_parts(self, value: object) -> bool:
        """Whether something can be reached from an object that every model has its own of."""
        seen: dict[int, object] = {}
        waiting = [value]
        while waiting:
            reached = waiting.pop()
            if isinstance(reached, self._shared_kinds):
                continue
            if id(reached) in seen or id(reached) in self._shared_ids:
                continue
            if isinstance(reached, self._parts):
                return True
            seen[id(reached)] = reached
            waiting.extend(children(reached))
        self._originals.extend(seen.values())
        self._shared_ids.update(seen)
        return False


def _attributes_to_copy(value: object) -> dict[str, Any]:
    """The attributes of an object that its copy takes over."""
    attributes = without_dispatchers(getattr(value, "__dict__", {}))
    if isinstance(value, keras.Model):
        attributes = _uncompiled(attributes)
    modules = attributes.get("_modules", {})
    if "_torch_params" in modules:
        # Keras makes it from the variables when it is asked for.
        attributes["_modules"] = {
            name: module
            for name, module in modules.items()
            if name != "_torch_params"
        }
    if isinstance(value, keras.Variable):
        attributes["_value"] = None
    elif isinstance(value, keras.Operation):
        # Calls in other models as well; nobody reads it.
        attributes["_outbound_nodes"] = []
    for name in _TRACKED:
        if name in attributes:
            attributes[name] = _without_functions(attributes[name])
    return attributes


def _renew_ids(tracker: AnyObject) -> None:
    """Lets a copied tracker know the items of its copied stores."""
    tracker.stored_ids = {
        name: {id(item) for item in store}
        for name, (_, store) in tracker.config.items()
    }


def _node_keys(model: keras.Model) -> Iterator[str]:
    """The keys of the calls in a graph, which have the `id` of the called operation."""
    nodes = [node for level in model._nodes_by_depth.values() for node in level]
    node_ids = {id(node) for node in nodes}
    operations = {id(node.operation): node.operation for node in nodes}
    for operation in operations.values():
        for number, node in enumerate(operation._inbound_nodes):
            if id(node) in node_ids:
                yield make_node_key(operation, number)


def _copy_of_state(state: AnyObject) -> AnyObject:
    """The copy of a variable or tensor of the backend."""
    # of torch, where others cannot be copied
    if not getattr(state, "is_leaf", True):
        state = state.detach()
    return copy.deepcopy(state)


def _is_hashed(container: object) -> bool:
    """Whether a container hashes items that must have their content for that."""
    if isinstance(container, dict):
        return any(
            not isinstance(key, str | int) for key in dict.keys(container)
        )
    return isinstance(container, set)


def _without_functions(tracked: AnyObject) -> AnyObject:
    """Leaves compiled functions out, such as the train function, which a copy makes itself."""
    if isinstance(tracked, Mapping):
        return {
            key: value
            for key, value in tracked.items()
            if not _is_compiled(value)
        }
    return [value for value in tracked if not _is_compiled(value)]


def _is_compiled(tracked: AnyObject) -> bool:
    return hasattr(getattr(tracked, "ref", tracked), "python_function")


def _uncompiled(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a model without compilation and training."""
    fresh, compiled = _attributes_of_keras()
    uncompiled = {}
    for name, value in attributes.items():
        # A model makes functions such as `train_function` from its layers.
        is_made = name.endswith("_function") and callable(value)
        if name in fresh and (name in compiled or is_made):
            uncompiled[name] = fresh[name]
        elif is_made and name not in compiled:
            uncompiled[name] = None
        elif name not in compiled:
            uncompiled[name] = value
    return uncompiled


@functools.cache
def _attributes_of_keras() -> tuple[dict[str, Any], frozenset[str]]:
    """The attributes of a new model, and the names of those set by compiling and training."""
    inputs = keras.Input((1,), name="input")
    model = keras.Model(inputs, inputs, name="plain")
    fresh = dict(vars(model))
    model.compile(
        optimizer=keras.optimizers.SGD(name="sgd"),
        loss="mse",
        jit_compile=False,
    )
    # The last by `before_save`.
    changed_names = {
        "history",
        "stop_training",
        "save_own_variables",
    }
    for name, value in vars(model).items():
        if name not in fresh or fresh[name] is not value:
            changed_names.add(name)
    return fresh, frozenset(changed_names)


def _kinds_of_backend() -> tuple[tuple[type, ...], tuple[type, ...]]:
    """Classes of the backend: objects with variables of no model, and state that is not Keras'."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return (tf.distribute.Strategy,), (tf.Variable,)
    if keras.backend.backend() == "torch":
        import torch

        return (), (torch.Tensor,)
    return (), ()
