"""`Budget`: how much of every weight is live, as a value; exact counts, and files."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence

import keras

from keras_sparse_ortho._checks import (
    as_text,
    check_density,
    is_integer,
    other_keywords,
)
from keras_sparse_ortho._files import atomic_write, shown
from keras_sparse_ortho._foreign_names import Answering, for_value, unknown_path
from keras_sparse_ortho._types import Config
from keras_sparse_ortho.budgets._tables import read_rows
from keras_sparse_ortho.errors import BudgetError, DensityError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import weights_of
from keras_sparse_ortho.orthogonal import GivenBlocks, live_count

# Entries of an array; larger integers overflow as floats.
_LARGEST_COUNT = 2**63 - 1


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
            str(path): _check_density_of(path, density)
            for path, density in densities.items()
        }
        self.sizes: dict[str, int] = {}
        for path, size in (sizes or {}).items():
            self.sizes[str(path)] = _check_count(f"size of {path!r}", size, 1)
        self.lifted_from: dict[str, int] = {}
        for path, share in (lifted_from or {}).items():
            self.lifted_from[path] = _check_count(
                f"`lifted_from` of {path!r}", share, 0
            )
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
        return (self._densities, self.blocks) == (
            other._densities,
            other.blocks,
        )

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
        lifted_from = {
            path: share
            for path, share in self.lifted_from.items()
            if path in densities
        }
        return Budget(densities, sizes, lifted_from, self.blocks)

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
    def from_model(
        cls, model: keras.Model | Sequence[PrunableWeight]
    ) -> Budget:
        """Reads the current densities of the weights of a Keras 3 or tf_keras model, or a list."""
        weights = weights_of(model)
        empty = [weight.path for weight in weights if weight.live == 0]
        if empty:
            raise BudgetError(
                f"All weights need live entries in a budget. Received: {empty}"
            )
        densities = {weight.path: weight.density for weight in weights}
        sizes = {weight.path: weight.size for weight in weights}
        return cls(densities, sizes)

    def save(self, path: str | pathlib.Path) -> None:
        """Writes density, size, lifted_from and blocks as JSON; replaces a file only when done."""
        rows = []
        for name, density in self.items():
            row: Config = {
                "weight": name,
                "density": density,
                "size": self.sizes.get(name),
                "lifted_from": self.lifted_from.get(name),
            }
            if name in self.blocks:
                row["blocks"] = self.blocks[name].get_config()
            rows.append(row)
        if pathlib.Path(path).suffix != ".json":
            raise BudgetError(
                f"A budget file ends in .json. Received: path={str(path)!r}"
            )
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
                    raise ValueError(
                        f"weight={shown(name)!r} is empty, or named twice"
                    )
                name.encode()  # refuses lone surrogates, which JSON can contain
                densities[name] = check_density(row["density"])
                if row.get("size") is not None:
                    sizes[name] = _check_count(
                        f"size of {shown(name)!r}", row["size"], 1
                    )
                if row.get("lifted_from") is not None:
                    lifted_from[name] = _check_count(
                        "`lifted_from`", row["lifted_from"], 0
                    )
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
            title += (
                f", density {self.density:.6g}, {self.live} of {self.size} live"
            )
        lines = [title]
        for path, density in self.items():
            line = f"  {path:<{width}}  {density:<10.6g}"
            if has_sizes:
                line += f"  {self.counts[path]} of {self.sizes[path]}"
            if path in self.lifted_from:
                line += f"  (lifted from {self.lifted_from[path]})"
            lines.append(line)
        return "\n".join(lines) + ">"


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
    value: object,
    least: int,
) -> int:
    """Returns a count as an int, or raises a BudgetError."""
    if not is_integer(value) or not least <= value <= _LARGEST_COUNT:
        raise BudgetError(
            f"The {name} must be an integer from {least} to 2^63 - 1. Received: {as_text(value)}"
        )
    return int(value)
