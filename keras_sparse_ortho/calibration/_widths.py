"""`widths`: the errors of a trained model with narrower groups of channels, measured."""

import functools
import time
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_integer, other_keywords
from keras_sparse_ortho.calibration._elimination import eliminate
from keras_sparse_ortho.calibration._layerwise import calibration_batches
from keras_sparse_ortho.calibration._output_errors import OutputErrors
from keras_sparse_ortho.calibration._readers import ReaderMoments
from keras_sparse_ortho.calibration._width_clock import (
    FEWEST_BATCHES,
    WidthClock,
)
from keras_sparse_ortho.calibration._width_costs import (
    WidthCosts,
    seconds_of_costs,
)
from keras_sparse_ortho.calibration._width_ladder import ladder_of
from keras_sparse_ortho.calibration._width_table import (
    WidthTable,
    digest_of_weights,
)
from keras_sparse_ortho.models import (
    ChannelGroup,
    ChannelGroups,
    OutputKind,
    channel_groups,
    output_kinds,
    strip,
)

_POINTS = 120  # that are measured in all: groups times widths
_FEWEST_WIDTHS = 3  # of a group
_MOST_WIDTHS = 12
# Rows to measure errors on, which are relative to the rows' distance from their mean.
_FEWEST_HELD = 2


@other_keywords
def widths(
    model: keras.Model,
    data: Any,
    *,
    multiple_of: int = 8,
    minutes: float | None = None,
    verbose: int = 0,
) -> WidthTable:
    """Measures the errors of a trained model with each group of channels narrowed by itself.

    A group (`kso.channel_groups`) is narrowed by structured OBS: always the channel goes that costs
    least in all kernels `W` that read it, and these are refitted to the others. With the inputs `X`
    of a kernel and `H = X^T X + 0.01 mean(diag X^T X) I`,

        V = argmin tr (V - W)^T H (V - W)  over  V with zeros in the rows of the channels.

    One pass has the kernels of all widths. The error of a width is that of the model's outputs,

        e = sum |f - f_0|^2 / sum |f_0 - mean f_0|^2

    on every fourth row of data, which no kernel was fitted to; `f` are logits where outputs are
    probabilities. Errors of several groups add up, to about 0.1, so the table predicts the error of
    any widths, and searches.

    Args:
        model: A built model, functional or Sequential, wrapped or plain.
        data: A few hundred rows of inputs, as for `prune`; labels are not used.
        multiple_of: int. Widths that are measured are multiples of it; take that of `search`.
        minutes: float. How long it may take. Where the time is short, fewer widths of each group
            are measured, at least two, on fewer rows; then groups that have few weights for their
            time are left out, and keep their width. Default: as long as it needs.
        verbose: int. 1 for progress bars.

    Returns:
        A `calibration.WidthTable`: it prints, has `plot()` (after
        `pip install keras-sparse-ortho[plot]`), `predicted(widths)`, `search(target)`, and goes
        into `kso.narrow`.

    Raises:
        NotPrunableError: A model without groups, or whose graph Keras does not know: subclassed,
            with its own `call`, or not built.
        ValueError: Data that the model cannot take, or of fewer than eight rows; `minutes` too
            short for any width.

    Warns:
        UserWarning: Groups whose readers cannot be measured, which keep their width; rows and
            groups for which there was no time; fewer than 16 different rows.

    Limits: memory holds two matrices `k^2` for each reading kernel of `k` inputs (times taps), and
    the table keeps one of them, `8 k^2` bytes, to refit kernels in `narrow` without a pass. Each
    width that is measured takes a forward pass of a fourth of the rows: 12 widths of each group, or
    fewer with more than ten groups, and at least three. Between these the logarithm of the error is
    interpolated over that of width / (full width - width). Channels that LayerNormalization reads
    stay. No step is cut short by `minutes`: the longest one that is not foreseen, a pass or a
    group, may end later.

    Examples:
        >>> import keras, numpy as np
        >>> layers = [keras.layers.Dense(32, "relu", name="hidden"), keras.layers.Dense(3)]
        >>> model = keras.Sequential([keras.Input((8,)), *layers])
        >>> table = widths(model, np.random.default_rng(0).normal(size=(256, 8)))
        >>> table.search(0.6)
        {'hidden': 16}
        >>> table.predicted({"hidden": 8}) > table.predicted({"hidden": 16}) > 0
        True

    References: Hassibi and Stork, "Optimal Brain Surgeon" (NeurIPS 1992); Kurtic, Frantar and
    Alistarh, "ZipLM" (NeurIPS 2023), arXiv 2302.04089, for channels and a search
    """
    check_integer("multiple_of", multiple_of)
    clock = WidthClock(minutes)
    groups = channel_groups(model)
    batches = calibration_batches(
        model, data, has_small_batches=clock.is_limited
    )
    stripped = strip(model)
    kinds = output_kinds(model, len(stripped.outputs))
    errors = errors_in_time(stripped, batches, kinds, clock)
    clock.check()
    moments = measured_in_time(stripped, groups, batches, clock, verbose)
    return measured_widths(
        stripped, groups, moments, errors, multiple_of, verbose, clock
    )


def errors_in_time(
    model: keras.Model,
    batches: Sequence[Any],
    kinds: Sequence[OutputKind],
    clock: WidthClock,
) -> OutputErrors:
    """The errors on held-out rows of all batches, or of as many as the time allows."""
    if not clock.is_limited:
        return OutputErrors(model, batches, kinds)
    count = FEWEST_BATCHES
    errors = clock.timed_pass(
        lambda: OutputErrors(model, batches[:count], kinds)
    )
    more = clock.batches_of_references(count, len(batches))
    if more > count:
        errors = clock.timed_pass(
            lambda: OutputErrors(model, batches[:more], kinds)
        )
    return errors


def measured_in_time(
    model: keras.Model,
    groups: ChannelGroups,
    batches: Sequence[Any],
    clock: WidthClock,
    verbose: int,
) -> ReaderMoments:
    """The moments of all batches, or of as many as the time allows, with a warning.

    With a limit each batch alone has enough positions of convolutions, as it may be the last one.
    """
    if not clock.is_limited:
        return ReaderMoments.measured(model, groups, batches, verbose)
    start = time.monotonic()
    moments = ReaderMoments.measured(model, groups, batches[:1], verbose)
    for number, batch in enumerate(batches[1:], 1):
        batch_seconds = time.monotonic() - start
        if not clock.has_time_to_sweep(batch_seconds):
            clock.note_shortage(
                f"kernels fitted to {number} of {len(batches)} batches"
            )
            break
        start = time.monotonic()
        moments += ReaderMoments.measured(model, groups, [batch], verbose)
    return moments


def measured_widths(
    model: keras.Model,
    groups: ChannelGroups,
    moments: ReaderMoments,
    output_errors: OutputErrors,
    multiple_of: int,
    verbose: int,
    clock: WidthClock | None = None,
) -> WidthTable:
    """The table of a plain model whose readers have been measured."""
    if output_errors.rows < _FEWEST_HELD:
        raise ValueError(
            f"`data` must have at least {4 * _FEWEST_HELD} rows, better a few hundred: errors are "
            f"measured on every fourth. Received: {output_errors.rows} rows to measure them on"
        )
    if clock is None:
        clock = WidthClock()
    measurable = moments.measurable(groups)
    clock.reserve_for_costs(seconds_of_costs(model))
    pending = clock.by_worth(model, measurable, moments)
    rows = clock.rows_in_time(pending, moments, output_errors.rows)
    output_errors.keep_rows(rows)
    errors = {}
    order = {}
    progress = keras.utils.Progbar(len(measurable), verbose=verbose)
    points = _POINTS // len(measurable)
    points = max(min(points, _MOST_WIDTHS), _FEWEST_WIDTHS)
    while pending:
        group = pending[0]
        count = clock.widths_in_time(pending, moments, points)
        del pending[0]
        if count == 0:
            clock.note_shortage(f"no widths of {group.name}")
            continue
        measured = _measured_widths_of(group, multiple_of, count)
        errors[group.name], order[group.name] = _measured_group(
            group, measured, moments, output_errors, clock
        )
        progress.update(len(errors))
    if not errors:
        clock.refuse()
    clock.warn_of_shortages()
    in_table = [group for group in measurable if group.name in errors]
    last_steps = {name: int(steps[-1]) for name, steps in order.items()}
    costs = WidthCosts.of(model, in_table, moments, last_steps)
    return WidthTable(
        {group.name: errors[group.name] for group in in_table},
        groups,
        order,
        costs,
        moments.grams,
        digest_of_weights(model),
    )


def _measured_group(
    group: ChannelGroup,
    widths: Sequence[int],
    moments: ReaderMoments,
    output_errors: OutputErrors,
    clock: WidthClock,
) -> tuple[dict[int, float], np.ndarray]:
    """The errors of a group at some widths, and its steps, the first to go first."""
    errors = {group.width: 0.0}
    error = 0.0
    elimination = 0.0
    gone = np.zeros(0, int)
    start = time.monotonic()
    for stage in narrowed(
        group, moments, [width // group.unit for width in widths]
    ):
        elimination += time.monotonic() - start
        gone = stage.gone
        width = group.unit * stage.width
        if width in widths:
            pairs = [
                moments.pair(path, kernel)
                for path, kernel in stage.kernels.items()
            ]
            measured = clock.timed_pass(
                functools.partial(output_errors.error, pairs)
            )
            # An error that falls with the width comes from few rows.
            error = max(error, measured)
            errors[width] = error
        start = time.monotonic()
    clock.timed_group(group, moments, elimination)
    return errors, _with_all_steps(gone, group.steps)


def narrowed(
    group: ChannelGroup, moments: ReaderMoments, steps: Sequence[int]
) -> Any:
    """Yields the stages of a group with so many steps left, and at the end with one."""
    paths = [*group.rows]
    kernels = {path: moments.kernel(path) for path in paths}
    grams = {path: moments.used_grams[path] for path in paths}
    return eliminate(kernels, grams, group.rows, sorted({*steps, 1}))


def _measured_widths_of(
    group: ChannelGroup, multiple_of: int, count: int
) -> list[int]:
    """The widths of a group's ladder that are measured: at most so many, with both ends."""
    ladder = ladder_of(group, multiple_of)[1:]
    count = min(count, len(ladder))
    places = np.linspace(0, len(ladder) - 1, count)
    return [ladder[round(place)] for place in places]


def _with_all_steps(gone: np.ndarray, count: int) -> np.ndarray:
    """All steps of a group: first the ones that go, in their order."""
    stays = np.setdiff1d(np.arange(count), gone)
    return np.concatenate([gone, stays])
