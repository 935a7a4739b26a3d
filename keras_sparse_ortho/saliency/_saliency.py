"""`Saliency`: scores of a model's kernels, with their masks and budget."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho._foreign_names import Answering
from keras_sparse_ortho.budgets import Budget, allocate
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.orthogonal import (
    floored_mask,
    floored_masks,
    live_count,
)

_ALMOST_NOTHING = (
    1e-9  # live entries of a collapsed weight, for a share that can be scaled
)


class Saliency(Answering):
    """Scores of all entries of a model's kernels, with the masks and the budget that follow.

    The `round(density * size)` highest scores over all kernels together are live; ties go to the
    kernel listed first, then to the lower flat index. Each output of a depthwise kernel keeps its
    highest score. It has three uses:

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
        for_untrained: bool. Whether `prune` warns where the weights are trained.

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

    refits: ClassVar[bool] = True
    """Whether `prune` with `data` fits live entries to the inputs of their layers."""

    def __init__(
        self,
        method: str,
        density: float,
        weights: Sequence[PrunableWeight],
        scores: Sequence[np.ndarray],
        on_collapse: str = "error",
        *,
        for_untrained: bool = False,
    ) -> None:
        self.method = method
        self.density = check_density(density)
        self.for_untrained = for_untrained
        self._weights = tuple(weights)
        self.scores: dict[str, np.ndarray] = {}
        for weight, score in zip(weights, scores, strict=True):
            self.scores[weight.path] = _checked(score, weight, method)
        if on_collapse == "error":
            self.refuse_collapse()

    @functools.cached_property
    def masks(self) -> dict[str, np.ndarray]:
        """Live entries of every weight, bool arrays."""
        scores = list(self.scores.values())
        layouts = [weight.layout for weight in self._weights]
        count = live_count(self.density, sum(score.size for score in scores))
        masks = floored_masks(scores, layouts, count)
        return dict(zip(self.scores, masks, strict=True))

    @property
    def counts(self) -> dict[str, int]:
        """Live entries of every weight."""
        return {
            path: int(np.count_nonzero(mask))
            for path, mask in self.masks.items()
        }

    @property
    def collapsed(self) -> list[str]:
        """Paths of the weights without any live entry."""
        return [path for path, count in self.counts.items() if count == 0]

    @property
    def budget(self) -> Budget:
        """The density of every weight; BudgetError if one has no live entry."""
        self.refuse_collapse()
        sizes = {path: mask.size for path, mask in self.masks.items()}
        densities = {
            path: count / sizes[path] for path, count in self.counts.items()
        }
        return Budget(densities, sizes)

    @property
    def orthogonal_budget(self) -> Budget:
        """The budget with every weight lifted to the least density of an orthogonal kernel.

        The other weights give up entries in proportion; `Budget.lifted` names the lifted ones.
        BudgetError if the density is too small for orthogonal kernels.
        """
        counts = self.counts
        relative = [
            max(counts[weight.path], _ALMOST_NOTHING) / weight.size
            for weight in self._weights
        ]
        return allocate(self._weights, self.density, relative, orthogonal=True)

    def masks_for(self, budget: Budget) -> dict[str, np.ndarray]:
        """Returns masks with a budget's counts for these weights; ties go to lower indices."""
        counts = budget.for_weights(self._weights).counts
        return {
            weight.path: floored_mask(
                self.scores[weight.path], weight.layout, counts[weight.path]
            )
            for weight in self._weights
        }

    def refuse_collapse(self) -> None:
        """Raises BudgetError if a weight has no live entry."""
        if self.collapsed:
            raise BudgetError(
                f"Layer collapse: {self.method} at density {self.density:.6g} leaves these weights "
                "without live entries, so no signal passes them. Use a higher density, `exclude` "
                'them, or give every kernel its share with prune(model, density, budget="erk"). '
                f"Received: {self.collapsed}"
            )

    def __repr__(self) -> str:
        lines = [f"<Saliency by {self.method}, density {self.density:.6g}"]
        for path, count in self.counts.items():
            lines.append(f"  {path}  {count} of {self.masks[path].size}")
        return "\n".join(lines) + ">"


def _checked(
    scores: np.ndarray, weight: PrunableWeight, method: str
) -> np.ndarray:
    """The scores of a weight; raises NotPrunableError unless all are finite, of its shape."""
    if scores.shape != weight.shape:
        raise NotPrunableError(
            f"The {method} scores of {weight.path!r} must have its shape, {weight.shape}. "
            f"Received: scores of shape {scores.shape}"
        )
    wrong = np.count_nonzero(~np.isfinite(scores))
    if wrong:
        raise NotPrunableError(
            f"The {method} scores of {weight.path!r} are not finite. "
            f"Received: {wrong} infinite or NaN scores"
        )
    return scores
