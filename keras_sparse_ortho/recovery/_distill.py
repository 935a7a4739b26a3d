"""`distill`: trains a sparse or quantized model towards the dense one that it was made from."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Sequence

import keras
import numpy as np

from keras_sparse_ortho._checked_data import (
    check_inputs,
    warn_of_few_rows,
    warn_of_weights,
)
from keras_sparse_ortho._checks import (
    as_float,
    as_text,
    check_integer,
    check_number,
    other_keywords,
)
from keras_sparse_ortho._data import all_rows, rows_at
from keras_sparse_ortho._keras_internals import (
    GraphCall,
    computes_its_graph,
    graph_calls,
    graph_ends,
    warn_user,
)
from keras_sparse_ortho._types import Nested, Tensor
from keras_sparse_ortho._values import assign, to_numpy
from keras_sparse_ortho.callbacks import UpdateMasks
from keras_sparse_ortho.models import (
    check_built,
    output_kinds,
    prunable_weights,
)
from keras_sparse_ortho.parametrizations import ScheduledMask
from keras_sparse_ortho.recovery._backtracking import STAGES, Backtracking
from keras_sparse_ortho.recovery._without_noise import (
    with_fixed_statistics,
    without_noise,
)

ToLogits = Callable[[Tensor], Tensor]
Loss = Callable[[Tensor, Tensor], Tensor]

_WARM_UP = 0.05  # of the steps
_HELD_BATCH = 256  # rows that judge, at once
_SMALLEST = 1e-30  # a probability whose logarithm float32 still knows
_ROUNDED = 1e-6  # at this distance from 1 float32 rounds probabilities


@other_keywords
def distill(
    student: keras.Model,
    teacher: keras.Model,
    data: object,
    *,
    epochs: int = 3,
    batch_size: int = 32,
    learning_rate: float = 3e-3,
    validation_split: float = 0.0,
    minutes: float | None = None,
    seed: int | None = 0,
    outputs: str | Sequence[str] | None = None,
    verbose: int | str = "auto",
) -> keras.callbacks.History:
    """Trains `student`, in place, to answer as `teacher` does, on rows without labels.

        loss = sum of  mean (f_student - f_teacher)^2 / var f_teacher  over logits and features f

    The features are the inputs of the last layer, if both models are graphs and have as many of
    them. The logits of outputs that are probabilities are their logarithms. The optimizer is Adam;
    its rate rises over the first 5% of the steps and falls to zero as a cosine. Masks on a schedule
    (`MagnitudeMask`) move as it says, so gradual pruning takes two lines. Dropout, noise and
    augmentation act as in inference, as they do in the teacher.

    Args:
        student: A built model with the inputs and outputs of the teacher: from `parametrize`, for
            masks that move; from `prune`, for masks that stay; from `quantize_aware`.
        teacher: The trained model, which stays as it is.
        data: Rows of inputs, nested as the model takes them; `(x, y)` and batches of these, as for
            `fit`, work as well. Labels are not used. A few thousand rows are usual.
        epochs: Passes over the rows.
        batch_size: Rows of a step.
        learning_rate: The highest rate.
        validation_split: A share of the rows that no step sees. They protect the student. Training
            has 12 stages: after one that raises their loss by a quarter, the student goes back to
            its best values, and the rate of later stages is a quarter. It ends with its best
            values, which may be those before training. Statistics of batch normalization stay, and
            masks must stay. 0: all rows train.
        minutes: With `validation_split`, how long the call may take, about: training ends after the
            stage that the time allows, and the rate falls to zero by then. Default: no limit.
        seed: Decides the order of the rows. `None`: another in every call.
        outputs: The kind of the model's outputs: `"softmax"` or `"sigmoid"`, probabilities with
            logits; or `"values"`. A list has one for each output. Default: what the teacher's last
            layers and its loss say. Subclassed models without a loss show nothing: `"values"`.
        verbose: As for `fit`.

    Returns:
        The history of `fit`. With `validation_split` it has the stages as epochs, with the
        `learning_rate` of each, and `improved`: 1 where the loss on held-out rows was the lowest so
        far, else 0. The student is not compiled by it.

    Raises:
        ValueError: If the outputs of the models differ in number or shape, there are no rows or
            rows that the models cannot take, or the loss does not stay finite; for a
            `validation_split` with masks on a schedule; for `minutes` without `validation_split`.

    After an error, and if training is interrupted, the student is as it was before.

    Warns:
        UserWarning: No rate lowers the loss on held-out rows, so that the student is as it was.
            Fewer than 16 different rows; sample weights, which are not used; a data set or
            generator of which not all rows were read, as it may be endless.

    Limits: all rows, and the teacher's features of them, are in memory. A short training at a high
    rate can do harm, above all where weights are as small as `learning_rate`: steps of Adam do not
    depend on the size of a weight. `validation_split` protects from it. With a few hundred rows use
    `prune(score="obs")`, which needs no training. Agreement on the rows of `data` says little:
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
    learning_rate = _checked_rate(learning_rate)
    _check_models(student, teacher)
    _check_validation_split(validation_split, student)
    end = _end_of(minutes, validation_split)
    batch = all_rows(data)
    x = batch[0]
    check_inputs(teacher, x, text=False)
    warn_of_few_rows([batch], "Training")
    warn_of_weights([batch])
    targets = _Targets.of(student, teacher, x, outputs)
    options = _Options(epochs, batch_size, learning_rate, end, seed, verbose)
    with _restored_on_errors(student), without_noise(student):
        if validation_split:
            held_count = _held_count(validation_split, targets.count)
            return _fit_beside_held_rows(
                student, x, targets, held_count, options
            )
        return _fit(student, x, targets, options)


@dataclasses.dataclass(frozen=True)
class _Options:
    """How `distill` trains: its arguments, and the end of its time by `time.monotonic`."""

    epochs: int
    batch_size: int
    learning_rate: float
    end: float
    seed: int | None
    verbose: int | str


def _fit(
    student: keras.Model, x: Nested, targets: "_Targets", options: _Options
) -> keras.callbacks.History:
    """Trains on all rows, with one schedule of rates."""
    epochs = options.epochs
    rows = _Rows(
        x, targets.values, options.batch_size, epochs, epochs, options.seed
    )
    steps = epochs * len(rows)
    rate = keras.optimizers.schedules.CosineDecay(
        0.0,
        max(steps, 2),
        warmup_target=options.learning_rate,
        warmup_steps=max(round(_WARM_UP * steps), 1),
    )
    trained = targets.named_student()
    trained.compile(keras.optimizers.Adam(rate), targets.losses())
    updates = None
    if _has_schedules(student):
        updates = [UpdateMasks()]
    history = trained.fit(
        rows, epochs=epochs, verbose=options.verbose, callbacks=updates
    )
    if not np.isfinite(history.history["loss"][-1]):
        raise ValueError(
            "The loss must stay finite: lower `learning_rate`, or look for a layer whose gradient "
            "is not, such as a square root at 0. "
            f"Received: learning_rate={options.learning_rate}, loss=nan"
        )
    return history


def _fit_beside_held_rows(
    student: keras.Model,
    x: Nested,
    targets: "_Targets",
    held_count: int,
    options: _Options,
) -> keras.callbacks.History:
    """Trains in stages. A stage that does harm on held-out rows is undone."""
    order = np.random.default_rng(options.seed).permutation(targets.count)
    held = order[:held_count]
    others = order[held_count:]
    held_rows = rows_at(x, held), rows_at(targets.values, held)
    rows = _Rows(
        rows_at(x, others),
        rows_at(targets.values, others),
        options.batch_size,
        options.epochs,
        STAGES,
        options.seed,
    )
    trained = targets.named_student()
    optimizer = keras.optimizers.Adam(options.learning_rate)
    trained.compile(optimizer, targets.losses())
    loss = trained.evaluate(
        *held_rows, batch_size=_HELD_BATCH, verbose=0, return_dict=True
    )["loss"]
    backtracking = Backtracking(
        student, loss, options.learning_rate, rows.stages, options.end
    )
    # Moving statistics lag behind, and good stages would look harmful.
    with with_fixed_statistics(student):
        history = trained.fit(
            rows,
            epochs=rows.stages,
            verbose=options.verbose,
            validation_data=held_rows,
            validation_batch_size=_HELD_BATCH,
            callbacks=[backtracking],
        )
    if not any(history.history["improved"]):
        warn_user(
            "No rate lowered the loss on held-out rows, so the student is as it was. "
            f"Its loss on these is {loss:.3g}. Give more rows, or lower `learning_rate`. "
            f"Received: learning_rate={options.learning_rate}"
        )
    return history


def _held_count(share: float, count: int) -> int:
    """The number of held-out rows: at least one, and one trains."""
    if count < 2:
        raise ValueError(
            "`data` must have at least two rows: one trains, and one judges. "
            f"Received: {count} rows and validation_split={share}"
        )
    held_count = max(round(share * count), 1)
    return min(held_count, count - 1)


def _end_of(minutes: object, validation_split: float) -> float:
    """When training ends, by `time.monotonic`; ValueError for no time, or without stages."""
    if minutes is None:
        return math.inf
    limit = check_number("minutes", minutes)
    if limit <= 0.0:
        raise ValueError(
            f"`minutes` must be above 0. Received: minutes={as_text(minutes)}"
        )
    if not validation_split:
        raise ValueError(
            "`minutes` needs a `validation_split`, such as 0.1: training ends after one of the "
            "stages that it has. Without held-out rows, give fewer `epochs`. "
            f"Received: minutes={as_text(minutes)} and validation_split={validation_split}"
        )
    return time.monotonic() + 60.0 * limit


def _has_schedules(student: keras.Model) -> bool:
    return any(
        isinstance(weight.storage, ScheduledMask)
        for weight in prunable_weights(student)
    )


def _checked_rate(learning_rate: object) -> float:
    """The rate as a float; raises ValueError unless it is above 0."""
    rate = check_number("learning_rate", learning_rate)
    if rate <= 0.0:
        raise ValueError(
            "`learning_rate` must be above 0. "
            f"Received: learning_rate={as_text(learning_rate)}"
        )
    return rate


def _check_models(student: keras.Model, teacher: keras.Model) -> None:
    """Raises ValueError for one model in two roles, and for a student that is not built."""
    if student is teacher:
        raise ValueError(
            "`student` and `teacher` must be two models: the student is trained in place, the "
            f"teacher stays. Received: {student.name!r} twice"
        )
    check_built(student)


def _check_validation_split(share: object, student: keras.Model) -> None:
    """Raises ValueError for a share that is none, or with masks that move."""
    number = as_float(share)
    if not 0.0 <= number < 1.0:
        raise ValueError(
            "`validation_split` must be a number from 0 to less than 1. "
            f"Received: validation_split={as_text(share)}"
        )
    if number > 0.0 and _has_schedules(student):
        raise ValueError(
            "`validation_split` needs masks that stay: a stage that is undone would bring live "
            "weights back. Train without it, or `strip` and `prune` first. "
            f"Received: validation_split={as_text(share)} and masks on a schedule"
        )


@dataclasses.dataclass(frozen=True)
class _Targets:
    """The logits and features that a student is trained towards.

    Args:
        student: Model that gives outputs, and the features behind them.
        values: dict from the name of an output to the teacher's values, in the student's order.
        logits: list of functions from outputs to the values that are compared.
    """

    student: keras.Model
    values: dict[str, np.ndarray]
    logits: list[ToLogits]

    @classmethod
    def of(
        cls,
        student: keras.Model,
        teacher: keras.Model,
        x: Nested,
        outputs: str | Sequence[str] | None,
    ) -> "_Targets":
        """The targets for rows `x`; ValueError for models with other outputs."""
        student_end, teacher_end = _with_equal_features(student, teacher)
        values = keras.tree.flatten(
            teacher_end.predict(x, batch_size=256, verbose=0)
        )
        first_row = rows_at(x, slice(0, 1))
        student_outputs = keras.tree.flatten(
            student_end.predict(first_row, verbose=0)
        )
        student_shapes = [array.shape[1:] for array in student_outputs]
        teacher_shapes = [array.shape[1:] for array in values]
        if student_shapes != teacher_shapes:
            raise ValueError(
                "`student` must have outputs of the shapes of `teacher`'s. "
                f"Received: {student_shapes} and {teacher_shapes}"
            )
        count = len(values)
        if teacher_end is not teacher:  # it has its features behind the outputs
            count = len(keras.tree.flatten(teacher.outputs))
        feature_count = len(values) - count
        logits = [
            LOGITS[kind] for kind in _output_kinds_of(teacher, outputs, count)
        ]
        logits += [_unchanged] * feature_count
        names = [f"output_{number}" for number in range(count)]
        names += [f"feature_{number}" for number in range(feature_count)]
        targets = {
            name: to_numpy(to_logits(array))
            for name, to_logits, array in zip(
                names, logits, values, strict=True
            )
        }
        return cls(student_end, targets, logits)

    @property
    def count(self) -> int:
        """The number of rows."""
        return len(next(iter(self.values.values())))

    def named_student(self) -> keras.Model:
        """The student with the names of the values."""
        return _Named(self.student, list(self.values))

    def losses(self) -> dict[str, Loss]:
        """The loss of each output: the squared error by the variance of the target."""
        return {
            name: _loss(to_logits, array.var())
            for (name, array), to_logits in zip(
                self.values.items(), self.logits, strict=True
            )
        }


def _with_equal_features(
    student: keras.Model, teacher: keras.Model
) -> tuple[keras.Model, keras.Model]:
    """Both models with their features, if both are graphs and have as many; else as they are."""
    if not (computes_its_graph(student) and computes_its_graph(teacher)):
        return student, teacher
    student_end = with_features(student)
    teacher_end = with_features(teacher)
    student_shapes = [tensor.shape for tensor in student_end.outputs]
    teacher_shapes = [tensor.shape for tensor in teacher_end.outputs]
    if student_shapes != teacher_shapes:
        return student, teacher
    return student_end, teacher_end


@contextlib.contextmanager
def _restored_on_errors(model: keras.Model) -> Iterator[None]:
    """Gives a model its values back if training fails or is interrupted.

    On JAX `fit` frees the arrays of a model and hands new ones over at the end of an epoch.
    """
    # Seed states too. As tensors: what compact storage is given as arrays is checked against
    # values that may be freed.
    values = [
        (variable, keras.ops.copy(variable.value))
        for variable in model.variables
    ]

    def restore() -> None:
        for variable, value in values:
            assign(variable, value)

    with contextlib.ExitStack() as on_error:
        on_error.callback(restore)
        yield
        on_error.pop_all()  # nothing failed


class _Named(keras.Model):
    """A model with its outputs by name, whatever their structure."""

    def __init__(
        self,
        model: keras.Model,
        names: list[str],
    ) -> None:
        super().__init__(name=f"{model.name}_distilled")
        self.model = model
        self._names = names

    def call(
        self,
        inputs: Nested,
        training: bool | None = None,
    ) -> dict[str, Tensor]:
        outputs = keras.tree.flatten(self.model(inputs, training=training))
        return dict(zip(self._names, outputs, strict=True))


class _Rows(keras.utils.PyDataset):
    """Whole batches of rows and targets, in another order in every pass.

    Args:
        x: Inputs.
        targets: dict of arrays.
        size: int. Rows of a batch.
        passes: int. How often all rows are seen.
        stages: int. The epochs of `fit` that share the passes; at most as many as batches.
        seed: int or None.
    """

    def __init__(
        self,
        x: Nested,
        targets: dict[str, np.ndarray],
        size: int,
        passes: int,
        stages: int,
        seed: int | None,
    ) -> None:
        super().__init__()
        self._x = x
        self._targets = targets
        count = len(next(iter(targets.values())))
        self._size = min(size, count)
        whole = count - count % self._size
        rng = np.random.default_rng(seed)
        orders = [rng.permutation(count)[:whole] for _ in range(passes)]
        self._batches = np.concatenate(orders).reshape(-1, self._size)
        self.stages = min(stages, len(self._batches))
        self._length = len(self._batches) // self.stages
        self._stage = 0

    def on_epoch_end(self) -> None:
        self._stage += 1

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, number: int) -> tuple[Nested, Nested]:
        place = self._stage * self._length + number
        indices = self._batches[place % len(self._batches)]
        return rows_at(self._x, indices), rows_at(self._targets, indices)


def with_features(model: keras.Model) -> keras.Model:
    """The graph with the inputs of its last layers as further outputs."""
    makers = {
        id(tensor): call
        for call in graph_calls(model)
        for tensor in call.outputs
    }
    outputs = keras.tree.flatten(model.outputs)
    features: dict[int, Tensor] = {}
    for tensor in outputs:
        call = makers[id(tensor)]
        inputs = _float_inputs(call)
        while len(inputs) == 1 and not getattr(call.operation, "weights", None):
            call = makers[id(inputs[0])]  # an activation, or a reshape
            inputs = _float_inputs(call)
        for feature in inputs:
            if makers[id(feature)].inputs:  # no input of the model
                features[id(feature)] = feature
    model_inputs, _ = graph_ends(model)
    return keras.Model(model_inputs, [*outputs, *features.values()])


def _float_inputs(call: GraphCall) -> list[Tensor]:
    """The inputs of a call without masks and indices, which teach nothing."""
    return [
        tensor
        for tensor in call.inputs
        if keras.backend.is_float_dtype(tensor.dtype)
    ]


def _unchanged(values: Tensor) -> Tensor:
    return values


def _output_kinds_of(
    teacher: keras.Model,
    outputs: str | Sequence[str] | None,
    count: int,
) -> list[str]:
    """The kind of each output, a key of `LOGITS`: as given, or as the teacher shows."""
    if outputs is None:
        kinds = output_kinds(teacher, count)
        return [kind.probabilities or "values" for kind in kinds]
    names = list(outputs)
    if isinstance(outputs, str):
        names = [outputs] * count
    if len(names) != count or any(name not in LOGITS for name in names):
        raise ValueError(
            f"`outputs` must be one of {sorted(LOGITS)}, or a list with one of them for each of "
            f"the {count} outputs. Received: outputs={outputs!r}"
        )
    return names


def _logit(p: Tensor) -> Tensor:
    p = keras.ops.clip(p, _ROUNDED, 1.0 - _ROUNDED)
    return keras.ops.log(p) - keras.ops.log(1.0 - p)


def _centered_logarithm(p: Tensor) -> Tensor:
    logits = keras.ops.log(keras.ops.maximum(p, _SMALLEST))
    return logits - keras.ops.mean(logits, axis=-1, keepdims=True)


# From outputs of a kind to the logits that the squared error compares.
LOGITS: dict[str, ToLogits] = {
    "softmax": _centered_logarithm,
    "sigmoid": _logit,
    "values": _unchanged,
}


def _loss(to_logits: ToLogits, variance: float) -> Loss:
    """The mean squared error of logits by the variance of the target, or by 1 if that is 0."""
    scale = float(variance) or 1.0

    def loss(target: Tensor, output: Tensor) -> Tensor:
        error = target - to_logits(output)
        return keras.ops.mean(keras.ops.square(error)) / scale

    return loss
