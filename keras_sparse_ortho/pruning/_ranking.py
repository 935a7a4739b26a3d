"""Which entries of kernels `prune` ranks highest: the score, its data, the saliency of a model."""

import pathlib

import keras

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.calibration import LayerScore
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.pruning._signs_of_training import signs_of_training
from keras_sparse_ortho.saliency import ModelScore, Saliency, Score, as_score

Method = ModelScore | LayerScore | Saliency
"""A score that ranks entries, or a saliency that was computed before."""


def ranking_method(score: str | Score | Saliency) -> Method:
    """Returns what `score=` stands for; raises ValueError for an unknown name or a bare `Score`."""
    if isinstance(score, Saliency):
        return score
    method = as_score(score)
    if isinstance(method, ModelScore | LayerScore):
        return method
    raise ValueError(
        "A score must be derived from saliency.ModelScore, saliency.LossScore or "
        f"calibration.LayerScore. Received: score={score!r}"
    )


def check_data(
    method: Method,
    score: object,
    data: object,
    resume: str | pathlib.Path | None,
) -> None:
    """Refuses missing data, data of no use, and a folder without layers to solve.

    Args:
        method: Score, or a saliency.
        score: The argument of the user, for messages.
        data: Data, or `None`.
        resume: Folder of an earlier run, or `None`.
    """
    if isinstance(method, Score):
        if method.needs == "inputs" and data is None:
            raise ValueError(
                "Each layer is pruned on its inputs: give `data`, such as a few hundred rows of x. "
                f"Received: score={score!r}, data=None"
            )
        if method.needs == "loss" and data is None:
            raise ValueError(
                f"The score of {method.name} is a derivative of the loss: give `data`, such as "
                f"(x, y). Received: score={score!r}, data=None"
            )
        if method.needs == "nothing" and data is not None and not method.refits:
            raise ValueError(
                f"{method.name} uses the weights alone: leave `data` out. "
                f"Received: score={score!r}, data of type {type(data).__name__}"
            )
    solves_layers = data is not None and method.refits
    if resume is not None and not solves_layers:
        raise ValueError(
            'Only layer-by-layer pruning on `data` (score="obs", "wanda", or magnitudes with '
            f"`data`) goes on from a folder. Received: resume={str(resume)!r}, score={score!r}"
        )


def saliency_of(
    model: keras.Model,
    weights: list[PrunableWeight],
    method: ModelScore | Saliency,
    density: float | None,
    counts: Budget | None,
    data: object,
) -> Saliency:
    """The saliency of some weights; warns where it is for untrained networks and these are not.

    Weights may have collapsed: a budget has their live entries.

    Args:
        model: Model of the weights.
        weights: list of the `PrunableWeight` to score.
        method: Score, or a saliency, which is returned.
        density: Global live fraction.
        counts: Budget, whose density is used where there is one.
        data: Data of the loss.
    """
    saliency = method
    if not isinstance(saliency, Saliency):
        if counts is not None:
            density = counts.density
        paths = [weight.path for weight in weights]
        saliency = saliency.saliency(
            model,
            check_density(density),
            data,
            include=paths,
            on_collapse="ignore",
        )
    if saliency.for_untrained:
        reason = signs_of_training(model, weights)
        if reason is not None:
            warn_user(
                f"{saliency.method} scores the connections of untrained networks; of trained ones "
                'it drops what matters. For these use score="obs", or magnitudes, with `data`. '
                f"{reason}"
            )
    return saliency
