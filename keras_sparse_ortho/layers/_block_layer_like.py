"""`block_layer_like`: a layer of live blocks in the place of a plain one."""

from collections.abc import Mapping
from typing import Any

import keras

from keras_sparse_ortho._checks import as_text
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
from keras_sparse_ortho.layers._block_sparse_rnn import (
    CELLS,
    BlockSparseRNN,
    recurrent_like,
    why_no_gates,
)
from keras_sparse_ortho.parametrizations import why_needs_dense

BlockLayer = BlockSparseLayer | BlockSparseRNN
"""A layer that holds, and computes with, the live blocks of its kernels."""

_FORMS: dict[type, type[BlockSparseLayer]] = {}
# In the configurations of plain layers only; LoRA and quantization are refused below.
_NOT_TAKEN = (
    "lora_rank",
    "lora_alpha",
    "quantization_config",
    "gptq_unpacked_column_size",
)


def register_block_form(form: type[BlockSparseLayer]) -> None:
    """Makes a class of layers of live blocks the form of its `namesake`, a class of plain layers.

    The form takes the configuration of the plain layer, and `density`, `block`, `counts` and
    `seed`. Raises TypeError for another class.
    """
    if not (isinstance(form, type) and issubclass(form, BlockSparseLayer)):
        raise TypeError(
            "`blocks` must be a class of layers of live blocks, as a subclass of BlockSparseDense. "
            f"Received: blocks={as_text(form)}"
        )
    _FORMS[form.namesake] = form


for _form in (
    BlockSparseDense,
    BlockSparseEinsumDense,
    BlockSparseConv1D,
    BlockSparseConv2D,
    BlockSparseConv3D,
):
    register_block_form(_form)


def block_layer_like(
    layer: keras.layers.Layer,
    *,
    density: Mapping[str, float],
    block: Mapping[str, Any],
    counts: Mapping[str, Any] | None = None,
    seed: int | None = None,
) -> BlockLayer:
    """Returns the layer of live blocks with the settings of a plain layer, not built.

    Once it is built, its `storages()` take the kernels by `set_kernel(kernel, mask)`.

    Args:
        layer: Plain layer of Keras.
        density: dict from the name of a kernel to its live fraction.
        block: dict from the name of a kernel to the size of its blocks.
        counts: dict from the name of a kernel to the live blocks of each line, `None` for equal
            ones.
        seed: int. Seed of the mask and values, which the layer draws when it is built.

    Raises NotPrunableError for a layer that has no such form.
    """
    if (reason := why_no_block_form(layer)) is not None:
        raise NotPrunableError(
            f"{reason}. Received: layer={type(layer).__name__}"
        )
    live_counts = counts or {}
    if type(layer) in CELLS:
        sizes = {
            name: (density[name], block[name], live_counts.get(name))
            for name in density
        }
        return recurrent_like(layer, sizes, seed)
    config = {
        key: value
        for key, value in layer.get_config().items()
        if key not in _NOT_TAKEN
    }
    settings: dict[str, Any] = {
        "density": density["kernel"],
        "block": block["kernel"],
        "seed": seed,
    }
    settings["counts"] = live_counts.get("kernel")
    initializers = keras.initializers
    replaced_kinds = (
        SparseInitializer | initializers.Orthogonal | initializers.Identity
    )
    if isinstance(layer.kernel_initializer, replaced_kinds):
        # They draw whole kernels; this draws the same kind of kernel in blocks.
        settings["kernel_initializer"] = "exact_orthogonal"
        gain = getattr(layer.kernel_initializer, "gain", 1.0)
        settings["gain"] = gain if isinstance(gain, float | int) else 1.0
    return _FORMS[type(layer)](**{**config, **settings})


def why_no_block_form(layer: keras.layers.Layer) -> str | None:
    """Why a layer cannot compute on live blocks, whatever its sizes; `None` if it can."""
    if type(layer) in CELLS:
        return "it is stateful" if layer.stateful else why_no_gates(layer.cell)
    if type(layer) in (keras.layers.LSTMCell, keras.layers.GRUCell):
        return why_no_gates(layer)
    if type(layer) not in _FORMS:
        kinds = ", ".join(kind.__name__ for kind in (*_FORMS, *CELLS))
        return f"only {kinds}, and `register_layer(blocks=)`, have such a form"
    if getattr(layer, "lora_enabled", False):
        return "LoRA is enabled on it, and its update of the kernel is dense"
    if getattr(layer, "quantization_mode", None) is not None:
        return "it is quantized"
    if getattr(layer, "groups", 1) != 1:
        return f"it has groups={layer.groups}"
    if reason := why_needs_dense(
        layer.kernel_regularizer, layer.kernel_constraint
    ):
        return reason
    if isinstance(layer, keras.layers.EinsumDense) and why_no_matrix(
        layer.equation
    ):
        return f"in {layer.equation!r} its kernel is not one matrix"
    return None
