"""Hooks into `fit` and saving for which Keras has no callback."""

import contextlib
import inspect
import os
import pathlib
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras

from keras_sparse_ortho._text import printable_lines
from keras_sparse_ortho._types import Config

AddToLogs = Callable[[Config], None]

_PACKAGES = (
    str(pathlib.Path(keras.__file__).parent) + os.sep,
    str(pathlib.Path(__file__).parents[1]) + os.sep,
)


def after_fit(model: keras.Model, function: Callable[[], None]) -> None:
    """Calls a function when `fit` ends, after the user's callbacks, which may restore weights."""
    history = getattr(model, "history", None)
    # A custom training loop.
    if not isinstance(history, keras.callbacks.History):
        function()
        return
    before = history.on_train_end

    def on_train_end(logs: Config | None = None) -> None:
        vars(history).pop("on_train_end", None)
        before(logs)
        function()

    vars(history)["on_train_end"] = on_train_end


def after_epochs(model: keras.Model, function: Callable[[int], bool]) -> None:
    """Calls one function with the epochs done after each of a running `fit`, until it is `True`."""
    history = getattr(model, "history", None)
    if not isinstance(
        history, keras.callbacks.History
    ) or "on_epoch_end" in vars(history):
        return
    before = history.on_epoch_end

    def on_epoch_end(epoch: int, logs: Config | None = None) -> None:
        before(epoch, logs)
        if function(epoch + 1) or epoch + 1 == history.params.get("epochs"):
            vars(history).pop("on_epoch_end", None)

    vars(history)["on_epoch_end"] = on_epoch_end


def log_first(callback: keras.callbacks.Callback, add: AddToLogs) -> bool:
    """Calls a function with the logs of every epoch before any callback of the list has them.

    So a logger may come before the callback. Call it in the callback's `on_train_begin`; `False`
    if no `keras.callbacks.CallbackList` has called that.
    """
    callbacks = _caller(keras.callbacks.CallbackList)
    if callbacks is None:
        return False
    functions: dict[int, AddToLogs] = vars(callbacks).setdefault(
        "_kso_log_first", {}
    )
    if not functions:
        before = callbacks.on_epoch_end

        def on_epoch_end(epoch: int, logs: Config | None = None) -> None:
            if logs is None:
                logs = {}
            for function in functions.values():
                function(logs)
            before(epoch, logs)

        vars(callbacks)["on_epoch_end"] = on_epoch_end
    functions[id(callback)] = add
    return True


def _caller(kind: type) -> Any:
    """The object of a class whose method runs around this call.

    Read from the stack: Keras hands a callback its model, and not the list that it stands in.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        caller = frame.f_locals.get("self")
        if isinstance(caller, kind):
            return caller
    return None


def before_save(
    model: keras.Model, function: Callable[[], None] | None
) -> None:
    """Calls a function whenever the model is saved; `None` undoes it."""
    vars(model).pop("save_own_variables", None)
    if function is None:
        return
    save = model.save_own_variables

    def save_own_variables(store: Any) -> None:
        function()
        save(store)

    vars(model)["save_own_variables"] = save_own_variables


def in_fit(model: keras.Model) -> bool:
    """Whether `fit` of a model runs around this call."""
    return any(other is model for other in _models_in_fit())


def model_in_fit() -> keras.Model | None:
    """The model whose `fit` runs around this call; `None` without one."""
    if keras.backend.backend() == "torch":
        import torch

        if torch.compiler.is_compiling():  # frames cannot be traced
            return None
    return next(_models_in_fit(), None)


class _WarningsOfThread(threading.local):
    """Whether `warn_user` warns in the running thread."""

    are_shown: bool = True


_warnings = _WarningsOfThread()


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Inside, and in this thread only, `warn_user` does nothing; Python's filters stay."""
    before = _warnings.are_shown
    _warnings.are_shown = False
    try:
        yield
    finally:
        _warnings.are_shown = before


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns, at the line that is neither in this package nor in Keras; escapes names in it."""
    if not _warnings.are_shown:
        return
    # From Python 3.12 on, `skip_file_prefixes` of `warnings.warn` does this.
    level = 1
    frame = inspect.currentframe()
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        level += 1
        frame = frame.f_back
    warnings.warn(printable_lines(message), category, stacklevel=level)


def _models_in_fit() -> Iterator[keras.Model]:
    """The models whose `fit` runs around this call, the innermost one first.

    Read from the stack: a `fit` that fails calls no callback, so a flag would be left behind, and a
    layer that is called has no way to its model.
    """
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        if frame.f_code.co_name == "fit":
            model = frame.f_locals.get("self")
            if isinstance(model, keras.Model):
                yield model


def initial_epoch_is(model: keras.Model, epoch: int) -> None:
    """Sets the epoch at which `fit` begins."""
    model._initial_epoch = epoch
