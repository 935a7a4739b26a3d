"""`storage="blocks"`: which kernels of a model get blocks, and what was not reached."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from keras_sparse_ortho._keras_internals import level_of_user
from keras_sparse_ortho.budgets import Budget, Orthogonal, allocate
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.initializers import AnyDraw, Draw
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.orthogonal import Block, Structure, best_regular, largest_mask
from keras_sparse_ortho.pruning._block_sizes import block_for, canonical_shape, why_not_on_blocks

# Kernels that cannot be on blocks stay dense while what they take beyond their shares is up to this
# part of the live entries.
_SMALL = 0.1
# The least density on blocks may exceed the share of a kernel by this factor, the others give it.
_LIFT = 1.5
# A density that is missed by more than this part is told.
_TOLD = 0.1


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """What `storage="blocks"` makes of the kernels of a model.

    Args:
        weights: Those that get masks; the others stay dense.
        budget: Their densities, which their blocks can have exactly.
        blocks: The blocks of those on live blocks, by path.
        asked: The densities that were asked for, of all kernels.
        given: Whether the densities of single kernels were.
        size: The only size of blocks, if one was asked for.
    """

    weights: list[PrunableWeight]
    budget: Budget
    blocks: dict[str, Block]
    asked: Budget
    given: bool
    size: Block | None = None

    @classmethod
    def of(
        cls,
        weights: list[PrunableWeight],
        asked: Budget,
        size: Structure | None,
        *,
        orthogonal: Orthogonal,
        given: bool,
    ) -> "BlockPlan":
        """The densities nearest to a budget that are not above it in total.

        Args:
            weights: The weights.
            asked: Their densities.
            size: The size of all blocks, or `None` to choose it for each kernel.
            orthogonal: As for `allocate`.
            given: Whether the densities of single kernels were asked for. If not, kernels that
                cannot be on blocks stay dense while they are small, and the others share the rest.

        Raises:
            ValueError: A `size` that is no Block.
            LayoutError: A `size` that divides no kernel.
            BudgetError: A density at which no kernel would be sparse.
        """
        if size is not None and not isinstance(size, Block):
            raise ValueError(
                'storage="blocks" takes the size of blocks as `structure`, such as Block(64, 64). '
                f"Received: structure={size!r}"
            )
        if size is not None:
            _check_fits_any(size, weights)
        for lift in (1.0,) if given else (_LIFT, 1.0):
            plan, held, blocks = _chosen(weights, asked, size, orthogonal, given, lift)
            fitted = _fitted(plan, held, blocks)
            if fitted is not None:
                break
        assert fitted is not None  # without lift, each kernel has what it needs
        if size is None:
            on_blocks = [w for w in held if w.path in blocks]
            blocks.update({w.path: _larger(w, fitted, blocks[w.path]) for w in on_blocks})
        return cls(held, fitted, blocks, asked, given, size)

    def draws(self, scores: Mapping[str, np.ndarray]) -> dict[str, AnyDraw]:
        """By path, the mask of largest total score: of regular blocks, or of single entries."""
        rng = np.random.default_rng(0)
        found: dict[str, AnyDraw] = {}
        for weight in self.weights:
            score, count = scores[weight.path], self.budget.counts[weight.path]
            block = self.blocks.get(weight.path)
            if block is None:
                found[weight.path] = Draw(largest_mask(score, count))
            else:
                layout = weight.layout or KernelLayout.convolution()
                live = best_regular(block, layout.to_canonical(score), count, rng)
                mask = layout.from_canonical(live, weight.shape)
                found[weight.path] = Draw(mask, block=(block.rows, block.cols))
        return found

    def reasons(self) -> dict[str, str | None]:
        """Why each kernel could not be on blocks, as long as its layer is as it was given."""
        return {w.path: why_not_on_blocks(w, self.budget[w.path], self.size) for w in self.weights}

    def warn(self, model: Any, storage: str, reasons: Mapping[str, str | None]) -> None:
        """Warns once if kernels of the new model are not on blocks or miss their densities."""
        found = {w.path: w for w in prunable_weights(model, unregistered=True)}
        told = [
            f"'{w.path}' is not on live blocks ({reasons[w.path]})"
            for w in self.weights
            if not (_is_on_blocks(found[w.path]) or self._only_masked(w, storage))
        ]
        live = {path: found[path].live for path in self.asked}
        wanted = self.asked.counts
        pairs = [(f"'{p}'", live[p], wanted[p], self.asked.sizes[p]) for p in wanted if self.given]
        pairs.append(("the model", sum(live.values()), self.asked.live, self.asked.size))
        told += [
            f"{name} has the density {now / size:.4g} instead of {then / size:.4g}"
            for name, now, then, size in pairs
            if abs(now - then) > _TOLD * then
        ]
        if told:
            warnings.warn(
                f'With storage="{storage}" not all that was asked for was possible; report(model) '
                "has the blocks of each kernel. Kernels that are not on blocks are stored "
                f"{'with masks' if storage == 'masked' else 'compactly'}, and are not faster than "
                f"dense ones. Received: {'; '.join(told)}",
                stacklevel=level_of_user(),
            )

    def _only_masked(self, weight: PrunableWeight, storage: str) -> bool:
        """Whether a kernel has blocks, but is not to be stored as such."""
        return storage not in ("blocks", "auto") and weight.path in self.blocks


def _is_on_blocks(weight: PrunableWeight) -> bool:
    return weight.storage is not None and weight.storage.in_blocks


def _check_fits_any(size: Block, weights: list[PrunableWeight]) -> None:
    regular = dataclasses.replace(size, regular=True)
    if not any(regular.divides(canonical_shape(weight)) for weight in weights):
        regular.check(canonical_shape(weights[0]))


def _chosen(
    weights: list[PrunableWeight],
    asked: Budget,
    size: Block | None,
    orthogonal: Orthogonal,
    given: bool,
    lift: float,
) -> tuple[Budget, list[PrunableWeight], dict[str, Block]]:
    """Densities of the kernels that are to be sparse, these kernels, and blocks by path."""
    plan, held, dense, extra = asked, weights, 0, 0
    while held:
        blocks = {w.path: block_for(w, plan[w.path], size, lift) for w in held}
        stay = {w.path for w in held if plan[w.path] == 1.0}
        for weight in () if given else sorted(held, key=lambda w: w.size):
            if blocks[weight.path] is None:
                small = {*stay, weight.path}
                more = sum(w.size - plan.counts[w.path] for w in held if w.path in small)
                if extra + more <= _SMALL * asked.live:
                    stay = small
        if not stay:
            return plan, held, {path: block for path, block in blocks.items() if block is not None}
        dense += sum(w.size for w in held if w.path in stay)
        extra += sum(w.size - plan.counts[w.path] for w in held if w.path in stay)
        held = [w for w in held if w.path not in stay]
        if held:
            density = (asked.live - dense) / sum(w.size for w in held)
            plan = allocate(held, density, [plan[w.path] for w in held], orthogonal=orthogonal)
    raise BudgetError(
        "No kernel would be sparse: all of them are too small for blocks. "
        f"Received: density={asked.density:.6g}"
    )


def _larger(weight: PrunableWeight, fitted: Budget, block: Block) -> Block:
    """The blocks by the rule for the density that the kernel has got, if they have exactly that."""
    found = block_for(weight, fitted[weight.path])
    if found is None or found.rows * found.cols <= block.rows * block.cols:
        return block
    return block if fitted.counts[weight.path] % found.unit(canonical_shape(weight)) else found


def _fitted(plan: Budget, held: list[PrunableWeight], blocks: dict[str, Block]) -> Budget | None:
    """The plan with counts that blocks can have; what is not on blocks keeps its own.

    Counts are rounded down; what is left then rounds as many up as it suffices for. Kernels that
    need more than their share take it from those that can spare it; `None` if these cannot.
    """
    units = {w.path: blocks[w.path].unit(canonical_shape(w)) for w in held if w.path in blocks}
    wanted = plan.counts
    counts = {path: max(wanted[path] // unit, 1) * unit for path, unit in units.items()}
    left = sum(wanted[path] - count for path, count in counts.items())
    while left < 0:
        richest = max(units, key=lambda path: (counts[path] - units[path]) / wanted[path])
        if counts[richest] == units[richest]:
            return None
        counts[richest] -= units[richest]
        left += units[richest]
    for path in sorted(units, key=lambda path: (counts[path] - wanted[path]) / units[path]):
        if units[path] <= left and counts[path] < wanted[path]:
            counts[path] += units[path]
            left -= units[path]
    densities = {w.path: counts.get(w.path, wanted[w.path]) / w.size for w in held}
    return Budget(densities, {w.path: w.size for w in held}, plan.lifted_from)
