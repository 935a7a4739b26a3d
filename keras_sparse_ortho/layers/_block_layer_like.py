"""`block_layer_like`: a layer of live blocks in the place of a plain one."""

from collections.abc import Mapping
from typing import Any

import keras

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.layers._block_sparse_dense import (
    BlockSparseConv1D,
    BlockSparseConv2D,
    BlockSparseConv3D,
    BlockSparseDense,
    BlockSparseEinsumDense,
    why_no_matrix,
)
from keras_sparse_ortho.layers._block_sparse_layer import BlockSparseLayer
from keras_sparse_ortho.layers._block_sparse_rnn import CELLS, recurrent_like, why_no_gates
from keras_sparse_ortho.parametrizations import why_needs_dense

_KINDS: dict[Any, type[BlockSparseLayer]] = {
    kind.namesake: kind
    for kind in (
        BlockSparseDense,
        BlockSparseEinsumDense,
        BlockSparseConv1D,
        BlockSparseConv2D,
        BlockSparseConv3D,
    )
}
# In the configurations of plain layers only; LoRA and quantization are refused below.
_NOT_TAKEN = ("lora_rank", "lora_alpha", "quantization_config", "gptq_unpacked_column_size")


def block_layer_like(
    layer: keras.layers.Layer,
    *,
    density: Mapping[str, float],
    block: Mapping[str, Any],
    counts: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> Any:
    """The layer of live blocks with the settings of a plain layer, not built."""
    # `density`, `block` and `counts` are by the names of its kernels. Once it is built, its
    # `storages()` take those of the plain one by `set_kernel(kernel, mask)`.
    if (reason := why_no_block_form(layer)) is not None:
        raise NotPrunableError(f"{reason}. Received: layer={type(layer).__name__}")
    given = counts or {}
    if type(layer) in CELLS:
        sizes = {name: (density[name], block[name], given.get(name)) for name in density}
        return recurrent_like(layer, sizes, seed)
    config = {key: value for key, value in layer.get_config().items() if key not in _NOT_TAKEN}
    own: dict[str, Any] = {"density": density["kernel"], "block": block["kernel"], "seed": seed}
    own["counts"] = given.get("kernel")
    initializers = keras.initializers
    whole = SparseInitializer | initializers.Orthogonal | initializers.Identity
    if isinstance(layer.kernel_initializer, whole):
        # They draw whole kernels; this draws the same kind of kernel in blocks.
        own["kernel_initializer"] = "exact_orthogonal"
        gain = getattr(layer.kernel_initializer, "gain", 1.0)
        own["gain"] = gain if isinstance(gain, float | int) else 1.0
    return _KINDS[type(layer)](**{**config, **own})


def why_no_block_form(layer: keras.layers.Layer) -> str | None:
    """Why a layer cannot compute on live blocks, whatever its sizes; `None` if it can."""
    if type(layer) in CELLS:
        return "it is stateful" if layer.stateful else why_no_gates(layer.cell)
    if type(layer) in (keras.layers.LSTMCell, keras.layers.GRUCell):
        return why_no_gates(layer)
    if type(layer) not in _KINDS:
        known = ", ".join(kind.__name__ for kind in (*_KINDS, *CELLS))
        return f"only {known} have such a form"
    if getattr(layer, "lora_enabled", False):
        return "LoRA is enabled on it, and its update of the kernel is dense"
    if getattr(layer, "quantization_mode", None) is not None:
        return "it is quantized"
    if getattr(layer, "groups", 1) != 1:
        return f"it has groups={layer.groups}"
    if reason := why_needs_dense(layer.kernel_regularizer, layer.kernel_constraint):
        return reason
    if isinstance(layer, keras.layers.EinsumDense) and why_no_matrix(layer.equation):
        return f"in {layer.equation!r} its kernel is not one matrix"
    return None
