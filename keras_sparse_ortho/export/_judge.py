"""How well a file does what the dense model does, on rows that made nothing of it."""

import dataclasses
import math
from collections.abc import Callable

import keras
import numpy as np

from keras_sparse_ortho.recovery import probabilities

Metric = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""From the wanted and the given outputs of some rows to a score in [0, 1] for each of them."""

_RESAMPLED = 2000


def same_class(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """Whether the largest entry, or the side of one half, is the same."""
    if want.shape[-1] == 1:
        same = (want > 0.5) == (got > 0.5)
    else:
        same = (want.argmax(-1) == got.argmax(-1))[..., None]
    return same.reshape(len(want), -1).mean(axis=1)


def closeness(want: np.ndarray, got: np.ndarray) -> np.ndarray:
    """`1 - |got - want| / |want - mean want|`, at least 0: norms of a row, and their rms."""
    want, got = (array.reshape(len(want), -1).astype(float) for array in (want, got))
    scale = np.sqrt(np.mean(np.sum((want - want.mean(axis=0)) ** 2, axis=1))) or 1.0
    return np.maximum(1.0 - np.linalg.norm(got - want, axis=1) / scale, 0.0)


@dataclasses.dataclass(frozen=True)
class Score:
    """The mean over rows, and its 95% interval by the bootstrap over rows."""

    mean: float
    low: float
    high: float


NO_SCORE = Score(math.nan, math.nan, math.nan)


class Judge:
    """Scores outputs on held rows, by labels if any, else against the dense model's."""

    def __init__(
        self, outputs: list[np.ndarray], labels: np.ndarray | None, metric: str | Metric | None
    ) -> None:
        self._outputs, self._labels = outputs, labels
        if metric is None:
            metric = "agreement" if all(map(_is_class, outputs)) else "closeness"
            metric = metric if labels is None else "accuracy"
        named = {"agreement": same_class, "accuracy": same_class, "closeness": closeness}
        if not callable(metric) and metric not in named:
            raise ValueError(
                '`metric` must be "agreement", "closeness" or a function. '
                f"Received: metric={metric!r}"
            )
        self._metric: Metric = metric if callable(metric) else named[metric]
        self.name = metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")
        self.dense = self.score(outputs)

    def score(self, outputs: list[np.ndarray]) -> Score:
        """The score on the held rows, the mean over the outputs of the model."""
        rows = np.mean([self._rows(k, got) for k, got in enumerate(outputs)], axis=0)
        drawn = np.random.default_rng(0).integers(len(rows), size=(_RESAMPLED, len(rows)))
        low, high = np.quantile(rows[drawn].mean(axis=1), [0.025, 0.975])
        return Score(float(rows.mean()), float(low), float(high))

    def _rows(self, k: int, got: np.ndarray) -> np.ndarray:
        want = self._outputs[k] if self._labels is None else self._labels
        if want.size == len(got) < got.size:  # classes by number
            want = keras.utils.to_categorical(want.reshape(len(got)), got.shape[-1])
        scores = np.asarray(self._metric(want.reshape(got.shape), got), float)
        return scores.reshape(len(got), -1).mean(axis=1)


def _is_class(output: np.ndarray) -> bool:
    """Whether an output is of classes: probabilities of all, or of one of two."""
    kind = probabilities(output)
    return kind == "softmax" or (kind == "sigmoid" and output.shape[-1] == 1)
