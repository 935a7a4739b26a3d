"""The goal of `shrink` without a target: the smallest file within the limits."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras

from keras_sparse_ortho._checks import check_number
from keras_sparse_ortho.shrinking._examples import Examples
from keras_sparse_ortho.shrinking._max_drop import MaxDrop
from keras_sparse_ortho.shrinking._search import Search
from keras_sparse_ortho.shrinking._shrink_report import ShrinkReport, Trial
from keras_sparse_ortho.shrinking._trials import Terms, Trials

PREFERENCES = ("both", "bytes", "ms")

_SAME_SPEED = 1.25  # within the noise of the clock


class SmallestFile:
    """The smallest file that loses at most `max_drop`, within limits of bytes and time.

    Attributes:
        limits: dict. `max_bytes` and `max_ms`, if they are given.

    Args:
        file: Path. Its name says whether sizes are under gzip.
        max_bytes: As for `shrink`.
        max_ms: As for `shrink`.
        prefer: As for `shrink`.
        target: `None` or `"arm64"`, as for `shrink`.
    """

    default_drop: MaxDrop = 0.01

    def __init__(
        self,
        file: Path,
        *,
        max_bytes: int | None,
        max_ms: float | None,
        prefer: str,
        target: str | None,
    ) -> None:
        self.limits: Mapping[str, float] = _checked_limits(max_bytes, max_ms)
        _check_preference(prefer)
        self._prefer = prefer
        self._target = target
        self._is_packed = file.name.endswith(".gz")

    def check_model(self, model: keras.Model) -> None:
        """Any model will do."""

    def run(
        self,
        model: keras.Model,
        examples: Examples,
        folder: Path,
        terms: Terms,
    ) -> Trials:
        """Makes all files that the time allows; the arguments are those of `Trials`."""
        trials = Trials(
            model,
            examples,
            folder,
            terms,
            packed=self._is_packed,
            target=self._target,
        )
        Search(trials, self._prefer).run()
        return trials

    def best(self, trials: Sequence[Trial], max_drop: MaxDrop) -> Trial | None:
        """The best trial within the limits; `None` if there is none."""
        candidates = []
        for trial in trials:
            figures = {"max_bytes": trial.bytes, "max_ms": trial.ms}
            is_within = all(
                figures[name] <= limit for name, limit in self.limits.items()
            )
            if is_within and trial.loses_at_most(max_drop):
                candidates.append(trial)
        return chosen(
            candidates,
            trials,
            self._prefer,
            is_slow_allowed="max_ms" in self.limits,
        )

    def report(self, **figures: Any) -> ShrinkReport:
        """The report on all trials; the arguments are those of `ShrinkReport`."""
        return ShrinkReport(target=self._target, **figures)


def _checked_limits(
    max_bytes: int | None, max_ms: float | None
) -> dict[str, float]:
    """The limits that were given, by name."""
    limits = {"max_bytes": max_bytes, "max_ms": max_ms}
    return {
        name: check_number(name, limit)
        for name, limit in limits.items()
        if limit is not None
    }


def _check_preference(prefer: Any) -> None:
    if prefer not in PREFERENCES:
        raise ValueError(
            f"`prefer` must be one of {list(PREFERENCES)}. Received: {prefer=}"
        )


def chosen(
    candidates: Sequence[Trial],
    trials: Sequence[Trial],
    prefer: str,
    *,
    is_slow_allowed: bool = False,
) -> Trial | None:
    """The best of the files within the limits; `None` if there is none.

    Args:
        candidates: Trials within the limits.
        trials: All trials, with the dense ones.
        prefer: str. One of `PREFERENCES`.
        is_slow_allowed: bool. Whether the user has said how slow a file may be. Else no file is
            taken that is slower than a dense one in int8, unless `prefer` is "bytes".
    """
    if prefer == "bytes" or (prefer == "both" and is_slow_allowed):
        return min(candidates, key=lambda trial: trial.bytes, default=None)
    if prefer == "ms":
        return min(
            candidates, key=lambda trial: (trial.ms, trial.bytes), default=None
        )
    dense_times = [
        trial.ms
        for trial in trials
        if trial.name == "dense" and "int8" in trial.route
    ]
    slowest = _SAME_SPEED * min(dense_times, default=float("inf"))
    fast = [trial for trial in candidates if trial.ms <= slowest]
    return min(
        fast or candidates,
        key=lambda trial: trial.bytes * trial.ms,
        default=None,
    )
