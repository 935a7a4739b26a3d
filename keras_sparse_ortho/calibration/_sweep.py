"""A sweep over layers: each gets its inputs from all batches, then may change values."""

import collections
import contextlib
import functools
import pathlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import keras
import numpy as np

from keras_sparse_ortho._interception import observe
from keras_sparse_ortho._keras_internals import (
    computes_its_graph,
    from_zero_states,
)
from keras_sparse_ortho._values import is_traced, to_numpy, without_gradients
from keras_sparse_ortho.calibration._graph_sweep import (
    CallRecorder,
    GraphWalk,
    LayerCall,
    Nested,
    Scope,
)
from keras_sparse_ortho.errors import NotPrunableError


class Stop(Protocol):
    """A layer whose inputs are wanted."""

    layer: Any
    path: str

    def add(self, inputs: Any, reference: Any = None, **options: Any) -> None:
        """Takes the inputs of one call.

        Args:
            inputs: Tensor. The first argument of the call.
            reference: Tensor. The same in the model as given, where the sweep has it.
            **options: Other arguments of the call.
        """

    def finish(self) -> None:
        """All inputs were added: may change values of the model."""


class Stream(Protocol):
    """A pass of all batches, with the values that the model has in a scope."""

    def calls(
        self,
        stop: Any,
        count: int,
        number: int,
    ) -> list[LayerCall]:
        """The first calls of a stop's layer, at most `count`, for the batch of a number."""

    def outputs(
        self,
        stop: Any,
        scope: Scope,
        number: int,
    ) -> list[Any]:
        """The model's outputs for a batch, with the values of a scope from the layer on."""


class Walk(Protocol):
    """How batches come to the stops."""

    def count_calls(
        self,
        stops: Sequence[Any],
        scope: Scope,
    ) -> dict[Any, int]:
        """How often the first batch calls each stop's layer, in the order of first calls."""

    def stream(self, scope: Scope) -> Stream:
        """A pass that begins at the inputs."""


class CallWalk:
    """Sends each batch through the model up to the layer, once for each stop.

    For models that are no graphs: nothing says where a layer is in them.
    """

    def __init__(
        self,
        model: Any,
        batches: Sequence[Any],
    ) -> None:
        self.model = model
        self.batches = batches

    def count_calls(
        self,
        stops: Sequence[Any],
        scope: Scope,
    ) -> dict[Any, int]:
        """How often the first batch calls each stop's layer, in the order of first calls."""
        counts: collections.Counter[Any] = collections.Counter()

        def count(
            layer: Any, call: Callable[..., Any], *args: Any, **kwargs: Any
        ) -> Any:
            if not is_traced(args[0] if args else kwargs["inputs"]):
                counts.update(stop for stop in stops if stop.layer is layer)
            return call(*args, **kwargs)

        with scope(), observe((stop.layer for stop in stops), count):
            self.model(self.batches[0], training=False)
        return dict(counts)

    def stream(self, scope: Scope) -> "CallStream":
        return CallStream(self, scope)


class CallStream:
    """Passes of batches from the inputs up to a layer, with the values of a scope."""

    def __init__(
        self,
        walk: CallWalk,
        scope: Scope,
    ) -> None:
        self._walk = walk
        self._scope = scope

    def calls(
        self,
        stop: Any,
        count: int,
        number: int,
    ) -> list[LayerCall]:
        """The calls of a stop's layer for a batch."""
        recorder = CallRecorder(count)
        with self._scope(), observe([stop.layer], recorder):
            self._walk.model(self._walk.batches[number], training=False)
        return recorder.calls

    def outputs(
        self,
        stop: Any,
        scope: Scope,
        number: int,
    ) -> list[Any]:
        """The model's outputs for a batch, with the values of both scopes."""
        with self._scope(), scope():
            outputs = self._walk.model(
                self._walk.batches[number], training=False
            )
        return keras.tree.flatten(outputs)


def sweep(
    model: Any,
    batches: Sequence[Any],
    stops: Sequence[Any],
    verbose: int = 0,
    changed: Scope = contextlib.nullcontext,
    *,
    with_reference: bool = False,
) -> list[Any]:
    """Finishes stop after stop, in the order of calls; returns stops that no call reaches.

    In a model that computes its graph, each batch goes through it once, and waits at each stop.
    At most half a gigabyte of waiting tensors is in memory, the others are on disk. In other models
    each batch goes through the model up to each stop's last call, one batch at a time.

    Args:
        model: Model.
        batches: list of its inputs.
        stops: list of `Stop`.
        verbose: As for `fit`.
        changed: callable. Inside `changed()` the model has the values that stops gave it.
        with_reference: bool. Whether `add` gets a `reference`, or `None`.

    Raises:
        NotPrunableError: A batch that does not reach a layer that the first one reaches.
    """
    progress = keras.utils.Progbar(len(stops), verbose=verbose)
    with (
        from_zero_states(model),
        without_gradients(),
        _walk_of(model, batches) as walk,
    ):
        counts = walk.count_calls(stops, changed)
        stream = walk.stream(changed)
        as_given = (
            walk.stream(contextlib.nullcontext) if with_reference else None
        )
        for done, (stop, count) in enumerate(counts.items(), 1):
            for number in range(len(batches)):
                _add_batch(
                    stop,
                    count,
                    number,
                    stream,
                    as_given,
                )
            stop.finish()
            progress.update(done)
    return [stop for stop in stops if stop not in counts]


def change_each(
    model: Any,
    batches: Sequence[Any],
    stops: Sequence[Any],
    change: Callable[[Any], contextlib.AbstractContextManager[Any]],
    take: Callable[[Any, list[np.ndarray]], None],
    verbose: int = 0,
) -> None:
    """Computes the outputs of a model with the values of one layer changed, for layer after layer.

    In a model that computes its graph only the layers behind the changed one compute again.

    Args:
        model: Model.
        batches: list of its inputs.
        stops: list of `Stop`. The layers to change, one at a time.
        change: callable. `change(stop)` is a context in which the layer has its other values.
        take: callable. Gets each stop, and the outputs for all batches in one flat list.
        verbose: As for `fit`.
    """
    progress = keras.utils.Progbar(len(stops), verbose=verbose)
    with (
        from_zero_states(model),
        without_gradients(),
        _walk_of(model, batches) as walk,
    ):
        counts = walk.count_calls(stops, contextlib.nullcontext)
        stream = walk.stream(contextlib.nullcontext)
        for done, stop in enumerate(counts, 1):
            outputs: list[np.ndarray] = []
            for number in range(len(batches)):
                tensors = stream.outputs(
                    stop, functools.partial(change, stop), number
                )
                outputs.extend(map(to_numpy, tensors))
            take(stop, outputs)
            progress.update(done)


def reached_stops(
    model: keras.Model,
    batch: Nested,
    stops: Sequence[Stop],
) -> list[Stop]:
    """The stops whose layers a batch calls outside of compiled code, in the order of first calls.

    In a model that computes its graph, one sample of the batch shows it.
    """
    with (
        from_zero_states(model),
        without_gradients(),
        _walk_of(model, [batch]) as walk,
    ):
        return [*walk.count_calls(stops, contextlib.nullcontext)]


@contextlib.contextmanager
def _walk_of(
    model: Any,
    batches: Sequence[Any],
) -> Iterator[Walk]:
    if not computes_its_graph(model):
        yield CallWalk(model, batches)
        return
    with tempfile.TemporaryDirectory(
        prefix="kso-", ignore_cleanup_errors=True
    ) as folder:
        yield GraphWalk(model, batches, pathlib.Path(folder))


def _add_batch(
    stop: Any,
    count: int,
    number: int,
    stream: Stream,
    as_given: Stream | None,
) -> None:
    """Adds the inputs of a batch, with those in the model as given, to a stop."""
    references: list[LayerCall] = []
    if as_given is not None:
        references = _calls(
            as_given,
            stop,
            count,
            number,
        )
    for position, call in enumerate(
        _calls(
            stream,
            stop,
            count,
            number,
        )
    ):
        if as_given is None:
            stop.add(call.inputs, None, **call.options)
        elif position < len(references):
            stop.add(call.inputs, references[position].inputs, **call.options)


def _calls(
    stream: Stream,
    stop: Any,
    count: int,
    number: int,
) -> list[LayerCall]:
    calls = stream.calls(stop, count, number)
    if not calls:
        raise NotPrunableError(
            f"Every calibration batch must reach {stop.path!r} after the layers before it have "
            "been changed, too; `exclude` layers that depend on the data. Received: the end of "
            "the model"
        )
    return calls
