"""`storage="blocks"`: which kernels of a model get live blocks, of which size, at which density."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.budgets import Budget, Orthogonal, allocate
from keras_sparse_ortho.calibration import Sensitivity, canonical_shape, other_density
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.layers import why_no_block_form
from keras_sparse_ortho.models import Plan, prunable_weights
from keras_sparse_ortho.orthogonal import Block, block_unit
from keras_sparse_ortho.storages import BlockForm

_SIZES = (128, 64, 32, 16)  # larger blocks are faster (benchmarks/results/blocks.md)
_CLOSE = 0.75  # blocks are taken if they reach this part of the density; smaller ones come closer
_LEAST_TIMES = 2  # fans in multiples of the least, at which a kernel falls into separate matrices
_SMALL = 0.1  # part of the live entries up to which the excess of kernels not on blocks stays dense
_LIFT = 1.5  # the multiple of its share that a kernel may take from others


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """The kernels of a model with `storage="blocks"`."""

    weights: list[PrunableWeight]  # they get masks; the others stay dense
    budget: Budget  # their densities, which their blocks can have exactly
    blocks: dict[str, Block]  # of those on live blocks, by path
    asked: Budget  # the densities that were asked for, of all kernels
    given: bool  # whether the densities of single kernels were
    size: Block | None = None  # the only size of blocks, if one was asked for

    @classmethod
    def of(
        cls,
        weights: list[PrunableWeight],
        asked: Budget,
        size: object,
        *,
        orthogonal: Orthogonal,
        budget: Any,
    ) -> "BlockPlan":
        """The nearest densities that are in total not above those `asked` for.

        Unless `budget` has densities of single kernels, small ones not on blocks stay dense.
        """
        given = not (budget is None or isinstance(budget, str | Sensitivity))
        if size is not None:
            if not isinstance(size, Block):
                raise ValueError(
                    'storage="blocks" takes the size of blocks as `structure`, such as '
                    f"Block(64, 64). Received: structure={size!r}"
                )
            if not any(size.divides(canonical_shape(weight)) for weight in weights):
                size.check(canonical_shape(weights[0]))
        for lift in (1.0,) if given else (_LIFT, 1.0):
            plan, held, blocks = _chosen(weights, asked, size, orthogonal, given, lift)
            fitted = _fitted(plan, held, blocks)
            if fitted is not None:
                break
        assert fitted is not None  # without lift, each kernel has what it needs
        for weight in held if size is None else ():
            # The density that the kernel has got may allow larger ones.
            path, shape = weight.path, canonical_shape(weight)
            more = block_for(weight, fitted[path]) if path in blocks else None
            if more is not None and fitted.counts[path] % block_unit(more, shape) == 0:
                blocks[path] = max(blocks[path], more, key=lambda block: block.rows * block.cols)
        return cls(held, fitted, blocks, asked, given, size)

    def warn(self, model: keras.Model, plan: Plan, storage: str) -> None:
        """Warns once if kernels of a plan are not on blocks or miss their densities.

        Args:
            model: Model that the plan is for.
            plan: Plan of the kernels' new forms.
            storage: str. The form that was asked for.
        """
        missed = []
        for weight in self.weights:
            form_name = plan[weight.path].storage
            has_planned_mask = storage != BlockForm.name and weight.path in self.blocks
            if form_name == BlockForm.name or has_planned_mask:
                continue
            reason = why_not_on_blocks(weight, self.budget[weight.path], self.size)
            missed.append(f"{weight.path!r} is not on live blocks ({reason})")
        live_counts = self._live_counts(model, plan)
        rows = [
            (repr(path), live_counts[path], count, self.asked.sizes[path])
            for path, count in self.asked.counts.items()
        ]
        total = sum(live_counts[path] for path in self.asked)
        whole_model = ("the model", total, self.asked.live, self.asked.size)
        for row in [*rows, whole_model] if self.given else [whole_model]:
            missed += other_density(*row)
        if missed:
            warn_user(
                f'With storage="{storage}" some requests could not be met; report(model) '
                "has the blocks of each kernel. Kernels that are not on blocks are stored "
                f"{'with masks' if storage == 'masked' else 'compactly'}, and are not faster than "
                f"dense ones. Received: {'; '.join(missed)}"
            )

    def _live_counts(self, model: keras.Model, plan: Plan) -> dict[str, int]:
        """Live entries of all kernels that a density was asked for, some of which stay dense."""
        live_counts = {}
        for weight in prunable_weights(model, unregistered=True):
            if weight.path in plan:
                draw = plan[weight.path].draw
                assert draw is not None
                live_counts[weight.path] = draw.live
            elif weight.path in self.asked:
                live_counts[weight.path] = weight.live
        return live_counts


def _chosen(
    weights: list[PrunableWeight],
    asked: Budget,
    size: Block | None,
    orthogonal: Orthogonal,
    given: bool,
    lift: float,
) -> tuple[Budget, list[PrunableWeight], dict[str, Block]]:
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


def _fitted(plan: Budget, held: list[PrunableWeight], blocks: dict[str, Block]) -> Budget | None:
    """The plan with counts that blocks can have: rounded down, and up while the rest lasts.

    Kernels that need more than their share take it from others; `None` if these cannot spare it.
    """
    units = {
        w.path: block_unit(blocks[w.path], canonical_shape(w)) for w in held if w.path in blocks
    }
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


def block_for(
    weight: PrunableWeight, density: float, size: Block | None = None, lift: float = 1.0
) -> Block | None:
    """The blocks for a kernel, of one `size` or regular; `None` if none has so low a density.

    `I x J` regular blocks can have densities `t / gcd(I, J)`: the largest blocks with a `t` of 2 or
    more within a quarter below `density`; else about 16 if `t = 1` is at most `lift density`.
    """
    shape = canonical_shape(weight)
    if density == 1.0 or why_no_block_form(weight.owner) is not None:
        return None
    if size is not None:
        return size if _fits(size, shape) and _times(shape, size, lift * density) else None
    for side in _SIZES:
        found = [(_times(shape, block, density), block) for block in _fitting(shape, side)]
        for times, block in found:
            if times >= _LEAST_TIMES and times * _step(shape, block) >= _CLOSE * density:
                return _widened(shape, block)
    least = next((block for _, block in found if _times(shape, block, lift * density)), None)
    return least and _widened(shape, least)


def why_not_on_blocks(
    weight: PrunableWeight, density: float, size: Block | None = None
) -> str | None:
    """Why a kernel at a density is not on blocks, or on none of one `size`."""
    if (reason := why_no_block_form(weight.owner)) is not None:
        return reason
    if block_for(weight, density, size) is not None:
        if isinstance(weight.owner, keras.layers.LSTMCell | keras.layers.GRUCell):
            return "it needs an LSTM or GRU layer without states, both of whose kernels fit blocks"
        return None
    *_, inputs, outputs = shape = canonical_shape(weight)
    fitting = _fitting(shape, _SIZES[-1]) if size is None else [size][: _fits(size, shape)]
    least = min((_step(shape, block) for block in fitting), default=None)
    if least is None:
        blocks = "blocks of about 16" if size is None else f"blocks of {size.rows} x {size.cols}"
        return f"{inputs} x {outputs} cannot be divided into {blocks}"
    return f"blocks have the density {least:.4g} or more" if density < 1.0 else "it is dense"


def _widened(shape: Sequence[int], block: Block) -> Block:
    """Blocks longer along the kernel's longer side, as long as densities stay."""
    *_, inputs, outputs = shape
    along = "cols" if inputs < outputs else "rows"
    side = getattr(block, along)
    longer = (
        dataclasses.replace(block, **{along: times * side})
        for times in range(_SIZES[0] // side, 1, -1)
    )
    same = (b for b in longer if _fits(b, shape) and b.unit(shape) == block.unit(shape))
    return next(same, block)


def _fits(block: Block, shape: Sequence[int]) -> bool:
    """Whether blocks divide a kernel; gates stand side by side, without padded outputs."""
    return block.divides(shape) and (shape[1] == 1 or shape[-1] % block.cols == 0)


def _fitting(shape: Sequence[int], size: int) -> list[Block]:
    return [block for block in _of_size(*shape[-2:], size) if _fits(block, shape)]


@functools.lru_cache(maxsize=256)
def _of_size(inputs: int, outputs: int, size: int) -> list[Block]:
    """Blocks of about `size x size` for a matrix: without padding first, then nearest."""
    sides = range(math.ceil(size / 2**0.5), math.ceil(size * 2**0.5))
    found = []
    for rows, cols in itertools.product(sides, sides):
        if inputs % rows == 0 or outputs % cols == 0:
            block = Block(rows, cols, regular=True)
            if block.divides((inputs, outputs)):
                padded = inputs % rows > 0 or outputs % cols > 0
                distance = abs(math.log(rows / size)) + abs(math.log(cols / size))
                found.append((padded, distance, rows, cols, block))
    return [block for *_, block in sorted(found, key=lambda entry: entry[:-1])]


def _step(shape: Sequence[int], block: Block) -> float:
    """The least density on these blocks, of which the others are multiples."""
    return block_unit(block, shape) / math.prod(shape)


def _times(shape: Sequence[int], block: Block, density: float) -> int:
    return math.floor(density / _step(shape, block) + 1e-9)
