"""What other rooms and files know of a kernel that is stored as its live blocks."""

from collections.abc import Callable
from typing import Any

import numpy as np

from keras_sparse_ortho.initializers import numpy_dtype
from keras_sparse_ortho.kernels import KernelLayout
from keras_sparse_ortho.orthogonal import slots_of


class StoredBlocks:
    """The `StoredKernel` of a layer of live blocks.

    Args:
        layer: A `BlockKernel` that is built.
    """

    def __init__(self, layer: Any) -> None:
        self.variable = layer.blocks
        self.shape: tuple[int, ...] = layer._kernel_shape
        self.layout: KernelLayout | None = layer._layout
        self.live: int = layer.grid.live
        self.value: Callable[[], np.ndarray] = layer.kernel_value
        self.mask_value: Callable[[], np.ndarray] = layer.mask_value
        self.is_as_drawn: Callable[[], bool] = layer.is_as_drawn


def as_stored(values: np.ndarray, dtype: str) -> np.ndarray:
    """Values as `to_numpy` reads them back from a variable of a dtype."""
    stored = values.astype(numpy_dtype(dtype))
    return stored.astype(np.float32) if dtype == "bfloat16" else stored


def check_stored(layer: Any, store: Any) -> None:
    """Raises ValueError unless a file holds the variables of a layer, and possible places."""
    wanted = {variable.name: tuple(variable.shape) for variable in layer.weights}
    found = {name: tuple(store[name].shape) for name in store.keys()}  # noqa: SIM118
    if found != wanted:
        raise ValueError(
            f"The file does not fit the layer '{layer.name}', which has {wanted}. Received: {found}"
        )
    try:
        pattern = layer.grid.check_pattern(np.array(store["inputs_of"]))
        slots = slots_of(pattern, layer.grid.in_blocks)
        if not np.array_equal(slots, np.array(store["slots_of"])):
            raise ValueError(
                "`slots_of` must list where `inputs_of` names each input block. "
                "Received: other slots"
            )
    except ValueError as error:
        raise ValueError(f"The file is damaged at the layer '{layer.name}': {error}") from None
