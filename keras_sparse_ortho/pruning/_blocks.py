"""`storage="blocks"`: which kernels of a model get live blocks, of which size, at which density."""

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Sequence

import keras

from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.budgets import Budget, Orthogonal, allocate
from keras_sparse_ortho.calibration import (
    Sensitivity,
    other_density,
)
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.kernels import PrunableWeight, canonical_shape
from keras_sparse_ortho.layers import block_sizes, why_no_block_form
from keras_sparse_ortho.models import Plan, prunable_weights
from keras_sparse_ortho.orthogonal import Block, block_unit
from keras_sparse_ortho.storages import BlockForm

_CLOSE = 0.75  # blocks are taken if they reach this part of the density; smaller ones come closer
_FEWEST_FANS = 2  # fans in multiples of the least, at which a kernel falls into separate matrices
_SMALL_PART = 0.1  # of the live entries: the excess of kernels not on blocks that stay dense
_LIFT = 1.5  # the multiple of its share that a kernel may take from others


@dataclasses.dataclass(frozen=True)
class BlockPlan:
    """The kernels of a model with `storage="blocks"`.

    Args:
        weights: list of `PrunableWeight` that get masks; the others stay dense.
        budget: Budget of their densities, which their blocks can have exactly.
        blocks: dict from path to the `Block` of those on live blocks.
        asked: Budget that was asked for, of all kernels.
        names_kernels: bool. Whether the densities of single kernels were asked for.
        size: Block. The only size of blocks, if one was asked for.
    """

    weights: list[PrunableWeight]
    budget: Budget
    blocks: dict[str, Block]
    asked: Budget
    names_kernels: bool
    size: Block | None = None

    @classmethod
    def of(
        cls,
        weights: list[PrunableWeight],
        asked: Budget,
        size: object,
        *,
        orthogonal: Orthogonal,
        budget: object,
    ) -> "BlockPlan":
        """The nearest densities that are in total not above those `asked` for.

        Unless `budget` has densities of single kernels, small ones not on blocks stay dense.

        Args:
            weights: list of `PrunableWeight` to prune.
            asked: Budget for them.
            size: Block, the only size, or `None`.
            orthogonal: As in `budgets.uniform`.
            budget: The argument of the user.
        """
        names_kernels = not (
            budget is None or isinstance(budget, str | Sensitivity)
        )
        checked_size = _checked_size(size, weights)
        request = _Request(
            weights, asked, checked_size, orthogonal, names_kernels
        )
        fitted = None
        if not names_kernels:
            masked, blocks, fitted = request.fitted(_LIFT)
        if fitted is None:
            masked, blocks, fitted = request.fitted(1.0)
        assert fitted is not None  # without lift, each kernel has what it needs
        if checked_size is None:
            _enlarge(blocks, masked, fitted)
        return cls(masked, fitted, blocks, asked, names_kernels, checked_size)

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
            has_planned_mask = (
                storage != BlockForm.name and weight.path in self.blocks
            )
            if form_name == BlockForm.name or has_planned_mask:
                continue
            reason = why_not_on_blocks(
                weight, self.budget[weight.path], self.size
            )
            missed.append(f"{weight.path!r} is not on live blocks ({reason})")
        live_counts = self._live_counts(model, plan)
        rows = [
            (repr(path), live_counts[path], count, self.asked.sizes[path])
            for path, count in self.asked.counts.items()
        ]
        total = sum(live_counts[path] for path in self.asked)
        whole_model = ("the model", total, self.asked.live, self.asked.size)
        if not self.names_kernels:
            rows = []
        for row in [*rows, whole_model]:
            missed += other_density(*row)
        if missed:
            manner = "with masks" if storage == "masked" else "compactly"
            warn_user(
                f'With storage="{storage}" some requests could not be met; report(model) '
                "has the blocks of each kernel. Kernels that are not on blocks are stored "
                f"{manner}, and are not faster than "
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


def _checked_size(size: object, weights: list[PrunableWeight]) -> Block | None:
    """The size of blocks that a user asked for; raises an error for one that fits no kernel."""
    if size is None:
        return None
    if not isinstance(size, Block):
        raise ValueError(
            'storage="blocks" takes the size of blocks as `structure`, such as '
            f"Block(64, 64). Received: structure={size!r}"
        )
    shapes = [canonical_shape(weight) for weight in weights]
    if not any(size.divides(shape) for shape in shapes):
        size.check(shapes[0])
    return size


def _enlarge(
    blocks: dict[str, Block], weights: list[PrunableWeight], budget: Budget
) -> None:
    """Takes larger blocks where the density that a kernel has got allows them."""
    for weight in weights:
        path = weight.path
        if path not in blocks:
            continue
        block = block_for(weight, budget[path])
        if block is None:
            continue
        unit = block_unit(block, canonical_shape(weight))
        if budget.counts[path] % unit == 0 and _area(block) > _area(
            blocks[path]
        ):
            blocks[path] = block


def _area(block: Block) -> int:
    return block.rows * block.cols


@dataclasses.dataclass(frozen=True)
class _Request:
    """The kernels for live blocks, and their densities; see `BlockPlan`."""

    weights: list[PrunableWeight]
    asked: Budget
    size: Block | None
    orthogonal: Orthogonal
    names_kernels: bool

    def fitted(
        self, lift: float
    ) -> tuple[list[PrunableWeight], dict[str, Block], Budget | None]:
        """The kernels with masks, their blocks, and a budget that the blocks can have.

        Args:
            lift: float. The multiple of its share that a kernel may take from others. The budget is
                `None` where these cannot spare it.
        """
        budget, masked, blocks = self._masked(lift)
        return masked, blocks, _in_whole_blocks(budget, masked, blocks)

    def _masked(
        self, lift: float
    ) -> tuple[Budget, list[PrunableWeight], dict[str, Block]]:
        """The budget of the kernels that do not stay dense, these, and their blocks."""
        budget = self.asked
        masked = self.weights
        dense_size = 0
        excess = 0
        while masked:
            blocks: dict[str, Block] = {}
            for weight in masked:
                block = block_for(weight, budget[weight.path], self.size, lift)
                if block is not None:
                    blocks[weight.path] = block
            dense = self._dense(budget, masked, blocks, excess)
            if not dense:
                return budget, masked, blocks
            for weight in dense:
                dense_size += weight.size
                excess += weight.size - budget.counts[weight.path]
            dense_paths = {weight.path for weight in dense}
            masked = [
                weight for weight in masked if weight.path not in dense_paths
            ]
            if masked:
                size = sum(weight.size for weight in masked)
                density = (self.asked.live - dense_size) / size
                shares = [budget[weight.path] for weight in masked]
                budget = allocate(
                    masked, density, shares, orthogonal=self.orthogonal
                )
        raise BudgetError(
            "No kernel would be sparse: all of them are too small for blocks. "
            f"Received: density={self.asked.density:.6g}"
        )

    def _dense(
        self,
        budget: Budget,
        weights: list[PrunableWeight],
        blocks: dict[str, Block],
        excess: int,
    ) -> list[PrunableWeight]:
        """The kernels that stay dense: those of density 1, and small ones not on blocks."""
        dense = []
        without_blocks = []
        for weight in weights:
            if budget[weight.path] == 1.0:
                dense.append(weight)
            elif weight.path not in blocks:
                without_blocks.append(weight)
        if self.names_kernels:
            return dense
        allowed = _SMALL_PART * self.asked.live
        for weight in sorted(without_blocks, key=lambda weight: weight.size):
            excess_of_weight = weight.size - budget.counts[weight.path]
            if excess + excess_of_weight <= allowed:
                dense.append(weight)
                excess += excess_of_weight
        return dense


def _in_whole_blocks(
    budget: Budget,
    weights: list[PrunableWeight],
    blocks: dict[str, Block],
) -> Budget | None:
    """The budget with counts that blocks can have: rounded down, and up while the rest lasts.

    Kernels that need more than their share take it from others; `None` if these cannot spare it.
    """
    units = {
        weight.path: block_unit(blocks[weight.path], canonical_shape(weight))
        for weight in weights
        if weight.path in blocks
    }
    shares = budget.counts
    counts: dict[str, int] = {}
    spare = 0
    for path, unit in units.items():
        counts[path] = max(shares[path] // unit, 1) * unit
        spare += shares[path] - counts[path]

    def richness(path: str) -> float:
        return (counts[path] - units[path]) / shares[path]

    def excess(path: str) -> float:
        return (counts[path] - shares[path]) / units[path]

    while spare < 0:
        richest = max(units, key=richness)
        unit = units[richest]
        if counts[richest] == unit:
            return None
        counts[richest] -= unit
        spare += unit
    for path in sorted(units, key=excess):
        unit = units[path]
        if unit <= spare and counts[path] < shares[path]:
            counts[path] += unit
            spare -= unit
    densities: dict[str, float] = {}
    sizes: dict[str, int] = {}
    for weight in weights:
        count = counts.get(weight.path, shares[weight.path])
        densities[weight.path] = count / weight.size
        sizes[weight.path] = weight.size
    return Budget(densities, sizes, budget.lifted_from)


def block_for(
    weight: PrunableWeight,
    density: float,
    size: Block | None = None,
    lift: float = 1.0,
) -> Block | None:
    """The blocks for a kernel, of one `size` or regular; `None` if none has so low a density.

    `I x J` regular blocks can have densities `t / gcd(I, J)`: the largest blocks with a `t` of 2 or
    more within a quarter below `density`; else about 16 if `t = 1` is at most `lift density`.
    """
    shape = canonical_shape(weight)
    if density == 1.0 or why_no_block_form(weight.owner) is not None:
        return None
    if size is not None:
        if _fits(size, shape) and _times(shape, size, lift * density) > 0:
            return size
        return None
    for side in block_sizes().sides:
        blocks = _fitting(shape, side)
        for block in blocks:
            times = _times(shape, block, density)
            reached = times * _step(shape, block)
            if times >= _FEWEST_FANS and reached >= _CLOSE * density:
                return _widened(shape, block)
    for block in blocks:  # of the shortest side
        if _times(shape, block, lift * density) > 0:
            return _widened(shape, block)
    return None


def why_not_on_blocks(
    weight: PrunableWeight, density: float, size: Block | None = None
) -> str | None:
    """Why a kernel at a density is not on blocks, or on none of one `size`."""
    reason = why_no_block_form(weight.owner)
    if reason is not None:
        return reason
    if block_for(weight, density, size) is not None:
        if isinstance(
            weight.owner, keras.layers.LSTMCell | keras.layers.GRUCell
        ):
            return "it needs an LSTM or GRU layer without states, both of whose kernels fit blocks"
        return None
    shape = canonical_shape(weight)
    fitting: list[Block] = []
    if size is None:
        sizes = "blocks of about 16"
        fitting = _fitting(shape, block_sizes().sides[-1])
    else:
        sizes = f"blocks of {size.rows} x {size.cols}"
        if _fits(size, shape):
            fitting = [size]
    if not fitting:
        return f"{shape[-2]} x {shape[-1]} cannot be divided into {sizes}"
    if density == 1.0:
        return "it is dense"
    lowest = min(_step(shape, block) for block in fitting)
    return f"blocks have the density {lowest:.4g} or more"


def _widened(shape: Sequence[int], block: Block) -> Block:
    """Blocks longer along the kernel's longer side, as long as densities stay."""
    *_, inputs, outputs = shape
    along = "cols" if inputs < outputs else "rows"
    side = getattr(block, along)
    for times in range(block_sizes().sides[0] // side, 1, -1):
        longer = dataclasses.replace(block, **{along: times * side})
        if _fits(longer, shape) and longer.unit(shape) == block.unit(shape):
            return longer
    return block


def _fits(block: Block, shape: Sequence[int]) -> bool:
    """Whether blocks divide a kernel; gates stand side by side, without padded outputs."""
    if not block.divides(shape):
        return False
    _, parts, *_, outputs = shape
    return parts == 1 or outputs % block.cols == 0


def _fitting(shape: Sequence[int], side: int) -> list[Block]:
    *_, inputs, outputs = shape
    return [
        block
        for block in _of_side(inputs, outputs, side)
        if _fits(block, shape)
    ]


@functools.lru_cache(maxsize=256)
def _of_side(inputs: int, outputs: int, side: int) -> list[Block]:
    """Blocks of about `side x side` for a matrix: without padding first, then nearest."""
    sides = range(math.ceil(side / 2**0.5), math.ceil(side * 2**0.5))
    ranked_blocks = []
    for rows, cols in itertools.product(sides, sides):
        pads_inputs = inputs % rows > 0
        pads_outputs = outputs % cols > 0
        if pads_inputs and pads_outputs:
            continue
        block = Block(rows, cols, regular=True)
        if not block.divides((inputs, outputs)):
            continue
        is_padded = pads_inputs or pads_outputs
        distance = abs(math.log(rows / side)) + abs(math.log(cols / side))
        rank = (is_padded, distance, rows, cols)
        ranked_blocks.append((rank, block))
    ranked_blocks.sort(key=operator.itemgetter(0))
    return [block for _, block in ranked_blocks]


def _step(shape: Sequence[int], block: Block) -> float:
    """The least density on these blocks, of which the others are multiples."""
    return block_unit(block, shape) / math.prod(shape)


def _times(shape: Sequence[int], block: Block, density: float) -> int:
    """How many times the least density fits into another one."""
    return math.floor(density / _step(shape, block) + 1e-9)
