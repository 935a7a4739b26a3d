"""The relative squared error of a model's outputs on rows, of logits where it has them."""

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import (
    VariableOverrides,
    from_zero_states,
)
from keras_sparse_ortho._types import Nested, Tensor
from keras_sparse_ortho._values import to_numpy, without_gradients
from keras_sparse_ortho.calibration._held_out import held_out_batches
from keras_sparse_ortho.calibration._moments import samples_in
from keras_sparse_ortho.models import OutputKind

_UNDERFLOW = 1e-30  # a probability whose logarithm float32 still knows
_ROUNDED = 1e-6  # at this distance from 1 float32 rounds probabilities


class OutputErrors:
    """Compares a model's outputs with its first ones.

    The error of an output is `sum |f - f_0|^2 / sum |f_0 - mean f_0|^2`, where `f` are logits if
    the output is a probability; that of the model is the mean over its outputs.

    Args:
        model: Model.
        batches: list of its inputs, of which held-out rows are taken.
        kinds: list of OutputKind, one for each output.
    """

    def __init__(
        self,
        model: keras.Model,
        batches: Iterable[Nested],
        kinds: Sequence[OutputKind],
    ) -> None:
        self._model = model
        self._batches = held_out_batches(batches)
        self._kinds = kinds
        self._references = self._outputs()

    @property
    def rows(self) -> int:
        """The number of rows."""
        return samples_in(self._batches)

    def keep_rows(self, count: int) -> None:
        """Compares the first rows alone from now on."""
        batches = []
        missing = count
        for batch in self._batches:
            first_rows = functools.partial(_first_rows, missing)
            if missing > 0:
                batches.append(keras.tree.map_structure(first_rows, batch))
            missing -= samples_in([batch])
        self._batches = batches
        self._references = [output[:count] for output in self._references]

    def error(self, values: Iterable[tuple[keras.Variable, Any]] = ()) -> float:
        """The error with other values of some variables; the model keeps its own.

        Args:
            values: Pairs of a variable and a tensor.
        """
        with VariableOverrides(values):
            outputs = self._outputs()
        errors = []
        for output, reference in zip(outputs, self._references, strict=True):
            distance = float(np.sum((output - reference) ** 2))
            errors.append(distance / _spread(reference))
        return float(np.mean(errors))

    def _outputs(self) -> list[np.ndarray]:
        """Each output on all rows, flattened to `(rows, values)`."""
        answers: list[list[np.ndarray]] = [[] for _ in self._kinds]
        with from_zero_states(self._model), without_gradients():
            for batch in self._batches:
                nested = self._model(batch, training=False)
                outputs = keras.tree.flatten(nested)
                for answer, output, kind in zip(
                    answers, outputs, self._kinds, strict=True
                ):
                    values = to_numpy(output).astype(np.float64)
                    answer.append(_logits(values, kind))
        return [np.concatenate(answer) for answer in answers]


def _first_rows(count: int, tensor: Tensor) -> Tensor:
    return tensor[:count]


def _logits(outputs: np.ndarray, kind: OutputKind) -> np.ndarray:
    """The logits of probabilities, and other outputs as they are, `(rows, values)`."""
    function = kind.probabilities
    if function == "softmax":
        positive = np.maximum(outputs, _UNDERFLOW)
        logarithms = np.log(positive)
        # Softmax does not show the common part of all logits of a row.
        common = np.mean(logarithms, axis=-1, keepdims=True)
        outputs = logarithms - common
    elif function == "sigmoid":
        clipped = np.clip(outputs, _ROUNDED, 1.0 - _ROUNDED)
        complements = 1.0 - clipped
        outputs = np.log(clipped) - np.log(complements)
    count = len(outputs)
    return outputs.reshape(count, -1)


def _spread(outputs: np.ndarray) -> float:
    """The squared distance of outputs from their mean; 1 if they are constant."""
    centered = outputs - np.mean(outputs, axis=0)
    spread = float(np.sum(centered**2))
    return spread or 1.0
