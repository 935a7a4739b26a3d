"""The objects that a Python object leads to: attributes, items, slots, closures."""

import collections
import functools
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import cast

import keras

Container = list[object] | set[object] | dict[object, object]
Items = Iterable[object] | Mapping[object, object]

CONTAINERS = (list, tuple, dict, set, frozenset)
# Names in `__slots__` that hold no value.
_NO_ATTRIBUTES = (
    "__dict__",
    "__weakref__",
)


def children(value: object) -> list[object]:
    """The objects that one object leads to."""
    if isinstance(value, dict):
        content = content_of(value)
        return [*dict.keys(content), *dict.values(content)]
    if isinstance(value, CONTAINERS):
        return list(value)
    if isinstance(value, types.FunctionType):
        reached: list[object] = [
            value.__defaults__,
            value.__kwdefaults__,
            vars(value),
        ]
        for cell in value.__closure__ or ():
            reached += contents(cell)
        return reached
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    attributes = getattr(value, "__dict__", {})
    return [*attributes.values(), *slots(value).values()]


def content_of(value: dict[object, object]) -> dict[object, object]:
    """A dict, or the dict inside a proxy of TensorFlow, which says it is one."""
    if issubclass(type(value), dict):
        return value
    return cast(dict[object, object], getattr(value, "__wrapped__", {}))


def slots(value: object) -> dict[str, object]:
    """The attributes of an object that are in slots, as TensorFlow's references to layers are."""
    values: dict[str, object] = {}
    for kind in type(value).__mro__:
        names = vars(kind).get("__slots__", ())
        if isinstance(names, str):
            names = (names,)
        for name in names:
            if name not in _NO_ATTRIBUTES and hasattr(value, name):
                values[name] = getattr(value, name)
    return values


def contents(cell: types.CellType) -> list[object]:
    """The content of a closure's cell; nothing as long as its variable has not been set."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def with_cells(
    function: types.FunctionType, cells: Iterable[types.CellType]
) -> types.FunctionType:
    """A copy of a function that finds other cells where it reads variables from around it."""
    code = function.__code__
    copy = types.FunctionType(code, function.__globals__, closure=tuple(cells))
    copy.__defaults__ = function.__defaults__
    copy.__kwdefaults__ = function.__kwdefaults__
    for name in functools.WRAPPER_ASSIGNMENTS:
        setattr(copy, name, getattr(function, name))
    vars(copy).update(vars(function))
    return copy


def refill(
    container: Container,
    items: Items,
) -> None:
    """Replaces the contents of a list, set or dict, past its own class."""
    if isinstance(container, list):
        list.__setitem__(container, slice(None), cast(Sequence[object], items))
    elif isinstance(container, set):
        set.clear(container)
        set.update(container, items)
    else:
        kind: type[dict[object, object]] = dict
        if isinstance(container, collections.OrderedDict):
            kind = collections.OrderedDict
        kind.clear(container)
        for key, item in cast(Mapping[object, object], items).items():
            kind.__setitem__(container, key, item)


def is_ours(value: object) -> bool:
    """Whether an object is of a class of this package, whose state belongs to one layer."""
    is_of_package = type(value).__module__.startswith("keras_sparse_ortho.")
    return is_of_package and hasattr(value, "__dict__")


@functools.cache
def tracker_class() -> type:
    """The class that notes which attributes of a layer are variables and layers."""
    return type(keras.layers.Layer(name="plain")._tracker)
