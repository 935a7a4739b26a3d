"""The inputs of a model's layers on calibration data, one layer after the other."""

import abc
import contextlib
import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import is_traced, without_gradients
from keras_sparse_ortho._data import Batch, first_batches, is_batched, samples
from keras_sparse_ortho._keras_internals import level_of_user, replaced
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import from_zero_states

_ROWS = 64
_MOST_BATCHES = 64
# With fewer different rows OBS is often behind magnitudes, which need no data.
_FEWEST_ROWS = 16


class Stop(abc.ABC):
    """What is done with the inputs of one layer.

    Args:
        layer: The layer.
        path: Its path, or that of its kernel, for messages.
    """

    def __init__(self, layer: Any, path: str) -> None:
        self.layer = layer
        self.path = path

    @abc.abstractmethod
    def add(self, inputs: Any, reference: Any = None, **options: Any) -> None:
        """Takes in the inputs of one batch, those in the model as given, and other arguments."""

    @abc.abstractmethod
    def finish(self) -> None:
        """Called after the last batch. The layers behind see the values assigned here."""


def calibration_batches(data: Any) -> list[Any]:
    """The inputs of calibration data: arrays in batches of 64 rows, else the first 64 batches."""
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
    as_given: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
) -> list[Stop]:
    """Finishes one stop after the other, in the order in which the model calls their layers.

    For each stop every batch goes through the model up to the layer, so memory is that of one
    batch. A layer that is called several times is stopped at its first call.

    Args:
        model: The model, called with `training=False`.
        batches: Inputs.
        stops: What is done at which layers; several of one layer follow each other.
        verbose: 1 for a progress bar over the stops.
        as_given: Inside, the model has the values that it came with. Then each batch goes through
            that model, too, for the `reference` of `Stop.add`.

    Returns:
        The stops that no batch has reached outside of compiled code.

    Raises:
        NotPrunableError: Batches that reach other layers, or in another order, than the first.
    """
    progress = keras.utils.Progbar(len(stops), verbose=verbose)
    with from_zero_states(model), without_gradients():
        order = _order(model, batches, stops)
        for done, stop in enumerate(order, 1):
            for batch in batches:
                reference = None
                if as_given is not None:
                    with as_given():
                        reference, _ = _inputs(model, batch, stop)
                inputs, options = _inputs(model, batch, stop)
                stop.add(inputs, reference, **options)
            stop.finish()
            progress.update(done)
    return [stop for stop in stops if stop not in order]


def _order(model: Any, batches: Sequence[Any], stops: Sequence[Stop]) -> list[Stop]:
    """The stops in the order of calls, which must be the same for all batches."""
    first: list[Stop] = []
    for number, batch in enumerate(batches):
        reached: list[Stop] = []
        with contextlib.ExitStack() as stack:
            for layer in {id(stop.layer): stop.layer for stop in stops}.values():
                own = [stop for stop in stops if stop.layer is layer]
                hook = functools.partial(_noting, layer.call, own, reached)
                stack.enter_context(replaced(layer, "call", hook))
            model(batch, training=False)
        first = first if number else reached
        for pair in itertools.zip_longest(first, reached):
            if pair[0] is not pair[1]:
                before, now = ("the end" if s is None else f"'{s.path}'" for s in pair)
                raise NotPrunableError(
                    "Calibration batches must go through the layers of a model in one order, as "
                    "its first batch does; `exclude` layers that depend on the data. Received: "
                    f"{now} reached by batch {number} where the first one reached {before}"
                )
    return first


def _noting(call: Any, stops: list[Stop], reached: list[Stop], *args: Any, **kwargs: Any) -> Any:
    """Stands in for a layer's `call`."""
    if not is_traced(args[0] if args else kwargs["inputs"]):
        reached += [stop for stop in stops if stop not in reached]
    return call(*args, **kwargs)


class _Reached(BaseException):
    """Ends a call of the model, with the arguments of a layer; no model catches it by mistake."""


def _inputs(model: Any, batch: Any, stop: Stop) -> tuple[Any, dict[str, Any]]:
    """The first argument of a layer for a batch, and the others."""
    call = stop.layer.call

    def reach(*args: Any, **kwargs: Any) -> Any:
        inputs = args[0] if args else kwargs["inputs"]
        if is_traced(inputs):
            return call(*args, **kwargs)
        kwargs.pop("inputs", None)
        raise _Reached(inputs, kwargs)

    with replaced(stop.layer, "call", reach):
        try:
            model(batch, training=False)
        except _Reached as reached:
            return reached.args
    raise NotPrunableError(
        f"Every calibration batch must reach '{stop.path}' after the layers before it have been "
        "changed, too; `exclude` layers that depend on the data. Received: the end of the model"
    )
