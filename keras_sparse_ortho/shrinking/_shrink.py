"""`shrink`: a trained model to the smallest LiteRT file that keeps what was asked for."""

import gzip
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import keras

from keras_sparse_ortho._checks import check_number, other_keywords
from keras_sparse_ortho._files import staging
from keras_sparse_ortho.errors import ShrinkError
from keras_sparse_ortho.export import Steps, assigned_variables, check_path
from keras_sparse_ortho.models import input_specs, strip
from keras_sparse_ortho.shrinking._examples import Examples
from keras_sparse_ortho.shrinking._judge import Metric
from keras_sparse_ortho.shrinking._max_drop import (
    MaxDrop,
    checked_max_drop,
    max_drop_as_text,
)
from keras_sparse_ortho.shrinking._micro_report import (
    MicroReport,
    least_loss,
)
from keras_sparse_ortho.shrinking._micro_search import MicroSearch
from keras_sparse_ortho.shrinking._microcontroller import (
    ArenaOf,
    Microcontroller,
    checked_microcontroller,
)
from keras_sparse_ortho.shrinking._search import Search
from keras_sparse_ortho.shrinking._shrink_report import ShrinkReport, Trial

PREFERENCES = ("both", "bytes", "ms")

_LARGEST_DROP = 0.01  # by default
_ANY_DROP = 1.0  # scores are between 0 and 1
_SAME_SPEED = 1.25  # within the noise of the clock


@other_keywords
def shrink(
    model: keras.Model,
    data: Any,
    path: str | os.PathLike[str],
    *,
    max_drop: float | Mapping[str, float] | None = None,
    max_bytes: int | None = None,
    max_ms: float | None = None,
    target: str | None = None,
    max_flash: int | None = None,
    max_ram: int | None = None,
    decode_code: int = 0,
    arena: ArenaOf | None = None,
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

    Dense files come first, in float16 and in integers. Where static int8 loses too much, its
    remedies follow, the cheapest first: fitted ranges, equalized channels, a stretch in floats (see
    `export_litert`). Then `shrink` looks for widths: `widths`
    measures what each group of channels is worth, and a bisection finds the smallest network within
    the limit, a plain Keras model with fewer channels (`narrow`). With 1,500 examples and more, a
    network that lost much learns the dense model's outputs (`recovery.distill`). The smallest one
    is tried in 4 bits last. Single zeros are tried for `*.tflite.gz` only: as stored, a zero takes
    as many bytes as any other number.

    Outputs of classes are scored by accuracy, with labels; without, by the accuracy that the dense
    model expects: the mean of its probability of the class that the file answers. Others are scored
    by the explained variance. The last layers and the compiled loss say which are classes.

    With `target="micro"` files are static int8 with int8 ends, for LiteRT Micro, and the limits are
    those of the device. It writes the file of least loss within them:

        flash = bytes of the array of `c_array`  [+ decode_code if zeros are packed] <= max_flash,
        arena = what tflite-micro reports for it                                     <= max_ram

    The dense file is enough if it fits. Else a bisection looks for the widest network that fits,
    by the bytes of weights and the activations that live together; larger networks are pruned to
    the density at which they fit with packed zeros. Both are trained further on 500 examples and
    more.

    Args:
        model: A built Keras model, with or without our wrappers; it stays as it is.
        data: Examples as for `fit`, `x` or `(x, y)`, like those the model will see; some thousands
            are best, and at least 32 are needed.
        path: str or path. Where to write, `*.tflite`; with `*.tflite.gz`, sizes are under gzip.
        max_drop: float. The largest loss of the score, by default `0.01`, one point; with `target`
            by default any, as the device has the limits. Or a dict with a limit for each output,
            as `{"class": 0.01, "box": 0.05}`, by the keys of outputs in a dict, or the names of
            the layers that return them (`model.output_names`).
        max_bytes: int. The largest file.
        max_ms: float. The longest call, one example on one thread of this machine.
        target: `None`, or `"micro"` for microcontrollers: `path` is then the header with the C
            array, `*.h`, or the LiteRT file, with another ending.
        max_flash: int. With `target`: the largest array, in bytes.
        max_ram: int. With `target`: the largest arena, in bytes.
        decode_code: int. With `target`: bytes of code that count with each packed array, 11,100 for
            the operator "Decode" on a Cortex-M4. Default: 0, the array alone.
        arena: callable. With `target`: from the bytes of an array to the bytes of its arena, such
            as a device's own `arena_used_bytes()`. Default: tflite-micro says it, on Linux; its
            records have pointers of 64 bits, so a device of 32 bits takes a little less.
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
        the frontier. With `target="micro"` each trial has `micro`: flash, arena and the operators
        with their numbers; and `write` takes `*.h`, too.

    Raises:
        ShrinkError: If no file is within the limits. Nothing is written then. With `target` it says
            by how many bytes the nearest file misses each.
        ImportError: With `target`, if tflite-micro is missing and there is no `arena`.
        ValueError: If an argument does not fit the model: rows of another shape, of text, or not
            finite; labels that are no numbers; a metric for which lower is better; a `max_drop` by
            output that misses an output, or names another.

    Warns:
        UserWarning: Equal rows; rows or labels on which the model scores as if by chance; sample
            weights, which are not used; a data set or generator of which not all rows were read.

    Limits: the held examples judge several files, so the loss on new data is a little higher.
    Models written as classes cannot be narrowed: they get dense files, and zeros under gzip. With
    `target="micro"` nothing is timed, and a model that assigns variables in a call, such as the
    ring buffer of a streaming one, is refused: rows would be judged with the state that others
    left.

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
    file = check_path(path)
    device = checked_microcontroller(
        target,
        max_flash=max_flash,
        max_ram=max_ram,
        decode_code=decode_code,
        arena=arena,
        others=_given_limits(max_bytes, max_ms, prefer),
    )
    max_drop = _checked_drop(max_drop, device)
    limits = _checked_limits(max_bytes, max_ms, device)
    seconds = 60.0 * _checked_minutes(minutes)
    _check_preference(prefer)
    say = Steps(verbose)
    stripped = strip(model)
    if device is not None:
        _check_for_micro(stripped, file)
    examples = Examples(model, stripped, data, metric, seed, seconds, max_drop)
    with staging(file.parent, file.name) as folder:
        make_search = _kind_of_search(file, prefer, device)
        search: Search = make_search(
            stripped,
            examples,
            folder,
            say=say,
            seconds=seconds,
            max_drop=max_drop,
            seed=seed,
        )
        search.run()
        taken = _best_of(search.trials, max_drop, limits, prefer, device)
        report = _report_of(search, taken, examples, file, max_drop, device)
        if taken is None:
            raise _no_file(report, limits)
        if device is None:
            _move(search.file_of(taken), file)
        else:
            report.write(taken, file)
    return report


def _checked_drop(
    max_drop: float | Mapping[str, float] | None,
    device: Microcontroller | None,
) -> MaxDrop:
    """The limits of the loss; by default a point, and any for a microcontroller."""
    if max_drop is not None:
        return checked_max_drop(max_drop)
    if device is None:
        return _LARGEST_DROP
    return _ANY_DROP


def _no_file(report: ShrinkReport, limits: Mapping[str, float]) -> ShrinkError:
    """The error where no file is within the limits."""
    texts = [f"{name}={limit:.10g}" for name, limit in limits.items()]
    if report.max_drop != _ANY_DROP:
        texts.insert(0, f"max_drop={max_drop_as_text(report.max_drop)}")
    return ShrinkError(
        f"No file is within the limits: {', '.join(texts)}. Received:\n{report}"
    )


def _kind_of_search(
    file: Path, prefer: str, device: Microcontroller | None
) -> Callable[..., Search]:
    """The search for the kind of file, with the arguments that it alone takes."""
    if device is not None:
        return partial(MicroSearch, device=device)
    return partial(Search, packed=_is_packed(file), prefer=prefer)


def _is_packed(file: Path) -> bool:
    """Whether sizes are under gzip."""
    return file.name.endswith(".gz")


def _move(written: Path, file: Path) -> None:
    """Moves a LiteRT file to its place, compressed if its name says so."""
    if _is_packed(file):
        content = gzip.compress(written.read_bytes(), 6, mtime=0)
        written.write_bytes(content)
    os.replace(written, file)


def _report_of(
    search: Search,
    taken: Trial | None,
    examples: Examples,
    file: Path,
    max_drop: MaxDrop,
    device: Microcontroller | None,
) -> ShrinkReport:
    """The report on the trials of a search.

    Args:
        search: The search, which has ended.
        taken: The best file within the limits, if there is one.
        examples: Those that have judged.
        file: Path. Where it is written.
        max_drop: The limits of the loss.
        device: The limits of a microcontroller, with `target="micro"`.
    """
    figures: dict[str, Any] = {
        "path": str(file),
        "taken": taken,
        "trials": tuple(search.trials),
        "measure": examples.judge.name,
        "rows": examples.count,
        "dense": examples.judge.dense,
        "max_drop": max_drop,
        "untried": tuple(search.untried),
        "contents": search.contents(taken),
    }
    if device is None:
        return ShrinkReport(**figures)
    return MicroReport(**figures, device=device)


def _given_limits(
    max_bytes: int | None, max_ms: float | None, prefer: str
) -> dict[str, object]:
    """The arguments about files of this machine, by name; `None` by default."""
    preference = None
    if prefer != PREFERENCES[0]:
        preference = prefer
    return {"max_bytes": max_bytes, "max_ms": max_ms, "prefer": preference}


def _checked_limits(
    max_bytes: int | None,
    max_ms: float | None,
    device: Microcontroller | None,
) -> Mapping[str, float]:
    """The limits that were given, by name."""
    if device is not None:
        return device.limits
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


def _check_for_micro(model: keras.Model, file: Path) -> None:
    """ValueError for a compressed array, and for a model that assigns variables in a call."""
    if _is_packed(file):
        raise ValueError(
            "With `target`, `path` must be a header with the C array, *.h, or a LiteRT file, "
            f"*.tflite: a microcontroller reads neither from gzip. Received: path={str(file)!r}"
        )
    specs = input_specs(model)
    if specs is None:  # of which the export says what is missing
        return
    zeros = keras.tree.map_structure(
        lambda spec: keras.ops.zeros(spec.shape, spec.dtype), specs
    )
    assigned = assigned_variables(model, zeros)
    if assigned:
        raise ValueError(
            "With `target`, a call of the model must assign no variables: each row would be judged "
            "with the state that others left. Write the file with `export_litert` and `c_array`, "
            "which keep READ_VARIABLE and ASSIGN_VARIABLE; or make the state an input and an "
            f"output of the model. Received: model {model.name!r}, variables {assigned[:5]}"
        )


def _best_of(
    trials: Sequence[Trial],
    max_drop: MaxDrop,
    limits: Mapping[str, float],
    prefer: str,
    device: Microcontroller | None,
) -> Trial | None:
    """The best trial within the limits, those of a device if there is one."""
    if device is not None:
        return least_loss(trials, max_drop, device)
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
