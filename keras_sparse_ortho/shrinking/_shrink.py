"""`shrink`: a trained model to the smallest LiteRT file that keeps what was asked for."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import keras

from keras_sparse_ortho._checks import check_number, other_keywords
from keras_sparse_ortho._files import staging
from keras_sparse_ortho.errors import ShrinkError
from keras_sparse_ortho.export import Steps, check_path
from keras_sparse_ortho.models import strip
from keras_sparse_ortho.shrinking._examples import Examples
from keras_sparse_ortho.shrinking._judge import Metrics
from keras_sparse_ortho.shrinking._least_loss import ANY_DROP, LeastLoss
from keras_sparse_ortho.shrinking._max_drop import (
    MaxDrop,
    checked_max_drop,
    max_drop_as_text,
)
from keras_sparse_ortho.shrinking._microcontroller import (
    ArenaOf,
    checked_microcontroller,
)
from keras_sparse_ortho.shrinking._shrink_report import ShrinkReport
from keras_sparse_ortho.shrinking._smallest_file import (
    PREFERENCES,
    SmallestFile,
)
from keras_sparse_ortho.shrinking._trials import Terms


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
    metric: Metrics | None = None,
    prefer: str = "both",
    seed: int = 0,
    verbose: bool | str = "auto",
) -> ShrinkReport:
    """Finds the smallest LiteRT file of a trained model that loses at most `max_drop`.

    A quarter of the examples is held out, and judges all files:

        lost = score(dense model) - score(file),
        lost + standard error of lost <= max_drop    for every output of the model

    Dense files come first, in float16, 8 and 4 bits, those of LSTMs with the fused operator, too.
    Where static int8 loses too much, and no good file costs less, its remedies follow, the cheapest
    first: fitted ranges, equalized channels, a stretch in floats (see `export_litert`). A
    microcontroller gets those without floats. Then `shrink` looks for widths:
    `widths` measures what each group of channels is worth, and a bisection finds the smallest
    network within the limit, a plain Keras model with fewer channels (`narrow`). With 1,500
    examples and more, smaller networks near the limit learn the dense model's outputs; some of
    these examples undo what does harm (`recovery.distill`). The smallest good network is trained in
    4 bits last. Single zeros are tried for `*.tflite.gz` only: as stored, a zero takes as many
    bytes as any other number.

    Outputs of classes are scored by accuracy, with labels; without, by the accuracy that the dense
    model expects: the mean of its probability of the class that the file answers. An answer that is
    not the dense model's loses an eighth at least. Others are scored by the explained variance. The
    last layers and the compiled loss say which are classes.

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
        max_drop: float. The largest loss of the score, by default `0.01`, one point; for `"micro"`
            by default any, as the device has the limits. Or a dict with a limit for each output,
            as `{"class": 0.01, "box": 0.05}`, by the keys of outputs in a dict, or the names of
            the layers that return them (`model.output_names`).
        max_bytes: int. The largest file.
        max_ms: float. The longest call, one example on one thread.
        target: The device. `None`: this machine. `"arm64"`: files are timed on this machine without
            AMX, which only servers of Intel have, as an estimate. `"micro"`: microcontrollers;
            `path` is then the header with the C array, `*.h`, or the LiteRT file, with another
            ending.
        max_flash: int. For `"micro"`: the largest array, in bytes.
        max_ram: int. For `"micro"`: the largest arena, in bytes.
        decode_code: int. For `"micro"`: bytes of code that count with each packed array, 11,100 for
            the operator "Decode" on a Cortex-M4. Default: 0, the array alone.
        arena: callable. For `"micro"`: from the bytes of an array to the bytes of its arena, such
            as a device's own `arena_used_bytes()`. Default: tflite-micro says it, on Linux; its
            records have pointers of 64 bits, so a device of 32 bits takes a little less.
        minutes: float. How long to try. No trial starts that would end later, if it takes as long
            as the longest one of a dense network, or one that was narrowed at once; the table of
            widths has half of the time that is left. With 0, dense files alone.
        metric: `"expected accuracy"` or `"agreement"`, for classes; `"closeness"`; or a function
            of wanted and given outputs that scores each example between 0 and 1, the best. Or a
            dict of these for some of the outputs, by their names, as for `max_drop`.
        prefer: str. The measure that decides among files within the limits: `"bytes"`; `"ms"`; or
            `"both"`, their product, among files that are not slower than a dense int8 one.
        seed: int. Decides which examples judge, and the order of training.
        verbose: bool or `"auto"`. Whether to log steps to standard error; "auto": in a terminal.

    Returns:
        A `ShrinkReport` with the table of all trials. It can be plotted, and writes other files of
        the frontier. With `target="micro"` each trial has `micro`: flash, arena and the operators
        with their numbers; and `write` takes `*.h`, too.

    Raises:
        ShrinkError: If no file is within the limits. Nothing is written then. For `"micro"` it says
            by how many bytes the nearest file misses each.
        ImportError: With `target="micro"`, if tflite-micro is missing and there is no `arena`.
        ValueError: If an argument does not fit the model: rows of another shape, of text, or not
            finite; labels that are no numbers; a metric for which lower is better; a `max_drop` by
            output that misses an output, or names another.

    Warns:
        UserWarning: Equal rows; rows or labels on which the model scores as if by chance; a limit
            that a file with one answer to all rows would meet; sample weights, which are not used;
            a data set or generator of which not all rows were read.

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
    goal = _goal(
        file,
        {"max_bytes": max_bytes, "max_ms": max_ms, "prefer": prefer},
        target=target,
        max_flash=max_flash,
        max_ram=max_ram,
        decode_code=decode_code,
        arena=arena,
    )
    terms = Terms(
        say=Steps(verbose),
        seconds=60.0 * _checked_minutes(minutes),
        max_drop=_checked_drop(max_drop, goal.default_drop),
        seed=seed,
    )
    stripped = strip(model)
    goal.check_model(stripped)
    examples = Examples(
        model, stripped, data, metric, seed, terms.seconds, terms.max_drop
    )
    with staging(file.parent, file.name) as folder:
        trials = goal.run(stripped, examples, folder, terms)
        best = goal.best(trials.made, terms.max_drop)
        report = goal.report(
            path=str(file),
            taken=best,
            trials=tuple(trials.made),
            measure=examples.judge.name,
            rows=examples.count,
            dense=examples.judge.dense,
            max_drop=terms.max_drop,
            untried=tuple(trials.untried),
            contents=trials.contents(best),
        )
        if best is None:
            raise _no_file(report, goal.limits)
        report.write(best, file)
    return report


def _checked_drop(
    max_drop: float | Mapping[str, float] | None, default_drop: MaxDrop
) -> MaxDrop:
    if max_drop is None:
        return default_drop
    return checked_max_drop(max_drop)


def _goal(
    file: Path, of_files: dict[str, Any], **of_devices: Any
) -> SmallestFile | LeastLoss:
    """The goal of the search: the smallest file, or the array that a device can hold.

    Args:
        file: Path. Where it is written.
        of_files: Arguments of `shrink` about files of this machine.
        of_devices: Arguments of `shrink` about microcontrollers.
    """
    target = of_devices["target"]
    given_for_files = dict(of_files)
    if of_files["prefer"] == PREFERENCES[0]:  # the default: nobody asked for it
        given_for_files["prefer"] = None
    device = checked_microcontroller(**of_devices, others=given_for_files)
    if device is not None:
        return LeastLoss(file, device)
    return SmallestFile(file, target=target, **of_files)


def _no_file(report: ShrinkReport, limits: Mapping[str, float]) -> ShrinkError:
    """The error where no file is within the limits."""
    texts = [f"{name}={limit:.10g}" for name, limit in limits.items()]
    if report.max_drop != ANY_DROP:
        texts.insert(0, f"max_drop={max_drop_as_text(report.max_drop)}")
    return ShrinkError(
        f"No file is within the limits: {', '.join(texts)}. Received:\n{report}"
    )


def _checked_minutes(minutes: Any) -> float:
    number = check_number("minutes", minutes)
    if number < 0.0:
        raise ValueError(
            "`minutes` must be 0 or more; with 0 only dense files are made. "
            f"Received: minutes={minutes!r}"
        )
    return number
