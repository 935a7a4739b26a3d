"""`Budget`: how much of every weight is live."""

import functools
import json
import math
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from keras_sparse_ortho._checks import check_density, is_integer
from keras_sparse_ortho._files import atomic_write, read_csv, read_json_rows, shown, write_csv
from keras_sparse_ortho.errors import BudgetError, DensityError
from keras_sparse_ortho.kernels import PrunableWeight
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.orthogonal import live_count

_COLUMNS = ("weight", "density", "size", "lifted", "lifted_from")
_LARGEST = 2**63 - 1  # entries of an array; larger integers overflow as floats


class Budget(Mapping[str, float]):
    """Densities of the weights of a model, which can be saved and loaded.

    Maps the path of a weight (as in `keras_sparse_ortho.prunable_weights`) to its live fraction.
    A weight of `size` entries gets exactly `round(density * size)` live ones.

    Args:
        densities: From weight path to density, in (0, 1].
        sizes: From weight path to number of entries, up to 2^63 - 1; needed for counts before the
            budget is applied to a model.
        lifted: Paths of the weights that were given more than their share, because an exactly
            orthogonal kernel without dead outputs needs it; or a dict from these paths to the live
            entries of their share, which becomes `lifted_from`.

    Raises:
        BudgetError: A density outside (0, 1], a size or count out of range or for a weight without
            a density, no weights.

    Example:

    >>> budget = Budget({"hidden/kernel": 0.1, "head/kernel": 0.5}, {"hidden/kernel": 7840,
    ...                                                              "head/kernel": 1000})
    >>> budget.live, round(budget.density, 4)
    (1284, 0.1452)
    """

    def __init__(
        self,
        densities: Mapping[str, float],
        sizes: Mapping[str, int] | None = None,
        lifted: Sequence[str] | Mapping[str, int | None] = (),
    ) -> None:
        if not densities:
            raise BudgetError(f"A budget needs weights. Received: densities={densities!r}")
        self._densities: dict[str, float] = {}
        for path, density in densities.items():
            try:
                self._densities[str(path)] = check_density(density)
            except DensityError as error:
                raise BudgetError(f"In the budget of '{path}': {error}") from None
        self.sizes = {
            str(path): _count(f"size of '{path}'", size, 1) for path, size in (sizes or {}).items()
        }
        known = lifted if isinstance(lifted, Mapping) else dict.fromkeys(lifted)
        self.lifted_from: dict[str, int | None] = {
            path: None if share is None else _count(f"`lifted_from` of '{path}'", share, 0)
            for path, share in known.items()
        }
        self.lifted = tuple(known)
        unknown = [p for p in (*self.sizes, *self.lifted) if p not in self._densities]
        if unknown:
            raise BudgetError(f"`sizes` and `lifted` name unknown weights. Received: {unknown}")

    def __getitem__(self, path: str) -> float:
        return self._densities[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._densities)

    def __len__(self) -> int:
        return len(self._densities)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Budget) and self._densities == other._densities

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
        return {path: live_count(density, self.sizes[path]) for path, density in self.items()}

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

    def for_weights(self, weights: Sequence[PrunableWeight]) -> "Budget":
        """This budget with the paths and sizes of a model's weights.

        A name without a size may also be the path of a layer: all its kernels that the budget does
        not name themselves get this density.

        Raises:
            BudgetError: Missing or unknown weights, different sizes, or a density that leaves a
                weight without live entries.
        """
        sizes = {weight.path: weight.size for weight in weights}
        densities: dict[str, float] = {}
        unknown = []
        for name, density in self.items():
            inside = [path for path in sizes if path.startswith(f"{name}/")]
            if name in sizes:
                densities[name] = density
            elif name in self.sizes or not inside:
                unknown.append(name)
            else:
                densities |= {path: self._densities.get(path, density) for path in inside}
        missing = [path for path in sizes if path not in densities]
        if unknown or missing:
            raise BudgetError(
                "The budget must name exactly the weights to be pruned (see `include` and "
                f"`exclude`). Received: unknown {unknown}, missing {missing}"
            )
        for path, size in self.sizes.items():
            if size != sizes[path]:
                raise BudgetError(
                    f"The budget was made for a weight '{path}' of {size} entries. "
                    f"Received: a weight of {sizes[path]}"
                )
        for path, density in densities.items():
            if live_count(density, sizes[path]) < 1:
                raise BudgetError(
                    f"The weight '{path}' of {sizes[path]} entries would have no live one. "
                    f"Received: density={density}"
                )
        lifted = {path: n for path, n in self.lifted_from.items() if path in densities}
        return Budget(densities, sizes, lifted)

    @classmethod
    def from_model(cls, model: Any) -> "Budget":
        """The current densities of the weights of a model (see `prunable_weights`)."""
        weights = prunable_weights(model)
        empty = [weight.path for weight in weights if weight.live == 0]
        if empty:
            raise BudgetError(
                f"A budget cannot hold weights without live entries. Received: {empty}"
            )
        return cls({w.path: w.density for w in weights}, {w.path: w.size for w in weights})

    def save(self, path: str | pathlib.Path) -> None:
        """Writes the budget as `.csv` or `.json`: weight, density, size, lifted, lifted_from.

        An existing file is replaced only once everything is written.
        """
        path = pathlib.Path(path)
        rows = [
            {
                "weight": name,
                "density": density,
                "size": self.sizes.get(name),
                "lifted": name in self.lifted_from,
                "lifted_from": self.lifted_from.get(name),
            }
            for name, density in self.items()
        ]
        if _suffix(path) == ".json":
            with atomic_write(path) as stream:
                stream.write(json.dumps({"budget": rows}, indent=1) + "\n")
        else:
            write_csv(path, _COLUMNS, ({**row, "lifted": int(bool(row["lifted"]))} for row in rows))

    @classmethod
    def load(cls, path: str | pathlib.Path) -> "Budget":
        """Reads a file written by `save`; a CSV file needs only `weight` and `density`.

        Raises:
            BudgetError: A file that is not a budget, or is truncated; names the line.
        """
        path = pathlib.Path(path)
        if _suffix(path) == ".json":
            rows = read_json_rows(path, "budget", BudgetError)
        else:
            rows = read_csv(path, ("weight", "density"), BudgetError)
            # CSV values are text; what is not a number is refused below with its line.
            rows = [(place, {**row, "density": _number(row["density"])}) for place, row in rows]
        densities: dict[str, float] = {}
        sizes: dict[str, int] = {}
        lifted: dict[str, int | None] = {}
        for place, row in rows:
            try:
                name = row["weight"]
                if not isinstance(name, str) or not name or name in densities:
                    raise ValueError(f"weight={shown(name)!r} is empty, or named twice")
                name.encode()  # refuses lone surrogates, which JSON can contain
                densities[name] = check_density(row["density"])
                if row.get("size") not in (None, ""):
                    sizes[name] = _count(f"size of '{shown(name)}'", row["size"], 1)
                if row.get("lifted") not in (None, "", "0", 0, False):
                    share = row.get("lifted_from")
                    count = None if share in (None, "") else _count("`lifted_from`", share, 0)
                    lifted[name] = count
            except (KeyError, TypeError, ValueError) as error:
                raise BudgetError(
                    f"{path}, {place}: {shown(str(error))}. Received: {shown(row)}"
                ) from None
        return cls(densities, sizes, lifted)

    def __repr__(self) -> str:
        width = max(len(path) for path in self)
        known = len(self.sizes) == len(self)
        total = f", density {self.density:.6g}, {self.live} of {self.size} live" if known else ""
        lines = [f"<Budget of {len(self)} weights{total}"]
        for path, density in self.items():
            count = f"  {self.counts[path]} of {self.sizes[path]}" if known else ""
            share = self.lifted_from.get(path)
            note = "" if path not in self.lifted_from else "  (lifted)"
            note = note if share is None else f"  (lifted from {share})"
            lines.append(f"  {path:<{width}}  {density:<10.6g}{count}{note}")
        return "\n".join(lines) + ">"


def _suffix(path: pathlib.Path) -> str:
    if path.suffix not in (".csv", ".json"):
        raise BudgetError(f"A budget file ends in .csv or .json. Received: path={str(path)!r}")
    return path.suffix


def _number(text: str) -> float | str:
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text


def _count(name: str, value: Any, least: int) -> int:
    """A size or count as an int; in CSV files it is text."""
    count = int(value) if isinstance(value, str) else value
    if not is_integer(count) or not least <= count <= _LARGEST:
        # Python does not print integers of more than 4300 digits.
        long = is_integer(count) and int(count).bit_length() > 1000
        found = f"an integer of {int(count).bit_length()} bits" if long else shown(value)
        raise BudgetError(
            f"The {name} must be an integer from {least} to 2^63 - 1. Received: {found}"
        )
    return int(count)
