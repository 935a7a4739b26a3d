"""Initializers, regularizers and constraints of a kernel that is stored as its live blocks."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import are_weights_set_later
from keras_sparse_ortho.layers._block_grid import BlockGrid
from keras_sparse_ortho.orthogonal import Block, regular_blocks

ops = keras.ops
EXACT_ORTHOGONAL = "exact_orthogonal"


def restore_initializer(initializer: Any, places_given: bool) -> Any:
    """`"exact_orthogonal"` as it is, or an initializer of Keras; refuses what fits no blocks."""
    if initializer == EXACT_ORTHOGONAL:
        if places_given:
            raise ValueError(
                "Exactly orthogonal values have places of their own: with `inputs_of` give another "
                'initializer, such as "lecun_normal". '
                f"Received: kernel_initializer={initializer!r}"
            )
        return initializer
    found = keras.initializers.get(initializer)
    kinds = keras.initializers
    fits = isinstance(found, kinds.Initializer) and not hasattr(found, "sample")
    unfit = isinstance(found, kinds.Orthogonal | kinds.Identity)
    if not callable(found) or unfit or not (fits or not isinstance(found, kinds.Initializer)):
        raise ValueError(
            'A kernel of live blocks starts from "exact_orthogonal", or from an initializer of '
            "Keras that treats its entries alike. "
            f"Received: kernel_initializer={initializer!r}"
        )
    return found


def serialize_initializer(initializer: Any) -> Any:
    """For `get_config`."""
    if initializer == EXACT_ORTHOGONAL:
        return initializer
    return keras.initializers.serialize(initializer)


def check_kernel_functions(regularizer: Any) -> None:
    """Refuses a regularizer that compares whole outputs, whose live entries are not aligned."""
    if isinstance(regularizer, keras.regularizers.OrthogonalRegularizer):
        raise NotPrunableError(
            "The outputs of a layer of live blocks read different inputs, so that their kernels "
            "cannot be compared entry by entry. Leave the regularizer out. "
            f"Received: kernel_regularizer={regularizer!r}"
        )


def draw_blocks(
    grid: BlockGrid, initializer: Any, inputs_of: np.ndarray | None, gain: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Values `(J, k, *taps, r, c)` and places `(J, k)` of the live blocks."""
    if are_weights_set_later():
        pattern = grid.draw_pattern(seed) if inputs_of is None else inputs_of
        return np.zeros(grid.blocks_shape, dtype=np.float32), pattern
    if initializer == EXACT_ORTHOGONAL:
        structure = Block(grid.rows, grid.cols, regular=True)
        drawn = regular_blocks(
            grid.shape, grid.density, structure, gain=gain, seed=seed, dtype=np.float64
        )
        return drawn.with_taps()[0, 0], drawn.inputs_of[0, 0]
    pattern = grid.draw_pattern(seed) if inputs_of is None else grid.check_pattern(inputs_of)
    columns = to_numpy(initializer(grid.columns_shape, dtype="float32"))
    columns = columns * _fan_correction(grid, initializer)
    return _as_blocks(grid, columns), pattern


def _fan_correction(grid: BlockGrid, initializer: Any) -> float:
    """What a draw with all outputs as fan-out is to be multiplied by, so that live ones count."""
    mode = getattr(initializer, "mode", None)
    if mode not in ("fan_out", "fan_avg"):
        return 1.0
    fan_in, all_out = grid.fan_in * grid.rows, grid.outputs
    live_out = grid.fan_out * grid.cols
    if mode == "fan_out":
        return float(np.sqrt(all_out / live_out))
    return float(np.sqrt((fan_in + all_out) / (fan_in + live_out)))


def on_columns(grid: BlockGrid, function: Any, back: bool = False) -> Callable[[Any], Any] | None:
    """A regularizer or constraint of the live kernel `(*taps, k r, outputs)`, for its blocks."""
    if function is None:
        return None

    def applied(blocks: Any) -> Any:
        columns = ops.transpose(blocks, grid.columns_order())
        found = function(ops.reshape(columns, grid.columns_shape))
        return _as_blocks(grid, found) if back else found

    return applied


def _as_blocks(grid: BlockGrid, columns: Any) -> Any:
    """The live kernel `(*taps, k r, outputs)` as blocks, of NumPy or a backend."""
    split = (*grid.taps, grid.fan_in, grid.rows, grid.out_blocks, grid.cols)
    order = tuple(int(axis) for axis in np.argsort(grid.columns_order()))
    if isinstance(columns, np.ndarray):
        return columns.reshape(split).transpose(order)
    return ops.transpose(ops.reshape(columns, split), order)


def constant(value: np.ndarray) -> Callable[..., Any]:
    """An initializer that gives one array."""

    def initializer(shape: Any, dtype: Any = None) -> Any:
        return ops.cast(ops.convert_to_tensor(value), dtype)

    return initializer
