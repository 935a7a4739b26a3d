"""`register_layer`: all that the package asks of a class of layers, answered in one call."""

from collections.abc import Callable, Mapping
from typing import TypeVar

import keras

from keras_sparse_ortho import quantization
from keras_sparse_ortho._checks import as_text, other_keywords
from keras_sparse_ortho.kernels import (
    Layouts,
    MakeRows,
    RowsRule,
    kernel_layouts,
    kernel_rows,
    last_axis_rows,
    rows_by_name,
)
from keras_sparse_ortho.layers import (
    BlockSparseLayer,
    register_block_form,
    register_by_sample,
)
from keras_sparse_ortho.models import (
    MakeRule,
    PositionRule,
    kernel_positions,
    last_axis_positions,
    register_channel_rule,
)
from keras_sparse_ortho.orthogonal import KernelLayout
from keras_sparse_ortho.quantization import (
    ROUNDINGS,
    Rounding,
    kernel_rounding,
)

Rule = TypeVar("Rule")


@other_keywords
def register_layer(
    kind: type,
    layouts: Layouts | Callable[[keras.layers.Layer], Layouts],
    *,
    positions: str | PositionRule | None = None,
    rows: str | Mapping[str, MakeRows] | RowsRule | None = None,
    channels: str | MakeRule | None = None,
    rounding: Rounding | None = None,
    keeps_range: bool = False,
    by_sample: bool = False,
    blocks: type[BlockSparseLayer] | None = None,
) -> None:
    """Tells the package of a class of layers: its kernels, and how it computes with them.

    The package's own answers for Keras' layers are given in the same way, a file a family in
    `families/`. Each argument answers one open function. Questions without an answer stay open:
    reports have no FLOPs then, and pruning on data, channels and QAT leave the layer as it is, with
    a message that names it.

    Args:
        kind: type. A class of layers. All but `channels`, `by_sample` and `blocks` hold for its
            subclasses, too.
        layouts: dict from the name of each kernel (`variable.name`) to its `KernelLayout`, or a
            callable that takes the layer and returns one: `initializers.kernel_layouts`. Empty for
            a layer without kernels.
        positions: `"last axis"`, or a callable `(layer, inputs, outputs) -> int`: at how many
            positions of a sample the kernels are applied, for FLOPs. `models.kernel_positions`.
        rows: `"last axis"`; or a dict from the name of a kernel to a callable that takes the layer
            and returns `Rows`; or a callable `(layer, weight) -> Rows`: the rows that kernels
            multiply, for pruning and refits on data. `calibration.kernel_rows`.
        channels: `"last axis"`, `"elementwise"`, `"channelwise"` or a callable: what becomes of a
            channel, for `narrow` and `remove_channels`. `models.register_channel_rule`.
        rounding: `"by output"`, `"by kernel"`, `"by gate"` or `"floats"`: how LiteRT holds the
            kernels in integers, for `quantize_aware`. `quantization.kernel_rounding`.
        keeps_range: bool. Whether outputs have the range of the inputs, as where entries are moved
            about. `quantization.keeps_range`.
        by_sample: bool. Whether the layer maps each sample by itself, with samples first, and has
            no state. Under data parallelism on JAX, only the gradients of live values are then sent
            between devices.
        blocks: class of layers, derived from `layers.BlockSparseDense` or its like, whose
            `namesake` is `kind`: the form on live blocks, for `storage="blocks"`.

    A layer on the last axis computes

        y[..., m, :] = f(x[..., m, :] K_m + b_m)

    with `x` and `y` divided along their last axis into a part for each matrix `K_m`.

    Raises TypeError for a `kind` that is not a class of layers, and for other answers. Then nothing
    is registered.

    Limits: the layer should multiply by its kernels in `call` alone, and read them as attributes,
    since wrappers replace their values there.

    Examples:
        >>> import keras
        >>> from keras_sparse_ortho.initializers import KernelLayout
        >>> class Projection(keras.layers.Layer):
        ...     def __init__(self, units, **kwargs):
        ...         super().__init__(**kwargs)
        ...         self.units = units
        ...     def build(self, input_shape):
        ...         shape = (input_shape[-1], self.units)
        ...         self.matrix = self.add_weight(shape=shape, name="matrix")
        ...     def call(self, inputs):
        ...         return keras.ops.matmul(inputs, self.matrix)
        >>> register_layer(
        ...     Projection, {"matrix": KernelLayout.dense()}, positions="last axis",
        ...     rows="last axis", rounding="by output")
        >>> import keras_sparse_ortho as kso
        >>> model = keras.Sequential([keras.Input((8,)), Projection(4, name="projection")])
        >>> [weight.live for weight in kso.prunable_weights(kso.sparsify(model, 0.5, seed=0))]
        [16]
    """
    if not (isinstance(kind, type) and issubclass(kind, keras.layers.Layer)):
        raise TypeError(
            f"`kind` must be a class of layers. Received: kind={as_text(kind)}"
        )
    layouts_rule = _layouts_rule(layouts)
    positions_rule = _rule("positions", positions, last_axis_positions)
    if isinstance(rows, Mapping):
        rows = rows_by_name(rows)
    rows_rule = _rule("rows", rows, last_axis_rows)
    if rounding is not None and rounding not in ROUNDINGS:
        raise TypeError(
            f"`rounding` must be one of {list(ROUNDINGS)} or None. Received: rounding="
            f"{as_text(rounding)}"
        )
    if blocks is not None:
        if getattr(blocks, "namesake", kind) is not kind:
            raise TypeError(
                "The class `blocks` must have `kind` as its `namesake`. Received: "
                f"kind={as_text(kind)}, blocks={as_text(blocks)}, "
                f"blocks.namesake={as_text(blocks.namesake)}"
            )
        register_block_form(blocks)
    if channels is not None:
        register_channel_rule(kind, channels)
    kernel_layouts.register(kind, layouts_rule)
    if positions_rule is not None:
        kernel_positions.register(kind, positions_rule)
    if rows_rule is not None:
        kernel_rows.register(kind, rows_rule)
    if rounding is not None:
        kernel_rounding.register(kind, lambda layer: rounding)
    if keeps_range:
        quantization.keeps_range.register(kind, lambda layer: True)
    if by_sample:
        register_by_sample(kind)


def _layouts_rule(
    layouts: Layouts | Callable[[keras.layers.Layer], Layouts],
) -> Callable[[keras.layers.Layer], Layouts]:
    """The rule for the layouts of a class; raises a TypeError for another value."""
    if callable(layouts):
        return layouts
    is_table = isinstance(layouts, Mapping) and all(
        layout is None or isinstance(layout, KernelLayout)
        for layout in layouts.values()
    )
    if not is_table:
        raise TypeError(
            "`layouts` must be a dict from the names of kernels to KernelLayouts, or take a layer "
            f"and return one. Received: layouts={as_text(layouts)}"
        )
    table = dict(layouts)
    return lambda layer: dict(table)


def _rule(name: str, answer: str | Rule | None, last_axis: Rule) -> Rule | None:
    """The rule that answers a question; raises a TypeError for another value."""
    if answer == "last axis":
        return last_axis
    if answer is None or callable(answer):
        return answer
    raise TypeError(
        f"`{name}` must be 'last axis', a callable or None. Received: {name}={as_text(answer)}"
    )
