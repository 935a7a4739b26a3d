"""`shrink`: a trained model to the smallest LiteRT file that keeps what was asked for."""

import contextlib
import dataclasses
import gzip
import math
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checked_data import (
    check_inputs,
    check_targets,
    warn_of_equal_rows,
    warn_of_weights,
)
from keras_sparse_ortho._checks import check_number, other_keywords
from keras_sparse_ortho._data import all_rows, rows_at
from keras_sparse_ortho._files import staging
from keras_sparse_ortho._keras_internals import warn_user, without_warnings
from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.calibration import restore_statistics
from keras_sparse_ortho.errors import (
    ExportConversionError,
    ExportRouteError,
    ExportVerificationError,
    NotPrunableError,
    ShrinkError,
)
from keras_sparse_ortho.export._export_litert import check_path, export_litert
from keras_sparse_ortho.export._judge import Judge, Metric
from keras_sparse_ortho.export._load_litert import latencies, load_litert
from keras_sparse_ortho.export._shrink_report import ShrinkReport, Trial
from keras_sparse_ortho.export._task import Steps
from keras_sparse_ortho.models import output_kinds, prunable_weights, strip
from keras_sparse_ortho.parametrizations import MagnitudeMask
from keras_sparse_ortho.pruning import apply_masks, parametrize, prune
from keras_sparse_ortho.quantization import quantize_aware
from keras_sparse_ortho.recovery import distill
from keras_sparse_ortho.schedules import Cubic

_DENSITIES = (0.5, 0.35, 0.2, 0.1, 0.05)
_FIRST = 2  # the density that is tried first
_HELD = 0.25  # of the rows judge, at most:
_MOST_HELD = 2000
_FEW_HELD = 200  # if they take long
_COMPARED = 16  # rows, one by one in Keras with a file
_BATCH = 64
_LEAST_ROWS = 32
_FEW_ROWS = 1500  # too few to train on
_CALIBRATION = 512
_PASSES = 3
_MINUTE = 60.0  # pruning at once may take as long, if that is half of the time
_RATES = {"at once, trained": 1e-3, "gradually": 3e-3}
_LOW_RATE = 3e-4  # of training in 4 bits
_STEP = 4  # times a forward pass
_SAME_SPEED = 1.25  # within the noise of the clock
_READING = 0.25  # of the time may pass in reading a data set, and
_LEAST_READING = 10.0  # seconds
_DIGITS = 9  # 1 - 0.99 is more than 0.01
_REFUSALS = (ExportRouteError, ExportConversionError, ExportVerificationError, NotPrunableError)


@other_keywords
def shrink(
    model: keras.Model,
    data: Any,
    path: str | os.PathLike[str],
    *,
    max_drop: float = 0.01,
    max_bytes: int | None = None,
    max_ms: float | None = None,
    minutes: float = 10.0,
    metric: str | Metric | None = None,
    seed: int = 0,
    verbose: bool | str = "auto",
) -> ShrinkReport:
    """Makes the smallest LiteRT file of a trained model that loses at most `max_drop`.

    A quarter of the rows is held out, and judges all files. Dense ones come first, in float16 and
    integers. Then the model is pruned, to densities between .5 and .05 as far as drop and time
    allow: at once (`prune(score="obs")`); with 1,500 rows and more also gradually, and in both ways
    it learns the dense model's outputs (`recovery.distill`).

        drop = score(dense model) - score(file)

    Outputs of classes are scored by accuracy or, without labels, by agreement with the dense model,
    others by the explained variance. The last layers and the compiled loss say which are classes.
    The file with the fewest bytes within the limits is written; one that takes three times as long
    as the fastest must have less than a third of the bytes, unless `max_ms` says how slow it may
    be. So with a dense int8 one among them, it is never worse in all of score, bytes and time.

    Args:
        model: A built Keras model, with or without our wrappers; it stays as it is.
        data: Rows as for `fit`, `x` or `(x, y)`, like those the model will see; some thousands are
            best, and at least 32 are needed.
        path: str or path. Where to write, `*.tflite`; with `*.tflite.gz`, sizes are under gzip.
        max_drop: float. The largest drop of the score, `0.01` for one point.
        max_bytes: int. The largest file.
        max_ms: float. The longest call, one row on one thread of this machine.
        minutes: float. About how long to try; the trial that runs then is finished. The dense files
            and one sparse one take what they take. With 0, dense files alone.
        metric: `"agreement"`, for classes of a model without a loss; `"closeness"`; or a function
            of wanted and given outputs that scores each row between 0 and 1, the best.
        seed: int. Decides which rows judge, and the order of training.
        verbose: bool or `"auto"`. Whether to log steps to standard error; "auto": in a terminal.

    Returns:
        A `ShrinkReport` with the table of all trials; it can be plotted.

    Raises:
        ShrinkError: If no file is within the limits. Nothing is written then.
        ValueError: If an argument does not fit the model: rows of another shape, of text, or not
            finite; labels that are no numbers; a metric for which lower is better.

    Warns:
        UserWarning: Equal rows; rows or labels on which the model scores as if by chance; sample
            weights, which are not used; a data set or generator of which not all rows were read.

    Limits: the held rows judge several files, so the drop on new data is a little higher. Kernels
    are pruned entry by entry; for speed, blocks drawn before training are better.

    Examples:
        >>> import keras, numpy as np, tempfile, pathlib
        >>> from keras_sparse_ortho.export import shrink
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax")])
        >>> rows = np.random.default_rng(0).normal(size=(64, 8))
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "small.tflite"
        >>> report = shrink(model, rows, path, minutes=0)
        >>> report.taken.bytes == path.stat().st_size, report.taken.score.mean >= 0.99
        (True, True)
    """
    target, given = check_path(path), {"max_drop": max_drop, "max_bytes": max_bytes}
    given = {n: v for n, v in (given | {"max_ms": max_ms}).items() if v is not None}
    most = {name: check_number(name, value) for name, value in given.items()}
    seconds = 60.0 * _checked_minutes(minutes)
    say, packed, plain = Steps(verbose), target.name.endswith(".gz"), strip(model)
    rows = _Rows(model, plain, data, metric, seed, seconds)
    dense = rows.judge.dense

    def good(one: Trial) -> bool:
        drop = round(dense.mean - one.score.mean, _DIGITS)
        found = {"max_drop": drop, "max_bytes": one.bytes, "max_ms": one.ms}
        return all(found[name] <= value for name, value in most.items())

    with staging(target.parent, target.name) as folder:
        search = _Search(plain, rows, folder, packed, say)
        search.dense()
        if seconds > 0:
            search.sparse(round(dense.mean - max_drop, _DIGITS), seconds, seed)
        search.time()
        taken = _smallest([*filter(good, search.trials)], slow=max_ms is not None)
        figures = rows.judge.name, rows.count, dense, max_drop, tuple(search.untried)
        report = ShrinkReport(str(target), taken, tuple(search.trials), *figures)
        if taken is None:
            text = ", ".join(f"{name}={value:g}" for name, value in most.items())
            raise ShrinkError(f"No file is within the limits: {text}. Received:\n{report}")
        made = search.files[taken.name, taken.route]
        if packed:
            made.write_bytes(gzip.compress(made.read_bytes(), 6, mtime=0))
        os.replace(made, target)
    return report


def _checked_minutes(minutes: Any) -> float:
    number = check_number("minutes", minutes)
    if number < 0.0:
        raise ValueError(
            "`minutes` must be 0 or more; with 0 only dense files are made. "
            f"Received: minutes={minutes!r}"
        )
    return number


def _smallest(good: list[Trial], slow: bool) -> Trial | None:
    """The file with the fewest bytes, where a file that is slower counts as larger by this factor.

    Args:
        good: Trials within the limits.
        slow: bool. Whether the user has said how slow a file may be: then bytes alone count.
    """
    fastest = min((one.ms for one in good), default=0.0)

    def cost(one: Trial) -> float:
        is_slower = not slow and one.ms > _SAME_SPEED * fastest
        return one.bytes * one.ms / fastest if is_slower else one.bytes

    return min(good, key=cost, default=None)


class _Rows:
    """The rows that judge and the rows that train, the first of which calibrate.

    Args:
        given: The model of the user, whose last layers and loss say what its outputs are.
        model: The same without wrappers.
        data: Rows as for `fit`.
        metric: As for `shrink`.
        seed: int. As for `shrink`.
        seconds: float. How long `shrink` may take.
    """

    def __init__(
        self, given: Any, model: Any, data: Any, metric: Any, seed: int, seconds: float
    ) -> None:
        rows = all_rows(data, seconds=max(_READING * seconds, _LEAST_READING))
        self.x, labels, _ = rows
        check_inputs(given, self.x, text=False)
        check_targets(labels)
        are_equal = warn_of_equal_rows([rows])
        warn_of_weights([rows])
        count = len(keras.tree.flatten(self.x)[0])
        if count < _LEAST_ROWS:
            raise ValueError(
                f"`data` must have at least {_LEAST_ROWS} rows: a quarter judges, the others make "
                f"the files. Received: {count} rows"
            )
        order = np.random.default_rng(seed).permutation(count)
        some = rows_at(self.x, order[:_BATCH])
        model.predict(some, verbose=0)  # compiles it
        start = time.monotonic()
        model.predict(some, verbose=0)
        self.each = (time.monotonic() - start) / min(count, _BATCH)
        # A file of a large model may take three times as long: a tenth of the time.
        judges = min(_HELD * count, _MOST_HELD, max(_FEW_HELD, seconds / 30 / self.each))
        judging, self.training = np.split(order, [int(judges)])
        self.held, self.count = rows_at(self.x, judging), len(judging)
        self.calibration = rows_at(self.x, self.training[:_CALIBRATION])
        want = model.predict(self.held, verbose=0)
        if isinstance(labels, dict) and isinstance(want, list):
            labels = [labels[name] for name in model.output_names]
        own = None if labels is None else rows_at(labels, judging)
        outputs = keras.tree.flatten(want)
        if not all(np.isfinite(one).all() for one in outputs):
            raise ValueError(
                "The outputs of the model must be finite on `data`, or no file can be judged. "
                f"Received: NaN or infinity in the outputs of {model.name!r}"
            )
        kinds = output_kinds(given, len(outputs))
        self.logits = [kind.probabilities or "values" for kind in kinds]
        self.judge = Judge(outputs, own, metric, kinds)
        if self.judge.is_by_chance and not are_equal:
            warn_user(
                "These rows cannot tell a good file from a bad one: the model scores no better on "
                "them than with its outputs in another order. Check that labels belong to their "
                "rows, and give rows like those of training, with all answers among them. "
                f"Received: {self.judge.name} {self.judge.dense.mean:.4f} on {self.count} held rows"
            )

    def took(self, seconds: float, training: dict[str, Any]) -> None:
        """Notes how long a training took, so that the next one gets fewer rows if it was slow."""
        (x,) = training["data"]
        steps = training["epochs"] * len(keras.tree.flatten(x)[0])
        self.each = max(self.each, seconds / (_STEP * steps))

    def to_train(self, seconds: float, passes: int, **options: Any) -> dict[str, Any]:
        """Arguments of `distill` for the rows that the time allows; none if they are too few."""
        chosen = self.training[: int(max(seconds, 0.0) / (_STEP * passes * self.each))]
        options = options | {"outputs": self.logits}
        found = options | {"data": (rows_at(self.x, chosen),), "epochs": passes}
        return found if len(chosen) >= _FEW_ROWS else {}


class _Search:
    """The trials of one call, in the order of their promise."""

    def __init__(self, model: Any, rows: _Rows, folder: Path, packed: bool, say: Steps) -> None:
        self._model, self._rows, self._say = model, rows, say
        self._folder, self._packed = folder, packed
        self.trials: list[Trial] = []
        self.untried: list[float] = []
        self._at_once: tuple[float, Any] = 0.0, None
        self.files: dict[tuple[str, str], Path] = {}

    def dense(self) -> None:
        for route in ("float16", "dynamic_int8", "int8"):
            self._try("dense", self._model, route, time.monotonic())

    def sparse(self, least: float, seconds: float, seed: int) -> None:
        """Prunes to lower densities while the score is at least so high, else to higher ones.

        Each density is reached in one way after the other, until one is good; a way that failed is
        not tried for lower ones, and for higher ones only the first and the best. Networks are
        judged by their files in int8; then a good one is tried in 4 bits, and if it is bad, the
        next.
        """
        spare = max(seconds - self._say(), 0.0) / 4  # for a trial
        solved = self._rows_to_solve_on(max(spare, min(_MINUTE, seconds / 2)))
        self._by_magnitude = solved < _BATCH
        ways = ["by magnitude"] if self._by_magnitude else ["at once"]
        self._known = rows_at(self._rows.calibration, slice(0, max(solved, _BATCH)))
        training = self._rows.to_train(spare, _PASSES, seed=seed)
        if training:
            ways += ["gradually"] if self._by_magnitude else ["at once, trained", "gradually"]
        whole = [one for one in self.trials if "int8" in one.route] or self.trials[:1]
        route = max(whole, key=lambda one: one.mean).route
        todo, at, good = list(_DENSITIES), _FIRST, [("dense", self._model)]
        while todo:
            density, start, tried = todo[at], time.monotonic(), []
            for way in ways:
                make = partial(self._scheduled if way == "gradually" else self._pruned, density)
                rate = _RATES.get(way)
                rows = training | {"learning_rate": rate} if training and rate else {}
                tried.append((*self._made(f"density {density:g}, {way}", make, rows, route), way))
                if tried[-1][0].mean >= least or self._is_late(seconds):
                    break
            best, model, way = max(tried, key=lambda one: one[0].mean)
            kept = best.mean >= least
            # The others start from the first, which is better where training fits its rows.
            ways = ways[ways.index(way) :] if kept else [*dict.fromkeys((ways[0], way))]
            good += [(best.name, model)] if kept else []
            todo = todo[at + 1 :] if kept else todo[:at]
            at = 0 if kept else len(todo) - 1
            if self._is_late(seconds, (time.monotonic() - start) / len(tried)):
                self.untried = todo[at:] if kept else todo[at::-1]
                break
        if not self._packed and len(good) > 1 and not self._is_late(seconds):
            self._try(*good[-1], "float16+sp", time.monotonic())
        # Stored in 4 bits all are of one size: the most accurate is the best.
        for name, model in reversed(good) if self._packed else good:
            if self._is_late(seconds):
                break
            make = partial(_in_4_bits, model)
            low = {"learning_rate": _LOW_RATE, "seed": seed}
            left = max(seconds - self._say(), spare / _PASSES)
            rows = self._rows.to_train(left, _PASSES, **low)
            rows = rows or self._rows.to_train(left, 1, **low)
            # Compressed, integers of 15 values are as small in int8, which is faster.
            to = route if self._packed else "dynamic_int4"
            found, _ = self._made(f"{name}, int4", make, rows, to)
            if found.mean >= least:
                break

    def _is_late(self, seconds: float, needed: float = 0.0) -> bool:
        """Whether another trial, of as many seconds as a file takes, would end too late."""
        files = [one.seconds for one in self.trials if one.name == "dense"]
        return self._say() + max([needed, *files]) > seconds

    def _rows_to_solve_on(self, seconds: float) -> int:
        """On how many rows pruning at once takes so long: its solver, and rows in all layers."""
        square = np.ones((1024, 1024), "float32")
        start = time.monotonic()
        square @ square
        each = (time.monotonic() - start) / (2 * 1024**3)  # operation
        shapes = [w.shape for w in prunable_weights(self._model) if "embeddings" not in w.path]
        solver = each * sum(1000 * math.prod(shape[:-1]) ** 2 * shape[-1] for shape in shapes)
        return int((seconds - solver) / (2 * max(len(shapes), 1) * self._rows.each))

    def _made(
        self, name: str, make: Callable[[], Any], training: dict[str, Any], route: str
    ) -> tuple[Trial, Any]:
        """Makes a model, trains it to answer as the dense one if there are rows, and exports it."""
        start = time.monotonic()
        self._say(name)
        try:
            found = make()
            if training:
                found.trainable = True  # frozen layers as well
                began = time.monotonic()
                distill(found, self._model, verbose=2 if self._say.loud else 0, **training)
                self._rows.took(time.monotonic() - began, training)
        except Exception as error:  # any: there are other ways, and the dense files
            self.trials.append(Trial(name, "", reason=_shortly(error)))
            return self.trials[-1], None
        return self._try(name, found, route, start), found

    def _scheduled(self, density: float) -> Any:
        """Masks on a schedule, with the shares of pruning at once: they gain several points."""
        shares = Budget.from_model(self._pruned(density))
        return parametrize(self._model, MagnitudeMask(Cubic()), budget=shares)

    def _pruned(self, density: float) -> Any:
        if self._at_once[0] == density:
            return self._at_once[1]
        data = (self._known,)
        if self._by_magnitude:
            found = prune(self._model, density, score="magnitude", budget="uniform")
        else:
            found = prune(self._model, density, score="obs", budget="error", data=data)
        found.trainable = True  # frozen statistics as well
        with contextlib.suppress(NotPrunableError):  # without batch normalization
            restore_statistics(found, data, reference=self._model)
        self._at_once = density, found
        return found

    def _try(self, name: str, model: Any, route: str, start: float) -> Trial:
        path = self._folder / f"{len(self.trials)}.tflite"
        self._say(f"{name}: {route}")
        rows = self._rows.calibration if route == "int8" else None
        options = {"sample": rows_at(self._rows.held, slice(0, _COMPARED)), "tolerance": 1.0}
        refusals = _REFUSALS if model is self._model else Exception
        try:
            with without_warnings():  # the table has what they say
                report = export_litert(model, path, mode=route, representative_data=rows, **options)
            found = load_litert(path).predict(self._rows.held)
            outputs = [*found.values()] if isinstance(found, dict) else [found]
            if not all(np.isfinite(one).all() for one in outputs):
                raise ExportVerificationError("The file gives values that are not finite")
        except refusals as error:
            trial = Trial(name, route, reason=_shortly(error))
        else:
            trial = Trial(
                name,
                report.route,
                self._rows.judge.score(outputs),
                report.gzip_bytes if self._packed else path.stat().st_size,
                report.gzip_bytes,
                seconds=time.monotonic() - start,
            )
            self.files[name, trial.route] = path
        self.trials.append(trial)
        return trial

    def time(self) -> None:
        good = [k for k, one in enumerate(self.trials) if one.reason is None]
        files = [self.files[self.trials[k].name, self.trials[k].route] for k in good]
        self._say(f"timing {len(files)} files")
        for k, ms in zip(good, latencies(files), strict=True):
            self.trials[k] = dataclasses.replace(self.trials[k], ms=ms)


def _in_4_bits(model: Any) -> Any:
    """The model with kernels in 4 bits and masks that stay: schedules would start again."""
    masks = {w.path: w.mask for w in prunable_weights(model) if w.live < w.size}
    fixed = apply_masks(strip(model), masks) if masks else model
    return quantize_aware(fixed, "int4", None)


def _shortly(error: Exception) -> str:
    rule, _, received = str(error).partition("Received: ")
    return f"{rule.partition('. ')[0] or type(error).__name__} {received[:100]}".strip()
