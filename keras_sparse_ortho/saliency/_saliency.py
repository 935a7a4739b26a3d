"""`Saliency`: scores of a model's kernels, with their masks and budget; two baseline scores."""

from __future__ import annotations

import random as python_random
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_density, other_keywords
from keras_sparse_ortho._foreign_names import Answering
from keras_sparse_ortho.budgets import Budget, allocate
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight, Selection, choose, names_in
from keras_sparse_ortho.models import prunable_weights, refuse_unfit, weights_of
from keras_sparse_ortho.orthogonal import floored_mask, floored_masks, live_count

_ALMOST_NOTHING = 1e-9  # live entries of a collapsed weight, for a share that can be scaled


class Saliency(Answering):
    """Scores of all entries of a model's kernels, with the masks and the budget that follow.

    The `round(density * size)` highest scores over all kernels together are live; ties go to the
    kernel listed first, then to the lower flat index. Each output of a depthwise kernel keeps its
    highest score. It is used in three ways:

    - `prune(model, score=saliency)`: its masks on the given weights;
    - `sparsify(model, budget=saliency.orthogonal_budget)`: only its densities, for new, exactly
      orthogonal kernels. Other initializers take `saliency.budget`;
    - `saliency.masks_for(budget)`: the highest scores of each kernel, in the counts of a budget.

    Args:
        method: str. Name of the criterion.
        density: float in (0, 1]. Global live fraction.
        weights: list of `PrunableWeight`.
        scores: list of arrays, one of each weight's shape; higher is kept.
        on_collapse: `"error"` or `"ignore"` (e.g. for `masks_for`), for a weight without live
            entries.
        masks: list of bool arrays. Live entries, if the scores alone do not say.

    Raises BudgetError for a weight without live entries (layer collapse), if
    `on_collapse="error"`, and NotPrunableError for scores that are not finite.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="a"),
        ...                           keras.layers.Dense(2, name="b")])
        >>> saliency = kso.saliency.magnitude(model, 0.25)
        >>> saliency.budget.live, sum(int(mask.sum()) for mask in saliency.masks.values())
        (10, 10)
    """

    def __init__(
        self,
        method: str,
        density: float,
        weights: Sequence[PrunableWeight],
        scores: Sequence[np.ndarray],
        on_collapse: str = "error",
        masks: Sequence[np.ndarray] | None = None,
    ) -> None:
        self.method = method
        self.density = check_density(density)
        self._weights = tuple(weights)
        paths = [weight.path for weight in weights]
        for path, score in zip(paths, scores, strict=True):
            if wrong := np.count_nonzero(~np.isfinite(score)):
                raise NotPrunableError(
                    f"The {method} scores of {path!r} are not finite. "
                    f"Received: {wrong} infinite or NaN scores"
                )
        if masks is None:
            count = live_count(density, sum(score.size for score in scores))
            masks = floored_masks(scores, [weight.layout for weight in weights], count)
        self.scores = dict(zip(paths, scores, strict=True))
        self.masks = dict(zip(paths, masks, strict=True))
        if on_collapse == "error":
            self._refuse_collapse()

    @property
    def counts(self) -> dict[str, int]:
        """Live entries of every weight."""
        return {path: int(np.count_nonzero(mask)) for path, mask in self.masks.items()}

    @property
    def collapsed(self) -> list[str]:
        """Paths of the weights without any live entry."""
        return [path for path, count in self.counts.items() if count == 0]

    @property
    def budget(self) -> Budget:
        """The density of every weight; BudgetError if one has no live entry."""
        self._refuse_collapse()
        sizes = {path: mask.size for path, mask in self.masks.items()}
        return Budget({path: n / sizes[path] for path, n in self.counts.items()}, sizes)

    @property
    def orthogonal_budget(self) -> Budget:
        """The budget with every weight lifted to the least density of an orthogonal kernel.

        The other weights give up entries in proportion; `Budget.lifted` names the lifted ones.
        BudgetError if the density is too small for orthogonal kernels.
        """
        relative = [max(self.counts[w.path], _ALMOST_NOTHING) / w.size for w in self._weights]
        return allocate(self._weights, self.density, relative, orthogonal=True)

    def masks_for(self, budget: Budget) -> dict[str, np.ndarray]:
        """Returns masks with a budget's counts for these weights; ties go to lower indices."""
        counts = budget.for_weights(self._weights).counts
        return {
            weight.path: floored_mask(self.scores[weight.path], weight.layout, counts[weight.path])
            for weight in self._weights
        }

    def _refuse_collapse(self) -> None:
        if self.collapsed:
            raise BudgetError(
                f"Layer collapse: {self.method} at density {self.density:.6g} leaves these weights "
                "without live entries, so no signal passes them. Use a higher density, `exclude` "
                'them, or give every kernel its share with prune(model, density, budget="erk"). '
                f"Received: {self.collapsed}"
            )

    def __repr__(self) -> str:
        lines = [f"<Saliency by {self.method}, density {self.density:.6g}"]
        lines += [f"  {path}  {n} of {self.masks[path].size}" for path, n in self.counts.items()]
        return "\n".join(lines) + ">"


@other_keywords
def magnitude(
    model: Any,
    density: float,
    *,
    include: Selection = None,
    exclude: Selection = None,
    on_collapse: str = "error",
) -> Saliency:
    """Score `|w|`, compared over all kernels together: global magnitude pruning.

    Arguments and errors are those of `snip`; the model need not be compiled.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(10, name="a")])
        >>> magnitude(model, 0.1)
        <Saliency by magnitude, density 0.1
          a/kernel  20 of 200>
    """
    weights = scored_weights(model, density, include, exclude, on_collapse)
    scores = [np.abs(weight.raw_value()) for weight in weights]
    return Saliency("magnitude", density, weights, scores, on_collapse)


@other_keywords
def random(
    model: Any,
    density: float,
    *,
    seed: int | None = None,
    include: Selection = None,
    exclude: Selection = None,
    on_collapse: str = "error",
) -> Saliency:
    """Scores drawn uniformly from [0, 1): a uniformly random global mask of exact count.

    An integer `seed` gives the same mask everywhere; `None` takes one from Python's `random`. The
    other arguments and errors are those of `magnitude`.
    """
    weights = scored_weights(model, density, include, exclude, on_collapse)
    rng = np.random.default_rng(python_random.randrange(2**31) if seed is None else seed)
    scores = [rng.random(weight.shape) for weight in weights]
    return Saliency("random", density, weights, scores, on_collapse)


def scored_weights(
    model: Any, density: float, include: Selection, exclude: Selection, on_collapse: str
) -> list[PrunableWeight]:
    """The weights to score; unregistered matrices only if `include` lists their paths."""
    check_density(density)
    if on_collapse not in ("error", "ignore"):
        raise ValueError(f'`on_collapse` must be "error" or "ignore". Received: {on_collapse=}')
    weights = list(weights_of(model))
    paths = None if include is None else names_in(include)
    if isinstance(model, keras.layers.Layer) and paths is not None:
        others = prunable_weights(model, unregistered=True)
        weights += [w for w in others if not w.registered and w.path in paths]
    weights = choose(weights, include, exclude)
    refuse_unfit(model, weights, "no kernel that could be scored")
    return weights
