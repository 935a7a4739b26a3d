"""The user's examples in two parts: one judges files, the other makes them."""

import dataclasses
import time
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checked_data import (
    check_inputs,
    check_targets,
    warn_of_equal_rows,
    warn_of_weights,
)
from keras_sparse_ortho._checks import as_text
from keras_sparse_ortho._data import all_rows, rows_at
from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.models import output_kinds, output_names
from keras_sparse_ortho.shrinking._judge import Judge, Metrics
from keras_sparse_ortho.shrinking._max_drop import MaxDrop, check_output_names

_HELD_SHARE = 0.25  # of the examples judge, at most:
_MOST_HELD = 2000
_FEWEST_HELD = 200  # if they take long
_BATCH = 64
_LEAST_EXAMPLES = 32
_LEAST_TO_TRAIN = 1500
_CALIBRATION = 2048  # at most; `widths` takes fewer if they take long
_TIMED = 512  # examples of the forward pass that is timed
# A training step, which is compiled, in forward passes of the same rows through the same network:
# at first (a GRU took 2.9, a Transformer 1.9), and at least.
_STEP_COST, _LEAST_STEP_COST = 2.5, 1.5
# The held-out share of the examples of a training: for each pass over them, and at most.
_HELD_SHARE_OF_PASS, _MOST_HELD_SHARE = 0.03, 0.1
_READING_SHARE = 0.25  # of the time may pass in reading a data set, and
_LEAST_READING = 10.0  # seconds


@dataclasses.dataclass(frozen=True)
class Training:
    """How `distill` trains one network.

    Attributes:
        options: dict. The arguments of `distill`.
        forward_seconds: float. A forward pass of one row through the network.
        teacher_seconds: float. The dense model's answers to all rows.
    """

    options: dict[str, Any]
    forward_seconds: float
    teacher_seconds: float

    def with_options(self, **options: Any) -> "Training":
        """The same with other arguments of `distill`."""
        return dataclasses.replace(self, options={**self.options, **options})

    @property
    def rows_seen(self) -> int:
        """How many rows pass through the network, counted in each pass."""
        (inputs,) = self.options["data"]
        return self.options["epochs"] * len(keras.tree.flatten(inputs)[0])


class Examples:
    """Examples that judge, and examples that train, the first of which calibrate.

    Attributes:
        held: Inputs that judge.
        count: int. How many judge.
        calibration: Inputs for moments, statistics and ranges: the first training ones.
        judge: Judge. Scores outputs on `held`.
        logits: For each output the function from logits to it, as `distill` wants it.
        seconds_each: float. A forward pass of one example through the dense model.

    Args:
        original: The user's model, whose last layers and loss say what its outputs are.
        model: The same without wrappers.
        data: Examples as for `fit`.
        metric: As for `shrink`.
        seed: int. As for `shrink`.
        seconds: float. How long `shrink` may take.
        max_drop: As for `shrink`.
    """

    def __init__(
        self,
        original: keras.Model,
        model: keras.Model,
        data: Any,
        metric: Metrics | None,
        seed: int,
        seconds: float,
        max_drop: MaxDrop,
    ) -> None:
        rows = all_rows(
            data, seconds=max(_READING_SHARE * seconds, _LEAST_READING)
        )
        self._inputs, labels, _ = rows
        check_inputs(original, self._inputs, text=False)
        check_targets(labels)
        are_equal = warn_of_equal_rows([rows])
        warn_of_weights([rows])
        count = len(keras.tree.flatten(self._inputs)[0])
        if count < _LEAST_EXAMPLES:
            raise ValueError(
                f"`data` must have at least {_LEAST_EXAMPLES} rows: a quarter judges, the others "
                f"make the files. Received: {count} rows"
            )
        order = np.random.default_rng(seed).permutation(count)
        self._step_cost = _STEP_COST
        self._timed = rows_at(self._inputs, order[:_TIMED])
        self.seconds_each = self.forward_seconds(model)
        # A file of a large model may take three times as long: a tenth of the time.
        fitting = seconds / 30 / self.seconds_each
        judging_count = int(
            min(_HELD_SHARE * count, _MOST_HELD, max(_FEWEST_HELD, fitting))
        )
        judging = order[:judging_count]
        self._training = order[judging_count:]
        self.held = rows_at(self._inputs, judging)
        self.count = judging_count
        self.calibration = rows_at(self._inputs, self._training[:_CALIBRATION])
        answers = model.predict(self.held, verbose=0)
        if isinstance(labels, dict) and isinstance(answers, list):
            labels = [labels[name] for name in model.output_names]
        held_labels = None if labels is None else rows_at(labels, judging)
        outputs = keras.tree.flatten(answers)
        names = output_names(model, answers)
        check_output_names(max_drop, names)
        if not all(np.isfinite(output).all() for output in outputs):
            raise ValueError(
                "The outputs of the model must be finite on `data`, or no file can be judged. "
                f"Received: NaN or infinity in the outputs of {model.name!r}"
            )
        kinds = output_kinds(original, len(outputs))
        self.logits = [kind.probabilities or "values" for kind in kinds]
        self.judge = Judge(outputs, held_labels, metric, kinds, names, max_drop)
        if not are_equal:
            self._warn_of_poor_rows()

    def _warn_of_poor_rows(self) -> None:
        """Warns of rows on which a bad file would score as well as a good one."""
        if self.judge.is_by_chance:
            warn_user(
                "These rows cannot tell a good file from a bad one: the model scores no better on "
                "them than with its outputs in another order. Check that labels belong to their "
                "rows, and give rows like those of training, with all answers among them. "
                f"Received: {self.judge.name} {self.judge.dense.mean:.4f} on {self.count} rows"
            )
            return
        for name, score in self.judge.accepted_constants().items():
            warn_user(
                "A file that gives all rows the same answer would be within `max_drop`: nearly all "
                "answers are of one class, or the limit is high. Give more rows of the other "
                "classes, a `metric` that counts these, or a lower `max_drop`. Received: "
                f"output {as_text(name)}, whose one answer loses {score.lost:.2g}"
            )

    def forward_seconds(self, model: keras.Model) -> float:
        """Seconds of a forward pass of one example, measured.

        The size of a network says less: the steps of a recurrent layer take their time, however
        few its units are.
        """
        return _time_of_one(model, self._timed)

    def took(
        self, seconds: float, training: Training, share: float = 1.0
    ) -> None:
        """Notes how long a training took, by which the next one gets its examples.

        Args:
            seconds: float. The time it took.
            training: Training. From `to_train`.
            share: float. The part of its steps that were done.
        """
        rows_seen = share * training.rows_seen
        forward_seconds = training.forward_seconds * rows_seen
        step_seconds = seconds - training.teacher_seconds
        self._step_cost = max(step_seconds / forward_seconds, _LEAST_STEP_COST)

    def to_train(
        self,
        seconds: float,
        most_passes: int,
        *,
        fewest: int = _LEAST_TO_TRAIN,
        forward_seconds: float | None = None,
        **options: Any,
    ) -> Training | None:
        """The training that a time allows; `None` if it allows too few examples.

        The dense model answers each row once, and the network sees it in each pass:

            seconds = rows (dense forward pass + passes * cost of a step * forward pass)

        All examples come before a second pass over some of them. Some judge in place of
        training, and what does harm on these is undone; the fewer passes, the fewer, as their
        forward passes take time as well.

        Args:
            seconds: float. How long training may take.
            most_passes: int. How often it sees each example, at most.
            fewest: int. The fewest examples that are enough.
            forward_seconds: float. A forward pass of one row through the network that is trained.
                Default: through the dense model.
            options: Other arguments of `distill`.
        """
        if forward_seconds is None:
            forward_seconds = self.seconds_each
        seconds = max(seconds, 0.0)
        row_seconds = self._step_cost * forward_seconds
        row_count = max(len(self._training), 1)
        answers_seconds = row_count * self.seconds_each
        passes = int((seconds - answers_seconds) / (row_count * row_seconds))
        passes = max(1, min(passes, most_passes))
        rows_within = int(seconds / (self.seconds_each + passes * row_seconds))
        chosen = self._training[:rows_within]
        if len(chosen) < fewest:
            return None
        options = {
            "outputs": self.logits,
            "data": (rows_at(self._inputs, chosen),),
            "epochs": passes,
            "minutes": seconds / 60.0,
            "validation_split": min(
                _MOST_HELD_SHARE, _HELD_SHARE_OF_PASS * passes
            ),
            **options,
        }
        teacher_seconds = len(chosen) * self.seconds_each
        return Training(options, forward_seconds, teacher_seconds)


def _time_of_one(model: keras.Model, inputs: Any) -> float:
    """Seconds of a forward pass for one example, after one that compiles."""
    count = len(keras.tree.flatten(inputs)[0])
    first_batch = rows_at(inputs, slice(0, _BATCH))
    model.predict(first_batch, batch_size=_BATCH, verbose=0)
    start = time.monotonic()
    model.predict(inputs, batch_size=_BATCH, verbose=0)
    return (time.monotonic() - start) / count
