"""The kernels that read groups of channels, and the moments of their inputs."""

import dataclasses
import functools
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho._values import placed
from keras_sparse_ortho.calibration._moments import (
    Moments,
    samples_in,
    stop_of,
)
from keras_sparse_ortho.calibration._sweep import sweep
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    as_matrices,
    canonical_shape,
    from_matrices,
)
from keras_sparse_ortho.models import ChannelGroup, prunable_weights

Array = np.ndarray
Pair = tuple[keras.Variable, Any]
"""A variable, and a tensor that stands for its value."""

# Positions that are drawn for small kernels. With 2**13 a network of separable kernels lost a tenth
# more at a quarter of its size; with 2**15 as much as with all positions.
_LEAST_ROWS = 2**15


@dataclasses.dataclass(frozen=True)
class ReaderMoments:
    """The kernels that read the channels of a model, with the moments `X^T X` of their inputs `X`.

    Attributes:
        weights: The kernels, by path.
        used_grams: array `(k, k)` of three rows of data in four, by path.
        grams: array `(k, k)` of all rows of data, by path.
    """

    weights: Mapping[str, PrunableWeight]
    used_grams: Mapping[str, Array]
    grams: Mapping[str, Array]

    @classmethod
    def measured(
        cls,
        model: Any,
        groups: Iterable[ChannelGroup],
        batches: Sequence[Any],
        verbose: int = 0,
    ) -> "ReaderMoments":
        """Measures the inputs of all readers that can be measured, in one sweep.

        Args:
            model: Model, plain.
            groups: Groups of its channels.
            batches: list of inputs of the model.
            verbose: As for `fit`.
        """
        samples = samples_in(batches)
        paths = {path for group in groups for path in group.rows}
        weights = _weights_of(model, paths)
        used_grams: dict[str, Array] = {}
        grams: dict[str, Array] = {}

        def take(path: str, used: Moments, held_out: Moments) -> None:
            if np.ndim(used.gram) == 3 and len(used.gram) == 1:
                used_grams[path] = np.asarray(used.gram[0])
                grams[path] = np.asarray((used + held_out).gram[0])

        stops = []
        for path, weight in weights.items():
            stop = stop_of(
                model,
                weight,
                functools.partial(take, path),
                samples,
                _LEAST_ROWS,
            )
            if stop is not None:
                stops.append(stop)
        sweep(model, batches, stops, verbose)
        return cls({path: weights[path] for path in grams}, used_grams, grams)

    @classmethod
    def of_grams(
        cls, model: keras.Model, grams: Mapping[str, Array]
    ) -> "ReaderMoments":
        """The readers of a model whose moments are known: enough to refit them.

        Args:
            model: Model, plain.
            grams: array `(k, k)` of all rows of data, by path.
        """
        return cls(_weights_of(model, grams), {}, grams)

    def __add__(self, other: "ReaderMoments") -> "ReaderMoments":
        """The moments of the rows of both."""
        used_grams = {
            path: gram + other.used_grams[path]
            for path, gram in self.used_grams.items()
        }
        grams = {
            path: gram + other.grams[path] for path, gram in self.grams.items()
        }
        return ReaderMoments(self.weights, used_grams, grams)

    def measurable(self, groups: Iterable[ChannelGroup]) -> list[ChannelGroup]:
        """The groups of which all readers were measured; warns of the others."""
        groups = list(groups)
        listed = self._unmeasured(groups)
        measured = [
            group
            for group in groups
            if self.weights.keys() >= group.rows.keys()
        ]
        if not measured:
            raise NotPrunableError(
                "No group of channels can be narrowed: `kso.channel_groups(model)` lists groups "
                "and the channels that stay, and each kernel that reads a group must be one whose "
                f"inputs can be measured. Received: {listed or 'a model without groups'}"
            )
        if listed:
            warn_user(
                "Groups keep their width where the inputs of a kernel that reads them cannot be "
                f"measured. Received: {listed}"
            )
        return measured

    def check(self, groups: Iterable[ChannelGroup]) -> None:
        """Raises NotPrunableError for groups of which not all readers were measured."""
        listed = self._unmeasured(groups)
        if listed:
            raise NotPrunableError(
                "The inputs of each kernel that reads a group must be measured to narrow it: leave "
                f"these groups at their width. Received: {listed}"
            )

    def _unmeasured(self, groups: Iterable[ChannelGroup]) -> str:
        """The readers that were not measured, as text."""
        texts = []
        for group in groups:
            for path in group.rows:
                if path not in self.weights:
                    texts.append(f"{path!r}, which reads {group.name!r}")
        return ", ".join(texts)

    def kernel(self, path: str) -> Array:
        """A kernel as a matrix in float64, `(k, outputs)`."""
        weight = self.weights[path]
        matrices = as_matrices(weight.finite_raw_value(), weight.layout)
        # The gates of a recurrent layer, or heads, are matrices that multiply the same inputs.
        side_by_side = np.moveaxis(matrices, 0, 1)
        return side_by_side.reshape(matrices.shape[1], -1).astype(np.float64)

    def pair(self, path: str, kernel: Array) -> Pair:
        """A kernel `(k, outputs)` as the value of its variable, for `VariableOverrides`."""
        weight = self.weights[path]
        outputs = canonical_shape(weight)[-1]
        matrices = np.moveaxis(kernel.reshape(len(kernel), -1, outputs), 1, 0)
        value = from_matrices(matrices, weight.shape, weight.layout)
        return weight.variable, placed(value, weight.variable)


def _weights_of(
    model: keras.Model, paths: Collection[str]
) -> dict[str, PrunableWeight]:
    """The kernels of some paths."""
    return {
        weight.path: weight
        for weight in prunable_weights(model)
        if weight.path in paths
    }
