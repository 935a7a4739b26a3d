"""Places in `fit` and in files that Keras offers no callback for.

All hooks are attributes of the instance, set past Keras' tracking.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import keras


class _Entries:
    """What callbacks add to the logs of one `fit`."""

    def __init__(self, model: Any) -> None:
        self.history = model.history
        self.functions: list[Callable[[], dict[str, float]]] = []
        self._model, self._names = model, set[str]()

    def make(self, logs: Any) -> Any:
        result = dict(type(self._model)._get_metrics_result_or_logs(self._model, logs))
        for function in self.functions:
            entries = function()
            self._names |= entries.keys()
            result.update(entries)
        return result

    def flatten(self, logs: dict[str, Any]) -> Any:
        kept = {name: value for name, value in logs.items() if name not in self._names}
        return type(self._model)._flatten_metrics_in_order(self._model, kept)


def add_to_logs(model: Any, entries: Callable[[], dict[str, float]]) -> None:
    """Adds entries to the logs of a `fit` that begins: of its epochs, and of its evaluations.

    They are there before any callback sees the logs, whatever the order of the callbacks; those of
    an evaluation as `val_...`. What `evaluate` returns as a list stays as it is.

    Args:
        model: The model, in `on_train_begin`.
        entries: Called for each of the logs.
    """
    if not isinstance(getattr(model, "history", None), keras.callbacks.History):
        return  # a training loop of one's own
    held = vars(model).get("_entries_of_logs")
    # The history is a new one in every `fit`; what one that failed has left behind is dropped.
    if held is None or held.history is not model.history:
        held = _Entries(model)
        vars(model)["_entries_of_logs"] = held
        vars(model)["_get_metrics_result_or_logs"] = held.make
        vars(model)["_flatten_metrics_in_order"] = held.flatten
    held.functions.append(entries)


def leave_logs(model: Any) -> None:
    """Undoes `add_to_logs`, at the end of a `fit`."""
    for name in ("_get_metrics_result_or_logs", "_flatten_metrics_in_order", "_entries_of_logs"):
        vars(model).pop(name, None)


def after_fit(model: Any, function: Callable[[], None]) -> None:
    """Calls a function in `on_train_end`, after all callbacks that the user gave to `fit`.

    Some restore weights there. The history is the one that stands behind them.
    """
    history = getattr(model, "history", None)
    if not isinstance(history, keras.callbacks.History):  # a training loop of one's own
        function()
        return
    before = history.on_train_end

    def on_train_end(logs: Any = None) -> None:
        vars(history).pop("on_train_end", None)
        before(logs)
        function()

    vars(history)["on_train_end"] = on_train_end


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
    """Whether the caller was called, by whatever ways, by the `fit` of a model.

    Read from the stack: a `fit` that fails calls no callback, so a mark would be left behind.
    """
    return _fit_frame(model) is not None


def length_of_data(model: Any) -> int | None:
    """`len(x)` of the data set that the `fit` which called the caller trains on.

    For data sets of which Keras does not know how many batches they have, such as grain's; `None`
    for those without a length, or without an end.
    """
    frame = _fit_frame(model)
    data = None if frame is None else frame.f_locals.get("x")
    try:
        length = len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError, OverflowError):
        return None
    # One that repeats for ever has the largest number that `len` can give.
    return length if 0 < length < sys.maxsize else None


def _fit_frame(model: Any) -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "fit" and frame.f_locals.get("self") is model:
            return frame
        frame = frame.f_back
    return None


def initial_epoch_is(model: Any, epoch: int) -> None:
    """Lets the `fit` that begins start with an epoch, whatever its `initial_epoch`."""
    model._initial_epoch = epoch
