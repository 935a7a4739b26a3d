"""Networks with single zeros, which are small under gzip."""

import contextlib
import math
import time
from functools import partial
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._data import rows_at
from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.calibration import restore_statistics
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.models import prunable_weights
from keras_sparse_ortho.parametrizations import MagnitudeMask
from keras_sparse_ortho.pruning import parametrize, prune
from keras_sparse_ortho.schedules import Cubic
from keras_sparse_ortho.shrinking._examples import Training
from keras_sparse_ortho.shrinking._shrink_report import Trial
from keras_sparse_ortho.shrinking._trials import Trials

_DENSITIES = (0.5, 0.35, 0.2, 0.1, 0.05)
_FIRST_DENSITY = 2  # the number of the one that is tried first
_BATCH = 64
_PASSES = 3
_LONGEST_SOLVING = (
    60.0  # seconds of pruning at once, if that is less than half of the time
)
_TRAININGS: dict[str, dict[str, float | None]] = {
    "at once, trained": {"learning_rate": 1e-3},
    # Masks move, so no stage can be undone.
    "gradually": {
        "learning_rate": 3e-3,
        "validation_split": 0.0,
        "minutes": None,
    },
}


class SingleZeros:
    """Prunes to lower densities while the file is good, else to higher ones.

    Args:
        trials: Trials. Where files are made.
        route: str. The route of the files.
    """

    def __init__(self, trials: Trials, route: str) -> None:
        self._trials = trials
        self._route = route
        self._pruned_at_once: tuple[float, Any] = (0.0, None)
        self._by_magnitude = False
        self._solved_on: Any = trials.examples.calibration

    def run(self) -> list[tuple[str, keras.Model]]:
        """The good networks with their names, the smallest last.

        Each density is reached in one way after the other, until one is good; a way that failed is
        not tried for lower ones, and for higher ones only the first and the best.
        """
        methods, training = self._ways_to_prune()
        todo = list(_DENSITIES)
        position = _FIRST_DENSITY
        networks: list[tuple[str, keras.Model]] = []
        while todo:
            if self._trials.is_late():
                self._trials.untried.append(f"density {todo[position]:g}")
                break
            density = todo[position]
            name, model, method, is_good = self._try_density(
                density, methods, training
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
        trials = self._trials
        spare = max(trials.seconds_left(), 0.0) / 4  # for a trial
        solving = max(spare, min(_LONGEST_SOLVING, trials.seconds / 2))
        row_count = self._rows_to_solve_on(solving)
        self._by_magnitude = row_count < _BATCH
        self._solved_on = rows_at(
            trials.examples.calibration, slice(0, max(row_count, _BATCH))
        )
        training = trials.examples.to_train(spare, _PASSES, seed=trials.seed)
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
    ) -> tuple[str, keras.Model, str, bool]:
        """Tries ways until one is good; the best one's name, model, way and verdict."""
        trials = self._trials
        attempts: list[tuple[Trial, keras.Model | None, str]] = []
        for method in methods:
            make_pruned = (
                self._scheduled if method == "gradually" else self._pruned
            )
            make = partial(make_pruned, density)
            training_of_method = None
            if training is not None and method in _TRAININGS:
                training_of_method = training.with_options(**_TRAININGS[method])
            trial, model = trials.make(
                f"density {density:g}, {method}",
                make,
                training_of_method,
                self._route,
                was_tried=method == "at once, trained",
            )
            attempts.append((trial, model, method))
            if trials.is_good(trial) or trials.is_late():
                break
        trial, model, method = min(
            attempts,
            key=lambda attempt: attempt[0].share_of_limit(trials.max_drop),
        )
        return trial.name, model, method, trials.is_good(trial)

    def _rows_to_solve_on(self, seconds: float) -> int:
        """On how many rows pruning at once takes so long: its solver, and rows in all layers."""
        square = np.ones((1024, 1024), "float32")
        start = time.monotonic()
        square @ square
        seconds_of_product = (time.monotonic() - start) / (2 * 1024**3)
        shapes = [
            weight.shape
            for weight in prunable_weights(self._trials.model)
            if "embeddings" not in weight.path
        ]
        products = sum(
            1000 * math.prod(shape[:-1]) ** 2 * shape[-1] for shape in shapes
        )
        passes = 2 * max(len(shapes), 1)
        seconds_of_row = passes * self._trials.examples.seconds_each
        return int((seconds - seconds_of_product * products) / seconds_of_row)

    def _scheduled(self, density: float) -> keras.Model:
        """Masks on a schedule, with the shares of pruning at once: they gain several points."""
        shares = Budget.from_model(self._pruned(density))
        return parametrize(
            self._trials.model, MagnitudeMask(Cubic()), budget=shares
        )

    def _pruned(self, density: float) -> keras.Model:
        density_before, model_before = self._pruned_at_once
        if density_before == density:
            return model_before
        dense = self._trials.model
        data = (self._solved_on,)
        if self._by_magnitude:
            model = prune(dense, density, score="magnitude", budget="uniform")
        else:
            model = prune(
                dense, density, score="obs", budget="error", data=data
            )
        model.trainable = True  # frozen statistics as well
        # Without batch normalization.
        with contextlib.suppress(NotPrunableError):
            restore_statistics(model, data, reference=dense)
        self._pruned_at_once = (density, model)
        return model
