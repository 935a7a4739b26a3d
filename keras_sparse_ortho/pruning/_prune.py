"""`prune` and `apply_masks`: fixed masks on weights as they are, or refitted to data."""

from __future__ import annotations

import functools
import logging
import pathlib
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.calibration import (
    CALIBRATED,
    Channels,
    Recipe,
    Sensitivity,
    calibration_batches,
    densities_around,
    measurable,
    measured_errors,
    prune_layers,
)
from keras_sparse_ortho.errors import DensityError, NotPrunableError, UnknownWeightError
from keras_sparse_ortho.initializers import AnyDraw, Draw, SparseInitializer, adopt
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose
from keras_sparse_ortho.models import (
    Plan,
    carry_out,
    flattened,
    prunable_weights,
    refuse_unfit,
    verb,
)
from keras_sparse_ortho.orthogonal import (
    Block,
    NByM,
    StructureLike,
    as_structure,
    dead_outputs,
    depthwise_outputs,
)
from keras_sparse_ortho.pruning._blocks import BlockPlan
from keras_sparse_ortho.pruning._planning import (
    BudgetLike,
    Densities,
    density_and_budget,
    plan_for,
    plan_of_draws,
    shows_progress,
    weights_to_prune,
)
from keras_sparse_ortho.pruning._sparsify import signs_of_training
from keras_sparse_ortho.saliency import Saliency, saliency_by_name
from keras_sparse_ortho.storages import check_storage

_OF_FRESH_NETWORKS = ("snip", "grasp", "synflow")


def plan_prune(
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
    """Plans `prune`, with the same arguments."""
    check_storage(storage)
    density, budget = density_and_budget(density, budget)
    pattern: Any = None if structure is None else as_structure(structure)
    by_layer = isinstance(score, str) and score in CALIBRATED
    refits = by_layer or (isinstance(score, str) and score == "magnitude" and data is not None)
    _check_layerwise(score, data, pattern, resume, needs_data=refits)
    if isinstance(score, Saliency):
        others = {"data": data, "include": include, "exclude": exclude}
        if given := [name for name, value in others.items() if value is not None]:
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
    if not refits and pattern is None:
        return _by_scores(model, weights, density, score, budget, data, storage)
    batches = None if data is None else calibration_batches(model, data)
    if budget is None and (by_layer or pattern is not None):
        budget = "uniform"
    elif budget is None:
        paths = [weight.path for weight in weights]
        budget = saliency_by_name("magnitude", model, check_density(density), include=paths).budget
    if by_layer or (batches is not None and budget == "error"):
        densities = not isinstance(budget, str | Sensitivity)
        weights = measurable(model, weights, batches or (), given=densities)
    if batches is not None and isinstance(budget, str) and budget == "error":
        at = densities_around(check_density(density))
        budget = measured_errors(model, weights, at, batches, shows_progress())
    plan = plan_for(density, budget, weights, orthogonal=False)
    assert isinstance(score, str)
    blocks, refit = None, data is not None
    if storage == "blocks" or isinstance(pattern, Block):
        blocks = BlockPlan.of(weights, plan, pattern, orthogonal=False, budget=budget)
        weights, counts = blocks.weights, blocks.budget.counts
        recipe = Recipe(score, counts, blocks=blocks.blocks, refit=refit)
    else:
        times = flattened(model, weights) if isinstance(pattern, Channels) else {}
        recipe = Recipe(score, plan.counts, structure=pattern, refit=refit, positions=times)
    draws = prune_layers(model, weights, recipe, batches, resume, shows_progress())
    if pattern is None:
        _warn_of_dead_outputs(weights, draws)
    return plan_of_draws(model, weights, draws, storage, blocks)


@verb(plan_prune)
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
) -> keras.Model:
    """Keeps the weights of a model and masks them: `w_e = w` where a mask is live, else 0.

    The `round(density * size)` entries of highest score are live, over all selected kernels
    together, or within each kernel as many as a `budget` gives it. Ties go to the kernel listed
    first, and in it to the lower flat index. Each output of a depthwise kernel (few taps of one
    input) keeps its highest score, and budgets by name leave it that entry; `exclude` these kernels
    to keep them dense:

    - `prune(trained, 0.1, budget="erk")`: the largest magnitudes of each kernel;
    - `prune(model, 0.1, score="snip", data=(x, y))`: connection sensitivity, of a fresh model;
    - `prune(model, score=kso.saliency.grasp(model, 0.1, data, batches=8))`: other settings.

    Trained networks lose least with `score="obs"` and a few hundred rows of `data`. Layer by layer,
    with the inputs `X` from the pruned layers before, the dense kernel `W` and
    `H = X^T X + 0.01 mean(diag X^T X) I`, live entries minimize the outputs' squared error:

        V = argmin tr (V - W)^T (H + e diag H) (V - W)  over  V = M * V.

    The alternating direction method of multipliers (ADMM) finds the mask `M`: it alternates between
    this problem and the projection onto the pattern. One row in four is held out to choose the
    damping `e`. With the inputs `Y` in the given model, the target is `W + H^-1 X^T (Y - X) W / 2`,
    which makes up for part of the loss before the layer. `"wanda"` keeps the largest
    `|w_i| norm(X_i)` and refits them. With `data`, magnitudes are refitted, too.

    With batch normalization, call `restore_statistics(pruned, x, reference=model)` on the result.
    For other masks call `apply_masks`; to draw new kernels, `sparsify`; for masks learned in
    training, `parametrize`.

    Args:
        model: A built Keras 3 model: Sequential, functional, nested, or written as a class.
        density: float in (0, 1]. Global live fraction over the selected kernels, unless a
            `Saliency` or `Budget` says it. A dict or list of densities is taken as the budget.
        score: `"magnitude"` (default), `"obs"`, `"wanda"`, `"snip"`, `"grasp"` or `"synflow"`; or a
            `Saliency`, as the functions of `keras_sparse_ortho.saliency` return.
        budget: Density of each kernel: `"erk"`, `"er"`, `"uniform"`, a `Budget`, or a dict or list
            as for `sparsify`. `None`: scores of all kernels are compared; with `"obs"`, `"wanda"`
            or a `structure`, `"uniform"`. Per layer with `data` also `"error"` (best for trained
            networks; takes about as long as OBS again): the least sum of the layers' relative
            output errors, each times its part in the model's, on a fourth of the rows that OBS does
            not see there; or the table of these errors that `sensitivity` returns.
        data: For scores of the loss, what `fit` takes: `(x, y)`, `(x, y, sample_weight)`, a
            dataset, a generator of batches. For layers the same, or `x` alone: all rows of arrays,
            in batches of 64; of others the first 64 batches.
        structure: For `"obs"`, `"wanda"` and `"magnitude"`. `NByM`, or `"2:4"`: at most `n` live of
            every `m` consecutive inputs. `Block(rows, cols)`, `"32x32"` or `(32, 32)`: whole blocks
            live or dead, at all taps of a convolution, in any storage; `convert(pruned, "blocks",
            block=(rows, cols))` computes on them. Lines have at most 6 different counts on either
            side, and can be empty; with `regular=True` one, and densities as with
            `storage="blocks"`: take it where a side has few blocks. `calibration.Channels(group)`:
            whole inputs, for `remove_channels`.
        include: Which kernels, as for `sparsify`.
        exclude: Which kernels not.
        storage: str. As for `sparsify`. With `"blocks"` the blocks of largest total score are live;
            with `"obs"` ADMM projects onto them.
        resume: A folder, for layers pruned on `data`: it gets a file for each finished kernel, and
            a run with the same model, data and settings goes on from there.

    Returns:
        As for `sparsify`. Terminals get a progress bar while layers are pruned on `data`, unless
        `keras.config.disable_interactive_logging()` was called.

    Raises:
        DensityError, LayoutError, UnknownWeightError: As `sparsify`.
        BudgetError: Also for layer collapse: a kernel without a live entry.
        NotPrunableError: Also for scores that are not finite, and with `"obs"` or `"wanda"` a
            density for a kernel that cannot be measured.
        ValueError: Conflicting arguments; `data` missing or not used by this score; a damaged file
            in the folder of `resume`.

    Warns:
        UserWarning: As `sparsify`, for unregistered matrices and blocks. Depthwise kernels with
            fewer live entries than outputs. SNIP, GraSP or SynFlow, on
            trained weights. With `"obs"`, `"wanda"` and `budget="error"`, kernels that cannot be
            measured, which stay dense and do not count. Fewer than 16 different calibration rows.

    Limits: on calibration data a kernel of `k` inputs (times taps) and `m` outputs takes
    `70 k^2 + 60 k m` bytes and about `500 k^2 m` operations. Meanwhile there are copies of all
    kernels, and the given model's are set and put back: do not use it from another thread. The page
    on trained networks lists the layers that are measured.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="a")])
        >>> x = np.random.default_rng(0).normal(size=(64, 8))  # a few inputs
        >>> kso.prunable_weights(prune(dense, 0.25, score="obs", data=x))
        [<a/kernel shape=(8, 4), density=0.25>]

    References: Magnitudes: Han et al. (NeurIPS 2015), arXiv 1506.02626; OBS: Hassibi and Stork,
    "Optimal Brain Surgeon" (NeurIPS 1992); Frantar and Alistarh, "Optimal Brain Compression"
    (NeurIPS 2022), arXiv 2208.11580; ADMM: Meng et al., "ALPS" (NeurIPS 2024), arXiv 2406.07831;
    Wanda: Sun et al. (ICLR 2024), arXiv 2306.11695; others: `keras_sparse_ortho.saliency`
    """
    return carry_out(
        model,
        plan_prune(
            model,
            density,
            score=score,
            budget=budget,
            data=data,
            structure=structure,
            include=include,
            exclude=exclude,
            storage=storage,
            resume=resume,
        ),
    )


def plan_apply_masks(
    model: keras.Model,
    masks: Mapping[str, np.ndarray] | None = None,
    *,
    data: Any = None,
    include: Selection = None,
    exclude: Selection = None,
    storage: str = "masked",
) -> Plan:
    """Plans `apply_masks`, with the same arguments."""
    check_storage(storage)
    draws: dict[str, AnyDraw]
    if masks is not None:
        found, by_path = _named(model, masks)
        weights = choose(found, include, exclude)
        draws = {weight.path: Draw(by_path[weight.path]) for weight in weights}
    else:
        found = choose(prunable_weights(model, unregistered=True), include, exclude)
        weights = [w for w in found if isinstance(w.initializer, SparseInitializer)]
        refuse_unfit(model, weights, "no layer with one of our initializers")
        draws = {weight.path: adopt(weight, weight.initializer) for weight in weights}
    if data is not None:
        recipe = Recipe(masks={path: draw.mask for path, draw in draws.items()}, refit=True)
        batches = calibration_batches(model, data)
        draws = prune_layers(model, weights, recipe, batches, verbose=shows_progress())
    return plan_of_draws(model, weights, draws, storage)


@verb(plan_apply_masks)
def apply_masks(
    model: keras.Model,
    masks: Mapping[str, np.ndarray] | None = None,
    *,
    data: Any = None,
    include: Selection = None,
    exclude: Selection = None,
    storage: str = "masked",
) -> keras.Model:
    """Holds given masks, or the masks that the layers' own initializers drew: `w_e = M * w`.

    Kernels keep their values, and dead entries stay 0. Initializers see only a shape: if one drew
    along other axes than its layer's, and the kernel is as drawn, it is drawn again along the true
    ones.

    Args:
        model: A built Keras 3 model, as for `sparsify`.
        masks: dict from weight path to a bool array of its shape, or from the path of a layer with
            one kernel; other kernels stay dense. `None` (default): the masks that the layers'
            initializers, such as `initializers.ExactOrthogonal`, drew.
        data: A few hundred rows of inputs, as for `prune`, on which live entries get the values of
            least squared error of their layers' outputs. Default: kernels keep their values.
        include: Which kernels, as for `sparsify`. Default: all that have a mask.
        exclude: Which kernels not.
        storage: str. As for `sparsify`; with `"blocks"` masks that were drawn of regular blocks are
            stored as live blocks, others compactly.

    Returns:
        As for `sparsify`.

    Raises:
        NotPrunableError: A model that is not built or has no such initializers; a mask of another
            shape or type, or without live entries; a trained kernel in which the mask of its
            initializer would drop nonzero entries; layers that are wrapped or quantized already.
        UnknownWeightError: A mask, `include` or `exclude` that names nothing.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> orthogonal = kso.initializers.ExactOrthogonal(0.1, seed=0)
        >>> layer = keras.layers.Dense(100, kernel_initializer=orthogonal)
        >>> dense = keras.Sequential([keras.Input((64,)), layer, keras.layers.Dense(10)])
        >>> kso.report(apply_masks(dense)).rows[0].live
        640
    """
    return carry_out(
        model,
        plan_apply_masks(
            model,
            masks,
            data=data,
            include=include,
            exclude=exclude,
            storage=storage,
        ),
    )


def _by_scores(
    model: Any,
    weights: list[PrunableWeight],
    density: float | None,
    score: str | Saliency,
    budget: Any,
    data: Any,
    storage: str,
) -> Plan:
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
        warn_user(
            f"{saliency.method} scores the connections of untrained networks; of trained ones it "
            'drops what matters. For these use score="obs", or magnitudes, with `data`. '
            f"{reason}"
        )
    asked = saliency.budget if plan is None else plan  # refuses kernels without a live entry
    if storage == "blocks":
        blocks = BlockPlan.of(weights, asked, None, orthogonal=False, budget=budget)
        counts, scores = blocks.budget.counts, saliency.scores
        recipe = Recipe(counts=counts, blocks=blocks.blocks, scores=scores)
        draws = prune_layers(model, blocks.weights, recipe)
        return plan_of_draws(model, blocks.weights, draws, storage, blocks)
    masks = saliency.masks if plan is None else saliency.masks_for(plan)
    drawn: dict[str, AnyDraw] = {path: Draw(mask) for path, mask in masks.items()}
    _warn_of_dead_outputs(weights, drawn)
    return plan_of_draws(model, weights, drawn, storage)


def _warn_of_dead_outputs(weights: list[PrunableWeight], draws: Mapping[str, AnyDraw]) -> None:
    """Warns of depthwise kernels whose count does not even leave one entry for each output."""
    dead = []
    for weight in weights:
        outputs = depthwise_outputs(weight.shape, weight.layout)
        if outputs and (count := dead_outputs(draws[weight.path].mask, weight.layout)):
            dead.append(f"{count} of {outputs} of {weight.path!r}")
    if dead:
        warn_user(
            "These depthwise kernels have fewer live entries than outputs, so some outputs are "
            "constant: give them a higher density in the `budget`, or `exclude` them. "
            f"Received: {', '.join(dead)}"
        )


def _check_layerwise(
    score: Any, data: Any, structure: Any, resume: Any, *, needs_data: bool
) -> None:
    if needs_data and data is None:
        raise ValueError(
            "Each layer is pruned on its inputs: give `data`, such as a few hundred rows of x. "
            f"Received: score={score!r}, data=None"
        )
    if structure is not None and (
        not isinstance(structure, NByM | Block | Channels)
        or score not in ("magnitude", *CALIBRATED)
    ):
        raise ValueError(
            "`structure` must be Block, NByM or Channels, "
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
    logging.getLogger("keras_sparse_ortho").warning(
        f"prune keeps {100 * density:g}% of the entries (density={density:g}). To prune that many: "
        f"density={1 - density:.6g}, or sparsity={density:g}."
    )


def _named(model: Any, masks: Mapping[str, Any]) -> tuple[list[PrunableWeight], dict[str, Any]]:
    known = prunable_weights(model, unregistered=True)
    by_path: dict[str, Any] = {}
    for name, mask in masks.items():
        found = [w for w in known if w.path == name or w.path.startswith(f"{name}/")]
        if len(found) != 1 or found[0].path in by_path:
            raise UnknownWeightError(
                "`masks` must name each prunable weight once, by its path, or by its layer's if it "
                f"is the only one there. There are: {', '.join(w.path for w in known) or 'none'}. "
                f"Received: {name!r}, which names {[w.path for w in found] or 'none'}"
            )
        mask = np.asarray(mask)
        if mask.dtype != bool or mask.shape != found[0].shape or not mask.any():
            raise NotPrunableError(
                f"The mask of {found[0].path!r} must be a bool array of shape {found[0].shape} "
                f"with at least one live entry. Received: dtype {mask.dtype}, shape {mask.shape}, "
                f"{np.count_nonzero(mask)} live"
            )
        by_path[found[0].path] = mask
    weights = [weight for weight in known if weight.path in by_path]
    refuse_unfit(model, weights, "no kernel that is named by `masks`")
    return weights, by_path
