"""Calibration batches go through a model in step: at each layer they wait for each other."""

import abc
import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import keras
import numpy as np

from keras_sparse_ortho._backend import is_traced, without_gradients
from keras_sparse_ortho._data import Batch, first_batches, is_batched, samples
from keras_sparse_ortho._keras_internals import level_of_user
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import from_zero_states

_ROWS = 64
_MOST_BATCHES = 64
# With fewer different rows OBS is often behind magnitudes, which need no data.
_FEWEST_ROWS = 16


class Stop(abc.ABC):
    """A layer at which all batches wait for each other, and what is done there.

    Args:
        layer: The layer whose calls are waited for.
        path: Its path, or that of its kernel, for messages.
    """

    def __init__(self, layer: Any, path: str) -> None:
        self.layer = layer
        self.path = path

    def add_reference(self, inputs: Any) -> None:  # noqa: B027, few stops need it
        """Takes in what the layer of the model as given has for the batch that is added next."""

    @abc.abstractmethod
    def add(self, inputs: Any, **options: Any) -> None:
        """Takes in the inputs of one batch, with the other arguments of the layer's call."""

    @abc.abstractmethod
    def finish(self) -> None:
        """All batches are in; what is assigned now, they go through."""


def calibration_batches(data: Any) -> list[Any]:
    """The inputs of calibration data: arrays in batches of 64 rows, else the first 64 batches.

    Warns:
        UserWarning: Fewer than 16 different rows.
    """
    batched = is_batched(data)
    taken = first_batches(
        data, batch_size=_ROWS, batches=_MOST_BATCHES if batched else None, shuffle=False
    )
    _warn_of_few_rows(taken)
    return [keras.tree.map_structure(keras.ops.convert_to_tensor, x) for x, _, _ in taken]


def _warn_of_few_rows(batches: Sequence[Batch]) -> None:
    different: set[bytes] = set()
    for x, _, _ in batches:
        leaves = [to_numpy(leaf, copy=False) for leaf in keras.tree.flatten(x)]
        for row in zip(*leaves, strict=False):
            different.add(b"".join(np.asarray(leaf).tobytes() for leaf in row))
            if len(different) == _FEWEST_ROWS:
                return
    count = sum(samples(batch) for batch in batches)
    warnings.warn(
        f"Calibration needs at least {_FEWEST_ROWS} different rows, better a few hundred, such as "
        "rows of the training data. What is computed from fewer fits these rows and no others. "
        f"Received: {len(different)} different among {count} rows",
        stacklevel=level_of_user(),
    )


def sweep(
    model: Any,
    batches: Sequence[Any],
    stops: Sequence[Stop],
    verbose: int = 0,
    as_given: Callable[[Any], contextlib.AbstractContextManager[None]] | None = None,
) -> list[Stop]:
    """One pass of all batches through a model, each layer after the one before it is done with.

    A thread per batch, of which one runs at a time, in the order of the batches: so sums over
    batches are the same in every run, and memory is the activations between two layers for all
    batches, and those within one layer for one.

    Args:
        model: The model, called with `training=False`.
        batches: Inputs.
        stops: Where to wait. Several of one layer follow each other. A layer that is called
            several times is stopped at once, at the first call.
        verbose: 1 for a progress bar over the stops.
        as_given: Inside `as_given(layer)` a layer of the stops has the values that it came with.
            Then each batch goes through twice, in front as through the given model: this run is
            what `Stop.add_reference` sees.

    Returns:
        The stops that no batch has reached outside of compiled code.

    Raises:
        NotPrunableError: Batches that reach other layers, or in another order, than the first.
    """
    progress = keras.utils.Progbar(len(stops), verbose=verbose)
    runs = [batch for batch in batches for _ in range(1 if as_given is None else 2)]
    steps = _InStep(len(runs), progress, as_given)
    with _hooked(stops, steps), from_zero_states(model):
        if len(runs) == 1:
            steps.run(model, 0, runs[0])
        else:
            threads = [
                threading.Thread(target=steps.run, args=(model, number, batch), daemon=True)
                for number, batch in enumerate(runs)
            ]
            for thread in threads:
                thread.start()
            try:
                for thread in threads:
                    thread.join()
            except BaseException as error:  # Ctrl+C: the threads must not outlive the hooks
                steps.fail(error)
                for thread in threads:
                    thread.join()
    if steps.error is not None:
        raise steps.error
    return [stop for stop in stops if stop not in steps.reached]


class _Abandoned(BaseException):
    """Ends the call of a batch once another one has failed; no model catches it by mistake."""


class _InStep:
    """The turns of the batches: each goes to the next stop, then the following one does.

    With `as_given` every second run, from the first, is a reference.
    """

    def __init__(self, count: int, progress: Any, as_given: Any = None) -> None:
        self._turns = [threading.Semaphore(0) for _ in range(count)]
        self._turns[0].release()
        self._own = threading.local()
        self._at: Stop | None = None
        self._progress = progress
        self._as_given = as_given
        self.reached: set[Stop] = set()
        self.error: BaseException | None = None

    def run(self, model: Any, number: int, batch: Any) -> None:
        """One batch, from its first turn to its last."""
        self._own.number, self._own.passed = number, set()
        try:
            self._wait(number)
            with without_gradients():
                model(batch, training=False)
            self._arrive(number, None)
        except _Abandoned:
            pass
        except BaseException as error:
            self.fail(error)

    def stop(self, stop: Stop, inputs: Any, options: dict[str, Any]) -> None:
        """The batch of this thread has reached a stop."""
        if stop in self._own.passed or is_traced(inputs):
            return
        self._own.passed.add(stop)
        if self._is_reference:
            stop.add_reference(inputs)
        else:
            stop.add(inputs, **options)
        self._arrive(self._own.number, stop)
        self._wait(self._own.number)

    def values_of(self, layer: Any, inputs: Any) -> contextlib.AbstractContextManager[None]:
        """Inside, the layer has the values for the run of this thread."""
        if not self._is_reference or is_traced(inputs):
            return contextlib.nullcontext()
        found: contextlib.AbstractContextManager[None] = self._as_given(layer)
        return found

    @property
    def _is_reference(self) -> bool:
        return self._as_given is not None and self._own.number % 2 == 0

    def fail(self, error: BaseException) -> None:
        """Ends all batches at their next turn."""
        self.error = self.error or error
        for turn in self._turns:
            turn.release()

    def _arrive(self, number: int, stop: Stop | None) -> None:
        """The last batch to arrive finishes the stop; `None` is the end of the model."""
        if number == 0:
            self._at = stop
        elif stop is not self._at:
            first, other = ("the end" if s is None else f"'{s.path}'" for s in (self._at, stop))
            raise NotPrunableError(
                "Calibration batches must go through the layers of a model in one order, as its "
                f"first batch does; `exclude` layers that depend on the data. Received: {other} "
                f"reached by batch {number if self._as_given is None else number // 2} where the "
                f"first one reached {first}"
            )
        if number == len(self._turns) - 1 and stop is not None:
            stop.finish()
            self.reached.add(stop)
            self._progress.update(len(self.reached))
        self._turns[(number + 1) % len(self._turns)].release()

    def _wait(self, number: int) -> None:
        self._turns[number].acquire()
        if self.error is not None:
            raise _Abandoned


@contextlib.contextmanager
def _hooked(stops: Sequence[Stop], steps: _InStep) -> Iterator[None]:
    """Inside, calls of the layers lead through their stops first."""
    by_layer: dict[int, list[Stop]] = {}
    for stop in stops:
        by_layer.setdefault(id(stop.layer), []).append(stop)
    with contextlib.ExitStack() as stack:
        for own in by_layer.values():
            hook = _hook(own[0].layer.call, own, steps)
            stack.enter_context(mock.patch.object(own[0].layer, "call", hook))
        yield


def _hook(call: Callable[..., Any], stops: list[Stop], steps: _InStep) -> Callable[..., Any]:
    def stopped(*args: Any, **kwargs: Any) -> Any:
        options = dict(kwargs)
        inputs = args[0] if args else options.pop("inputs")
        for stop in stops:
            steps.stop(stop, inputs, options)
        with steps.values_of(stops[0].layer, inputs):
            return call(*args, **kwargs)

    return stopped
