"""`distill`: trains a sparse or quantized model towards the dense one that it was made from."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checked_data import check_inputs, warn_of_equal_rows, warn_of_weights
from keras_sparse_ortho._checks import check_integer, check_number, other_keywords
from keras_sparse_ortho._data import all_rows, rows_at
from keras_sparse_ortho._keras_internals import (
    GraphCall,
    computes_its_graph,
    graph_calls,
    graph_ends,
)
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.callbacks import UpdateMasks
from keras_sparse_ortho.models import output_kinds, prunable_weights
from keras_sparse_ortho.parametrizations import ScheduledMask

_WARM = 0.05  # of the steps
_LEAST = 1e-30  # a probability whose logarithm float32 still knows
_ROUNDED = 1e-6  # at this distance from 1 float32 rounds probabilities


@other_keywords
def distill(
    student: keras.Model,
    teacher: keras.Model,
    data: Any,
    *,
    epochs: int = 3,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
    seed: int | None = 0,
    outputs: str | Sequence[str] | None = None,
    verbose: int | str = "auto",
) -> keras.callbacks.History:
    """Trains `student`, in place, to answer as `teacher` does, on rows without labels.

        loss = sum of  mean (f_student - f_teacher)^2 / var f_teacher  over logits and features f

    The features are the inputs of the last layer, if both models are graphs and have as many of
    them. The logits of outputs that are probabilities are their logarithms. The optimizer is Adam;
    its rate rises over the first 5% of the steps and falls to zero as a cosine. Masks on a schedule
    (`MagnitudeMask`) move as it says, so gradual pruning takes two lines.

    Args:
        student: A built model with the inputs and outputs of the teacher: from `parametrize`, for
            masks that move; from `prune`, for masks that stay; from `quantize_aware`.
        teacher: The trained model, which stays as it is.
        data: Rows of inputs, nested as the model takes them; `(x, y)` and batches of these, as for
            `fit`, work as well. Labels are not used. A few thousand rows are usual.
        epochs: Passes over the rows.
        batch_size: Rows of a step.
        learning_rate: The highest rate.
        seed: Decides the order of the rows. `None`: another in every call.
        outputs: The kind of the model's outputs: `"softmax"` or `"sigmoid"`, probabilities with
            logits; or `"values"`. A list has one for each output. Default: what the teacher's last
            layers and its loss say. Subclassed models without a loss show nothing: `"values"`.
        verbose: As for `fit`.

    Returns:
        The history of `fit`. The student is not compiled by it.

    Raises:
        ValueError: If the outputs of the models differ in number or shape, there are no rows or
            rows that the models cannot take, or the loss does not stay finite.

    After an error, and if training is interrupted, the student is as it was before.

    Warns:
        UserWarning: Equal rows; sample weights, which are not used; a data set or generator of
            which not all rows were read, as it may be endless.

    Limits: all rows, and the teacher's features of them, are in memory. With a few hundred rows
    use `prune(score="obs")`, which needs no training. Agreement on the rows of `data` says little:
    judge on others.

    Examples:
        >>> import keras, numpy as np
        >>> import keras_sparse_ortho as kso
        >>> dense = keras.Sequential([
        ...     keras.Input((8,)),
        ...     keras.layers.Dense(32, "relu"),
        ...     keras.layers.Dense(3, "softmax"),
        ... ])
        >>> rows = np.random.default_rng(0).normal(size=(256, 8)).astype("float32")
        >>> sparse = kso.parametrize(dense, kso.MagnitudeMask(kso.schedules.Cubic(0.25)))
        >>> history = distill(sparse, dense, rows, verbose=0)
        >>> round(kso.report(sparse).density, 2)
        0.25

    Reference: Hinton et al., 2015, arXiv 1503.02531; Romero et al., 2015, arXiv 1412.6550.
    """
    check_integer("epochs", epochs)
    check_integer("batch_size", batch_size)
    check_number("learning_rate", learning_rate)
    batch = all_rows(data)
    x = batch[0]
    check_inputs(teacher, x, text=False)
    warn_of_equal_rows([batch])
    warn_of_weights([batch])
    ends = [student, teacher]
    if all(map(computes_its_graph, ends)):
        graphs = [_with_features(model) for model in ends]
        if [one.shape for one in graphs[0].outputs] == [one.shape for one in graphs[1].outputs]:
            ends = graphs
    wanted = keras.tree.flatten(ends[1].predict(x, batch_size=256, verbose=0))
    given = keras.tree.flatten(ends[0].predict(rows_at(x, slice(0, 1)), verbose=0))
    shapes = [[one.shape[1:] for one in outputs] for outputs in (given, wanted)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            "`student` must have outputs of the shapes of `teacher`'s. "
            f"Received: {shapes[0]} and {shapes[1]}"
        )
    # A graph has its features behind the outputs.
    count = len(keras.tree.flatten(teacher.outputs)) if ends[1] is not teacher else len(wanted)
    kinds = [_LOGITS[name] for name in _output_names(teacher, outputs, count)]
    kinds += [_same] * (len(wanted) - count)
    wanted = [to_numpy(of(one)) for of, one in zip(kinds, wanted, strict=True)]
    names = [f"output_{k}" if k < count else f"feature_{k - count}" for k in range(len(wanted))]
    rows = _Rows(x, dict(zip(names, wanted, strict=True)), batch_size, seed)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(epochs * len(rows), 2),
        warmup_target=learning_rate,
        warmup_steps=max(round(_WARM * epochs * len(rows)), 1),
    )
    trained = _Named(ends[0], names)
    losses = [_loss(of, one.var()) for of, one in zip(kinds, wanted, strict=True)]
    trained.compile(keras.optimizers.Adam(rate), dict(zip(names, losses, strict=True)))
    moving = any(isinstance(w.storage, ScheduledMask) for w in prunable_weights(student))
    updates = [UpdateMasks()] if moving else None
    with _restored_on_errors(student):
        history = trained.fit(rows, epochs=epochs, verbose=verbose, callbacks=updates)
        if not np.isfinite(history.history["loss"][-1]):
            raise ValueError(
                "The loss must stay finite: lower `learning_rate`, or look for a layer whose "
                "gradient is not, such as a square root at 0. "
                f"Received: {learning_rate=}, loss=nan"
            )
    return history


@contextlib.contextmanager
def _restored_on_errors(model: keras.Model) -> Iterator[None]:
    """Gives a model its values back if training fails or is interrupted.

    On JAX `fit` frees the arrays of a model and hands new ones over at the end of an epoch.
    """
    # Seed states too. As tensors: what compact storage is given as arrays is checked against
    # values that may be freed.
    values = [(variable, keras.ops.copy(variable.value)) for variable in model.variables]
    try:
        yield
    except BaseException:
        for variable, value in values:
            assign(variable, value)
        raise


class _Named(keras.Model):
    """A model with its outputs by name, whatever their structure."""

    def __init__(self, model: keras.Model, names: list[str]) -> None:
        super().__init__(name=f"{model.name}_distilled")
        self.model, self._names = model, names

    def call(self, inputs: Any, training: bool | None = None) -> dict[str, Any]:
        outputs = keras.tree.flatten(self.model(inputs, training=training))
        return dict(zip(self._names, outputs, strict=True))


class _Rows(keras.utils.PyDataset):
    """Whole batches of rows and targets, in another order in every epoch."""

    def __init__(self, x: Any, targets: dict[str, Any], size: int, seed: int | None) -> None:
        super().__init__()
        self._x, self._targets = x, targets
        self._rng = np.random.default_rng(seed)
        self._count = len(next(iter(targets.values())))
        self._size = min(size, self._count)
        self.on_epoch_end()

    def on_epoch_end(self) -> None:
        self._order = self._rng.permutation(self._count)

    def __len__(self) -> int:
        return len(self._order) // self._size

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        at = self._order[number * self._size : (number + 1) * self._size]
        return rows_at(self._x, at), rows_at(self._targets, at)


def _with_features(model: keras.Model) -> keras.Model:
    """The graph with the inputs of its last layers as further outputs."""
    makers = {id(tensor): call for call in graph_calls(model) for tensor in call.outputs}
    outputs = keras.tree.flatten(model.outputs)
    features: dict[int, Any] = {}
    for tensor in outputs:
        call = makers[id(tensor)]
        read = _floats(call)
        while len(read) == 1 and not getattr(call.operation, "weights", None):
            call = makers[id(read[0])]  # an activation, or a reshape
            read = _floats(call)
        for feature in read:
            if makers[id(feature)].inputs:  # not what goes into the model
                features[id(feature)] = feature
    return keras.Model(graph_ends(model)[0], [*outputs, *features.values()])


def _floats(call: GraphCall) -> list[Any]:
    """The inputs of a call without masks and indices, which teach nothing."""
    return [tensor for tensor in call.inputs if keras.backend.is_float_dtype(tensor.dtype)]


def _same(values: Any) -> Any:
    return values


def _output_names(teacher: Any, outputs: str | Sequence[str] | None, count: int) -> list[str]:
    """The kind of each output, a key of `_LOGITS`: as given, or as the teacher shows."""
    if outputs is None:
        kinds = output_kinds(teacher, count)
        return [kind.probabilities or "values" for kind in kinds]
    names = [outputs] * count if isinstance(outputs, str) else list(outputs)
    if len(names) != count or any(name not in _LOGITS for name in names):
        raise ValueError(
            f"`outputs` must be one of {sorted(_LOGITS)}, or a list with one of them for each of "
            f"the {count} outputs. Received: outputs={outputs!r}"
        )
    return names


def _logit(p: Any) -> Any:
    p = keras.ops.clip(p, _ROUNDED, 1.0 - _ROUNDED)
    return keras.ops.log(p) - keras.ops.log(1.0 - p)


def _centered_logarithm(p: Any) -> Any:
    logits = keras.ops.log(keras.ops.maximum(p, _LEAST))
    return logits - keras.ops.mean(logits, axis=-1, keepdims=True)


# From outputs of a kind to the logits that the squared error compares.
_LOGITS: dict[str, Callable[[Any], Any]] = {
    "softmax": _centered_logarithm,
    "sigmoid": _logit,
    "values": _same,
}


def _loss(of: Callable[[Any], Any], variance: float) -> Callable[[Any, Any], Any]:
    def loss(wanted: Any, given: Any) -> Any:
        return keras.ops.mean(keras.ops.square(wanted - of(given))) / (float(variance) or 1.0)

    return loss
