"""`Budget`: how much of every weight is live; uniform, ER, ERK and STR's; exact counts."""

from __future__ import annotations

import functools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from keras_sparse_ortho._checks import as_text, check_density, is_integer, other_keywords
from keras_sparse_ortho._files import atomic_write, shown
from keras_sparse_ortho._foreign_names import Answering, for_value, unknown_path
from keras_sparse_ortho.budgets._tables import read_rows, resnet50, sparsity_to_density
from keras_sparse_ortho.errors import BudgetError, DensityError, LayoutError
from keras_sparse_ortho.initializers import ExactOrthogonal, SparseInitializer, axes_for, layout_for
from keras_sparse_ortho.kernels import KernelLayout, PrunableWeight, Selection, choose
from keras_sparse_ortho.models import prunable_weights, weights_of
from keras_sparse_ortho.orthogonal import (
    GivenBlocks,
    apportion,
    depthwise_outputs,
    live_count,
)

Orthogonal = bool | SparseInitializer | Mapping[str, SparseInitializer]
"""Whether kernels must be exactly orthogonal, or their initializer: for all, or by weight path."""

_MOST_ENTRIES = 2**63 - 1  # entries of an array; larger integers overflow as floats
_RIVALS_OF_STR = ("uniform", "erk", "snfs", "vd", "gs")  # in its tables


class Needs(NamedTuple):
    """How many live entries a weight can have."""

    unit: int  # counts are multiples of this
    least: int
    covering: int  # the least without dead outputs
    most: int


class Budget(Mapping[str, float], Answering):
    """Densities of the weights of a model, by weight path (see `prunable_weights`).

    A weight of `size` entries gets exactly `round(density * size)` live ones.

    Args:
        densities: dict of str to float in (0, 1]. Live fraction by weight path.
        sizes: dict of str to int, up to 2^63 - 1. Entries by weight path; counts need them.
        lifted_from: dict of str to int. The share, in live entries, of each weight that got more,
            as an exactly orthogonal kernel without dead outputs needs.
        blocks: dict by weight path. Live blocks, as of `callbacks.probe`; `sparsify` draws on them.

    Raises BudgetError for densities outside (0, 1], counts out of range, unknown or no weights.

    Examples:
        >>> budget = Budget({"hidden/kernel": 0.1, "head/kernel": 0.5}, {"hidden/kernel": 7840,
        ...                                                              "head/kernel": 1000})
        >>> budget.live, round(budget.density, 4)
        (1284, 0.1452)
    """

    @other_keywords
    def __init__(
        self,
        densities: Mapping[str, float],
        sizes: Mapping[str, int] | None = None,
        lifted_from: Mapping[str, int] | None = None,
        blocks: Mapping[str, GivenBlocks] | None = None,
    ) -> None:
        if not isinstance(densities, Mapping) or not densities:
            raise BudgetError(
                "A budget needs weights: `densities` must be a dict from weights to densities."
                f"{for_value('densities', densities)} Received: densities={as_text(densities)}"
            )
        self._densities = {
            str(path): _check_density_of(path, density) for path, density in densities.items()
        }
        self.sizes: dict[str, int] = {}
        for path, size in (sizes or {}).items():
            self.sizes[str(path)] = _check_count(f"size of {path!r}", size, 1)
        self.lifted_from: dict[str, int] = {}
        for path, share in (lifted_from or {}).items():
            self.lifted_from[path] = _check_count(f"`lifted_from` of {path!r}", share, 0)
        self.blocks = dict(blocks or {})
        paths = [*self.sizes, *self.lifted_from, *self.blocks]
        unknown = [path for path in paths if path not in self._densities]
        if unknown:
            raise BudgetError(
                f"`sizes`, `lifted_from` and `blocks` name unknown weights. Received: {unknown}"
            )

    def __getitem__(self, path: str) -> float:
        if path not in self._densities:
            raise unknown_path(path, self._densities)
        return self._densities[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._densities)

    def __len__(self) -> int:
        return len(self._densities)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Budget):
            return False
        return (self._densities, self.blocks) == (other._densities, other.blocks)

    __hash__ = None  # type: ignore[assignment]

    @functools.cached_property
    def counts(self) -> dict[str, int]:
        """Live entries of every weight, `round(density * size)`."""
        missing = [path for path in self if path not in self.sizes]
        if missing:
            raise BudgetError(
                "Counts need the sizes of the weights: apply the budget to a model, or give "
                f"`sizes`. Received: no sizes for {missing[:5]}"
            )
        counts = {}
        for path, density in self.items():
            counts[path] = live_count(density, self.sizes[path])
        return counts

    @property
    def lifted(self) -> tuple[str, ...]:
        """Paths of the weights that got more than their share."""
        return tuple(self.lifted_from)

    @property
    def live(self) -> int:
        """Live entries of all weights together."""
        return sum(self.counts.values())

    @property
    def size(self) -> int:
        """Entries of all weights together."""
        return sum(self.sizes[path] for path in self.counts)

    @property
    def density(self) -> float:
        """Live fraction of all weights together."""
        return self.live / self.size

    def for_weights(self, weights: Sequence[PrunableWeight]) -> Budget:
        """Fits this budget to a model's weights: their paths and sizes.

        A name without a size may be the path of a layer, for all kernels that are not named. Raises
        BudgetError for missing or unknown weights, other sizes, weights without live entries.
        """
        sizes = {weight.path: weight.size for weight in weights}
        densities = self._by_weight(sizes)
        for path, size in self.sizes.items():
            if size != sizes[path]:
                raise BudgetError(
                    f"The budget was made for a weight {path!r} of {size} entries. "
                    f"Received: a weight of {sizes[path]}"
                )
        for path, density in densities.items():
            if live_count(density, sizes[path]) < 1:
                raise BudgetError(
                    f"The weight {path!r} of {sizes[path]} entries would have no live one. "
                    f"Received: density={density}"
                )
        lifted = {path: n for path, n in self.lifted_from.items() if path in densities}
        return Budget(densities, sizes, lifted, self.blocks)

    def _by_weight(self, sizes: Mapping[str, int]) -> dict[str, float]:
        """The density of each weight in `sizes`; a BudgetError for unknown or missing weights."""
        densities: dict[str, float] = {}
        unknown = []
        for name, density in self.items():
            inside = [path for path in sizes if path.startswith(f"{name}/")]
            if name in sizes:
                densities[name] = density
            elif name in self.sizes or not inside:
                unknown.append(name)
            else:
                for path in inside:
                    densities[path] = self._densities.get(path, density)
        missing = [path for path in sizes if path not in densities]
        if unknown or missing:
            raise BudgetError(
                "The budget must name exactly the weights to be pruned (see `include` and "
                f"`exclude`). Received: unknown {unknown}, missing {missing}"
            )
        return densities

    @classmethod
    def from_model(cls, model: Any) -> Budget:
        """Reads the current densities of a model's weights."""
        weights = prunable_weights(model)
        empty = [weight.path for weight in weights if weight.live == 0]
        if empty:
            raise BudgetError(f"All weights need live entries in a budget. Received: {empty}")
        densities = {weight.path: weight.density for weight in weights}
        return cls(densities, _sizes(weights))

    def save(self, path: str | pathlib.Path) -> None:
        """Writes density, size, lifted_from and blocks as JSON; replaces a file only when done."""
        rows = []
        for name, density in self.items():
            row: dict[str, Any] = {
                "weight": name,
                "density": density,
                "size": self.sizes.get(name),
                "lifted_from": self.lifted_from.get(name),
            }
            if name in self.blocks:
                row["blocks"] = self.blocks[name].get_config()
            rows.append(row)
        if pathlib.Path(path).suffix != ".json":
            raise BudgetError(f"A budget file ends in .json. Received: path={str(path)!r}")
        with atomic_write(path) as stream:
            stream.write(json.dumps({"budget": rows}, indent=1) + "\n")

    @classmethod
    def load(
        cls,
        path: str | pathlib.Path,
        column: str | float | None = None,
    ) -> Budget:
        """Reads a budget from JSON or CSV.

        JSON is what `save` writes (a row needs only `weight` and `density`), or `{"path": density,
        ...}`. CSV has lines `path,density`, or is one of STR's tables for ResNet-50 (RAIVNLab/STR,
        `budgets`), of sparsities in percent, for `keras.applications.ResNet50`.

        Args:
            path: str or Path. A file that ends in .json or .csv.
            column: float or str. Heading of a budget in a published table: 90.23, or `"GS"`.

        Raises BudgetError, with the place, for files that are no budget, and for an unknown
        `column`, with the known ones.
        """
        densities: dict[str, float] = {}
        sizes: dict[str, int] = {}
        lifted_from: dict[str, int] = {}
        blocks: dict[str, GivenBlocks] = {}
        for place, row in read_rows(pathlib.Path(path), column):
            try:
                name = row["weight"]
                if not isinstance(name, str) or not name or name in densities:
                    raise ValueError(f"weight={shown(name)!r} is empty, or named twice")
                name.encode()  # refuses lone surrogates, which JSON can contain
                densities[name] = check_density(row["density"])
                if row.get("size") is not None:
                    sizes[name] = _check_count(f"size of {shown(name)!r}", row["size"], 1)
                if row.get("lifted_from") is not None:
                    lifted_from[name] = _check_count("`lifted_from`", row["lifted_from"], 0)
                if row.get("blocks") is not None:
                    blocks[name] = GivenBlocks(**row["blocks"])
            except (KeyError, TypeError, ValueError) as error:
                raise BudgetError(
                    f"{path}, {place}: {shown(str(error))}. Received: {shown(row)}"
                ) from None
        return cls(densities, sizes, lifted_from, blocks)

    def __repr__(self) -> str:
        width = max(len(path) for path in self)
        has_sizes = len(self.sizes) == len(self)
        title = f"<Budget of {len(self)} weights"
        if has_sizes:
            title += f", density {self.density:.6g}, {self.live} of {self.size} live"
        lines = [title]
        for path, density in self.items():
            line = f"  {path:<{width}}  {density:<10.6g}"
            if has_sizes:
                line += f"  {self.counts[path]} of {self.sizes[path]}"
            if path in self.lifted_from:
                line += f"  (lifted from {self.lifted_from[path]})"
            lines.append(line)
        return "\n".join(lines) + ">"


def _sizes(weights: Sequence[PrunableWeight]) -> dict[str, int]:
    return {weight.path: weight.size for weight in weights}


def _check_density_of(
    path: str,
    density: float,
) -> float:
    """Returns the density of a weight as a float, or raises a BudgetError that names it."""
    try:
        return check_density(density)
    except DensityError as error:
        raise BudgetError(f"In the budget of {path!r}: {error}") from None


def _check_count(
    name: str,
    value: Any,
    least: int,
) -> int:
    """Returns a count as an int, or raises a BudgetError."""
    if not is_integer(value) or not least <= value <= _MOST_ENTRIES:
        raise BudgetError(
            f"The {name} must be an integer from {least} to 2^63 - 1. Received: {as_text(value)}"
        )
    return int(value)


@other_keywords
def uniform(
    model: Any,
    density: float,
    *,
    include: Selection = None,
    exclude: Selection = None,
    orthogonal: Orthogonal = True,
) -> Budget:
    """Gives every weight the same density.

    Args:
        model: Model (built) or list of `PrunableWeight`.
        density: float in (0, 1]. Global live fraction; exactly `round(density * size)` entries.
        include: Selection: paths, layers, regular expressions or a predicate. Default: all weights.
        exclude: Selection. Weights to leave out.
        orthogonal: bool or initializer. Whether to `lift` weights to the needs of exactly
            orthogonal kernels without dead outputs; or what will draw the kernels. If `False`, only
            depthwise kernels are lifted, to one entry for each output, where the density allows.

    Raises BudgetError for a global density that the bounds do not allow.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(10, name="a"),
        ...                           keras.layers.Dense(10, name="b")])
        >>> uniform(model, 0.5)
        <Budget of 2 weights, density 0.5, 150 of 300 live
          a/kernel  0.5         100 of 200
          b/kernel  0.5         50 of 100>
    """
    weights = choose(weights_of(model), include, exclude)
    return allocate(weights, density, [1.0] * len(weights), orthogonal=orthogonal)


@other_keywords
def er(
    model: Any,
    density: float,
    *,
    include: Selection = None,
    exclude: Selection = None,
    orthogonal: Orthogonal = True,
) -> Budget:
    """Erdos-Renyi (ER): the density of a layer is proportional to `(in + out) / (in * out)`.

    Layers that would exceed density 1 are dense, and the rest is rescaled. Spatial dimensions do
    not count; see `erk`. Arguments and errors are those of `uniform`.

    Reference: Mocanu et al. (Nature Communications 2018), arXiv 1707.04780.
    """
    return _erdos_renyi(model, density, include, exclude, orthogonal, spatial=False)


@other_keywords
def erk(
    model: Any,
    density: float,
    *,
    include: Selection = None,
    exclude: Selection = None,
    orthogonal: Orthogonal = True,
) -> Budget:
    """Erdos-Renyi-Kernel (ERK): density proportional to `sum(dims) / prod(dims)` of the kernel.

    For a convolution `(in + out + k_1 + ... ) / (in * out * k_1 * ...)`. The rest is as in `er`.

    Examples:
        >>> import keras
        >>> model = keras.Sequential([keras.Input((8, 8, 16)), keras.layers.Conv2D(32, 3, name="a"),
        ...                           keras.layers.Conv2D(32, 1, name="b")])
        >>> [round(d, 3) for d in erk(model, 0.2).values()]
        [0.11, 0.604]

    Reference: Evci et al. (ICML 2020), arXiv 1911.11134.
    """
    return _erdos_renyi(model, density, include, exclude, orthogonal, spatial=True)


def _erdos_renyi(
    model: Any,
    density: float,
    include: Selection,
    exclude: Selection,
    orthogonal: Orthogonal,
    *,
    spatial: bool,
) -> Budget:
    """ERK, or without the `spatial` dimensions ER."""
    weights = choose(weights_of(model), include, exclude)
    relative = []
    for weight in weights:
        dims = _dims(weight, spatial=spatial)
        relative.append(sum(dims) / math.prod(dims))
    return allocate(weights, density, relative, orthogonal=orthogonal)


def _dims(
    weight: PrunableWeight,
    *,
    spatial: bool,
) -> list[int]:
    """The dimensions of a kernel that ER and ERK count."""
    layout = weight.layout or KernelLayout.convolution()
    batch, parts, *taps, inputs, outputs = layout.canonical_shape(weight.shape)
    dims = [outputs * parts]
    if spatial:
        dims += taps
    if layout.inputs:
        dims.append(inputs)
    if layout.batch:
        dims.append(batch)
    return dims


def allocate(
    weights: Sequence[PrunableWeight],
    density: float,
    relative: Sequence[float],
    *,
    orthogonal: Orthogonal,
) -> Budget:
    """Shares exactly `round(density * total)` entries in proportion to `relative`, as `lift`.

    Args:
        weights: list of PrunableWeight.
        density: float in (0, 1]. Global live fraction.
        relative: list of float. Density of each weight, up to a common factor.
        orthogonal: As in `uniform`.

    Raises BudgetError for a density that leaves some weights too few entries.
    """
    if not weights:
        raise BudgetError("There are no weights to share a budget among. Received: weights=[]")
    sizes = [weight.size for weight in weights]
    total = live_count(density, sum(sizes))
    needs = [needs_of(weight, orthogonal) for weight in weights]
    if orthogonal is False and total < sum(need.covering for need in needs):
        needs = [need._replace(covering=need.least) for need in needs]
    least = sum(need.least for need in needs)
    if total < least:
        raise BudgetError(
            f"The least global density that leaves room for "
            f"{_what_needs_room(weights, needs, orthogonal)} Received: density={density!r}"
        )
    wanted = [share * weight.size for share, weight in zip(relative, weights, strict=True)]
    lower, upper = _bounds(total, needs, sizes)
    counts = _clipped_shares(total, wanted, lower, upper)
    unbounded = _clipped_shares(total, wanted, [0] * len(weights), sizes)
    lifted = {}
    for weight, need, share, count in zip(weights, needs, unbounded, counts, strict=True):
        needs_several = orthogonal or need.covering > 1
        if needs_several and share < min(count, need.covering):
            lifted[weight.path] = share
    return _budget(weights, counts, lifted)


def _what_needs_room(
    weights: Sequence[PrunableWeight],
    needs: Sequence[Needs],
    orthogonal: Orthogonal,
) -> str:
    """The end of the error for a global density that is too low."""
    least = sum(need.least for need in needs)
    size = sum(weight.size for weight in weights)
    if not orthogonal:
        return f"a live entry in every weight is {least / size:.6g}."
    most_needed = max(need.least for need in needs)
    largest = next(w for w, need in zip(weights, needs, strict=True) if need.least == most_needed)
    return (
        f"exactly orthogonal kernels is {least / size:.6g}. "
        f"{largest.path!r} needs most: {most_needed} of its {largest.size} entries. Kernels that "
        "need not be orthogonal take less (initializer='random_sparse')."
    )


def _budget(
    weights: Sequence[PrunableWeight],
    counts: Sequence[int],
    lifted: Mapping[str, int],
) -> Budget:
    """The budget with these counts of live entries."""
    densities = {w.path: count / w.size for w, count in zip(weights, counts, strict=True)}
    return Budget(densities, _sizes(weights), lifted)


@other_keywords
def lift(
    model: Any,
    budget: Budget,
    initializer: SparseInitializer | None = None,
) -> Budget:
    """Returns the budget nearest to another one that exactly orthogonal kernels can have.

    An orthogonal kernel needs `least_count` live entries, and `covering_count` to have no dead
    outputs. Weight `k` gets

        clip(scale * density_k * size_k, covering_k, size_k)

    live entries, with the one `scale` that keeps the global count; if that is too small, a count
    between `least_k` and `covering_k`. `Budget.lifted_from` has the counts before.

    Args:
        model: Model (built) or list of `PrunableWeight`, with the weights of the budget.
        budget: Budget. E.g. the final densities of STR or SNIP, or a published table.
        initializer: SparseInitializer of the kernels. Default: `ExactOrthogonal()`.

    Raises BudgetError for other weights, and for a global count below that of orthogonal kernels.

    Examples:
        >>> import keras, keras_sparse_ortho as kso
        >>> model = keras.Sequential([keras.Input((50,)), keras.layers.Dense(200, name="a"),
        ...                           keras.layers.Dense(10, name="b")])
        >>> lift(model, kso.Budget({"a/kernel": 0.006, "b/kernel": 0.5}))
        <Budget of 2 weights, density 0.0883333, 1060 of 12000 live
          a/kernel  0.02        200 of 10000  (lifted from 60)
          b/kernel  0.43        860 of 2000>
    """
    weights = [weight for weight in weights_of(model) if weight.path in budget]
    plan = budget.for_weights(weights)
    relative = [plan.counts[weight.path] / weight.size for weight in weights]
    return allocate(weights, plan.live / plan.size, relative, orthogonal=initializer or True)


@other_keywords
def str_resnet50(density: float | str = 0.0977) -> Budget:
    """Returns a published budget of soft threshold reparameterization (STR) for ResNet-50.

    For `keras.applications.ResNet50`: 16 budgets of STR, with global densities from 0.2045 to
    0.009, and those of five rivals at 0.1. The first 1x1 convolutions of stages 3, 4 and 5, which
    have the stride in Keras, cost a quarter of PyTorch's. `lift` lifts the layers that are too
    sparse for exactly orthogonal kernels.

    Args:
        density: float or str. Global live fraction of a budget of STR (0.0977: 90.23% sparsity,
            74.31% top-1 accuracy), or a rival: `"uniform"`, `"erk"`, `"snfs"` (sparse networks from
            scratch), `"vd"` (variational dropout) or `"gs"` (global magnitudes).

    Raises BudgetError for another density or name, with the available ones.

    Examples:
        >>> budget = str_resnet50(0.0977)
        >>> len(budget), round(budget["conv1_conv/kernel"], 4)
        (54, 0.402)
        >>> round(1 - budget.density, 4)
        0.9023
        >>> str_resnet50("vd")["conv1_conv/kernel"]
        0.6861

    Reference: Kusupati et al. (ICML 2020), arXiv 2002.03231; tables of RAIVNLab/STR, Keras' names.
    """
    overall, *layers = resnet50()
    columns = [name for name in overall if name.startswith("sparsity_")]
    published = {sparsity_to_density(overall[name]): name for name in columns}
    column = None
    if not isinstance(density, str):
        column = published.get(check_density(density))
    elif density in _RIVALS_OF_STR:
        column = density
    if column is None:
        raise BudgetError(
            f"STR's published densities for ResNet-50 are {sorted(published, reverse=True)}, and "
            f"its rivals at 0.1 {_RIVALS_OF_STR}. Received: density={density!r}"
        )
    densities = {row["layer"]: sparsity_to_density(row[column]) for row in layers}
    sizes = {row["layer"]: int(row["size"]) for row in layers}
    return Budget(densities, sizes)


def fit_structure(
    plan: Budget,
    weights: Sequence[PrunableWeight],
    patterns: Mapping[str, SparseInitializer],
) -> Budget:
    """Fits a budget to the structures of kernels; it loses less than the smallest unit.

    Args:
        plan: Budget.
        weights: list of PrunableWeight. The weights of the budget.
        patterns: dict of initializers by weight path.

    Raises BudgetError for a global density that the structures do not allow.
    """
    needs = [needs_of(weight, patterns) for weight in weights]
    least = sum(need.least for need in needs)
    most = sum(need.most for need in needs)
    if not least <= plan.live <= most:
        structures = (getattr(pattern, "structure", None) for pattern in patterns.values())
        names = sorted({str(structure) for structure in structures if structure})
        raise BudgetError(
            f"Exactly orthogonal kernels with the structure {', '.join(names)} allow global "
            f"densities from {least / plan.size:.6g} to {most / plan.size:.6g}. "
            f"Received: density={plan.density:.6g}"
        )
    lower, upper = _bounds(plan.live, needs, [need.most for need in needs])
    shares = [plan.counts[weight.path] for weight in weights]
    wanted = _clipped_shares(plan.live, shares, lower, upper)
    counts = _whole_units(plan.live, wanted, upper, needs)
    lifted = dict(plan.lifted_from)
    for weight, share, count, bound in zip(weights, shares, counts, lower, strict=True):
        if share < bound <= count:
            lifted.setdefault(weight.path, share)
    return _budget(weights, counts, lifted)


def _whole_units(
    total: int,
    wanted: Sequence[int],
    upper: Sequence[int],
    needs: Sequence[Needs],
) -> list[int]:
    """Counts in whole units near the wanted ones, with a sum of at most `total`.

    Counts are rounded down. Then the counts that lost the largest part of a unit get one more, up
    to `upper`. The remainder is less than a unit of each; weights with smaller units can take it.
    """
    units = [need.unit for need in needs]
    counts = [count - count % unit for count, unit in zip(wanted, units, strict=True)]
    missing = total - sum(counts)
    losses = [(n - count) / unit for n, count, unit in zip(counts, wanted, units, strict=True)]
    for k in sorted(range(len(counts)), key=losses.__getitem__):
        if units[k] <= missing and counts[k] + units[k] <= upper[k]:
            counts[k] += units[k]
            missing -= units[k]
    for k in sorted(range(len(counts)), key=units.__getitem__):
        room = min(missing, needs[k].most - counts[k])
        more = room // units[k] * units[k]
        counts[k] += more
        missing -= more
    return counts


def _clipped_shares(
    total: int,
    wanted: Sequence[float],
    lower: Sequence[int],
    upper: Sequence[int],
) -> list[int]:
    """Integers within bounds that sum to `total`, proportional to `wanted` where these allow.

    The sum of the clipped shares grows with their scale: fixing all on the side with the larger
    excess and rescaling the rest ends at the unique solution.
    """
    counts = [0] * len(wanted)
    free = list(range(len(wanted)))
    to_share = total
    while free:
        scale = to_share / sum(wanted[k] for k in free)
        over = [k for k in free if scale * wanted[k] > upper[k]]
        under = [k for k in free if scale * wanted[k] < lower[k]]
        if not over and not under:
            shares = apportion(to_share, [wanted[k] for k in free])
            for k, count in zip(free, shares, strict=True):
                counts[k] = count
            break
        excess = sum(scale * wanted[k] - upper[k] for k in over)
        lack = sum(lower[k] - scale * wanted[k] for k in under)
        bounds, fixed = (upper, over) if excess >= lack else (lower, under)
        for k in fixed:
            counts[k] = bounds[k]
            to_share -= bounds[k]
        free = [k for k in free if k not in fixed]
    return counts


def needs_of(
    weight: PrunableWeight,
    orthogonal: Orthogonal,
) -> Needs:
    """How many live entries a weight can have; a LayoutError if a structure does not fit it."""
    if orthogonal is False:
        outputs = depthwise_outputs(weight.shape, weight.layout)
        return Needs(1, 1, max(outputs, 1), weight.size)
    initializer: Any = orthogonal
    if isinstance(orthogonal, bool):
        initializer = ExactOrthogonal(seed=0)
    elif isinstance(orthogonal, Mapping):
        initializer = orthogonal[weight.path]
    try:
        least, covering = initializer.least_counts(weight.shape, axes_for(weight, initializer))
    except LayoutError as error:
        raise LayoutError(f"The weight {weight.path!r} does not fit: {error}") from None
    structure = getattr(initializer, "structure", None)
    if structure is None:
        return Needs(1, least, covering, weight.size)
    shape = layout_for(weight, initializer).canonical_shape(weight.shape)
    return Needs(structure.unit(shape), least, covering, structure.most(shape))


def _bounds(
    total: int,
    needs: Sequence[Needs],
    most: list[int],
) -> tuple[list[int], list[int]]:
    """Bounds of counts with as few dead outputs as `total` allows."""
    least = [need.least for need in needs]
    covering = [need.covering for need in needs]
    if total < sum(covering):
        return least, covering  # what one weight has beyond covering, another lacks
    return covering, most
