"""Calls of layers and functions, seen or answered in one thread, while others run as before."""

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

Observer = Callable[..., Any]
"""`(layer, call, *args, **kwargs)` -> what the call returns: `call(*args, **kwargs)`, or another
answer. It may raise `Enough`."""


class Enough(BaseException):
    """Ends what runs inside `observe`.

    As `GeneratorExit`, it is no `Exception`: it passes through all layers of a model, and neither
    their `except Exception` nor that of Keras, which rewrites what it catches, may stop it.
    """


@contextlib.contextmanager
def observe(layers: Iterable[Any], observer: Observer) -> Iterator[None]:
    """Inside, and in this thread only, calls of layers go to an observer.

    Several threads may observe the same layers: each sees its own calls. The layers are as before
    once the last thread is done. `Enough` leaves the block early.

    Args:
        layers: Layers, each observed once.
        observer: `Observer`. Called in place of `layer.call`, also where a layer around it calls
            that method directly, as TimeDistributed does.

    Examples:
        >>> import keras
        >>> layer, shapes = keras.layers.Dense(2), []
        >>> def note(layer, call, x):
        ...     shapes.append(tuple(x.shape))
        ...     return call(x)
        >>> with observe([layer], note):
        ...     _ = layer(keras.ops.ones((3, 4)))
        >>> shapes, "call" in vars(layer)
        ([(3, 4)], False)
    """
    with contextlib.ExitStack() as stack:
        for layer in {id(layer): layer for layer in layers}.values():
            stack.enter_context(
                intercepted(layer, "call", functools.partial(observer, layer))
            )
        with contextlib.suppress(Enough):
            yield


@contextlib.contextmanager
def intercepted(
    owner: Any, name: str, function: Callable[..., Any]
) -> Iterator[None]:
    """Inside, and in this thread only, `owner.name(...)` is `function(original, ...)`.

    Args:
        owner: Layer, module or other object with a `__dict__`.
        name: str. The attribute of `owner` that is called.
        function: callable. Gets the original, which an interception around this one may see.
    """

    def add(wishes: _Wishes) -> _Wishes:
        return wishes._replace(functions=(*wishes.functions, function))

    with _dispatched(owner, name, add):
        yield


@contextlib.contextmanager
def with_settings(layer: Any, **settings: Any) -> Iterator[None]:
    """Inside, and in this thread only, calls of a layer see other values of its attributes."""

    def add(wishes: _Wishes) -> _Wishes:
        return wishes._replace(settings={**wishes.settings, **settings})

    with _dispatched(layer, "call", add):
        yield


def stand_in(layer: Any, **settings: Any) -> Any:
    """An object of a layer's class with its attributes, variables and layers but some settings."""
    other = object.__new__(type(layer))
    # Bypass `__setattr__`: Keras would track the value.
    vars(other).update({**without_dispatchers(vars(layer)), **settings})
    return other


def without_dispatchers(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """The attributes of an object as they are when no thread intercepts its calls."""
    plain = dict(attributes)  # at once: another thread may intercept a call now
    for name, value in list(plain.items()):
        if isinstance(value, _Dispatcher):
            value.put_back(plain, name)
    return plain


class _Wishes(NamedTuple):
    """The changes that a thread asks for, to the calls of one function."""

    # The first is the next to the original.
    functions: tuple[Callable[..., Any], ...] = ()
    # Attributes of the layer whose `call` it is.
    settings: Mapping[str, Any] = types.MappingProxyType({})


_NO_WISHES = _Wishes()
_lock = threading.Lock()


class _WishesOfThread(threading.local):
    """The wishes of the running thread; it starts with none.

    The dictionary is never changed, only replaced.
    """

    by_dispatcher: Mapping["_Dispatcher", _Wishes] = types.MappingProxyType({})


_of_thread = _WishesOfThread()


class _Dispatcher:
    """Stands in the place of a function while some thread intercepts its calls."""

    def __init__(self, owner: Any, name: str) -> None:
        self.owner = owner
        self.name = name
        self.original = getattr(owner, name)
        self.users: set[object] = set()
        # A method is an attribute of the class instead.
        self._was_own = name in vars(owner)
        self._own = vars(owner).get(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        wishes = _of_thread.by_dispatcher.get(self, _NO_WISHES)
        call = self.original
        if wishes.settings:
            call = getattr(stand_in(self.owner, **wishes.settings), self.name)
        for function in wishes.functions:
            call = functools.partial(function, call)
        return call(*args, **kwargs)

    def put_back(self, attributes: dict[str, Any], name: str) -> None:
        if self._was_own:
            attributes[name] = self._own
        else:
            del attributes[name]


@contextlib.contextmanager
def _dispatched(
    owner: Any, name: str, add: Callable[[_Wishes], _Wishes]
) -> Iterator[None]:
    """Adds a wish of this thread to the calls of a function, by a dispatcher in its place."""
    user = object()
    try:  # around the beginning as well: an interrupt may come at any line
        dispatcher = _join(owner, name, user)
        before = _of_thread.by_dispatcher
        wishes = add(before.get(dispatcher, _NO_WISHES))
        try:
            _of_thread.by_dispatcher = {**before, dispatcher: wishes}
            yield
        finally:
            _of_thread.by_dispatcher = before
    finally:
        _leave(owner, name, user)


def _join(owner: Any, name: str, user: object) -> _Dispatcher:
    # Bypass `__setattr__`: Keras would track the value.
    attributes = vars(owner)
    with _lock:
        dispatcher = attributes.get(name)
        if not isinstance(dispatcher, _Dispatcher):
            dispatcher = _Dispatcher(owner, name)
        dispatcher.users.add(user)
        attributes[name] = dispatcher
    return dispatcher


def _leave(owner: Any, name: str, user: object) -> None:
    attributes = vars(owner)
    with _lock:
        dispatcher = attributes.get(name)
        if isinstance(dispatcher, _Dispatcher):
            dispatcher.users.discard(user)
            if not dispatcher.users:
                dispatcher.put_back(attributes, name)
