"""How well a file does what the dense model does, on examples that made nothing of it."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import numpy as np
from scipy.special import expit, softmax

from keras_sparse_ortho._checks import as_text
from keras_sparse_ortho._foreign_names import for_value
from keras_sparse_ortho.models import UNKNOWN, OutputKind
from keras_sparse_ortho.shrinking._max_drop import MaxDrop, limit_of

Metric = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From the wanted and the given outputs of some examples to a score in [0, 1] for each of them."""

Metrics = str | Metric | Mapping[str, str | Metric]
"""One metric for all outputs, or those of some of them, by name."""

METRICS = ("expected accuracy", "agreement", "closeness")

_RESAMPLED = 2000
_ORDERS = 20  # other orders of the examples, whose scores are those of chance
_SURE = 3.0  # standard deviations
# Skill is the score above chance as a share of the possible. Below the first the model is
# refused; the second is enough.
_LEAST_SKILL, _MOST_SKILL = 0.1, 0.5
_ROUNDING = 1e-6  # of a metric of the user beyond 0 and 1
_LEAST_LIMIT = 1e-9  # that divides a loss
_EXPECTED_ACCURACY = "expected accuracy"
# The least that an answer loses that is not the dense model's. By labels it was 0.07 to 0.13 in
# networks on text, where the dense model expects a few hundredths (docs/from_model_to_file.md).
_LEAST_LOSS = 0.125
# Between two classes, by the end of their one output.
_HALVES = {
    "sigmoid": 0.5,
    "linear": 0.0,
}


def same_class(
    want: np.ndarray, got: np.ndarray, halves: tuple[float, float] = (0.5, 0.5)
) -> Any:
    """Whether the largest entry is the same; of one entry, on which side of its half it is."""
    if want.shape[-1] == 1:
        agrees = (want > halves[0]) == (got > halves[1])
    else:
        agrees = (want.argmax(-1) == got.argmax(-1))[..., None]
    return agrees.reshape(len(want), -1).mean(axis=1)


def expected_accuracy(
    probabilities: np.ndarray,
    got: np.ndarray,
    half: float = 0.5,
    least_loss: float = 0.0,
) -> np.ndarray:
    """The dense model's probability of the class that the file answers, for each example.

    The mean is the accuracy that the dense model itself expects of the file. A changed answer
    costs little where the dense model is not sure.

    Args:
        probabilities: The dense model's, with one entry of two classes, or an entry for each class.
        got: The outputs of the file.
        half: float. Where the two classes of a single entry of `got` part.
        least_loss: float. The least loss of a changed answer.
    """
    if probabilities.shape[-1] == 1:
        best = np.maximum(probabilities, 1.0 - probabilities)
        expected = np.where(got > half, probabilities, 1.0 - probabilities)
    else:
        best = probabilities.max(axis=-1, keepdims=True)
        classes = got.argmax(-1)[..., None]
        expected = np.take_along_axis(probabilities, classes, axis=-1)
    is_changed = expected < best
    cautious = np.where(
        is_changed, np.minimum(expected, best - least_loss), expected
    )
    scores: np.ndarray = cautious.reshape(len(got), -1).mean(axis=1)
    return scores


def closeness(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """`1 - |got - want|^2 / mean |want - mean want|^2`, at least 0: the explained variance."""
    wanted_rows = want.reshape(len(want), -1).astype(float)
    file_rows = got.reshape(len(want), -1).astype(float)
    deviations = wanted_rows - wanted_rows.mean(axis=0)
    variance = np.mean(np.sum(deviations**2, axis=1)) or 1.0
    errors = np.sum((file_rows - wanted_rows) ** 2, axis=1)
    return np.maximum(1.0 - errors / variance, 0.0)


@dataclasses.dataclass(frozen=True)
class Score:
    """The mean over examples, and its 95% interval by the bootstrap over examples."""

    mean: float
    low: float
    high: float


NO_SCORE = Score(math.nan, math.nan, math.nan)


@dataclasses.dataclass(frozen=True)
class OutputScore:
    """The worth of one output of a file on the held examples.

    Attributes:
        measure: str. The score, such as "accuracy" or "closeness".
        mean: float. The score.
        lost: float. Its drop from the dense model's.
        margin: float. The standard error of this drop.
    """

    measure: str
    mean: float
    lost: float
    margin: float

    @property
    def bound(self) -> float:
        """The loss that a limit is compared with."""
        return self.lost + self.margin

    def share_of(self, limit: float) -> float:
        """The bound as a share of its limit."""
        return self.bound / max(limit, _LEAST_LIMIT)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The worth of a file on the held examples.

    Attributes:
        score: The mean over the outputs of the model.
        lost: float. The drop of the score in the output that comes nearest to its limit, or that is
            farthest beyond.
        margin: float. The standard error of this drop.
        measure: str. The score of this output.
        agreement: float. The share of answers with the dense model's class, over all outputs of
            classes; nan without such an output.
        outputs: mapping from the name of each output to its OutputScore.
    """

    score: Score = NO_SCORE
    lost: float = math.inf
    margin: float = 0.0
    measure: str = ""
    agreement: float = math.nan
    outputs: Mapping[str, OutputScore] = dataclasses.field(default_factory=dict)


class Judge:
    """Scores outputs on held examples, by labels if any, else against the dense model's.

    Args:
        outputs: The dense model's outputs on the held examples.
        labels: Labels of these examples, one array for each output, or `None`.
        metric: One of `METRICS`, a function, or `None` for the one that fits an output; or a dict
            of these by the names of outputs.
        kinds: The meaning of each output. Default: nothing is known of them.
        names: The name of each output. Default: their numbers.
        max_drop: The limits, which say which output decides. Default: all have the same.
        least_loss: float. The least loss of an answer that is not the dense model's, where the
            accuracy is expected.
    """

    def __init__(
        self,
        outputs: list[np.ndarray],
        labels: Any,
        metric: Metrics | None,
        kinds: Sequence[OutputKind] | None = None,
        names: Sequence[str] | None = None,
        max_drop: MaxDrop = 1.0,
        least_loss: float = _LEAST_LOSS,
    ) -> None:
        labels_by_output: list[Any] = [None] * len(outputs)
        if labels is not None:
            labels_by_output = keras.tree.flatten(labels)
        if len(labels_by_output) != len(outputs):
            raise ValueError(
                "`data` must have labels for every output of the model, in their order, or none. "
                f"Received: labels of {len(labels_by_output)} outputs, and a model with "
                f"{len(outputs)}"
            )
        if kinds is None:
            kinds = [UNKNOWN] * len(outputs)
        if names is None:
            names = [f"output_{k}" for k in range(1, len(outputs) + 1)]
        self._names = names
        self._max_drop = max_drop
        metrics = _metrics_by_output(metric, names)
        self._outputs = [
            _Output(dense, label, output_metric, kind, least_loss)
            for dense, label, output_metric, kind in zip(
                outputs, labels_by_output, metrics, kinds, strict=True
            )
        ]
        self.name = " and ".join(
            sorted({output.name for output in self._outputs})
        )
        self._dense = self._scores(outputs)
        self.dense = self.score(outputs)
        self._distinct = float(np.mean(self._answers(outputs)))
        self._by_chance = self._answers_by_chance(outputs)
        for output, output_metric in zip(self._outputs, metrics, strict=True):
            if callable(output_metric):
                output.check_direction()

    def score(self, outputs: list[np.ndarray]) -> Score:
        """The score on the held examples, the mean over the outputs of the model."""
        return _interval(np.mean(self._scores(outputs), axis=0))

    def verdict(self, outputs: list[np.ndarray]) -> Verdict:
        """The score, what each output loses, and the loss that decides.

        Args:
            outputs: Those of the file on the held examples.
        """
        scores = self._scores(outputs)
        by_output = self._output_scores(scores)
        shares = [
            output.share_of(limit_of(self._max_drop, name))
            for name, output in by_output.items()
        ]
        deciding = by_output[self._names[int(np.argmax(shares))]]
        agreements = [
            np.mean(output.agreement(array))
            for output, array in zip(self._outputs, outputs, strict=True)
            if output.is_class
        ]
        agreement = float(np.mean(agreements)) if agreements else math.nan
        return Verdict(
            _interval(np.mean(scores, axis=0)),
            deciding.lost,
            deciding.margin,
            deciding.measure,
            agreement,
            by_output,
        )

    def accepted_constants(self) -> dict[str, OutputScore]:
        """Outputs of classes that would be within their limits with one answer to all examples.

        The answer is that of the mean output, which for most outputs is the commonest one.
        """
        constants = []
        for output in self._outputs:
            constants.append(output.constant())
        by_output = self._output_scores(self._scores(constants))
        accepted = {}
        for output, (name, score) in zip(
            self._outputs, by_output.items(), strict=True
        ):
            limit = limit_of(self._max_drop, name)
            if output.is_class and score.bound <= limit < 1.0:
                accepted[name] = score
        return accepted

    def _output_scores(
        self, scores: list[np.ndarray]
    ) -> dict[str, OutputScore]:
        """The score of each output, and how much less than the dense model's it is."""
        by_output = {}
        for name, output, dense, file in zip(
            self._names, self._outputs, self._dense, scores, strict=True
        ):
            drops = dense - file
            by_output[name] = OutputScore(
                measure=output.name,
                mean=float(file.mean()),
                lost=float(drops.mean()),
                margin=float(drops.std() / math.sqrt(len(drops))),
            )
        return by_output

    @property
    def is_by_chance(self) -> bool:
        """Whether the dense model's answers are hardly better than those to other examples."""
        mean, deviation = self._by_chance
        room = 1.0 - mean
        # Few examples have large deviations, and would never be right.
        needed = min(
            max(_SURE * deviation, _LEAST_SKILL * room), _MOST_SKILL * room
        )
        return self._distinct <= mean + needed + _ROUNDING

    def _scores(self, outputs: list[np.ndarray]) -> list[np.ndarray]:
        """The score of each example, by output."""
        return [
            output.scores(array)
            for output, array in zip(self._outputs, outputs, strict=True)
        ]

    def _answers(self, outputs: list[np.ndarray]) -> list[np.ndarray]:
        """Whether the answer to each example is the wanted one, by output.

        That is the score, but for expected accuracies: a model that is never sure of its classes
        scores low, and still tells examples apart.
        """
        return [
            output.answers(array)
            for output, array in zip(self._outputs, outputs, strict=True)
        ]

    def _answers_by_chance(
        self, outputs: list[np.ndarray]
    ) -> tuple[float, float]:
        """Mean and deviation of the answers of the dense model in other orders."""

        def answers_in(order: np.ndarray) -> list[np.ndarray]:
            return self._answers([array[order] for array in outputs])

        return _in_other_orders(answers_in, len(outputs[0]))


def _in_other_orders(
    scores_in: Callable[[np.ndarray], Any], count: int
) -> tuple[float, float]:
    """Mean and deviation of scores over other orders of the examples.

    Args:
        scores_in: callable. From an order to scores.
        count: int. How many examples there are.
    """
    rng = np.random.default_rng(0)
    means = []
    for _ in range(_ORDERS):
        order = rng.permutation(count)
        means.append(np.mean(scores_in(order)))
    return float(np.mean(means)), float(np.std(means))


def _interval(scores: np.ndarray) -> Score:
    """The mean of scores, with its interval."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(scores), size=(_RESAMPLED, len(scores)))
    low, high = np.quantile(scores[drawn].mean(axis=1), [0.025, 0.975])
    return Score(float(scores.mean()), float(low), float(high))


def _metrics_by_output(
    metric: Metrics | None, names: Sequence[str]
) -> list[str | Metric | None]:
    """The metric of each output; `None` for the usual one."""
    if not isinstance(metric, Mapping):
        _check_metric(metric)
        return [metric] * len(names)
    unknown = [as_text(name) for name in metric if name not in names]
    if unknown:
        raise ValueError(
            "`metric` must be one metric, or a dict with those of outputs of the model: "
            f"{', '.join(map(as_text, names))}. Received: the unknown {', '.join(unknown)}"
        )
    metrics = []
    for name in names:
        output_metric = metric.get(name)
        _check_metric(output_metric)
        metrics.append(output_metric)
    return metrics


def _check_metric(metric: Any) -> None:
    if callable(metric) or metric is None or metric in METRICS:
        return
    raise ValueError(
        '`metric` must be "expected accuracy", "agreement", "closeness" or a function.'
        f"{for_value('metric', metric)} Received: metric={metric!r}"
    )


class _Output:
    """The wanted values of one output, and their metric."""

    def __init__(
        self,
        dense: np.ndarray,
        label: Any,
        metric: str | Metric | None,
        kind: OutputKind,
        least_loss: float,
    ) -> None:
        self._dense = dense
        self._want = dense
        self._half = _HALVES.get(kind.end or "")
        self.name: str = "closeness"
        self._metric: Metric = closeness
        is_one_bit = kind.answers == "bits" and dense.shape[-1] == 1
        self.is_class = kind.answers == "classes" or is_one_bit
        judged_as_class = self.is_class
        wanted_half = self._half
        if label is not None and (
            not callable(metric) or np.size(label) == dense.size
        ):
            self._want = _like(dense, checked_labels(label))
            judged_as_class, several = _are_classes(
                kind, self._want, np.size(label) == dense.size
            )
            wanted_half = 0.5
            if judged_as_class and several:
                self._want = self._want[..., None]
        if callable(metric):
            self.name = getattr(metric, "__name__", type(metric).__name__)
            self._metric = metric
        elif metric == _EXPECTED_ACCURACY or (
            metric is None and label is None and judged_as_class
        ):
            self._expect_accuracy(kind, least_loss)
        elif metric == "agreement" or (metric is None and judged_as_class):
            self.name = "agreement" if label is None else "accuracy"
            self._metric = functools.partial(
                same_class, halves=self._halves(wanted_half)
            )

    def _expect_accuracy(self, kind: OutputKind, least_loss: float) -> None:
        """Sets the metric of outputs of classes without labels."""
        if not self.is_class or kind.end not in ("softmax", *_HALVES):
            raise ValueError(
                "Only probabilities of classes, or their logits, have an expected accuracy, and "
                "this model does not show them. Compile it with its loss, or take "
                'metric="closeness". Received: an output of an unknown kind'
            )
        self.name = _EXPECTED_ACCURACY
        self._want = _probabilities(self._dense, kind)
        half = _HALVES.get(kind.end, 0.0)  # softmax has several entries
        self._metric = functools.partial(
            expected_accuracy, half=half, least_loss=least_loss
        )

    def _halves(self, wanted: float | None) -> tuple[float, float]:
        """Where the two classes of a single entry part: of the wanted values, and of outputs."""
        if self._want.shape[-1] != 1:
            return 0.0, 0.0  # the largest entry is compared
        if wanted is None or self._half is None:
            raise ValueError(
                "Two classes of a single output part at 0.5 if it is a sigmoid, and at 0 if it is "
                "a logit, and this model does not show which. Compile it with its loss, such as "
                'keras.losses.BinaryCrossentropy, or take metric="closeness". '
                "Received: an output of an unknown kind"
            )
        return wanted, self._half

    def check_direction(self) -> None:
        """Refuses a metric for which lower is better, or that leaves [0, 1]."""
        scores = self.scores(self._dense)

        def scores_in(order: np.ndarray) -> np.ndarray:
            return self.scores(self._dense[order])

        mean, deviation = _in_other_orders(scores_in, len(self._dense))
        lower_is_better = scores.mean() < mean - _SURE * deviation
        in_range = (
            scores.min() >= -_ROUNDING and scores.max() <= 1.0 + _ROUNDING
        )
        if lower_is_better or not in_range:
            raise ValueError(
                "`metric` must score each row between 0 and 1, and higher must be better, such as "
                "1 / (1 + error). "
                f"Received: {self.name}, which gives the dense model's outputs scores from "
                f"{scores.min():.4g} to {scores.max():.4g}, {scores.mean():.4g} in the mean, and "
                f"{mean:.4g} to those of other rows"
            )

    def constant(self) -> np.ndarray:
        """The mean of the dense model's output, as the output for every example."""
        entries = self._dense.shape[-1]
        mean = self._dense.reshape(-1, entries).mean(axis=0)
        return np.broadcast_to(mean, self._dense.shape)

    def agreement(self, got: np.ndarray) -> np.ndarray:
        """The share of answers that are the dense model's class, for each example."""
        half = self._half if self._half is not None else 0.0
        agreement: np.ndarray = same_class(
            self._dense, got.reshape(self._dense.shape), (half, half)
        )
        return agreement

    def answers(self, got: np.ndarray) -> np.ndarray:
        """The agreement where the expected accuracy is the score, else the score."""
        if self.name == _EXPECTED_ACCURACY:
            return self.agreement(got)
        return self.scores(got)

    def scores(self, got: np.ndarray) -> np.ndarray:
        """The score of each example."""
        outputs = got
        if self._want.size == got.size:
            outputs = got.reshape(self._want.shape)
        scores = np.asarray(self._metric(self._want, outputs), float)
        if (
            not scores.ndim
            or len(scores) != len(got)
            or not np.isfinite(scores).all()
        ):
            raise ValueError(
                "`metric` must return a finite score for each row. "
                f"Received: {self.name}, which returned an array of shape {scores.shape} for "
                f"{len(got)} rows, {np.count_nonzero(~np.isfinite(scores))} not finite"
            )
        means: np.ndarray = scores.reshape(len(got), -1).mean(axis=1)
        return means


def _probabilities(outputs: np.ndarray, kind: OutputKind) -> np.ndarray:
    """Outputs of classes as probabilities: logits go through softmax or sigmoid."""
    if kind.end != "linear":
        return outputs.astype(np.float64)
    logits = outputs.astype(np.float64)
    if logits.shape[-1] == 1:
        return np.asarray(expit(logits))
    return np.asarray(softmax(logits, axis=-1))


def _are_classes(
    kind: OutputKind, labels: np.ndarray, in_full: bool
) -> tuple[bool, bool]:
    """Whether labels in the shape of the output are of classes, and whether several hold at once.

    Args:
        kind: The meaning of the output. If it is unknown, labels of zeros and ones are of classes.
        labels: The labels.
        in_full: bool. Whether they were given in the shape of the output, not as numbers.
    """
    if not in_full:
        return True, False
    if kind.answers == "values":
        return False, False
    if kind.answers == "classes":
        return True, False
    if kind.answers is None and not np.isin(labels, (0, 1)).all():
        return False, False
    one_of_several = labels.shape[-1] > 1 and bool(
        np.all(labels.sum(axis=-1) == 1)
    )
    return True, kind.answers == "bits" or not one_of_several


def checked_labels(labels: Any) -> np.ndarray:
    """Labels as numbers; ValueError for text and for values that are not finite."""
    labels = np.asarray(labels)
    if labels.dtype.kind not in "biuf" or not np.isfinite(labels).all():
        raise ValueError(
            "Labels must be finite numbers, such as those of classes; give text a number for each "
            f"class. Received: labels of dtype {labels.dtype}, such as {labels.reshape(-1)[:3]}"
        )
    return labels


def _like(output: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Labels in the shape of the output; those by number become one of several."""
    if label.size == output.size:
        return label.reshape(output.shape)
    classes = output.shape[-1]
    if (
        label.size * classes != output.size
        or not 0 <= label.min() <= label.max() < classes
    ):
        raise ValueError(
            "Labels must have the shape of the output, or be numbers of its classes. "
            f"Received: labels of shape {label.shape} up to {label.max()} for an output of shape "
            f"{output.shape}"
        )
    return np.eye(classes)[label.reshape(output.shape[:-1]).astype(int)]
