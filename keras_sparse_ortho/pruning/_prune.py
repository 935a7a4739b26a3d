"""`prune`: fixed masks on the weights as they are, or refitted to calibration data."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
import warnings
from typing import Any

import keras

from keras_sparse_ortho._checks import check_density, other_keywords
from keras_sparse_ortho._keras_internals import level_of_user
from keras_sparse_ortho.calibration import (
    CALIBRATED,
    Channels,
    Recipe,
    budget_by_error,
    prune_layers,
)
from keras_sparse_ortho.errors import DensityError, NotPrunableError
from keras_sparse_ortho.initializers import Draw
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose
from keras_sparse_ortho.models import Plan, prunable_weights, refuse_unfit, verb
from keras_sparse_ortho.orthogonal import Block, NByM, StructureLike, as_structure
from keras_sparse_ortho.pruning._blocks import BlockPlan
from keras_sparse_ortho.pruning._planning import (
    BudgetLike,
    Densities,
    check_storage,
    density_and_budget,
    hold,
    plan_for,
    shows_progress,
    weights_to_prune,
)
from keras_sparse_ortho.pruning._sparsify import signs_of_training
from keras_sparse_ortho.saliency import Saliency, saliency_by_name

_OF_FRESH_NETWORKS = ("snip", "grasp", "synflow")


@verb
@other_keywords()
def prune(
    model: keras.Model,
    density: float | Densities | None = None,
    *,
    score: str | Saliency = "magnitude",
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
    listed first, and in it to the lower flat index):

    - `prune(trained, 0.1, budget="erk")`: the largest magnitudes of each kernel;
    - `prune(model, 0.1, score="snip", data=(x, y))`: connection sensitivity, of a fresh model;
    - `prune(model, score=kso.saliency.grasp(model, 0.1, data, batches=8))`: a saliency with
      other settings.

    Trained networks lose least with `score="obs"` and a few hundred rows of `data`. Then each layer
    is pruned on the inputs `X` that the pruned ones before it give. With the dense kernel `W` and
    `H = X^T X + 0.01 mean(diag X^T X) I`, live entries get the values

        V = argmin tr (V - W)^T H (V - W)  over  V = M * V,

    the least squared error of the layer's outputs, and the mask `M` is found in eight rounds,
    each of which drops the entries of least `v^2 / (H^-1)_ii` and refits the others (OBS, the
    optimal brain surgeon). Then dead entries of large `(H (W - V))_i^2 / H_ii` are exchanged for
    live ones while the error falls, in at most twelve rounds. OBS fits each layer to the average of
    both models' outputs: `W + H^-1 X^T (Y - X) W / 2` takes the place of `W`, where `Y` are the
    inputs in the model as given. So a layer makes up for part of what the ones before it lost.
    `"wanda"` keeps the largest `|w_i| norm(X_i)`, and refits these, as magnitudes are refitted if
    there is `data`:

    - `prune(trained, 0.2, score="obs", data=x)`, best with `budget="error"`;
    - `prune(trained, 0.5, score="obs", data=x, structure="2:4")`;
    - `prune(trained, 0.2, data=x)`: magnitudes, refitted.

    With batch normalization, call `restore_statistics` on the result. For masks of any other origin
    call `apply_masks`; to draw new sparse kernels, `sparsify`; for masks learned in training,
    `parametrize`.

    Args:
        model: A built Keras 3 model: Sequential, functional, nested, or written as a class.
        density: Global live fraction over the selected kernels, in (0, 1]. May be left out where
            a `Saliency` or a `Budget` says it. A dict or list of densities is taken as the budget.
        score: `"magnitude"` (default), `"obs"`, `"wanda"`, `"snip"`, `"grasp"` or `"synflow"`; or a
            `Saliency`, as the functions of `keras_sparse_ortho.saliency` return.
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
            with `storage="blocks"`. `calibration.Channels(group)`: whole inputs, for
            `remove_channels`.
        include: Which kernels, as for `sparsify`.
        exclude: Which kernels not.
        storage: As for `sparsify`. With `"blocks"` the blocks of largest total score are live; with
            `"obs"` of `v^T ((H^-1)_bb)^-1 v`, where `v` are the entries of the block `b` for an
            output.
        resume: A folder, where layers are pruned on `data`: a file is written for each kernel that
            is done, and a run with the same model, data and settings goes on from there.

    Returns:
        A new model, not compiled. The given one stays as it was; `prune.in_place` changes the model
        itself, and `prune.plan` only says what each kernel would become. A terminal gets a progress
        bar while layers are pruned on `data`, unless `keras.config.disable_interactive_logging()`
        was called.

    Raises:
        DensityError: A density outside (0, 1], or none where nothing says it.
        BudgetError: A budget that does not fit the model; layer collapse: a kernel that is left
            without a live entry.
        NotPrunableError: A model that is not built or has no kernels; layers that are wrapped or
            quantized already; weights or scores that are not finite; a weight that cannot be
            stored compactly.
        UnknownWeightError: An `include` or `exclude` that names nothing.
        LayoutError: A kernel that the `structure` does not fit.
        ValueError: Arguments that exclude each other; `data` that is missing or not used.

    Warns:
        UserWarning: As `sparsify`, for unregistered matrices and blocks. SNIP, GraSP or SynFlow,
            which are for untrained networks, on trained weights. Kernels that do not multiply the
            inputs of their layers (embeddings, recurrent cells, transposed convolutions): pruned by
            magnitude, within their counts. Fewer than 16 different rows of calibration data.

    Limits: on calibration data a kernel of `k` inputs (times taps) and `m` outputs takes
    `32 k^2 + 80 k m` bytes while it is solved, and `16 k^2 (k + 100 m)` operations or so in
    float64, where its layer computes. Meanwhile there are copies of all kernels, and kernels are
    set in the given model and put back: do not use it from another thread. For each layer `data`
    goes through the layers in front of it. A layer that is called several times is solved on the
    inputs of its first call.

    Example:

    >>> import keras, numpy as np
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
    check_storage(storage)
    density, budget = density_and_budget(density, budget)
    pattern: Any = None if structure is None else as_structure(structure, regular=True)
    if storage == "blocks" and isinstance(pattern, Block):
        pattern = dataclasses.replace(pattern, regular=True)
    by_layer = isinstance(score, str) and score in CALIBRATED
    refits = by_layer or (isinstance(score, str) and score == "magnitude" and data is not None)
    _check_layerwise(score, data, pattern, resume, needs_data=refits)
    if isinstance(score, Saliency):
        if given := [
            n
            for n, v in (("data", data), ("include", include), ("exclude", exclude))
            if v is not None
        ]:
            raise ValueError(
                "A Saliency says which entries are live; leave the other arguments out. "
                f"Received: score together with {', '.join(given)}"
            )
        weights = choose(prunable_weights(model, unregistered=True), [*score.masks], None)
        refuse_unfit(model, weights, "no kernel that could be pruned")
    else:
        weights = weights_to_prune(model, include, exclude)
    if density is None and budget is None and not isinstance(score, Saliency):
        raise DensityError(
            "prune needs a `density`, the live fraction, or a `budget` that says it. "
            "Received: density=None, budget=None"
        )
    if density is not None and 0.5 < check_density(density) < 1.0:
        _note_what_stays(float(density))
    if refits or pattern is not None:
        return _layer_by_layer(
            model, weights, density, score, budget, data, pattern, storage, resume
        )
    return _by_scores(model, weights, density, score, budget, data, storage)


def _by_scores(
    model: Any,
    weights: list[PrunableWeight],
    density: float | None,
    score: str | Saliency,
    budget: Any,
    data: Any,
    storage: str,
) -> Plan:
    """The plan that keeps the entries of highest score, over all kernels or within each."""
    plan = None if budget is None else plan_for(density, budget, weights, orthogonal=False)
    if isinstance(score, Saliency):
        saliency = score
        if plan is None and density is not None and check_density(density) != score.density:
            raise DensityError(
                f"The saliency was made for the density {score.density:.6g}; leave `density` out. "
                f"Received: density={density!r}"
            )
    else:
        share: Any = density if plan is None else plan.density
        options: dict[str, Any] = {"include": [weight.path for weight in weights]}
        options["on_collapse"] = "error" if plan is None else "ignore"
        saliency = saliency_by_name(score, model, share, data, **options)
    if saliency.method.lower() in _OF_FRESH_NETWORKS and (
        reason := signs_of_training(model, weights)
    ):
        warnings.warn(
            f"{saliency.method} scores the connections of untrained networks; of trained ones it "
            'drops what matters. For these use score="obs", or magnitudes, with `data`. '
            f"{reason}",
            stacklevel=level_of_user(),
        )
    if storage == "blocks":
        given = not (budget is None or isinstance(budget, str))
        plan = saliency.budget if plan is None else plan
        blocks = BlockPlan.of(weights, plan, None, orthogonal=False, given=given)
        return hold(model, blocks.weights, blocks.draws(saliency.scores), storage, blocks)
    masks = saliency.masks if plan is None else saliency.masks_for(plan)
    if empty := [path for path, mask in masks.items() if not mask.any()]:
        raise NotPrunableError(
            "A mask needs at least one live entry; a `budget` gives each kernel its share. "
            f"Received: 0 live of '{empty[0]}'"
        )
    return hold(model, weights, {path: Draw(mask) for path, mask in masks.items()}, storage)


def _layer_by_layer(
    model: Any,
    weights: list[PrunableWeight],
    density: float | None,
    score: Any,
    budget: Any,
    data: Any,
    structure: Any,
    storage: str,
    resume: Any,
) -> Plan:
    """The plan that prunes each layer for itself, on its inputs where there is data."""
    if data is not None and isinstance(budget, str) and budget == "error":
        plan = budget_by_error(model, weights, check_density(density), data, shows_progress())
    else:
        budget = "uniform" if budget is None else budget
        plan = plan_for(density, budget, weights, orthogonal=False)
    recipe = Recipe(score, plan.counts, structure=structure, refit=data is not None)
    blocks = None
    if storage == "blocks" or isinstance(structure, Block):
        given = budget is not None and not isinstance(budget, str)
        blocks = BlockPlan.of(weights, plan, structure, orthogonal=False, given=given)
        weights, counts = blocks.weights, blocks.budget.counts
        recipe = Recipe(score, counts, blocks=blocks.blocks, refit=data is not None)
    draws = prune_layers(model, weights, recipe, data, resume, shows_progress())
    return hold(model, weights, draws, storage, blocks)


def _check_layerwise(
    score: Any, data: Any, structure: Any, resume: Any, *, needs_data: bool
) -> None:
    """Refuses arguments of layer-by-layer pruning that do not go together."""
    if needs_data and data is None:
        raise ValueError(
            "Each layer is pruned on its inputs: give `data`, such as a few hundred rows of x. "
            f"Received: score={score!r}, data=None"
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
