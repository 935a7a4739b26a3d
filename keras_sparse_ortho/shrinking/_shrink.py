"""`shrink`: a trained model to the smallest LiteRT file that keeps what was asked for."""

import gzip
import os
from collections.abc import Mapping, Sequence
from typing import Any

import keras

from keras_sparse_ortho._checks import check_number, other_keywords
from keras_sparse_ortho._files import staging
from keras_sparse_ortho.errors import ShrinkError
from keras_sparse_ortho.export import Steps, check_path
from keras_sparse_ortho.models import strip
from keras_sparse_ortho.shrinking._examples import Examples
from keras_sparse_ortho.shrinking._judge import Metric
from keras_sparse_ortho.shrinking._max_drop import (
    MaxDrop,
    checked_max_drop,
    max_drop_as_text,
)
from keras_sparse_ortho.shrinking._search import Search
from keras_sparse_ortho.shrinking._shrink_report import ShrinkReport, Trial

PREFERENCES = ("both", "bytes", "ms")

_SAME_SPEED = 1.25  # within the noise of the clock


@other_keywords
def shrink(
    model: keras.Model,
    data: Any,
    path: str | os.PathLike[str],
    *,
    max_drop: float | Mapping[str, float] = 0.01,
    max_bytes: int | None = None,
    max_ms: float | None = None,
    minutes: float = 10.0,
    metric: str | Metric | None = None,
    prefer: str = "both",
    seed: int = 0,
    verbose: bool | str = "auto",
) -> ShrinkReport:
    """Finds the smallest LiteRT file of a trained model that loses at most `max_drop`.

    A quarter of the examples is held out, and judges all files:

        lost = score(dense model) - score(file),
        lost + standard error of lost <= max_drop    for every output of the model

    Dense files come first, in float16 and in integers. Then `shrink` looks for widths: `widths`
    measures what each group of channels is worth, and a bisection finds the smallest network within
    the limit, a plain Keras model with fewer channels (`narrow`). With 1,500 examples and more, a
    network that lost much learns the dense model's outputs (`recovery.distill`). The smallest one
    is tried in 4 bits last. Single zeros are tried for `*.tflite.gz` only: as stored, a zero takes
    as many bytes as any other number.

    Outputs of classes are scored by accuracy, with labels; without, by the accuracy that the dense
    model expects: the mean of its probability of the class that the file answers. Others are scored
    by the explained variance. The last layers and the compiled loss say which are classes.

    Args:
        model: A built Keras model, with or without our wrappers; it stays as it is.
        data: Examples as for `fit`, `x` or `(x, y)`, like those the model will see; some thousands
            are best, and at least 32 are needed.
        path: str or path. Where to write, `*.tflite`; with `*.tflite.gz`, sizes are under gzip.
        max_drop: float. The largest loss of the score, `0.01` for one point. Or a dict with a
            limit for each output, as `{"class": 0.01, "box": 0.05}`, by the keys of outputs in a
            dict, or the names of the layers that return them (`model.output_names`).
        max_bytes: int. The largest file.
        max_ms: float. The longest call, one example on one thread of this machine.
        minutes: float. How long to try. No trial starts that would end later, if it takes as long
            as the longest one of a dense network, or one that was narrowed at once; the table of
            widths has half of the time that is left. With 0, dense files alone.
        metric: `"expected accuracy"` or `"agreement"`, for classes; `"closeness"`; or a function
            of wanted and given outputs that scores each example between 0 and 1, the best.
        prefer: str. The measure that decides among files within the limits: `"bytes"`; `"ms"`; or
            `"both"`, their product, among files that are not slower than a dense int8 one.
        seed: int. Decides which examples judge, and the order of training.
        verbose: bool or `"auto"`. Whether to log steps to standard error; "auto": in a terminal.

    Returns:
        A `ShrinkReport` with the table of all trials. It can be plotted, and writes other files of
        the frontier.

    Raises:
        ShrinkError: If no file is within the limits. Nothing is written then.
        ValueError: If an argument does not fit the model: rows of another shape, of text, or not
            finite; labels that are no numbers; a metric for which lower is better; a `max_drop` by
            output that misses an output, or names another.

    Warns:
        UserWarning: Equal rows; rows or labels on which the model scores as if by chance; sample
            weights, which are not used; a data set or generator of which not all rows were read.

    Limits: the held examples judge several files, so the loss on new data is a little higher.
    Models written as classes cannot be narrowed: they get dense files, and zeros under gzip.

    Examples:
        >>> import keras, numpy as np, tempfile, pathlib
        >>> from keras_sparse_ortho.shrinking import shrink
        >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3, "softmax")])
        >>> rows = np.random.default_rng(0).normal(size=(64, 8))
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "small.tflite"
        >>> report = shrink(model, rows, path, minutes=0)
        >>> report.taken.bytes == path.stat().st_size, report.taken.lost <= 0.01
        (True, True)

    Reference: Kurtic et al., "ZipLM" (NeurIPS 2023), arXiv 2302.04089, for widths by their errors.
    """
    target = check_path(path)
    max_drop = checked_max_drop(max_drop)
    limits = _checked_limits(max_bytes, max_ms)
    seconds = 60.0 * _checked_minutes(minutes)
    _check_preference(prefer)
    say = Steps(verbose)
    packed = target.name.endswith(".gz")
    stripped = strip(model)
    examples = Examples(model, stripped, data, metric, seed, seconds, max_drop)
    with staging(target.parent, target.name) as folder:
        search = Search(
            stripped,
            examples,
            folder,
            packed=packed,
            say=say,
            seconds=seconds,
            max_drop=max_drop,
            seed=seed,
            prefer=prefer,
        )
        search.run()
        taken = _choice(search.trials, max_drop, limits, prefer)
        report = ShrinkReport(
            str(target),
            taken,
            tuple(search.trials),
            examples.judge.name,
            examples.count,
            examples.judge.dense,
            max_drop,
            tuple(search.untried),
            search.contents(taken),
        )
        if taken is None:
            texts = [f"max_drop={max_drop_as_text(max_drop)}"]
            texts += [f"{name}={limit:g}" for name, limit in limits.items()]
            raise ShrinkError(
                f"No file is within the limits: {', '.join(texts)}. Received:\n{report}"
            )
        file = search.file_of(taken)
        if packed:
            file.write_bytes(gzip.compress(file.read_bytes(), 6, mtime=0))
        os.replace(file, target)
    return report


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


def _checked_minutes(minutes: Any) -> float:
    number = check_number("minutes", minutes)
    if number < 0.0:
        raise ValueError(
            "`minutes` must be 0 or more; with 0 only dense files are made. "
            f"Received: minutes={minutes!r}"
        )
    return number


def _check_preference(prefer: Any) -> None:
    if prefer not in PREFERENCES:
        raise ValueError(
            f"`prefer` must be one of {list(PREFERENCES)}. Received: {prefer=}"
        )


def _choice(
    trials: Sequence[Trial],
    max_drop: MaxDrop,
    limits: dict[str, float],
    prefer: str,
) -> Trial | None:
    """The best trial within the limits."""
    candidates = []
    for trial in trials:
        figures = {"max_bytes": trial.bytes, "max_ms": trial.ms}
        is_within = all(
            figures[name] <= limit for name, limit in limits.items()
        )
        if is_within and trial.loses_at_most(max_drop):
            candidates.append(trial)
    return chosen(
        candidates, trials, prefer, is_slow_allowed="max_ms" in limits
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
