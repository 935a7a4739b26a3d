"""Hooks into `fit` and saving for which Keras has no callback."""

import contextlib
import contextvars
import os
import pathlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import keras

from keras_sparse_ortho._text import printable_lines

_PACKAGES = (
    str(pathlib.Path(keras.__file__).parent) + os.sep,
    str(pathlib.Path(__file__).parents[1]) + os.sep,
)


def after_fit(model: Any, function: Callable[[], None]) -> None:
    """Calls a function when `fit` ends, after the user's callbacks, which may restore weights."""
    history = getattr(model, "history", None)
    if not isinstance(history, keras.callbacks.History):  # a custom training loop
        function()
        return
    before = history.on_train_end

    def on_train_end(logs: Any = None) -> None:
        vars(history).pop("on_train_end", None)
        before(logs)
        function()

    vars(history)["on_train_end"] = on_train_end


def after_epochs(model: Any, function: Callable[[int], bool]) -> None:
    """Calls one function with the epochs done after each of a running `fit`, until it is `True`."""
    history = getattr(model, "history", None)
    if not isinstance(history, keras.callbacks.History) or "on_epoch_end" in vars(history):
        return
    before = history.on_epoch_end

    def on_epoch_end(epoch: int, logs: Any = None) -> None:
        before(epoch, logs)
        if function(epoch + 1) or epoch + 1 == history.params.get("epochs"):
            vars(history).pop("on_epoch_end", None)

    vars(history)["on_epoch_end"] = on_epoch_end


def log_first(callback: Any, add: Callable[[Any], None]) -> bool:
    """Calls a function with the logs of every epoch before any callback of the list has them."""
    # So a logger may come before the callback. Call it in the callback's `on_train_begin`; `False`
    # if no `keras.callbacks.CallbackList` has called that.
    callers = (frame.f_locals.get("self") for frame, _ in traceback.walk_stack(sys._getframe(1)))
    lists = (caller for caller in callers if isinstance(caller, keras.callbacks.CallbackList))
    if (callbacks := next(lists, None)) is None:
        return False
    functions: dict[int, Callable[[Any], None]] = vars(callbacks).setdefault("_kso_log_first", {})
    if not functions:
        before = callbacks.on_epoch_end

        def on_epoch_end(epoch: int, logs: Any = None) -> None:
            logs = {} if logs is None else logs
            for function in functions.values():
                function(logs)
            before(epoch, logs)

        vars(callbacks)["on_epoch_end"] = on_epoch_end
    functions[id(callback)] = add
    return True


def before_save(model: Any, function: Callable[[], None] | None) -> None:
    """Calls a function whenever the model is saved; `None` undoes it."""
    vars(model).pop("save_own_variables", None)
    if function is None:
        return
    save = model.save_own_variables

    def save_own_variables(store: Any) -> None:
        function()
        save(store)

    vars(model)["save_own_variables"] = save_own_variables


def in_fit(model: Any) -> bool:
    # Read from the stack: a `fit` that fails calls no callback, so a flag would be left behind.
    return _fit_frame(model) is not None


def model_in_fit() -> Any:
    if keras.backend.backend() == "torch":
        import torch

        if torch.compiler.is_compiling():  # frames cannot be traced
            return None
    frame = _fit_frame()
    return None if frame is None else frame.f_locals["self"]


_warns: contextvars.ContextVar[bool] = contextvars.ContextVar("warns", default=True)


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Inside, and in this thread only, `warn_user` does nothing; Python's filters stay."""
    token = _warns.set(False)
    try:
        yield
    finally:
        _warns.reset(token)


def warn_user(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns, at the line that is neither in this package nor in Keras; escapes names in it."""
    if not _warns.get():
        return
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PACKAGES):
        level, frame = level + 1, frame.f_back
    warnings.warn(printable_lines(message), category, stacklevel=level)


def _fit_frame(model: Any = None) -> FrameType | None:
    for frame, _ in traceback.walk_stack(sys._getframe(1)):
        own = frame.f_locals.get("self") if frame.f_code.co_name == "fit" else None
        if own is not None and (own is model or (model is None and isinstance(own, keras.Model))):
            return frame
    return None


def initial_epoch_is(model: Any, epoch: int) -> None:
    model._initial_epoch = epoch
