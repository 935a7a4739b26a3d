"""The trials of `shrink`, in the order of their promise."""

import time
from collections.abc import Mapping, Sequence
from functools import partial

import keras
import numpy as np

from keras_sparse_ortho._data import rows_at
from keras_sparse_ortho.export import REMEDIES, plan_of_lstms
from keras_sparse_ortho.models import prunable_weights, strip
from keras_sparse_ortho.pruning import apply_masks
from keras_sparse_ortho.quantization import quantize_aware
from keras_sparse_ortho.shrinking._narrowing import Narrowing, width_table
from keras_sparse_ortho.shrinking._shrink_report import Trial
from keras_sparse_ortho.shrinking._single_zeros import SingleZeros
from keras_sparse_ortho.shrinking._trials import Trials

_ROUTES = ("float16", "dynamic_int8", "int8")
_4_BITS = "dynamic_int4"
_PASSES = 3
_RATE = 3e-4  # of training in 4 bits
_REMEDY_COST = 5  # times the seconds of a file of static int8
_REMEDY_SHARE = 0.25  # of the time that is left, for one remedy


class Search:
    """Dense files first, then narrower networks, single zeros under gzip, and 4 bits.

    Args:
        trials: Trials. Where files are made.
        prefer: str. The measure that narrower networks save: `"bytes"`, `"ms"` or `"both"`.
    """

    def __init__(self, trials: Trials, prefer: str) -> None:
        self._trials = trials
        self._prefer = prefer

    def run(self) -> None:
        """Makes all files that the time allows, and times them."""
        self._try_dense()
        if self._trials.seconds > 0:
            self._try_remedies()
            self._trials.route = self._integer_route()
            self._try_smaller(self._trials.route)
        self._trials.time_files()

    # --- dense files ------------------------------------------------------------------------------

    def _try_dense(self) -> None:
        routes = [*_ROUTES, _4_BITS]
        trials = self._trials
        example = rows_at(trials.examples.calibration, slice(0, 1))
        if plan_of_lstms(trials.model, example).quarters:
            routes += [f"{route}+lstm" for route in _ROUTES]
        for route in routes:
            self._export_dense("dense", route)

    def _export_dense(self, name: str, route: str) -> None:
        start = time.monotonic()
        self._trials.export(name, self._trials.model, route, start)

    def _try_remedies(self) -> None:
        """Makes the dense file of static int8 better until it is good.

        Smaller networks get the same remedy. None is tried that would take the time of widths, and
        none where a good file costs less: remedies change neither bytes nor time.
        """
        trials = self._trials
        static = _first_of_route(trials.made, "int8")
        if trials.is_good(static):
            return
        longest = _REMEDY_COST * static.seconds
        remedied = static
        for remedy in REMEDIES:
            if not self._is_cheaper_than_good_files(remedied):
                break
            name = f"dense, {remedy.name}"
            if longest > _REMEDY_SHARE * trials.seconds_left():
                trials.untried.append(name)
                break
            trials.remedy = remedy.options
            self._export_dense(name, "int8")
            remedied = trials.made[-1]
            if trials.is_good(remedied):
                return
            longest = max(longest, remedied.seconds)
        trials.remedy = {}

    def _is_cheaper_than_good_files(self, static: Trial) -> bool:
        """Whether a file would be taken if it were good; a file that was refused may be."""
        numbers = self._good_integers()
        if static.reason is not None or not numbers:
            return True
        is_static = [trial is static for trial in self._trials.made]
        numbers.append(is_static.index(True))
        *costs, static_cost = self._costs(numbers)
        return static_cost < min(costs)

    def _integer_route(self) -> str:
        """The route of smaller networks: int8, of which the dense file is the best."""
        trials = self._trials.made
        files = [k for k, trial in enumerate(trials) if trial.reason is None]
        integers = [k for k in files if "int8" in trials[k].route]
        if not integers:
            return trials[files[0]].route if files else "float16"
        numbers = self._good_integers()
        if len(numbers) < 2:
            most_exact = max(numbers or integers, key=lambda k: trials[k].mean)
            return trials[most_exact].route
        cheapest = np.argmin(self._costs(numbers))
        return trials[numbers[cheapest]].route

    def _good_integers(self) -> list[int]:
        """The numbers of the trials in int8 that are within the limits."""
        return [
            number
            for number, trial in enumerate(self._trials.made)
            if "int8" in trial.route and self._trials.is_good(trial)
        ]

    def _costs(self, numbers: list[int]) -> list[float]:
        """The costs of the files of some trials, by the measure that is preferred."""
        sizes = [self._trials.made[number].bytes for number in numbers]
        if self._prefer == "bytes":
            return sizes
        times = self._trials.latencies(numbers)
        if self._prefer == "ms":
            return times
        return [size * ms for size, ms in zip(sizes, times, strict=True)]

    # --- smaller networks -------------------------------------------------------------------------

    def _try_smaller(self, route: str) -> None:
        """Narrower networks, those with single zeros, and the smallest good one in 4 bits.

        Args:
            route: str. That of the files. In 4 bits, it stays under gzip, where integers of 15
                values are as small in it.
        """
        trials = self._trials
        networks: list[tuple[str, keras.Model]] = [("dense", trials.model)]
        table = width_table(trials)
        if table is not None:
            networks += Narrowing(trials, table, self._prefer, route).run()
        if trials.packed:
            networks += SingleZeros(trials, route).run()
        route_of_4_bits = route if trials.packed else _4_BITS
        dense = _first_of_route(trials.made, _4_BITS)
        if trials.packed or dense.reason is None:
            self._try_4_bits(networks, route_of_4_bits)

    def _try_4_bits(
        self, networks: list[tuple[str, keras.Model]], route: str
    ) -> None:
        """The smallest good network whose kernels lose little in 4 bits, too.

        Args:
            networks: Good networks with their names, the smallest last.
            route: str. The route of the files.
        """
        trials = self._trials
        refusals: set[str] = set()
        for name, model in reversed(networks):
            if trials.is_late():
                trials.untried.append(f"{name} in 4 bits")
                return
            training = trials.examples.to_train(
                trials.seconds_to_train(),
                _PASSES,
                seed=trials.seed,
                learning_rate=_RATE,
            )
            trial, _ = trials.make(
                f"{name}, int4",
                partial(_in_4_bits, model),
                training,
                route,
                self._widths_of(name),
            )
            # A refusal of two networks holds for the wider ones, too.
            if trials.is_good(trial) or trial.reason in refusals:
                return
            if trial.reason is not None:
                refusals.add(trial.reason)

    def _widths_of(self, name: str) -> Mapping[str, int]:
        return next(
            trial.widths for trial in self._trials.made if trial.name == name
        )


def _first_of_route(trials: Sequence[Trial], route: str) -> Trial:
    return next(trial for trial in trials if trial.route == route)


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
