"""`density_for`: the density whose exported file keeps a bound, found by exporting."""

import dataclasses
import io
import math
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho.errors import BudgetError, DensityError
from keras_sparse_ortho.export._export_litert import export_litert
from keras_sparse_ortho.export._routes import ExportRouteError
from keras_sparse_ortho.export._vela import check_accelerator, require_vela, vela_report

EXPORTS = 4
# A file this close below its bound ends the search; what is aimed at lies in the middle.
_NEAR = 0.97


@dataclasses.dataclass(frozen=True)
class DensityTrial:
    """One density that was tried.

    Attributes:
        density: As given to `make`.
        bytes: Of the exported file; None if there is none.
        ms: Vela's estimate of a call; None without an accelerator.
        keeps: Whether all bounds are kept.
        reason: Why there is no file of the route, or None.
    """

    density: float
    bytes: int | None
    ms: float | None
    keeps: bool
    reason: str | None = None


@dataclasses.dataclass(frozen=True)
class FittedDensity:
    """The largest density tried that keeps the bounds. Print it for a table.

    Attributes:
        density: The density.
        model: What `make` gave for it.
        route: Of the exported files.
        bounds: `max_bytes` and `max_ms`, those given.
        tried: All trials, in their order.
    """

    density: float
    model: keras.Model
    route: str
    bounds: dict[str, float]
    tried: tuple[DensityTrial, ...]

    def __rich__(self) -> Group:
        """The bounds, and a table of the trials."""
        bounds = ", ".join(f"{name}={value:,g}" for name, value in self.bounds.items())
        title = f"Density {self.density:g} for {bounds}, route {self.route}"
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for column in ("density", "bytes", "ms (estimate)"):
            table.add_column(column, justify="right")
        table.add_column("")
        for one in self.tried:
            size = "" if one.bytes is None else f"{one.bytes:,}"
            ms = "" if one.ms is None else f"{one.ms:.4g}"
            chosen = "chosen" if one.density == self.density else "kept" if one.keeps else "over"
            table.add_row(f"{one.density:g}", size, ms, one.reason or chosen)
        return Group(Text(title), table)

    def __str__(self) -> str:
        text = io.StringIO()
        Console(file=text, width=100).print(self)
        return text.getvalue().rstrip()


def density_for(
    make: Callable[[float], keras.Model],
    *,
    max_bytes: float | None = None,
    max_ms: float | None = None,
    accelerator: str | None = None,
    mode: str | None = None,
    start: float = 0.2,
    **options: Any,
) -> FittedDensity:
    """The largest density, nearly, whose exported LiteRT file keeps a bound on bytes or time.

    Bytes and time depend on how many entries are live and where, hardly on their values, so the
    density is found before the training. Let `f(d)` be the larger of `bytes / max_bytes` and
    `ms / max_ms`; the densities tried are `start`, then that on a line through the origin, then
    those of the secant through the last two,

        d' = d_2 + (0.985 - f(d_2)) * (d_2 - d_1) / (f(d_2) - f(d_1)),

    within what is known to keep the bounds and what is not. It ends at `0.97 <= f <= 1` or after
    4 exports. Equal calls give equal densities, if `make` has a seed and
    names its model: names are in the file.

    Args:
        make: Gives a new model for a density, by any verb and budget:
            `lambda d: kso.sparsify(model, d, "uniform", seed=0)`, `lambda d: kso.prune(model, d)`,
            `lambda d: kso.prune(model, budget=kso.budgets.er(model, d))`.
        max_bytes: The largest file, uncompressed.
        max_ms: The largest time of a call on `accelerator`, as Vela estimates it.
        accelerator: An Ethos-U, as for `vela_report`. Its files are `int8`.
        mode: As for `export_litert`: None, `"small"`, `"sparse"` or a route.
        start: The first density.
        options: For `export_litert`, such as `quantization`, `representative_data`, `sample`.

    Returns:
        The `FittedDensity`: density, its model, and every trial.

    Raises:
        BudgetError: if no density tried keeps the bounds, with the least bytes and time seen; if
            `make` refuses a density so small, with its reason.
        ValueError: if no bound is given; for `max_ms` without an accelerator, and for the modes
            `"fast"` and `"auto"`: times of a CPU vary more from run to run than with the density
            (densities of 0.1, 0.147 and 0.1 came out of three equal runs).
        ImportError: if TensorFlow, ai-edge-litert or, for `max_ms`, Vela is missing.
        Exception: what `make` and `export_litert` raise at the first density.

    Limits: Nothing is judged by the data that made it: bytes and estimated times depend on no rows,
    and `representative_data` are divided as by `export_litert`. Dense files (`float32`, `int8`)
    have the same bytes at every density; give a sparse
    route for `max_bytes`. Four exports take from half a minute to minutes. After training, or
    with another seed, the same density may take some bytes more or fewer.

    Example:
    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> from keras_sparse_ortho.export import density_for
    >>> model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(64, name="hidden")])
    >>> density_for(lambda d: kso.sparsify(model, d, seed=0), max_ms=1.0)
    Traceback (most recent call last):
        ...
    ValueError: `max_ms` needs an `accelerator`, ...
    """
    bounds = {
        name: _positive(name, value)
        for name, value in (("max_bytes", max_bytes), ("max_ms", max_ms))
        if value is not None
    }
    _check(bounds, accelerator, mode, options)
    if accelerator is not None:
        mode = "int8"
    search = _Search(bounds)
    density: float | None = check_density(start, "start")
    route = ""
    best: keras.Model | None = None
    while density is not None and len(search.tried) < EXPORTS:
        try:
            model = make(density)
        except (BudgetError, DensityError) as error:
            if not search.tried:
                raise
            raise BudgetError(
                "`make` must give a model at the densities that the bounds ask for. "
                f"{search.seen()} Received: density={density:g}, for which it raised "
                f"{type(error).__name__}: {error}"
            ) from error
        trial, name = _trial(model, density, bounds, accelerator, mode, options)
        if trial.reason is not None and not search.tried:
            raise ExportRouteError(
                f"The route must be able to encode the model at the first density. {trial.reason} "
                f"Received: start={density:g}"
            )
        if search.add(trial):
            best, route = model, name
        density = search.next()
    if best is None or search.best is None:
        told = ", ".join(f"{name}={value:,g}" for name, value in bounds.items())
        raise BudgetError(
            f"A density must keep the bounds, and none of {len(search.tried)} tried does. "
            f"{search.seen()} Received: {told}"
        )
    return FittedDensity(search.best.density, best, route, bounds, tuple(search.tried))


def _positive(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"`{name}` must be a number above 0. Received: {name}={value!r}")
    return float(value)


def _check(
    bounds: dict[str, float], accelerator: str | None, mode: str | None, options: dict[str, Any]
) -> None:
    """Refuses arguments that do not go together, before anything is exported."""
    if not bounds:
        raise ValueError("Give `max_bytes`, `max_ms` or both. Received: neither")
    if accelerator is None and "max_ms" in bounds:
        raise ValueError(
            "`max_ms` needs an `accelerator`, whose time is computed: measured times of this CPU "
            "vary more from run to run than with the density. Received: accelerator=None"
        )
    if mode in ("fast", "auto"):
        raise ValueError(
            'The modes "fast" and "auto" choose by measured times, which vary, so that equal calls '
            f'would give other densities; use "small" or a route. Received: mode={mode!r}'
        )
    if accelerator is None:
        return
    check_accelerator(accelerator)
    if mode not in (None, "int8") or options.get("quantization", "int8") != "int8":
        raise ValueError(
            "The files of an Ethos-U are of the route int8; leave `mode` and `quantization` out. "
            f"Received: {mode=}, quantization={options.get('quantization')!r}"
        )
    require_vela()


def _trial(
    model: keras.Model,
    density: float,
    bounds: dict[str, float],
    accelerator: str | None,
    mode: str | None,
    options: dict[str, Any],
) -> tuple[DensityTrial, str]:
    """What the file of one model has, and the route that was taken."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tried.tflite")
        try:
            report = export_litert(model, path, mode=mode, **options)
        except ExportRouteError as error:
            return DensityTrial(density, None, None, False, str(error)), ""
        ms = None if accelerator is None else vela_report(path, accelerator).ms
    reason = report.fallback_reason
    found = {"max_bytes": report.bytes, "max_ms": ms}
    keeps = reason is None and all((found[name] or 0) <= bounds[name] for name in bounds)
    return DensityTrial(density, report.bytes, ms, keeps, reason), report.route


class _Search:
    """A secant between densities that keep the bounds and those that do not."""

    def __init__(self, bounds: dict[str, float]) -> None:
        self.bounds = bounds
        self.tried: list[DensityTrial] = []
        self.best: DensityTrial | None = None

    def add(self, trial: DensityTrial) -> bool:
        """Whether this one is the best so far."""
        self.tried.append(trial)
        better = trial.keeps and (self.best is None or trial.density > self.best.density)
        if better:
            self.best = trial
        return better

    def next(self) -> float | None:
        """The density to try next; None where another one would not be better."""
        if self.best is not None and (self.best.density == 1 or self._ratio(self.best) >= _NEAR):
            return None
        low = 0.0 if self.best is None else self.best.density
        high = min((one.density for one in self.tried if not one.keeps), default=None)
        aim = (1 + _NEAR) / 2
        points = [(one.density, self._ratio(one)) for one in self.tried if one.reason is None]
        (x, y), *before = reversed(points)
        slope = y / x
        if before:
            slope = (y - before[0][1]) / (x - before[0][0])
        if slope <= 0 and self.best is None:  # the same at every density
            return None
        wanted = x + (aim - y) / slope if slope > 0 else 1.0
        if high is None:
            wanted = min(wanted, 1.0)
        elif not low < wanted < high:
            wanted = (low + high) / 2
        # Rounded down: three digits are enough, and the same everywhere.
        unit = 10.0 ** (math.floor(math.log10(wanted)) - 2)
        wanted = round(math.floor(wanted / unit + 1e-9) * unit, 12)
        return None if any(one.density == wanted for one in self.tried) else wanted

    def seen(self) -> str:
        """The least bytes and time of all trials."""
        files = [one for one in self.tried if one.bytes is not None]
        text = f"The least seen: {min(one.bytes or 0 for one in files):,} bytes"
        if any(one.ms is not None for one in files):
            text += f" and {min(one.ms or 0 for one in files):.4g} ms"
        return f"{text}, at densities down to {min(one.density for one in self.tried):g}."

    def _ratio(self, trial: DensityTrial) -> float:
        found = {"max_bytes": trial.bytes, "max_ms": trial.ms}
        return max((found[name] or 0) / bound for name, bound in self.bounds.items())
