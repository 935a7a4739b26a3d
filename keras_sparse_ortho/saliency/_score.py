"""`Score`: how the entries of kernels are ranked; the registry of all scores by name."""

from __future__ import annotations

import abc
import dataclasses
import inspect
from typing import ClassVar, Literal, TypeVar

import keras
import numpy as np

from keras_sparse_ortho._checked_data import check_batches, warn_of_equal_rows
from keras_sparse_ortho._checks import as_text, check_density, other_keywords
from keras_sparse_ortho._data import Batch, first_batches
from keras_sparse_ortho._foreign_names import for_value
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    Selection,
    choose,
    names_in,
)
from keras_sparse_ortho.models import (
    is_of_tf_keras,
    prunable_weights,
    refuse_unfit,
    weights_of,
)
from keras_sparse_ortho.saliency._saliency import Saliency

Need = Literal["nothing", "loss", "inputs"]
ScoreClass = TypeVar("ScoreClass", bound="type[Score]")

SCORES: dict[str, Score] = {}


class Score:
    """How the entries of kernels are ranked, and what that takes.

    `score=` of `prune` is such an object, or the `name` of a class with `@register_score`. The
    base class says which data it needs:

    - the values of kernels: `ModelScore`;
    - derivatives of the loss: `LossScore`;
    - the inputs of each layer: `calibration.LayerScore`.

    Settings are fields of a frozen dataclass. The name stands for their defaults.
    """

    name: ClassVar[str]
    """The value of `score=` that chooses the score."""

    label: ClassVar[str | None] = None
    """How tables and messages call it; `None` for `name`."""

    needs: ClassVar[Need] = "nothing"
    """The data that it needs besides the kernels."""

    for_untrained: ClassVar[bool] = False
    """Whether the score is for fresh networks: `prune` warns where weights are trained."""

    refits: ClassVar[bool] = True
    """Whether `prune` with `data` fits live entries to the inputs of their layers."""

    calls_model: ClassVar[bool] = False
    """Whether scores are computed in calls of the model, which is then one of Keras 3."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class ModelScore(Score, abc.ABC):
    """A score of all kernels of a model at once.

    Override `scores`. Any structure, budget, storage and refit of `prune` then works.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> class Smallest(kso.saliency.ModelScore):
        ...     name = "smallest"
        ...     def scores(self, model, weights, density, batches):
        ...         return [-np.abs(weight.raw_value()) for weight in weights]
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="a")])
        >>> kso.prunable_weights(kso.prune(model, 0.25, score=Smallest()))
        [<a/kernel shape=(8, 4), density=0.25>]
    """

    @abc.abstractmethod
    def scores(
        self,
        model: keras.Model,
        weights: list[PrunableWeight],
        density: float,
        batches: list[Batch],
    ) -> list[np.ndarray]:
        """Returns an array of scores for each weight, of its shape; the highest are kept.

        Args:
            model: Model, which must stay as it is.
            weights: list of the `PrunableWeight` to score.
            density: float in (0, 1]. Live fraction over all of them, for scores that depend on it.
            batches: list of `(x, y, sample_weight)` for a `LossScore`, else empty.
        """

    @other_keywords
    def saliency(
        self,
        model: keras.Model,
        density: float,
        data: object = None,
        *,
        include: Selection = None,
        exclude: Selection = None,
        on_collapse: str = "error",
    ) -> Saliency:
        """Returns the `Saliency` of a model by this score.

        Args:
            model: Model. Built; compiled for scores of the loss.
            density: float in (0, 1]. Global live fraction.
            data: As for `fit`, for scores of the loss.
            include: Selection: paths, layers, regular expressions or a predicate. Default: all.
            exclude: Selection. Weights to leave out.
            on_collapse: `"error"` or `"ignore"`, for a weight without live entries.

        Raises BudgetError, NotPrunableError and ValueError as `snip`.
        """
        self._refuse_tf_keras(model)
        weights = scored_weights(model, density, include, exclude, on_collapse)
        batches = self.batches_of(model, data)
        scores = self.scores(model, weights, density, batches)
        return Saliency(
            self.label or self.name,
            density,
            weights,
            scores,
            on_collapse,
            for_untrained=self.for_untrained,
        )

    def batches_of(self, model: keras.Model, data: object) -> list[Batch]:
        """Returns the checked batches that `scores` gets."""
        return []

    def _refuse_tf_keras(self, model: object) -> None:
        if self.calls_model and is_of_tf_keras(model):
            raise NotPrunableError(
                f"{self.label or self.name} calls the model, which must be one of Keras 3. Score "
                "the same network in Keras 3, with its weights set to those of this one, and give "
                "its masks to keras_sparse_ortho.tfmot.prune_with_mask(model, masks): "
                f"equal layer names have equal paths. Received: model={type(model).__name__} of "
                "tf_keras"
            )


@dataclasses.dataclass(frozen=True)
class LossScore(ModelScore):
    """A score of derivatives of the loss, on batches of labelled data.

    `LossDerivatives(model, weights, batches)` has gradients and Hessian-vector products.

    Args:
        batch_size: int. Samples per batch of arrays.
        batches: int. How many batches to use; `None` for all, of data sets and generators at most
            100,000 rows.
        shuffle: bool. Whether samples of arrays are drawn; else the first ones are taken.
        seed: int. For drawing samples; `None` takes one from Python's `random`.
    """

    needs: ClassVar[Need] = "loss"
    calls_model: ClassVar[bool] = True

    batch_size: int = 128
    batches: int | None = 1
    shuffle: bool = True
    seed: int | None = None

    def batches_of(self, model: keras.Model, data: object) -> list[Batch]:
        batches = first_batches(
            data,
            batch_size=self.batch_size,
            batches=self.batches,
            shuffle=self.shuffle,
            seed=self.seed,
        )
        check_batches(model, batches)
        warn_of_equal_rows(batches)
        return batches


def register_score(kind: ScoreClass) -> ScoreClass:
    """Registers a score by its `name`, as a value of `score=`; a class decorator.

    Examples:
        >>> import numpy as np, keras_sparse_ortho as kso
        >>> @kso.saliency.register_score
        ... class Fisher(kso.saliency.LossScore):
        ...     name = "fisher"
        ...     def scores(self, model, weights, density, batches):
        ...         loss = kso.saliency.LossDerivatives(model, weights, batches)
        ...         squares = loss.gradient(np.square)
        ...         return [s * w.raw_value() ** 2 for s, w in zip(squares, weights)]
    """
    SCORES[kind.name] = kind()
    return kind


def as_score(score: object) -> Score:
    """Returns a score from its name or object; raises ValueError for another value."""
    if isinstance(score, Score):
        return score
    if isinstance(score, str) and score in SCORES:
        return SCORES[score]
    names = ", ".join(f'"{name}"' for name in sorted(SCORES))
    hint = for_value("score", score)
    if inspect.isfunction(score):
        hint = (
            " Make a function a subclass of saliency.ModelScore, whose `scores` calls it, with "
            "saliency.register_score."
        )
    raise ValueError(
        f"`score` must be one of {names}.{hint} Received: score={as_text(score)}"
    )


def is_model_score(name: str) -> bool:
    """Whether a name is that of a registered `ModelScore`."""
    return isinstance(SCORES.get(name), ModelScore)


def scored_weights(
    model: keras.Model,
    density: float,
    include: Selection,
    exclude: Selection,
    on_collapse: str,
) -> list[PrunableWeight]:
    """The weights to score; unregistered matrices only if `include` lists their paths."""
    check_density(density)
    if on_collapse not in ("error", "ignore"):
        raise ValueError(
            f'`on_collapse` must be "error" or "ignore". Received: {on_collapse=}'
        )
    weights = list(weights_of(model))
    paths = None
    if include is not None:
        paths = names_in(include)
    if isinstance(model, keras.layers.Layer) and paths is not None:
        weights += [
            weight
            for weight in prunable_weights(model, unregistered=True)
            if not weight.registered and weight.path in paths
        ]
    weights = choose(weights, include, exclude)
    refuse_unfit(model, weights, "no kernel that could be scored")
    return weights
