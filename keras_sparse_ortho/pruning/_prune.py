"""`prune`: masks on the weights of a model by any score, with refits on calibration data."""

from __future__ import annotations

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Mapping, Sequence

import keras

from keras_sparse_ortho._checks import as_text, check_density
from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.calibration import (
    Channels,
    LayerScore,
    Recipe,
    Sensitivity,
    calibration_batches,
    densities_around,
    measurable,
    measured_errors,
    prune_layers,
)
from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.initializers import AnyDraw, Draw
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
from keras_sparse_ortho.pruning._ranking import (
    Method,
    check_data,
    ranking_method,
    saliency_of,
)
from keras_sparse_ortho.saliency import Saliency, Score
from keras_sparse_ortho.storages import BlockForm, check_storage

Pattern = NByM | Block | Channels


def plan_prune(
    model: keras.Model,
    density: float | Densities | None = None,
    *,
    score: str | Score | Saliency = "magnitude",
    budget: BudgetLike | None = None,
    data: object = None,
    structure: StructureLike | Channels | None = None,
    include: Selection = None,
    exclude: Selection = None,
    storage: str = "masked",
    resume: str | pathlib.Path | None = None,
) -> Plan:
    """Plans `prune`, with the same arguments."""
    check_storage(storage)
    density, budget = density_and_budget(density, budget)
    pattern = _checked_structure(structure)
    method = ranking_method(score)
    check_data(method, score, data, resume)
    weights = _weights_for(model, method, include, exclude)
    density = _checked_density(density, budget, method)
    refit = data is not None and method.refits
    batches = calibration_batches(model, data) if refit else None
    is_layer_score = isinstance(method, LayerScore)
    if budget is None and (pattern is not None or is_layer_score):
        budget = "uniform"
    if batches is not None and (is_layer_score or _is_by_error(budget)):
        names_kernels = not isinstance(budget, str | Sensitivity)
        weights = measurable(model, weights, batches, given=names_kernels)
        if _is_by_error(budget):
            budget = _budget_by_error(model, weights, density, batches)
    counts = None
    if budget is not None:
        counts = plan_for(density, budget, weights, orthogonal=False)
    if isinstance(method, LayerScore):
        assert counts is not None  # by the uniform budget, if no other
        recipe = Recipe(score=method, counts=counts.counts)
    else:
        saliency = saliency_of(model, weights, method, density, counts, data)
        if batches is None and pattern is None and storage != BlockForm.name:
            draws = _draws_of_masks(saliency, counts)
            _warn_of_dead_outputs(weights, draws)
            return plan_of_draws(model, weights, draws, storage)
        if counts is None:
            counts = saliency.budget
        scores = saliency.scores
        recipe = Recipe(scores=scores, counts=counts.counts, refit=refit)
    blocks = None
    if storage == BlockForm.name or isinstance(pattern, Block):
        blocks = BlockPlan.of(
            weights, counts, pattern, orthogonal=False, budget=budget
        )
        weights = blocks.weights
    recipe = _with_pattern(recipe, model, weights, pattern, blocks)
    verbose = shows_progress()
    draws = prune_layers(model, weights, recipe, batches, resume, verbose)
    if pattern is None:
        _warn_of_dead_outputs(weights, draws)
    return plan_of_draws(model, weights, draws, storage, blocks)


def _budget_by_error(
    model: keras.Model,
    weights: Sequence[PrunableWeight],
    density: float | None,
    batches: Sequence[object],
) -> Sensitivity:
    densities = densities_around(check_density(density))
    return measured_errors(model, weights, densities, batches, shows_progress())


@verb(plan_prune)
def prune(
    model: keras.Model,
    density: float | Densities | None = None,
    *,
    score: str | Score | Saliency = "magnitude",
    budget: BudgetLike | None = None,
    data: object = None,
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
        score: `"magnitude"` (default), `"obs"`, `"wanda"`, `"snip"`, `"grasp"` or `"synflow"`; a
            score of yours, by its name or as an object (`saliency.register_score`); or a
            `Saliency`, as the functions of `keras_sparse_ortho.saliency` return.
        budget: Density of each kernel: `"erk"`, `"er"`, `"uniform"`, a `Budget`, or a dict or list
            as for `sparsify`. `None`: scores of all kernels are compared; with `"obs"`, `"wanda"`
            or a `structure`, `"uniform"`. Per layer with `data` also `"error"` (best for trained
            networks; takes about as long as OBS again): the least sum of the layers' relative
            output errors, each times its part in the model's, on a fourth of the rows that OBS does
            not see there; or the table of these errors that `sensitivity` returns.
        data: For scores of the loss, what `fit` takes: `(x, y)`, `(x, y, sample_weight)`, a
            dataset, a generator of batches. For layers the same, or `x` alone: all rows of arrays,
            in batches of 64 to 512; of others the first 64 batches. Live entries are refitted to
            them, unless the score is for untrained networks.
        structure: `NByM`, or `"2:4"`: at most `n` live of every `m` consecutive inputs.
            `Block(rows, cols)`, `"32x32"` or `(32, 32)`: whole blocks live or dead, at all taps of
            a convolution, in any storage; `convert(pruned, "blocks", block=(rows, cols))` computes
            on them. Lines have at most 6 different counts on either side, and can be empty; with
            `regular=True` one, and densities as with `storage="blocks"`: take it where a side has
            few blocks. `calibration.Channels(group)`: whole inputs, for `remove_channels`.
        include: Which kernels, as for `sparsify`.
        exclude: Which kernels not.
        storage: str. As for `sparsify`. With `"blocks"` the blocks of largest total score are live;
            with `"obs"` ADMM projects onto them.
        resume: A folder, for layers pruned or refitted on `data`: it gets a file for each finished
            kernel, and a run with the same model, data and settings goes on from there.

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


def _checked_structure(
    structure: StructureLike | Channels | None,
) -> Pattern | None:
    """The structure of masks of given weights; raises ValueError for one that only draws have."""
    if structure is None:
        return None
    pattern = as_structure(structure)
    if isinstance(pattern, Pattern):
        return pattern
    raise ValueError(
        "`structure` must be Block, NByM or Channels; other structures are drawn by sparsify. "
        f"Received: structure={pattern!r}"
    )


def _weights_for(
    model: keras.Model, method: Method, include: Selection, exclude: Selection
) -> list[PrunableWeight]:
    if not isinstance(method, Saliency):
        return weights_to_prune(model, include, exclude)
    if include is not None or exclude is not None:
        raise ValueError(
            "A Saliency says which kernels are pruned; leave `include` and `exclude` out. "
            f"Received: include={as_text(include)}, exclude={as_text(exclude)}"
        )
    weights = choose(
        prunable_weights(model, unregistered=True), [*method.scores], None
    )
    refuse_unfit(model, weights, "no kernel that could be pruned")
    return weights


def _checked_density(
    density: float | None, budget: BudgetLike | None, method: Method
) -> float | None:
    """The density that is given, or else that of a `Saliency`; `None` where a budget says it."""
    if density is not None:
        density = check_density(density)
        if 0.5 < density < 1.0:
            _note_what_stays(density)
        if (
            isinstance(method, Saliency)
            and budget is None
            and density != method.density
        ):
            raise DensityError(
                f"The saliency was made for the density {method.density:.6g}; leave `density` out. "
                f"Received: density={density!r}"
            )
        return density
    needs_density = budget is None or isinstance(budget, str | Sensitivity)
    if needs_density and isinstance(method, Saliency):
        return method.density
    if budget is None:
        raise DensityError(
            "prune needs a `density`, the live fraction, or a `budget` that says it. "
            "Received: density=None, budget=None"
        )
    return None


def _is_by_error(budget: BudgetLike | None) -> bool:
    """Whether a budget is measured on `data`."""
    return isinstance(budget, str) and budget == "error"


def _with_pattern(
    recipe: Recipe,
    model: keras.Model,
    weights: list[PrunableWeight],
    pattern: Pattern | None,
    blocks: BlockPlan | None,
) -> Recipe:
    """The recipe for masks of whole blocks, groups or channels."""
    if blocks is not None:
        counts = blocks.budget.counts
        return dataclasses.replace(recipe, counts=counts, blocks=blocks.blocks)
    if isinstance(pattern, Channels):
        positions = flattened(model, weights)
        return dataclasses.replace(
            recipe, structure=pattern, positions=positions
        )
    if isinstance(pattern, NByM):
        return dataclasses.replace(recipe, structure=pattern)
    return recipe


def _draws_of_masks(
    saliency: Saliency, counts: Budget | None
) -> dict[str, AnyDraw]:
    """The masks of a saliency, with the counts of a budget where there is one."""
    if counts is None:
        saliency.refuse_collapse()
        masks = saliency.masks
    else:
        masks = saliency.masks_for(counts)
    return {path: Draw(mask) for path, mask in masks.items()}


def _warn_of_dead_outputs(
    weights: list[PrunableWeight], draws: Mapping[str, AnyDraw]
) -> None:
    """Warns of depthwise kernels whose count does not even leave one entry for each output."""
    texts = []
    for weight in weights:
        outputs = depthwise_outputs(weight.shape, weight.layout)
        if outputs == 0:
            continue
        dead = dead_outputs(draws[weight.path].mask, weight.layout)
        if dead > 0:
            texts.append(f"{dead} of {outputs} of {weight.path!r}")
    if texts:
        warn_user(
            "These depthwise kernels have fewer live entries than outputs, so some outputs are "
            "constant: give them a higher density in the `budget`, or `exclude` them. "
            f"Received: {', '.join(texts)}"
        )


@functools.cache  # once for each density
def _note_what_stays(density: float) -> None:
    logging.getLogger("keras_sparse_ortho").warning(
        f"prune keeps {100 * density:g}% of the entries (density={density:g}). To prune that many: "
        f"density={1 - density:.6g}, or sparsity={density:g}."
    )
