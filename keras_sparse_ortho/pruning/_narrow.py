"""`narrow`: a trained network with fewer channels, in plain and smaller layers."""

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import as_text, check_integer, other_keywords
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.calibration import (
    ReaderMoments,
    WidthTable,
    calibration_batches,
    checked_widths,
    measured_widths,
    narrowed,
    refitted_without,
    restore_statistics,
)
from keras_sparse_ortho.errors import BudgetError, NotPrunableError
from keras_sparse_ortho.models import (
    ChannelGroup,
    ChannelGroups,
    channel_groups,
    output_kinds,
    remove_channels,
    strip,
)
from keras_sparse_ortho.pruning._planning import shows_progress


@other_keywords
def narrow(
    model: keras.Model,
    widths: float | Mapping[str, int] | WidthTable,
    *,
    data: Any,
    target: float | None = None,
    cost: Any = "parameters",
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
            theirs. Or the `WidthTable` of the model that `kso.widths` returned, with a `target`.
        data: A few hundred rows of inputs, as for `prune`; labels are not used.
        target: float in (0, 1]. With a table: the share of the cost.
        cost: `"parameters"`, `"flops"`, `"bytes"`, or a callable, as for `WidthTable.search`.
        multiple_of: int. Searched widths are multiples of it.

    Returns:
        A new model, not compiled, whose layers have the names of the given ones. Train it further
        in `fit`, or with `recovery.distill(small, model, rows)`.

    Raises:
        NotPrunableError: A model without groups of channels, or whose graph Keras does not know.
        BudgetError: A share that no widths reach; a `target` without a table, or a table without a
            `target`.
        UnknownWeightError: Names that are no groups.
        ValueError: Widths that a group cannot have; data that the model cannot take.

    Warns:
        UserWarning: Groups whose readers cannot be measured; fewer than 16 different rows; dead
            channels that `remove_channels` cannot take out.

    Limits: removing half of the channels often costs little, removing three quarters needs training
    afterwards. Memory holds two matrices `k^2` for each kernel of `k` inputs (times taps).
    Subclassed models have no groups: `prune` them to blocks instead.

    Examples:
        >>> import keras, numpy as np
        >>> layers = [keras.layers.Dense(32, "relu", name="hidden"), keras.layers.Dense(3)]
        >>> model = keras.Sequential([keras.Input((8,)), *layers])
        >>> x = np.random.default_rng(0).normal(size=(256, 8))  # a few hundred inputs
        >>> small = narrow(model, 0.5, data=x)
        >>> [tuple(layer.kernel.shape) for layer in small.layers]
        [(8, 16), (16, 3)]
        >>> small = narrow(model, {"hidden": 24}, data=x)
        >>> [tuple(layer.kernel.shape) for layer in small.layers]
        [(8, 24), (24, 3)]

    References: Hassibi and Stork, "Optimal Brain Surgeon" (NeurIPS 1992); Kurtic, Frantar and
    Alistarh, "ZipLM" (NeurIPS 2023), arXiv 2302.04089
    """
    check_integer("multiple_of", multiple_of)
    _check_target(widths, target)
    groups = channel_groups(model)
    readable: Sequence[ChannelGroup] = groups
    if isinstance(widths, Mapping):
        chosen = checked_widths(groups, widths)
        readable = _narrower_groups(groups, chosen)
    batches = calibration_batches(model, data)
    plain = strip(model)  # a copy
    moments = ReaderMoments.measured(plain, readable, batches, shows_progress())
    if isinstance(widths, Mapping):
        order = _order(readable, chosen, moments)
    else:
        table = widths
        if not isinstance(table, WidthTable):
            target = widths
            kinds = output_kinds(model, len(plain.outputs))
            table = measured_widths(
                plain, groups, moments, batches, kinds, multiple_of, shows_progress()
            )
        chosen = table.search(target, cost=cost, multiple_of=multiple_of)
        order = table.order
    for path, rows in _rows_to_remove(groups, chosen, order).items():
        kernel = refitted_without(moments.kernel(path), moments.gram(path), rows)
        variable, value = moments.pair(path, kernel)
        assign(variable, value)
    if _has_statistics(plain):
        restore_statistics(plain, [(batch,) for batch in batches], reference=model)
    small = remove_channels(plain)
    _check_widths(small, chosen)
    return small


def _check_target(widths: object, target: float | None) -> None:
    """Raises unless there is a target with a table, and none with anything else."""
    if isinstance(widths, WidthTable) and target is None:
        raise BudgetError(
            "A table of widths needs a `target`, the share of the cost that the result may have, "
            "or pass `table.search(...)` itself. Received: target=None"
        )
    if not isinstance(widths, WidthTable) and target is not None:
        raise BudgetError(
            "`target` belongs to a `WidthTable`; a share is `widths` itself: `narrow(model, 0.5, "
            f"data=x)`. Received: target={as_text(target)}, widths of type {type(widths).__name__}"
        )


def _narrower_groups(groups: ChannelGroups, widths: Mapping[str, int]) -> list[ChannelGroup]:
    return [group for group in groups if widths.get(group.name, group.width) < group.width]


def _order(
    groups: Sequence[ChannelGroup], widths: Mapping[str, int], moments: ReaderMoments
) -> dict[str, np.ndarray]:
    """For each group its steps, in the order in which they go, as far as its width."""
    order = {}
    for group in moments.measurable(groups) if groups else ():
        steps = widths[group.name] // group.unit
        for stage in narrowed(group, moments, [steps]):
            order[group.name] = stage.gone
    return order


def _rows_to_remove(
    groups: ChannelGroups, widths: Mapping[str, int], order: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """By the path of each kernel the rows of channels that go, in all groups."""
    rows: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for group in _narrower_groups(groups, widths):
        if group.name not in order:  # a warning has said that it cannot be measured
            continue
        count = (group.width - widths[group.name]) // group.unit
        steps = order[group.name][:count]
        for path, rows_of_steps in group.rows.items():
            rows[path].append(rows_of_steps[steps].ravel())
    return {path: np.concatenate(parts) for path, parts in rows.items()}


def _has_statistics(model: keras.Model) -> bool:
    """Whether there is batch normalization that is not frozen."""
    return any(
        isinstance(layer, keras.layers.BatchNormalization) and layer.trainable
        for layer in model.layers
    )


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
