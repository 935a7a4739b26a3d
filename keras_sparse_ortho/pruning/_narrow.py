"""`narrow`: a trained network with fewer channels, in plain and smaller layers."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import (
    as_float,
    as_text,
    check_integer,
    other_keywords,
)
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.calibration import (
    Costs,
    OutputErrors,
    ReaderMoments,
    WidthTable,
    calibration_batches,
    check_cost,
    checked_widths,
    measured_widths,
    narrowed,
    refitted_without,
    restore_statistics,
)
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.models import (
    ChannelGroup,
    channel_groups,
    output_kinds,
    remove_channels,
    strip,
)
from keras_sparse_ortho.pruning._planning import shows_progress


@other_keywords
def narrow(
    model: keras.Model,
    widths: float | Mapping[str, int],
    *,
    data: Any,
    table: WidthTable | None = None,
    cost: str | Costs = "parameters",
    multiple_of: int = 8,
) -> keras.Model:
    """Makes a trained network narrower: whole channels go, and what reads them is refitted.

    `narrow(model, 0.5, data=x)` measures what each group of channels costs in error
    (`calibration.widths`), searches the widths of least error with half of the parameters, and
    returns a plain, smaller Keras model of the same inputs and outputs. Each kernel `W` that reads
    channels becomes, on its inputs `X` in the given model,

        V = argmin tr (V - W)^T H (V - W)  over  V with zeros in the rows of channels that go,
        H = X^T X + 0.01 mean(diag X^T X) I.

    Then the moving statistics of batch normalization are moved as narrowing has moved the moments,
    if held-out rows prefer that (`restore_statistics`), and `remove_channels` takes the channels
    out of all layers.

    Args:
        model: A built model, functional or Sequential, wrapped or plain. It stays as it is.
        widths: float in (0, 1]: the share of the cost that the result may have. Or a dict from
            names of groups, as `kso.channel_groups(model)` lists them, to widths; other groups keep
            theirs.
        data: A few hundred rows of inputs, as for `prune`; labels are not used.
        table: WidthTable of the model, from `kso.widths`, where several networks are made: errors
            are not measured again, and kernels are refitted on the rows of the table. A model that
            was trained further keeps the table's errors and order; it is refitted on `data`.
        cost: `"parameters"`, `"flops"`, `"bytes"`, or a callable, as for `WidthTable.search`.
        multiple_of: int. Searched widths are multiples of it.

    Returns:
        A new model, not compiled, whose layers have the names of the given ones. Train it further
        in `fit`, or with `recovery.distill(small, model, rows, validation_split=0.1)`.

    Raises:
        NotPrunableError: A model without groups of channels, or whose graph Keras does not know.
        BudgetError: A share that no widths reach.
        UnknownWeightError: Names that are not groups.
        ValueError: Widths that a group cannot have; data that the model cannot take, or of fewer
            than eight rows; the table of another model.

    Warns:
        UserWarning: Groups whose readers cannot be measured; fewer than 16 different rows; dead
            channels that `remove_channels` cannot take out.

    Limits: removing half of the channels often costs little, removing three quarters needs training
    afterwards. Memory holds two matrices `k^2` for each kernel of `k` inputs (times taps), a table
    one.
    Subclassed models have no groups: `prune` them to blocks instead.

    Examples:
        >>> import keras, numpy as np
        >>> layers = [keras.layers.Dense(32, "relu", name="hidden"), keras.layers.Dense(3)]
        >>> model = keras.Sequential([keras.Input((8,)), *layers])
        >>> x = np.random.default_rng(0).normal(size=(256, 8))  # a few hundred inputs
        >>> small = narrow(model, 0.6, data=x)
        >>> [tuple(layer.kernel.shape) for layer in small.layers]
        [(8, 16), (16, 3)]
        >>> small = narrow(model, {"hidden": 24}, data=x)
        >>> [tuple(layer.kernel.shape) for layer in small.layers]
        [(8, 24), (24, 3)]

    References: Hassibi and Stork, "Optimal Brain Surgeon" (NeurIPS 1992); Kurtic, Frantar and
    Alistarh, "ZipLM" (NeurIPS 2023), arXiv 2302.04089
    """
    check_integer("multiple_of", multiple_of)
    check_cost(cost)
    if not isinstance(widths, Mapping):
        _check_share(widths)
    groups = channel_groups(model)
    batches = calibration_batches(model, data)
    zeroed = strip(model)  # a copy
    if isinstance(widths, Mapping):
        new_widths = checked_widths(groups, widths)
    else:
        if table is None:
            moments = ReaderMoments.measured(
                zeroed, groups, batches, shows_progress()
            )
            kinds = output_kinds(model, len(zeroed.outputs))
            errors = OutputErrors(zeroed, batches, kinds)
            table = measured_widths(
                zeroed, groups, moments, errors, multiple_of, shows_progress()
            )
        new_widths = table.search(widths, cost=cost, multiple_of=multiple_of)
    narrower = [
        group
        for group in groups
        if new_widths.get(group.name, group.width) < group.width
    ]
    moments = _moments(zeroed, narrower, batches, table)
    if table is None:
        order = _order(narrower, new_widths, moments)
    else:
        order = _order_of(table, narrower)
    for path, rows in _rows_to_remove(narrower, new_widths, order).items():
        kernel = refitted_without(
            moments.kernel(path), moments.grams[path], rows
        )
        variable, value = moments.pair(path, kernel)
        assign(variable, value)
    if _has_statistics(zeroed):
        restore_statistics(
            zeroed, [(batch,) for batch in batches], reference=model
        )
    narrowed_model = remove_channels(zeroed)
    _check_widths(narrowed_model, new_widths)
    return narrowed_model


def _check_share(share: object) -> None:
    """Raises BudgetError unless a share is in (0, 1]: before anything is measured."""
    if not 0.0 < as_float(share) <= 1.0:
        raise BudgetError(
            "`widths` must be in (0, 1], the share of the cost that the result may have, or a dict "
            "from names of groups, as `kso.channel_groups(model)` lists them, to widths. "
            f"Received: widths={as_text(share)}"
        )


def _moments(
    model: keras.Model,
    groups: Sequence[ChannelGroup],
    batches: Sequence[Any],
    table: WidthTable | None,
) -> ReaderMoments:
    """The moments that the table has of these weights; else they are measured."""
    if table is not None and table.is_of(model):
        return ReaderMoments.of_grams(model, table.grams)
    return ReaderMoments.measured(model, groups, batches, shows_progress())


def _order(
    groups: Sequence[ChannelGroup],
    widths: Mapping[str, int],
    moments: ReaderMoments,
) -> dict[str, np.ndarray]:
    """For each group its steps, in the order in which they go, as far as its width."""
    order = {}
    moments.check(groups)
    for group in groups:
        steps = widths[group.name] // group.unit
        for stage in narrowed(group, moments, [steps]):
            order[group.name] = stage.gone
    return order


def _order_of(
    table: WidthTable, groups: Sequence[ChannelGroup]
) -> dict[str, np.ndarray]:
    """The order of a table; raises if it is that of another model."""
    for group in groups:
        steps = len(table.order.get(group.name, ()))
        if steps != group.steps:
            raise ValueError(
                "`table` must be that of this model: `kso.widths(model, data)`. Received: a table "
                f"with {steps} steps of the group {group.name!r}, which has {group.steps}"
            )
    return table.order


def _rows_to_remove(
    groups: Sequence[ChannelGroup],
    widths: Mapping[str, int],
    order: Mapping[str, np.ndarray],
) -> dict[str, np.ndarray]:
    """By the path of each kernel the rows of channels that go, in all groups."""
    removed: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for group in groups:
        count = (group.width - widths[group.name]) // group.unit
        steps = order[group.name][:count]
        for path, rows_of_steps in group.rows.items():
            removed[path].append(rows_of_steps[steps].ravel())
    return {path: np.concatenate(arrays) for path, arrays in removed.items()}


def _has_statistics(model: keras.Model) -> bool:
    """Whether there is batch normalization that is not frozen."""
    for layer, _ in walk(model, ""):
        if (
            isinstance(layer, keras.layers.BatchNormalization)
            and layer.trainable
        ):
            return True
    return False


def _check_widths(model: keras.Model, widths: Mapping[str, int]) -> None:
    """Raises if channels are still there that nothing reads any more."""
    wider = [
        f"{group.width} channels of {group.name!r}"
        for group in channel_groups(model)
        if group.width > widths.get(group.name, group.width)
    ]
    if wider:
        raise NotPrunableError(
            "Channels that nothing reads could not be removed: leave these groups out, by a dict "
            f"of widths of the others. Received: {', '.join(wider)}"
        )
