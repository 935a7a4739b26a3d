"""How well a file does what the dense model does, on rows that made nothing of it."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._foreign_names import for_value
from keras_sparse_ortho.recovery import probabilities

Metric = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From the wanted and the given outputs of some rows to a score in [0, 1] for each of them."""

_RESAMPLED = 2000


def same_class(want: np.ndarray, got: np.ndarray, halves: tuple[float, float] = (0.5, 0.5)) -> Any:
    """Whether the largest entry is the same; of one entry, on which side of its half it is."""
    if want.shape[-1] == 1:
        same = (want > halves[0]) == (got > halves[1])
    else:
        same = (want.argmax(-1) == got.argmax(-1))[..., None]
    return same.reshape(len(want), -1).mean(axis=1)


def closeness(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """`1 - |got - want|^2 / mean |want - mean want|^2`, at least 0: the explained variance."""
    want, got = (array.reshape(len(want), -1).astype(float) for array in (want, got))
    scale = np.mean(np.sum((want - want.mean(axis=0)) ** 2, axis=1)) or 1.0
    return np.maximum(1.0 - np.sum((got - want) ** 2, axis=1) / scale, 0.0)


@dataclasses.dataclass(frozen=True)
class Score:
    """The mean over rows, and its 95% interval by the bootstrap over rows."""

    mean: float
    low: float
    high: float


NO_SCORE = Score(math.nan, math.nan, math.nan)


class Judge:
    """Scores outputs on held rows, by labels if any, else against the dense model's."""

    def __init__(self, outputs: list[np.ndarray], labels: Any, metric: str | Metric | None) -> None:
        if not (callable(metric) or metric in (None, "agreement", "closeness")):
            raise ValueError(
                '`metric` must be "agreement", "closeness" or a function.'
                f"{for_value('metric', metric)} Received: metric={metric!r}"
            )
        given = [None] * len(outputs) if labels is None else keras.tree.flatten(labels)
        if len(given) != len(outputs):
            raise ValueError(
                "`data` must have labels for every output of the model, in their order, or none. "
                f"Received: labels of {len(given)} outputs, and a model with {len(outputs)}"
            )
        pairs = zip(outputs, given, strict=True)
        self._outputs = [_Output(dense, label, metric) for dense, label in pairs]
        self.name = " and ".join(sorted({one.name for one in self._outputs}))
        self.dense = self.score(outputs)

    def score(self, outputs: list[np.ndarray]) -> Score:
        """The score on the held rows, the mean over the outputs of the model."""
        pairs = zip(self._outputs, outputs, strict=True)
        rows = np.mean([own.rows(got) for own, got in pairs], axis=0)
        drawn = np.random.default_rng(0).integers(len(rows), size=(_RESAMPLED, len(rows)))
        low, high = np.quantile(rows[drawn].mean(axis=1), [0.025, 0.975])
        return Score(float(rows.mean()), float(low), float(high))


class _Output:
    """The wanted values of one output, and their metric."""

    def __init__(self, dense: np.ndarray, label: Any, metric: Any) -> None:
        kind, self._want = probabilities(dense), dense
        half = 0.5 if kind else 0.0  # of a probability, or of a logit
        is_class, halves = kind == "softmax" or (kind and dense.shape[-1] == 1), (half, half)
        if label is not None and (not callable(metric) or np.size(label) == dense.size):
            self._want = _like(dense, np.asarray(label))
            one_of = probabilities(self._want) == "softmax"
            is_class, halves = one_of or np.isin(self._want, (0, 1)).all(), (0.5, half)
            if is_class and not one_of:  # several at once
                self._want = self._want[..., None]
        self.name = metric or ("agreement" if is_class else "closeness")
        self._metric: Metric = functools.partial(same_class, halves=halves)
        if callable(metric):
            self.name, self._metric = getattr(metric, "__name__", "metric"), metric
        elif self.name == "closeness":
            self._metric = closeness
        elif label is not None:
            self.name = "accuracy"

    def rows(self, got: np.ndarray) -> np.ndarray:
        got = got.reshape(self._want.shape) if self._want.size == got.size else got
        return np.asarray(self._metric(self._want, got), float).reshape(len(got), -1).mean(axis=1)


def _like(output: np.ndarray, label: np.ndarray) -> np.ndarray:
    """Labels in the shape of the output; those by number become one of several."""
    if label.size == output.size:
        return label.reshape(output.shape)
    classes = output.shape[-1]
    if label.size * classes != output.size or not 0 <= label.min() <= label.max() < classes:
        raise ValueError(
            "Labels must have the shape of the output, or be numbers of its classes. "
            f"Received: labels of shape {label.shape} up to {label.max()} for an output of shape "
            f"{output.shape}"
        )
    return np.eye(classes)[label.reshape(output.shape[:-1]).astype(int)]
