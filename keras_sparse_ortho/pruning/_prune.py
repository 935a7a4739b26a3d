"""`prune`: fixed masks on the weights as they are, or refitted to calibration data."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho._keras_internals import level_of_user
from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.calibration import (
    CALIBRATED,
    Channels,
    Recipe,
    budget_by_error,
    prune_layers,
)
from keras_sparse_ortho.errors import DensityError, NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw, Draw
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose
from keras_sparse_ortho.models import Plan, prunable_weights, refuse_unfit, verb
from keras_sparse_ortho.orthogonal import Block, NByM, StructureLike, as_structure
from keras_sparse_ortho.pruning._block_plan import BlockPlan
from keras_sparse_ortho.pruning._drawing import signs_of_training
from keras_sparse_ortho.pruning._holding import hold, mask_class, shows_progress
from keras_sparse_ortho.pruning._planning import (
    BudgetLike,
    Densities,
    density_and_budget,
    plan_for,
    weights_to_prune,
)
from keras_sparse_ortho.saliency import Saliency, saliency_by_name

_OF_FRESH_NETWORKS = ("snip", "grasp", "synflow")


@verb
@other_keywords()
def prune(
    model: keras.Model,
    density: float | Densities | None = None,
    *,
    score: str | Saliency | Callable[[np.ndarray], np.ndarray] = "magnitude",
    budget: BudgetLike | None = None,
    data: Any = None,
    structure: StructureLike | Channels | None = None,
    include: Selection = None,
    exclude: Selection = None,
    storage: str = "masked",
    resume: str | pathlib.Path | None = None,
) -> Plan:
    """Keeps the weights of a model and masks them: `w_e = w` where a mask is live, else 0.

    The `round(density * size)` entries of highest score are live: over all selected kernels
    together, or within each kernel as many as a `budget` gives it (ties to the kernel that is
    listed first, and in it to the lower flat index). So one call is one-shot pruning by
    magnitude, of a trained model, or by SNIP, GraSP or SynFlow, of a fresh one:

    - `prune(trained, 0.1, budget="erk")`: the largest magnitudes of each kernel;
    - `prune(model, 0.1, score="snip", data=(x, y))`: connection sensitivity;
    - `prune(model, score=kso.saliency.grasp(model, 0.1, data, batches=8))`: a saliency with
      other settings.

    Trained networks lose least with `score="obs"` and a few hundred rows of `data`. Then each layer
    is pruned on the inputs `X` that the pruned ones before it give. With the dense kernel `W` and
    `H = X^T X + 0.01 mean(diag X^T X) I`, live entries get the values

        V = argmin tr (V - W)^T H (V - W)  over  V = M * V,

    the least squared error of the layer's outputs, and the mask `M` is found in eight rounds,
    each of which drops the entries of least `v^2 / (H^-1)_ii` and refits the others (OBS, the
    optimal brain surgeon). Then dead entries of large `(H (W - V))_i^2 / H_ii` are exchanged for
    live ones while the error falls, in at most twelve rounds. With OBS the outputs to come near
    to are those halfway between the two models: `W + H^-1 X^T (Y - X) W / 2` in place of `W`,
    where `Y` are the inputs in the model as given. So a layer makes up for part of what the ones
    before it lost. `"wanda"` keeps the largest `|w_i| norm(X_i)`, and refits these, as magnitudes
    are refitted if there is `data`:

    - `prune(trained, 0.2, score="obs", data=x)`, best with `budget="error"`;
    - `prune(trained, 0.5, score="obs", data=x, structure="2:4")`;
    - `prune(trained, 0.2, data=x)`: magnitudes, refitted.

    Where there is batch normalization, call `restore_statistics` on the result. For masks of any
    other origin call `apply_masks`; to draw new sparse kernels, `sparsify`; for masks that training
    brings, `parametrize`.

    Args:
        model: A built Keras 3 model: Sequential, functional, nested, or written as a class.
        density: Global live fraction over the selected kernels, in (0, 1]. May be left out where
            a `Saliency` or a `Budget` says it. A dict or list of densities is taken as the budget.
        score: `"magnitude"` (default), `"obs"`, `"wanda"`, `"snip"`, `"grasp"` or `"synflow"`; a
            `Saliency`, as the functions of `keras_sparse_ortho.saliency` return; or a function of a
            kernel, which returns an array of its shape.
        budget: Density of each kernel: `"erk"`, `"er"`, `"uniform"`, a `Budget`, or a dict or list
            as for `sparsify`. `None`: the scores of all kernels are compared with each other; with
            `"obs"`, `"wanda"` or a `structure`, `"uniform"`. With `data` for a layer also
            `"error"`, the densities of the least sum of the relative errors of the layers' outputs,
            each measured along the way of OBS, on a fourth of the rows that OBS does not see there
            (for trained networks the best of these; as long again as OBS takes).
        data: For scores of the loss, what `fit` takes: `(x, y)`, `(x, y, sample_weight)`, a
            dataset, a generator of batches. For layers the same, or `x` alone: all rows of arrays,
            in batches of 64; of others the first 64 batches.
        structure: For `"obs"`, `"wanda"` and `"magnitude"`. `NByM`, or `"2:4"`: at most `n` live of
            every `m` consecutive inputs. `Block(rows, cols, regular=True)`, `"32x32"` or
            `(32, 32)`: blocks that are live or dead as a whole, in any storage; densities are as
            with `storage="blocks"`.
            `calibration.Channels(group)`: whole inputs, for `remove_channels`.
        include: Which kernels: weight paths, layer paths, regular expressions, layers, classes of
            layers, or indices into `prunable_weights(model)` (one or a list); or a predicate of a
            `PrunableWeight`.
            Default: all kernels and embeddings.
        exclude: Which kernels not. Biases and normalization weights are never pruned.
        storage: `"masked"` keeps dense kernels with masks (`FixedMask`), `"compact"` live values
            and their indices only (`CompactMask`): at density 0.1 a fifth of the weights' memory,
            and a tenth of the optimizer's. `"blocks"`: layers that compute on live blocks, for
            speed: each kernel gets the largest regular blocks that its shape and density allow
            (128 x 128 down to 16 x 16), or those of `structure`, and of these the blocks of
            largest total score; with `"obs"` of `v^T ((H^-1)_bb)^-1 v`, where `v` are the entries
            of the block `b` for an output.
            What cannot be on blocks is compact, or stays dense while it is small and no density
            was given for it; the total is at most `density`. `"auto"`: live blocks where the
            masks are of regular blocks already, compact elsewhere. `convert` changes the
            storage later.
        resume: A folder, where layers are pruned on `data`: a file is written for each kernel that
            is done, and a run with the same model, data and settings goes on from there.

    Returns:
        A new model, not compiled. The given one stays as it was; `prune.in_place` changes the model
        itself, and `prune.plan` only says what each kernel would become.

    Raises:
        DensityError: A density outside (0, 1], or none where nothing says it.
        BudgetError: A budget that does not fit the model; layer collapse: a kernel that is left
            without a live entry.
        NotPrunableError: A model that is not built or has no kernels; layers that are wrapped or
            quantized already; weights or scores that are not finite; a weight that cannot be
            stored compactly.
        UnknownWeightError: An `include` or `exclude` that names nothing.
        LayoutError: A kernel that the `structure` does not fit.
        ValueError: Arguments that exclude each other; `data` that is missing or of no use.

    A terminal gets a progress bar while layers are pruned on `data`, unless
    `keras.config.disable_interactive_logging()` was called.

    Warns:
        UserWarning: Matrices that stay dense because they are not registered. With
            `storage="blocks"` larger kernels that cannot be on blocks, and densities that are
            missed by more than a tenth. With `storage="auto"` large kernels that are not on live
            blocks. SNIP, GraSP or SynFlow, which are for untrained networks, on trained weights.
            Kernels that do not multiply the inputs of their layers (embeddings, recurrent cells,
            transposed convolutions): pruned by magnitude, within their counts. Fewer than 16
            different rows of calibration data.

    Limits: on calibration data a kernel of `k` inputs (times taps) and `m` outputs takes
    `32 k^2 + 80 k m` bytes while it is solved, and `16 k^2 (k + 100 m)` operations or so in
    float64, where its layer computes. Meanwhile there are copies of all kernels. For each layer
    `data` goes through the layers in front of it. A layer that is called several times is solved
    on the inputs of its first call. Layers are set in the given model meanwhile, and put back: do
    not use it from another thread.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="a")])
    >>> kso.prunable_weights(prune(dense, 0.25))
    [<a/kernel shape=(8, 4), density=0.25>]
    >>> x = np.random.default_rng(0).normal(size=(64, 8))  # a few inputs
    >>> kso.prunable_weights(prune(dense, 0.25, score="obs", data=x))
    [<a/kernel shape=(8, 4), density=0.25>]

    References:

    - Han et al., "Learning both Weights and Connections for Efficient Neural Networks" (NeurIPS
      2015), arXiv 1506.02626, for magnitudes; those of `keras_sparse_ortho.saliency` for the rest
    - Hassibi and Stork, "Second order derivatives for network pruning: Optimal Brain Surgeon"
      (NeurIPS 1992); Frantar and Alistarh, "Optimal Brain Compression" (NeurIPS 2022), arXiv
      2208.11580, for layers on calibration data
    - Sun et al., "A Simple and Effective Pruning Approach for Large Language Models" (ICLR 2024),
      arXiv 2306.11695, for Wanda
    """
    mask_class(storage)
    density, budget = density_and_budget(density, budget)
    pattern: Any = None if structure is None else as_structure(structure, regular=True)
    if storage == "blocks" and isinstance(pattern, Block):
        pattern = dataclasses.replace(pattern, regular=True)
    by_layer = (score in CALIBRATED) if isinstance(score, str) else False
    refits = by_layer or (score == "magnitude" and data is not None)
    _check_layerwise(score, data, pattern, resume, storage, needs_data=refits)
    if isinstance(score, Saliency):
        _refuse_beside("score", data=data, include=include, exclude=exclude)
        weights = choose(prunable_weights(model, unregistered=True), [*score.masks], None)
    else:
        weights = weights_to_prune(model, include, exclude)
    refuse_unfit(model, weights, "no kernel that could be pruned")
    if density is not None and 0.5 < check_density(density) < 1.0:
        _note_what_stays(float(density))
    if not (refits or pattern is not None):
        return _by_scores(model, weights, density, score, budget, data, storage)
    if density is None and budget is None:
        raise _no_density()
    plan = _budget_by_layer(model, weights, density, budget, data)
    recipe = Recipe(str(score), plan.counts, structure=pattern, refit=refits)
    blocks = None
    if storage == "blocks" or isinstance(pattern, Block):
        given = budget is not None and not isinstance(budget, str)
        size = pattern if isinstance(pattern, Block) else None
        blocks = BlockPlan.of(weights, plan, size, orthogonal=False, given=given)
        recipe = Recipe(str(score), blocks.budget.counts, blocks=blocks.blocks, refit=refits)
        weights = blocks.weights
    draws = prune_layers(model, weights, recipe, data, resume, shows_progress())
    return hold(model, weights, draws, storage, blocks)


def _budget_by_layer(
    model: Any, weights: list[PrunableWeight], density: float | None, budget: Any, data: Any
) -> Budget:
    """The densities of kernels that are pruned layer by layer."""
    if data is not None and isinstance(budget, str) and budget == "error":
        share = check_density(density)
        return budget_by_error(model, weights, share, data, shows_progress())
    budget = "uniform" if budget is None else budget
    return plan_for(density, budget, weights, orthogonal=False)


def _by_scores(
    model: Any,
    weights: list[PrunableWeight],
    density: float | None,
    score: Any,
    budget: Any,
    data: Any,
    storage: str,
) -> Plan:
    """The plan that keeps the entries of highest score, over all kernels or within each."""
    on_blocks = storage == "blocks"
    plan: Budget | None = None
    if budget is not None:
        plan = plan_for(density, budget, weights, orthogonal=False)
        saliency = _scored(model, plan.density, score, data, weights, collapse_matters=False)
        masks = {} if on_blocks else saliency.masks_for(plan)
    else:
        if density is None and not isinstance(score, Saliency):
            raise _no_density()
        saliency = _scored(model, density, score, data, weights, collapse_matters=True)
        if density is not None and check_density(density) != saliency.density:
            raise DensityError(
                f"The saliency was made for the density {saliency.density:.6g}; leave `density` "
                f"out. Received: density={density!r}"
            )
        masks = saliency.masks
        plan = saliency.budget if on_blocks else None
    _warn_if_trained(model, weights, score)
    if not on_blocks:
        if empty := [path for path, mask in masks.items() if not mask.any()]:
            raise NotPrunableError(
                "A mask needs at least one live entry; a `budget` gives each kernel its share. "
                f"Received: 0 live of '{empty[0]}'"
            )
        draws: dict[str, AnyDraw] = {path: Draw(mask) for path, mask in masks.items()}
        return hold(model, weights, draws, storage)
    assert plan is not None
    given = not (budget is None or isinstance(budget, str))
    blocks = BlockPlan.of(weights, plan, None, orthogonal=False, given=given)
    return hold(model, blocks.weights, blocks.draws(saliency.scores), storage, blocks)


def _check_layerwise(
    score: Any, data: Any, structure: Any, resume: Any, storage: str, *, needs_data: bool
) -> None:
    """Refuses arguments of layer-by-layer pruning that do not go together."""
    if needs_data and data is None:
        raise ValueError(
            "Each layer is pruned on its inputs: give `data`, such as a few hundred rows of x. "
            f"Received: score={score!r}, data=None"
        )
    if storage == "blocks" and isinstance(structure, NByM | Channels):
        raise ValueError(
            'storage="blocks" takes the size of blocks as `structure`, such as '
            f"Block(64, 64). Received: structure={structure!r}"
        )
    regular = isinstance(structure, Block) and structure.regular
    if structure is not None and (
        not (isinstance(structure, NByM | Channels) or regular)
        or score not in ("magnitude", *CALIBRATED)
    ):
        raise ValueError(
            "`structure` must be NByM, or Block(rows, cols, regular=True), or Channels, "
            'with score="obs", "wanda" or "magnitude"; other structures are drawn by sparsify. '
            f"Received: structure={structure!r}, score={score!r}"
        )
    if resume is not None and not needs_data:
        raise ValueError(
            'Only layer-by-layer pruning on `data` (score="obs", "wanda", or magnitudes with '
            f"`data`) goes on from a folder. Received: resume={str(resume)!r}, score={score!r}"
        )


def _warn_if_trained(model: Any, weights: list[PrunableWeight], score: Any) -> None:
    name = score.method if isinstance(score, Saliency) else getattr(score, "__name__", score)
    if str(name).lower() in _OF_FRESH_NETWORKS and (reason := signs_of_training(model, weights)):
        warnings.warn(
            f"{name} scores the connections of untrained networks; of trained ones it drops what "
            'matters. For these use score="obs", or magnitudes, with `data`. '
            f"{reason}",
            stacklevel=level_of_user(),
        )


@functools.cache  # once for each density
def _note_what_stays(density: float) -> None:
    """Logs how much is kept: those who count sparsity mean the rest."""
    logging.getLogger("keras_sparse_ortho").warning(
        "prune keeps %g%% of the entries (density=%g). To prune that many: density=%g, or "
        "sparsity=%g.",
        100 * density,
        density,
        float(f"{1 - density:.6g}"),
        density,
    )


def _no_density() -> DensityError:
    return DensityError(
        "prune needs a `density`, the live fraction, or a `budget` that says it. "
        "Received: density=None, budget=None"
    )


def _scored(
    model: Any,
    density: float | None,
    score: Any,
    data: Any,
    weights: list[PrunableWeight],
    *,
    collapse_matters: bool,
) -> Saliency:
    on_collapse = "error" if collapse_matters else "ignore"
    if isinstance(score, Saliency):
        return score
    if callable(score):
        return _of_kernels(score, density, data, weights, on_collapse)
    assert density is not None
    paths = [weight.path for weight in weights]
    options: dict[str, Any] = {"include": paths, "on_collapse": on_collapse}
    return saliency_by_name(score, model, density, data, **options)


def _of_kernels(
    function: Callable[..., Any],
    density: float | None,
    data: Any,
    weights: list[PrunableWeight],
    on_collapse: str,
) -> Saliency:
    """The scores that a function of a kernel gives."""
    name = str(getattr(function, "__name__", "score"))
    if data is not None:
        raise ValueError(
            "A function of a kernel given as `score` uses no data: leave `data` out. "
            f"Received: score={name}, data of type {type(data).__name__}"
        )
    scores = []
    for weight in weights:
        score = to_numpy(function(weight.raw_value()))
        if score.shape != weight.shape:
            raise ValueError(
                "A function given as `score` takes a kernel and returns an array of its shape; "
                "give what a function of keras_sparse_ortho.saliency returns, not the function. "
                f"Received: score={name}, shape {score.shape} for '{weight.path}' {weight.shape}"
            )
        scores.append(score)
    return Saliency(name, check_density(density), weights, scores, on_collapse)


def _refuse_beside(name: str, **others: Any) -> None:
    given = [other for other, value in others.items() if value is not None]
    if given:
        raise ValueError(
            f"`{name}` says which entries are live; leave the other arguments out. "
            f"Received: {name} together with {', '.join(given)}"
        )
