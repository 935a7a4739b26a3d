"""`prune`: fixed masks on the weights as they are, or refitted to calibration data."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
import pathlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.calibration import (
    CALIBRATED,
    Channels,
    Recipe,
    budget_by_error,
    prune_layers,
)
from keras_sparse_ortho.errors import DensityError, NotPrunableError, UnknownWeightError
from keras_sparse_ortho.initializers import AnyDraw, Draw
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose
from keras_sparse_ortho.models import prunable_weights, refuse_unfit
from keras_sparse_ortho.orthogonal import Block, NByM, StructureLike, as_structure
from keras_sparse_ortho.pruning._block_plan import BlockPlan
from keras_sparse_ortho.pruning._drawing import signs_of_training
from keras_sparse_ortho.pruning._planning import BudgetLike, Densities, density_and_budget, plan_for
from keras_sparse_ortho.pruning._selection import weights_to_prune
from keras_sparse_ortho.pruning._storage import mask_class
from keras_sparse_ortho.pruning._wrapping import hold
from keras_sparse_ortho.saliency import OF_DATA, Saliency, saliency_by_name

_OF_FRESH_NETWORKS = ("snip", "grasp", "synflow")


@other_keywords()
def prune(
    model: keras.Model,
    density: float | Densities | None = None,
    *,
    score: str | Saliency | Callable[..., Any] = "magnitude",
    budget: BudgetLike | None = None,
    masks: Mapping[str, np.ndarray] | None = None,
    data: Any = None,
    refit: bool = False,
    structure: StructureLike | Channels | None = None,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
    unregistered: str = "warn",
    storage: str = "masked",
    resume: str | pathlib.Path | None = None,
    verbose: int = 0,
    in_place: bool = False,
) -> keras.Model:
    """Keeps the weights of a model and masks them: `w_e = w` where a mask is live, else 0.

    The `round(density * size)` entries of highest score are live: over all selected kernels
    together, or within each kernel as many as a `budget` gives it (ties to the kernel that is
    listed first, and in it to the lower flat index). So one call is one-shot pruning by
    magnitude, of a trained model, or by SNIP, GraSP or SynFlow, of a fresh one:

    - `prune(trained, 0.1, budget="erk")`: the largest magnitudes of each kernel;
    - `prune(model, 0.1, score="snip", data=(x, y))`: connection sensitivity;
    - `prune(model, score=kso.saliency.grasp(model, 0.1, data, batches=8))`: a saliency with
      other settings;
    - `prune(model, masks={"hidden/kernel": mask})`: masks of any origin.

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
    before it lost. `"wanda"` keeps the largest `|w_i| norm(X_i)`; `refit=True` refits its live
    entries, those of magnitudes, or of any other masks:

    - `prune(trained, 0.2, score="obs", data=x)`, best with `budget="error"`;
    - `prune(trained, 0.5, score="wanda", data=x, refit=True, structure=kso.NByM(2, 4))`;
    - `prune(trained, 0.2, data=x, refit=True)`: magnitudes.

    Where there is batch normalization, call `restore_statistics` on the result.

    To draw sparse kernels anew, call `sparsify`; for masks that come about in training,
    `parametrize`.

    Args:
        model: A built Keras 3 model: Sequential, functional, nested, or written as a class.
        density: Global live fraction over the selected kernels, in (0, 1]. May be left out where
            a `Saliency`, a `Budget` or `masks` say it. A dict or list of densities is taken as the
            budget.
        score: `"magnitude"` (default), `"obs"`, `"wanda"`, `"random"`, `"snip"`, `"grasp"` or
            `"synflow"`; a `Saliency`; a function of a kernel, which returns an array of its shape;
            or a function of `keras_sparse_ortho.saliency`, called as `score(model, density)`, or
            with `data` where that is given.
        budget: Density of each kernel: `"erk"`, `"er"`, `"uniform"`, a `Budget`, or a dict or list
            as for `sparsify`. `None`: the scores of all kernels are compared with each other; with
            `"obs"`, `"wanda"` or a `structure`, `"uniform"`. With `"obs"`, `"wanda"` or
            `"magnitude"` and `data` also `"error"`, the densities of the least sum of the relative
            errors of the layers' outputs, each measured along the way of OBS, on a fourth of the
            rows that OBS does not see there (for trained networks
            the best of these; as long again as OBS takes).
        masks: From weight path to a bool array of its shape, or from layer path where the layer
            has one kernel; kernels that are not named stay dense. In place of density, score and
            budget.
        data: For scores of the loss, what `fit` takes: `(x, y)`, `(x, y, sample_weight)`, a
            dataset, a generator of batches. For `"obs"`, `"wanda"` and `refit` the same, or `x`
            alone: all rows of arrays, in batches of 64; of others the first 64 batches.
        refit: Whether live entries get the values of least squared error on `data`; with `"obs"`
            they always do.
        structure: For `"obs"`, `"wanda"` and `"magnitude"`. `NByM`, or `"2:4"`: at most `n` live of
            every `m` consecutive inputs. `Block(rows, cols, regular=True)`, `"32x32"` or
            `(32, 32)`: blocks that are live or dead as a whole, in any storage; densities are as
            with `storage="blocks"`.
            `calibration.Channels(group)`: whole inputs, for `remove_channels`.
        seed: Integer, for `score="random"` and the choice of samples from arrays.
        include: Which kernels: weight paths, layer paths, regular expressions, layers, classes of
            layers, or indices into `prunable_weights(model)` (one or a list); or a predicate of a
            `PrunableWeight`.
            Default: all kernels and embeddings.
        exclude: Which kernels not. Biases and normalization weights are never pruned.
        unregistered: What is done with matrices in layers that are neither Keras' nor registered
            (`initializers.kernel_layouts`), so that the meaning of their axes is unknown: `"warn"`
            (default) and `"dense"` leave them dense, `"guess"` takes them in as
            `(*batch, in, out)`. `report` lists them.
        storage: `"masked"` keeps dense kernels with masks (`FixedMask`), `"compact"` live values
            and their indices only (`CompactMask`): at density 0.1 a fifth of the weights' memory,
            and a tenth of the optimizer's. `"blocks"`: layers that compute on live blocks, for
            speed: each kernel gets the largest regular blocks that its shape and density allow
            (128 x 128 down to 16 x 16), or those of `structure`, and of these the blocks of
            largest total score; with `"obs"` of `v^T ((H^-1)_bb)^-1 v`, where `v` are the entries
            of the block `b` for an output.
            What cannot be on blocks is compact, or stays dense while it is small and no density
            was given for it; the total is at most `density`. `"auto"`: live blocks where the
            masks are of regular blocks already, compact elsewhere. `to_blocks`, `to_compact` and
            `to_masked` convert.
        resume: A folder, for `"obs"`, `"wanda"` and `refit`: a file is written for each kernel that
            is done, and a run with the same model, data and settings goes on from there.
        verbose: 1 for a progress bar over the kernels, for these.
        in_place: Changes the given model itself, not a copy. For subclassed models that cannot be
            copied; the error says so.

    Returns:
        A new model, not compiled. The given one stays as it was.

    Raises:
        DensityError: A density outside (0, 1], or none where nothing says it.
        BudgetError: A budget that does not fit the model; layer collapse: a kernel that is left
            without a live entry.
        NotPrunableError: A model that is not built or has no kernels; layers that are wrapped or
            quantized already; weights or scores that are not finite; a mask of another shape or
            type, or without live entries; a weight that cannot be stored compactly.
        UnknownWeightError: An `include`, `exclude` or mask that names nothing.
        LayoutError: A kernel that the `structure` does not fit.
        ValueError: Arguments that exclude each other; `data` that is missing or of no use.

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
    mask_class(storage, masks_are_given=masks is not None)
    density, budget = density_and_budget(density, budget)
    pattern: Any = as_structure(structure, regular=True)
    layerwise = score in CALIBRATED if isinstance(score, str) else False
    on_blocks = storage == "blocks"
    if on_blocks and isinstance(pattern, Block):
        pattern = dataclasses.replace(pattern, regular=True)
    _check_layerwise(score, data, refit, pattern, resume, needs_data=refit or layerwise)
    if on_blocks and isinstance(pattern, NByM | Channels):
        raise ValueError(
            'storage="blocks" takes the size of blocks as `structure`, such as '
            f"Block(64, 64). Received: structure={pattern!r}"
        )
    run = {"data": data, "resume": resume, "verbose": verbose}
    finish = functools.partial(hold, model, in_place=in_place)
    if masks is not None:
        _refuse_beside(
            "masks",
            density=density,
            score=None if score == "magnitude" else score,
            budget=budget,
            data=None if refit else data,
            structure=pattern,
            include=include,
            exclude=exclude,
        )
        weights, masks = _named(model, masks)
        given = _given(weights, masks)
        if refit:
            given = prune_layers(model, weights, Recipe(masks=masks, refit=True), **run)
        return finish(weights, given, storage)
    if isinstance(score, Saliency):
        _refuse_beside("score", data=None if refit else data, include=include, exclude=exclude)
        weights = choose(prunable_weights(model, unregistered=True), [*score.masks], None)
    else:
        weights = weights_to_prune(model, include, exclude, unregistered)
    refuse_unfit(model, weights, "no kernel that could be pruned")
    if density is not None and 0.5 < check_density(density) < 1.0:
        _note_what_stays(float(density))
    by_error = data is not None and isinstance(budget, str) and budget == "error"
    if layerwise or pattern is not None or (by_error and score == "magnitude"):
        if density is None and budget is None:
            raise _no_density()
        budget = budget or "uniform"
        if by_error:
            share = check_density(density)
            plan = budget_by_error(model, weights, share, data, verbose)
        else:
            plan = plan_for(density, budget, weights, orthogonal=False)
        if on_blocks or isinstance(pattern, Block):
            fixed = not isinstance(budget, str)
            size = pattern if isinstance(pattern, Block) else None
            blocks = BlockPlan.of(weights, plan, size, orthogonal=False, given=fixed)
            recipe = Recipe(str(score), blocks.budget.counts, blocks=blocks.blocks, refit=refit)
            draws = prune_layers(model, blocks.weights, recipe, **run)
            return finish(blocks.weights, draws, storage, blocks)
        recipe = Recipe(str(score), plan.counts, structure=pattern, refit=refit)
        return finish(weights, prune_layers(model, weights, recipe, **run), storage)
    if refit and score not in OF_DATA:
        data = None
    if budget is not None:
        plan = plan_for(density, budget, weights, orthogonal=False)
        saliency = _scored(model, plan.density, score, data, seed, weights, collapse_matters=False)
        chosen = {} if on_blocks else saliency.masks_for(plan)
    else:
        if density is None and not isinstance(score, Saliency):
            raise _no_density()
        saliency = _scored(model, density, score, data, seed, weights, collapse_matters=True)
        if density is not None and check_density(density) != saliency.density:
            raise DensityError(
                f"The saliency was made for the density {saliency.density:.6g}; leave `density` "
                f"out. Received: density={density!r}"
            )
        chosen = saliency.masks
        if on_blocks:
            plan = saliency.budget
    _warn_if_trained(model, weights, score)
    if on_blocks:
        fixed = not (budget is None or isinstance(budget, str))
        blocks = BlockPlan.of(weights, plan, None, orthogonal=False, given=fixed)
        draws = blocks.draws(saliency.scores, seed)
        if refit:
            chosen = {path: draw.mask for path, draw in draws.items()}
            recipe = Recipe(masks=chosen, blocks=blocks.blocks, refit=True)
            draws = prune_layers(model, blocks.weights, recipe, **run)
        return finish(blocks.weights, draws, storage, blocks)
    if refit:
        given = prune_layers(model, weights, Recipe(masks=chosen, refit=True), **run)
        return finish(weights, given, storage)
    return finish(weights, _given(weights, chosen), storage)


def _check_layerwise(
    score: Any, data: Any, refit: bool, structure: Any, resume: Any, *, needs_data: bool
) -> None:
    """Refuses arguments of layer-by-layer pruning that do not go together."""
    if needs_data and data is None:
        raise ValueError(
            "Each layer is pruned or refitted on its inputs: give `data`, such as a few hundred "
            f"rows of x. Received: score={score!r}, refit={refit}, data=None"
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
            'Only layer-by-layer pruning on `data` (score="obs", "wanda", or refit=True) goes on '
            f"from a folder. Received: resume={str(resume)!r}, score={score!r}"
        )


def _warn_if_trained(model: Any, weights: list[PrunableWeight], score: Any) -> None:
    name = score.method if isinstance(score, Saliency) else getattr(score, "__name__", score)
    if str(name).lower() in _OF_FRESH_NETWORKS and (reason := signs_of_training(model, weights)):
        warnings.warn(
            f"{name} scores the connections of untrained networks; of trained ones it drops what "
            'matters. For these use score="obs" with `data`, or magnitudes with refit=True. '
            f"{reason}",
            stacklevel=4,
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
    seed: int | None,
    weights: list[PrunableWeight],
    *,
    collapse_matters: bool,
) -> Saliency:
    if isinstance(score, Saliency):
        return score
    options: dict[str, Any] = {
        "include": [weight.path for weight in weights],
        "on_collapse": "error" if collapse_matters else "ignore",
    }
    if callable(score):
        args = [model, density, *([] if data is None else [data])]
        if not _takes(score, *args, **options):
            return _of_kernels(score, density, data, weights, options["on_collapse"])
        found = score(*args, **options)
        if not isinstance(found, Saliency):
            raise ValueError(
                "A function given as `score` must return a Saliency, as those of "
                f"keras_sparse_ortho.saliency do. Received: {found!r}"
            )
        return found
    assert density is not None
    return saliency_by_name(score, model, density, data, seed=seed, **options)


def _takes(function: Callable[..., Any], *args: Any, **options: Any) -> bool:
    try:
        inspect.signature(function).bind(*args, **options)
    except (TypeError, ValueError):  # ValueError: some builtin functions have no signature
        return False
    return True


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
                "A function given as `score` takes a kernel and returns an array of its shape, or "
                "takes (model, density, include=, on_collapse=) and returns a Saliency. "
                f"Received: score={name}, shape {score.shape} for '{weight.path}' {weight.shape}"
            )
        scores.append(score)
    return Saliency(name, check_density(density), weights, scores, on_collapse)


def _named(
    model: Any, masks: Mapping[str, np.ndarray]
) -> tuple[list[PrunableWeight], dict[str, np.ndarray]]:
    """The weights that masks are for, and the masks by the paths of these."""
    known = prunable_weights(model, unregistered=True)
    by_path: dict[str, np.ndarray] = {}
    for name, mask in masks.items():
        found = [w.path for w in known if w.path == name or w.path.startswith(f"{name}/")]
        if len(found) != 1 or found[0] in by_path:
            raise UnknownWeightError(
                "`masks` must name each prunable weight once, by its path, or by its layer's if it "
                f"is the only one there. There are: {', '.join(w.path for w in known) or 'none'}. "
                f"Received: {name!r}, which names {found or 'none'}"
            )
        by_path[found[0]] = mask
    weights = [weight for weight in known if weight.path in by_path]
    refuse_unfit(model, weights, "no kernel that is named by `masks`")
    return weights, by_path


def _given(weights: list[PrunableWeight], masks: Mapping[str, np.ndarray]) -> dict[str, AnyDraw]:
    draws: dict[str, AnyDraw] = {}
    for weight in weights:
        mask = np.asarray(masks[weight.path])
        if mask.dtype != bool or mask.shape != weight.shape or not mask.any():
            raise NotPrunableError(
                f"The mask of '{weight.path}' must be a bool array of shape {weight.shape} with "
                f"at least one live entry. Received: dtype {mask.dtype}, shape {mask.shape}, "
                f"{np.count_nonzero(mask)} live"
            )
        draws[weight.path] = Draw(mask)
    return draws


def _refuse_beside(name: str, **others: Any) -> None:
    given = [other for other, value in others.items() if value is not None]
    if given:
        raise ValueError(
            f"`{name}` says which entries are live; leave the other arguments out. "
            f"Received: {name} together with {', '.join(given)}"
        )
