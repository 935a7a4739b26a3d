"""`widths`: the errors of a trained model with narrower groups of channels, measured."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_integer, other_keywords
from keras_sparse_ortho.calibration._elimination import eliminate
from keras_sparse_ortho.calibration._layerwise import calibration_batches
from keras_sparse_ortho.calibration._output_errors import OutputErrors
from keras_sparse_ortho.calibration._readers import ReaderMoments
from keras_sparse_ortho.calibration._width_costs import WidthCosts
from keras_sparse_ortho.calibration._width_ladder import ladder_of
from keras_sparse_ortho.calibration._width_table import (
    WidthTable,
    digest_of_weights,
)
from keras_sparse_ortho.models import (
    ChannelGroup,
    ChannelGroups,
    channel_groups,
    output_kinds,
    strip,
)

_POINTS = 120  # that are measured in all: groups times widths
_FEWEST_WIDTHS = 3  # of a group
_MOST_WIDTHS = 12


@other_keywords
def widths(
    model: keras.Model,
    data: Any,
    *,
    multiple_of: int = 8,
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
        verbose: int. 1 for progress bars.

    Returns:
        A `calibration.WidthTable`: it prints, has `plot()` (after
        `pip install keras-sparse-ortho[plot]`), `predicted(widths)`, `search(target)`, and goes
        into `kso.narrow`.

    Raises:
        NotPrunableError: A model without groups, or whose graph Keras does not know: subclassed,
            with its own `call`, or not built.
        ValueError: Data that the model cannot take.

    Warns:
        UserWarning: Groups whose readers cannot be measured, which keep their width; fewer than 16
            different rows.

    Limits: memory holds two matrices `k^2` for each reading kernel of `k` inputs (times taps), and
    the table keeps one of them, `8 k^2` bytes, to refit kernels in `narrow` without a pass. Each
    width that is measured takes a forward pass of a fourth of the rows: 12 widths of each group, or
    fewer with more than ten groups, and at least three. Between these the logarithm of the error is
    interpolated. Channels that LayerNormalization reads stay.

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
    groups = channel_groups(model)
    batches = calibration_batches(model, data)
    stripped = strip(model)
    kinds = output_kinds(model, len(stripped.outputs))
    moments = ReaderMoments.measured(stripped, groups, batches, verbose)
    errors = OutputErrors(stripped, batches, kinds)
    return measured_widths(
        stripped, groups, moments, errors, multiple_of, verbose
    )


def measured_widths(
    model: keras.Model,
    groups: ChannelGroups,
    moments: ReaderMoments,
    output_errors: OutputErrors,
    multiple_of: int,
    verbose: int,
) -> WidthTable:
    """The table of a plain model whose readers have been measured."""
    measurable = moments.measurable(groups)
    errors = {}
    order = {}
    progress = keras.utils.Progbar(len(measurable), verbose=verbose)
    count = _POINTS // len(measurable)
    count = max(min(count, _MOST_WIDTHS), _FEWEST_WIDTHS)
    for number, group in enumerate(measurable, 1):
        measured = _measured_widths_of(group, multiple_of, count)
        errors[group.name] = {group.width: 0.0}
        error = 0.0
        for stage in narrowed(
            group, moments, [width // group.unit for width in measured]
        ):
            order[group.name] = stage.gone
            width = group.unit * stage.width
            if width in measured:
                pairs = [
                    moments.pair(path, kernel)
                    for path, kernel in stage.kernels.items()
                ]
                # An error that falls with the width comes from few rows.
                error = max(error, output_errors.error(pairs))
                errors[group.name][width] = error
        order[group.name] = _with_all_steps(order[group.name], group.steps)
        progress.update(number)
    last_steps = {name: int(steps[-1]) for name, steps in order.items()}
    costs = WidthCosts.of(model, measurable, moments, last_steps)
    return WidthTable(
        errors, groups, order, costs, moments.grams, digest_of_weights(model)
    )


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
