"""The trials of `shrink`, in the order of their promise."""

import contextlib
import dataclasses
import math
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._data import rows_at
from keras_sparse_ortho._keras_internals import without_warnings
from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.calibration import (
    WidthTable,
    restore_statistics,
    widths,
)
from keras_sparse_ortho.errors import (
    BudgetError,
    ExportConversionError,
    ExportRouteError,
    ExportVerificationError,
    NotPrunableError,
)
from keras_sparse_ortho.export import (
    Steps,
    export_litert,
    latencies,
    load_litert,
)
from keras_sparse_ortho.models import prunable_weights, strip
from keras_sparse_ortho.parametrizations import MagnitudeMask
from keras_sparse_ortho.pruning import apply_masks, narrow, parametrize, prune
from keras_sparse_ortho.quantization import quantize_aware
from keras_sparse_ortho.recovery import distill
from keras_sparse_ortho.schedules import Cubic
from keras_sparse_ortho.shrinking._examples import Examples, Training
from keras_sparse_ortho.shrinking._max_drop import MaxDrop, scaled
from keras_sparse_ortho.shrinking._shrink_report import Trial, frontier_of
from keras_sparse_ortho.shrinking._width_shares import WidthShares

_DENSITIES = (0.5, 0.35, 0.2, 0.1, 0.05)
_FIRST_DENSITY = 2  # the number of the one that is tried first
_FIRST_SHARE = 0.5  # of the cost of the dense network
_LEAST_SHARE = 0.02
_TABLE_SHARE = 0.5  # of the time that is left, for the table of widths
_NEAR_ENOUGH = 0.08  # between a share that is good and one that is not, relative to the first
_LONGEST_REASON = 100  # characters of a reason in the table
_COMPARED = 16  # examples, one by one in Keras with a file
_BATCH = 64
_PASSES = 3
_LONGEST_SOLVING = (
    60.0  # seconds of pruning at once, if that is less than half of the time
)
_RATES = {"at once, trained": 1e-3, "gradually": 3e-3}
_LOW_RATE = 3e-4  # of training in 4 bits, and of networks that have lost little
_NARROW_RATE = 1e-3
_LITTLE = 0.01  # predicted relative error; a higher rate did harm below it
_WORTH_TRAINING = 0.25  # of the limit: training can do harm where less was lost
_TRAINING_SHARE = 1 / 6  # of the time, for one training
# Of static int8, by their cost; the last is for devices with floats.
_REMEDIES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("fitted ranges", {"ranges": "fitted"}),
    ("fitted, equalized", {"ranges": "fitted", "equalize": True}),
    ("partly in floats", {"ranges": "fitted", "floats": "auto"}),
)
_REFUSALS = (
    ExportRouteError,
    ExportConversionError,
    ExportVerificationError,
    NotPrunableError,
)


class Search:
    """The trials of one call, in the order of their promise.

    Args:
        model: The dense model, without wrappers.
        examples: The examples that judge and that train.
        folder: Path. Where files are made.
        packed: bool. Whether sizes are under gzip.
        say: Steps. Logs what is done, and knows how long the call has taken.
        seconds: float. How long the call may take.
        max_drop: float or dict by output. The largest losses of a good file.
        seed: int. Decides the order of training.
        prefer: str. The measure that narrower networks save: `"bytes"`, `"ms"` or `"both"`.
    """

    _ends = ("float32", "float32")  # types of inputs and outputs

    def __init__(
        self,
        model: keras.Model,
        examples: Examples,
        folder: Path,
        *,
        packed: bool,
        say: Steps,
        seconds: float,
        max_drop: MaxDrop,
        seed: int,
        prefer: str = "both",
    ) -> None:
        self._model = model
        self._examples = examples
        self._folder = folder
        self._packed = packed
        self._say = say
        self._seconds = seconds
        self._max_drop = max_drop
        self._seed = seed
        self._prefer = prefer
        self._pruned_at_once: tuple[float, Any] = (0.0, None)
        self._by_magnitude = False
        self._solved_on: Any = examples.calibration
        self._files: dict[int, Path] = {}
        self._remedy: dict[str, Any] = {}
        self.trials: list[Trial] = []
        self.untried: list[str] = []

    def run(self) -> None:
        """Makes all files that the time allows, and times them."""
        self._try_dense()
        if self._seconds > 0:
            self._try_remedies(_REMEDIES)
            route = self._integer_route()
            candidates: list[tuple[str, keras.Model]] = [("dense", self._model)]
            candidates += self._try_narrow(route)
            if self._packed:
                candidates += self._try_zeros(route)
            self._try_4_bits(candidates, route)
        self._time_files()

    def file_of(self, trial: Trial) -> Path:
        """The file of a trial."""
        return self._files[self._number_of(trial)]

    def contents(self, taken: Trial | None) -> dict[int, bytes]:
        """The compressed files of the frontier, and the taken one, by the number of the trial."""
        kept_trials = list(frontier_of(self.trials))
        if taken is not None:
            kept_trials.append(taken)
        numbers = {self._number_of(trial) for trial in kept_trials}
        return {
            k: zlib.compress(self._files[k].read_bytes(), 1)
            for k in sorted(numbers)
        }

    def _number_of(self, trial: Trial) -> int:
        return next(k for k, entry in enumerate(self.trials) if entry is trial)

    # --- dense files ------------------------------------------------------------------------------

    def _try_dense(self) -> None:
        for route in ("float16", "dynamic_int8", "int8"):
            self._try("dense", self._model, route, time.monotonic())

    def _try_remedies(
        self, remedies: Sequence[tuple[str, dict[str, Any]]]
    ) -> None:
        """Makes the dense file of static int8, the last one, better until it is good.

        Smaller networks get the same remedy.
        """
        if self.trials[-1].loses_at_most(self._max_drop):
            return
        for name, remedy in remedies:
            if self._is_late():
                self.untried.append(f"dense, {name}")
                break
            self._remedy = remedy
            start = time.monotonic()
            trial = self._try(f"dense, {name}", self._model, "int8", start)
            if trial.loses_at_most(self._max_drop):
                return
        self._remedy = {}

    def _integer_route(self) -> str:
        """The route of smaller networks: int8, of which the dense file is the best."""
        files = [
            k for k, trial in enumerate(self.trials) if trial.reason is None
        ]
        integers = [k for k in files if "int8" in self.trials[k].route]
        if not integers:
            return self.trials[files[0]].route if files else "float16"
        good = [
            k for k in integers if self.trials[k].loses_at_most(self._max_drop)
        ]
        if len(good) < 2:
            return max(
                (self.trials[k] for k in good or integers),
                key=lambda trial: trial.mean,
            ).route
        times = latencies([self._files[k] for k in good])
        costs = [
            ms * self.trials[k].bytes for k, ms in zip(good, times, strict=True)
        ]
        return self.trials[good[int(np.argmin(costs))]].route

    # --- widths -----------------------------------------------------------------------------------

    def _try_narrow(self, route: str) -> list[tuple[str, keras.Model]]:
        """Bisects on the cost of the network, for the smallest one that is good.

        Returns the good networks with their names, the smallest last.
        """
        table = self._width_table()
        if table is None:
            return []
        cost = WidthShares(table).preferred(self._prefer)
        networks: list[tuple[str, keras.Model]] = []
        choices: list[Mapping[str, int]] = []
        too_small, small_enough = 0.0, 1.0
        while small_enough - too_small > _NEAR_ENOUGH * small_enough:
            share = _between(too_small, small_enough)
            if share <= _LEAST_SHARE:
                break
            if self._is_late():
                self.untried.append(f"a network of {share:.2f} of the cost")
                break
            try:
                choice = table.search(share, cost=cost)
            except BudgetError:  # the narrowest widths cost more
                too_small = share
                continue
            if choice in choices:
                too_small = share
                continue
            choices.append(choice)
            name, model, is_good = self._try_widths(share, choice, table, route)
            if is_good:
                networks.append((name, model))
                small_enough = share
            else:
                too_small = share
        return networks

    def _width_table(self) -> WidthTable | None:
        """The errors of widths; `None` for a model of which nothing can be narrowed."""
        seconds = _TABLE_SHARE * (self._seconds - self._say())
        if seconds <= 0.0:
            self.untried.append("a table of widths")
            return None
        self._say("a table of widths")
        try:
            with without_warnings():
                return widths(
                    self._model,
                    self._examples.calibration,
                    minutes=seconds / 60.0,
                )
        # Any: there are other ways, and the dense files.
        except Exception as error:
            self.trials.append(Trial("narrowed", "", reason=shortly(error)))
            return None

    def _try_widths(
        self,
        share: float,
        choice: Mapping[str, int],
        table: WidthTable,
        route: str,
    ) -> tuple[str, keras.Model, bool]:
        """A network of some widths, refitted and, if it lost much, trained.

        Returns its name, the model, and whether its file is good.
        """
        name = f"narrowed to {share:.2g}"
        make = partial(self._narrowed, choice, table)
        trial, model = self._try_made(name, make, None, route, choice)
        is_good_enough = trial.loses_at_most(
            scaled(self._max_drop, _WORTH_TRAINING)
        )
        if is_good_enough or model is None:
            return name, model, trial.loses_at_most(self._max_drop)
        is_little = table.predicted(choice) < _LITTLE
        rate = _LOW_RATE if is_little else _NARROW_RATE
        seconds = min(
            _TRAINING_SHARE * self._seconds, self._seconds - self._say()
        )
        training = self._examples.to_train(
            seconds,
            _PASSES,
            cost=WidthShares(table).training(choice),
            seed=self._seed,
            learning_rate=rate,
        )
        if training is None:
            return name, model, trial.loses_at_most(self._max_drop)
        trained_name = f"{name}, trained"
        trained_trial, trained = self._try_made(
            trained_name, make, training, route, choice
        )
        share_before = trial.share_of_limit(self._max_drop)
        if trained_trial.share_of_limit(self._max_drop) < share_before:
            return (
                trained_name,
                trained,
                trained_trial.loses_at_most(self._max_drop),
            )
        return name, model, trial.loses_at_most(self._max_drop)

    def _narrowed(
        self, choice: Mapping[str, int], table: WidthTable
    ) -> keras.Model:
        with without_warnings():
            return narrow(
                self._model,
                choice,
                data=self._examples.calibration,
                table=table,
            )

    # --- zeros ------------------------------------------------------------------------------------

    def _try_zeros(self, route: str) -> list[tuple[str, keras.Model]]:
        """Prunes to lower densities while the file is good, else to higher ones.

        Each density is reached in one way after the other, until one is good; a way that failed is
        not tried for lower ones, and for higher ones only the first and the best.

        Returns the good networks with their names, the smallest last.
        """
        methods, training = self._ways_to_prune()
        todo = list(_DENSITIES)
        position = _FIRST_DENSITY
        networks: list[tuple[str, keras.Model]] = []
        while todo:
            if self._is_late():
                self.untried.append(f"density {todo[position]:g}")
                break
            density = todo[position]
            name, model, method, is_good = self._try_density(
                density, methods, training, route
            )
            # The others start from the first, which is better where training fits its rows.
            if is_good:
                networks.append((name, model))
                methods = methods[methods.index(method) :]
                todo = todo[position + 1 :]
                position = 0
            else:
                methods = list(dict.fromkeys((methods[0], method)))
                todo = todo[:position]
                position = len(todo) - 1
        return networks

    def _ways_to_prune(self) -> tuple[list[str], Training | None]:
        """The ways of pruning that the time allows, and what training needs."""
        spare = max(self._seconds - self._say(), 0.0) / 4  # for a trial
        solving = max(spare, min(_LONGEST_SOLVING, self._seconds / 2))
        row_count = self._rows_to_solve_on(solving)
        self._by_magnitude = row_count < _BATCH
        self._solved_on = rows_at(
            self._examples.calibration, slice(0, max(row_count, _BATCH))
        )
        training = self._examples.to_train(spare, _PASSES, seed=self._seed)
        if self._by_magnitude:
            methods = ["by magnitude"]
            trained_methods = ["gradually"]
        else:
            methods = ["at once"]
            trained_methods = ["at once, trained", "gradually"]
        if training is not None:
            methods += trained_methods
        return methods, training

    def _try_density(
        self,
        density: float,
        methods: list[str],
        training: Training | None,
        route: str,
    ) -> tuple[str, keras.Model, str, bool]:
        """Tries ways until one is good; the best one's name, model, way and verdict."""
        attempts: list[tuple[Trial, keras.Model | None, str]] = []
        for method in methods:
            make_pruned = (
                self._scheduled if method == "gradually" else self._pruned
            )
            make = partial(make_pruned, density)
            training_of_method = None
            if training is not None and method in _RATES:
                training_of_method = training.at_rate(_RATES[method])
            trial, model = self._try_made(
                f"density {density:g}, {method}",
                make,
                training_of_method,
                route,
            )
            attempts.append((trial, model, method))
            if trial.loses_at_most(self._max_drop) or self._is_late():
                break
        trial, model, method = min(
            attempts,
            key=lambda attempt: attempt[0].share_of_limit(self._max_drop),
        )
        return trial.name, model, method, trial.loses_at_most(self._max_drop)

    def _rows_to_solve_on(self, seconds: float) -> int:
        """On how many rows pruning at once takes so long: its solver, and rows in all layers."""
        square = np.ones((1024, 1024), "float32")
        start = time.monotonic()
        square @ square
        seconds_of_product = (time.monotonic() - start) / (2 * 1024**3)
        shapes = [
            weight.shape
            for weight in prunable_weights(self._model)
            if "embeddings" not in weight.path
        ]
        products = sum(
            1000 * math.prod(shape[:-1]) ** 2 * shape[-1] for shape in shapes
        )
        seconds_of_row = 2 * max(len(shapes), 1) * self._examples.seconds_each
        return int((seconds - seconds_of_product * products) / seconds_of_row)

    def _scheduled(self, density: float) -> keras.Model:
        """Masks on a schedule, with the shares of pruning at once: they gain several points."""
        shares = Budget.from_model(self._pruned(density))
        return parametrize(self._model, MagnitudeMask(Cubic()), budget=shares)

    def _pruned(self, density: float) -> keras.Model:
        density_before, model_before = self._pruned_at_once
        if density_before == density:
            return model_before
        data = (self._solved_on,)
        if self._by_magnitude:
            model = prune(
                self._model, density, score="magnitude", budget="uniform"
            )
        else:
            model = prune(
                self._model, density, score="obs", budget="error", data=data
            )
        model.trainable = True  # frozen statistics as well
        # Without batch normalization.
        with contextlib.suppress(NotPrunableError):
            restore_statistics(model, data, reference=self._model)
        self._pruned_at_once = (density, model)
        return model

    # --- 4 bits -----------------------------------------------------------------------------------

    def _try_4_bits(
        self, candidates: list[tuple[str, keras.Model]], route: str
    ) -> None:
        """The smallest good network whose kernels lose little in 4 bits, too.

        Args:
            candidates: Good networks with their names, the smallest last.
            route: str. That of the others. Under gzip, integers of 15 values are as small in it.
        """
        for name, model in reversed(candidates):
            if self._is_late():
                self.untried.append(f"{name} in 4 bits")
                return
            seconds = min(
                _TRAINING_SHARE * self._seconds, self._seconds - self._say()
            )
            training = self._examples.to_train(
                seconds, _PASSES, seed=self._seed, learning_rate=_LOW_RATE
            )
            trial, _ = self._try_made(
                f"{name}, int4",
                partial(_in_4_bits, model),
                training,
                route if self._packed else "dynamic_int4",
                self._widths_of(name),
            )
            if trial.loses_at_most(self._max_drop):
                return

    def _widths_of(self, name: str) -> Mapping[str, int]:
        return next(trial.widths for trial in self.trials if trial.name == name)

    # --- one file ---------------------------------------------------------------------------------

    def _try_made(
        self,
        name: str,
        make: Callable[[], keras.Model],
        training: Training | None,
        route: str,
        choice: Mapping[str, int] | None = None,
    ) -> tuple[Trial, keras.Model | None]:
        """Makes a model, trains it to answer as the dense one if there are rows, and exports it."""
        start = time.monotonic()
        self._say(name)
        try:
            model = make()
            if training is not None:
                model.trainable = True  # frozen layers as well
                began = time.monotonic()
                distill(
                    model,
                    self._model,
                    verbose=2 if self._say.loud else 0,
                    **training.options,
                )
                self._examples.took(time.monotonic() - began, training)
        # Any: there are other ways, and the dense files.
        except Exception as error:
            self.trials.append(Trial(name, "", reason=shortly(error)))
            return self.trials[-1], None
        return self._try(name, model, route, start, choice), model

    def _try(
        self,
        name: str,
        model: keras.Model,
        route: str,
        start: float,
        choice: Mapping[str, int] | None = None,
    ) -> Trial:
        """Exports a model and judges its file."""
        number = len(self.trials)
        path = self._folder / f"{number}.tflite"
        self._say(f"{name}: {route}")
        of_int8: dict[str, Any] = {}
        if route == "int8":
            of_int8["representative_data"] = self._examples.calibration
            of_int8 |= self._remedy
        sample = rows_at(self._examples.held, slice(0, _COMPARED))
        refusals: Any = _REFUSALS if model is self._model else Exception
        try:
            with without_warnings():  # the table has what they say
                report = export_litert(
                    model,
                    path,
                    mode=route,
                    **of_int8,
                    sample=sample,
                    tolerance=1.0,
                    inference_input_type=self._ends[0],
                    inference_output_type=self._ends[1],
                )
            verdict = self._examples.judge.verdict(self._answers(path))
        except refusals as error:
            trial = Trial(name, route, reason=shortly(error))
        else:
            trial = Trial(
                name,
                report.route,
                verdict.score,
                report.gzip_bytes if self._packed else path.stat().st_size,
                report.gzip_bytes,
                seconds=time.monotonic() - start,
                lost=verdict.lost,
                margin=verdict.margin,
                agreement=verdict.agreement,
                outputs=verdict.outputs,
                widths=dict(choice or {}),
                in_floats=report.in_floats,
            )
            self._files[number] = path
        self.trials.append(trial)
        return trial

    def _answers(self, path: Path) -> list[np.ndarray]:
        """The outputs of a file on the held examples."""
        answers = load_litert(path).predict(self._examples.held)
        outputs = (
            [*answers.values()] if isinstance(answers, dict) else [answers]
        )
        if not all(np.isfinite(output).all() for output in outputs):
            raise ExportVerificationError(
                "The file gives values that are not finite"
            )
        return outputs

    def _is_late(self) -> bool:
        """Whether another trial would end too late.

        It takes as many seconds as a dense file, or a network that was narrowed at once.
        """
        trial_times = [
            trial.seconds
            for trial in self.trials
            if trial.name == "dense" or _is_narrowed_at_once(trial)
        ]
        return self._say() + max(trial_times, default=0.0) > self._seconds

    def _time_files(self) -> None:
        numbers = sorted(self._files)
        self._say(f"timing {len(numbers)} files")
        times = latencies([self._files[k] for k in numbers])
        for k, ms in zip(numbers, times, strict=True):
            self.trials[k] = dataclasses.replace(self.trials[k], ms=ms)


def _is_narrowed_at_once(trial: Trial) -> bool:
    return bool(trial.widths) and not trial.name.endswith("trained")


def _between(too_small: float, small_enough: float) -> float:
    """The next share of the cost: a half first, then between known ones."""
    if small_enough == 1.0 and too_small == 0.0:
        return _FIRST_SHARE
    if small_enough <= _FIRST_SHARE:
        return math.sqrt(max(too_small, _LEAST_SHARE) * small_enough)
    return 0.5 * (too_small + small_enough)


def _in_4_bits(model: keras.Model) -> keras.Model:
    """The model with kernels in 4 bits and masks that stay: schedules would start again."""
    masks = {
        weight.path: weight.mask
        for weight in prunable_weights(model)
        if weight.live < weight.size
    }
    if masks:
        model = apply_masks(strip(model), masks)
    return quantize_aware(model, "int4", None)


def shortly(error: Exception) -> str:
    """The first sentence of an error and the value in it; of a failed conversion its cause."""
    rule, _, received = str(error).partition("Received: ")
    _, _, cause = received.partition("Error: ")
    if isinstance(error, ExportConversionError) and cause:
        return cause[:_LONGEST_REASON].strip()
    sentence = rule.partition(". ")[0] or type(error).__name__
    return f"{sentence} {received[:_LONGEST_REASON]}".strip()
