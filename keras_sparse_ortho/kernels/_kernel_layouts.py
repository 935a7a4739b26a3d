"""The registry: which weights of a layer are kernels, and what their axes mean."""

import functools
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import ConvLSTMCell
from keras_sparse_ortho.orthogonal import KernelLayout

L = keras.layers


@functools.singledispatch
def kernel_layouts(layer: Any) -> dict[str, KernelLayout | None]:
    """Names the kernels among a layer's own weights, each with its layout.

    Dispatches on the class of `layer`, subclasses included. Keras' layers are registered, and
    those of keras-hub known by name. For any other layer the weights called `kernel` or `*_kernel`
    and `embeddings` count, if they are matrices at least, with the default layout
    `(*spatial, in, out)` (`None`). A custom layer whose kernels are named or shaped otherwise
    registers them, and `{}` if it is to stay dense:

    >>> import keras
    >>> class Bilinear(keras.layers.Layer):
    ...     def build(self, input_shape):
    ...         self.form = self.add_weight(shape=(input_shape[-1], 4, 4), name="form")
    >>> _ = kernel_layouts.register(
    ...     Bilinear, lambda layer: {"form": KernelLayout(inputs=(0,), outputs=(1, 2))})
    >>> kernel_layouts(Bilinear())
    {'form': KernelLayout(inputs=(0,), outputs=(1, 2), ...)}

    Args:
        layer: A layer. Its sublayers are asked one by one.

    Returns:
        A dict from weight name (`variable.name`) to layout.
    """
    names = [v.name for v in layer.weights if len(v.shape) >= 2]
    found: dict[str, KernelLayout | None] = {
        name: None for name in names if name in ("kernel", "embeddings") or name.endswith("_kernel")
    }
    known = (_KNOWN[name] for name in _names(layer) if name in _KNOWN)
    return {**found, **next(known, {})}


def declares_kernels(layer: Any) -> bool:
    """Whether a layer's kernels are declared, so that none of its other weights is one."""
    declared = hasattr(layer, "get_prunable_weights") or hasattr(type(layer), "storages")
    if declared or hasattr(layer, "transparent_path") or _is_of_keras(type(layer)):
        return True
    registered = [k for k in type(layer).__mro__ if k is not object and not _is_of_keras(k)]
    return any(kind in kernel_layouts.registry for kind in registered)


def _is_of_keras(kind: type) -> bool:
    # Keras' layers around somebody else's functions or modules do not know what these hold.
    others = (L.TorchModuleWrapper, L.JaxLayer, L.FlaxLayer)
    return kind.__module__.partition(".")[0] == "keras" and not issubclass(kind, others)


@kernel_layouts.register(L.Dense)
@kernel_layouts.register(L.Embedding)
def _dense(layer: keras.layers.Layer) -> dict[str, KernelLayout | None]:
    return dict.fromkeys(("kernel", "embeddings", "reverse_embeddings"), KernelLayout.dense())


@kernel_layouts.register(L.Conv1D)
@kernel_layouts.register(L.Conv2D)
@kernel_layouts.register(L.Conv3D)
def _convolution(layer: Any) -> dict[str, KernelLayout | None]:
    return {"kernel": KernelLayout.convolution(layer.groups)}


@kernel_layouts.register(L.Conv1DTranspose)
@kernel_layouts.register(L.Conv2DTranspose)
@kernel_layouts.register(L.Conv3DTranspose)
def _transposed_convolution(layer: Any) -> dict[str, KernelLayout | None]:
    return {"kernel": KernelLayout.transposed_convolution()}


@kernel_layouts.register(L.DepthwiseConv1D)
@kernel_layouts.register(L.DepthwiseConv2D)
def _depthwise_convolution(layer: Any) -> dict[str, KernelLayout | None]:
    return {"kernel": KernelLayout.depthwise()}


@kernel_layouts.register(L.SeparableConv1D)
@kernel_layouts.register(L.SeparableConv2D)
def _separable_convolution(layer: Any) -> dict[str, KernelLayout | None]:
    return {
        "depthwise_kernel": KernelLayout.depthwise(),
        "pointwise_kernel": KernelLayout.convolution(),
    }


@kernel_layouts.register(L.EinsumDense)
def _einsum_dense(layer: Any) -> dict[str, KernelLayout | None]:
    return {"kernel": KernelLayout.einsum(layer.equation)}


@kernel_layouts.register(L.SimpleRNNCell)
@kernel_layouts.register(L.GRUCell)
@kernel_layouts.register(L.LSTMCell)
def _recurrent_cell(layer: Any) -> dict[str, KernelLayout | None]:
    gates = 4 if isinstance(layer, L.LSTMCell) else 3 if isinstance(layer, L.GRUCell) else 1
    return dict.fromkeys(("kernel", "recurrent_kernel"), KernelLayout.recurrent(gates))


@kernel_layouts.register(ConvLSTMCell)
def _conv_lstm_cell(layer: Any) -> dict[str, KernelLayout | None]:
    return dict.fromkeys(("kernel", "recurrent_kernel"), KernelLayout.recurrent(4))


# --- keras-hub's layers, known by name: nothing of it is imported ---------------------------------

_TABLE = KernelLayout.dense()  # (entries, features), as of an Embedding
_ONE_TABLE = KernelLayout(inputs=(1,), outputs=(2,), batch=(0,))  # (1, entries, features)
_MAP = KernelLayout(inputs=(1, 2), outputs=(3,), batch=(0,))  # (1, height, width, features)
_HEADS = KernelLayout(inputs=(0,), outputs=(1, 2))  # (in, heads, features)
_CHANNELS = KernelLayout(inputs=(), outputs=(), batch=(0,))  # (channels, taps)
_EXPERTS = KernelLayout(inputs=(1,), outputs=(2,), batch=(0,))  # (experts, in, out)
_TWO_EACH = KernelLayout(inputs=(1,), outputs=(2,), batch=(0,), gates=2)  # side by side

_FUSED_EXPERTS = {
    "expert_feedforward_gate_dense": _TWO_EACH,
    "expert_feedforward_output_dense": _EXPERTS,
}

# By class: matrices that are not called `kernel`, `*_kernel` or `embeddings`, or have other axes.
_KNOWN: dict[str, dict[str, KernelLayout]] = {
    "MixtralMoeExperts": {
        "expert_feedforward_gate_dense": _EXPERTS,
        "expert_feedforward_intermediate_dense": _EXPERTS,
        "expert_feedforward_output_dense": _EXPERTS,
    },
    "QwenMoeExperts": _FUSED_EXPERTS,
    "Qwen3MoeExperts": _FUSED_EXPERTS,
    "Qwen3_5MoeExperts": _FUSED_EXPERTS,
    "Gemma4MoEBlock": dict.fromkeys(("gate_proj", "up_proj", "down_proj"), _EXPERTS),
    # GPT-OSS interleaves gate and input, so that they count as one matrix.
    "GptOssExperts": {"gate_up_proj": _EXPERTS, "down_proj": _EXPERTS},
    "RelativeEmbedding": {"rel_embedding": _TABLE},
    "WindowAttention": {"relative_position_bias_table": _TABLE},
    "AddRelativePositionalEmbedding": {"rel_pos_h": _TABLE, "rel_pos_w": _TABLE},
    "AddPositionalEmbedding": {"pos_embed": _MAP},
    "DeiTEmbeddings": {"position_embedding": _ONE_TABLE},
    # The other table, `position_embeddings`, is neither trained nor used.
    "DINOV2Embedding": {"interpolated_position_embeddings": _ONE_TABLE},
    "XLNetEncoder": {"segment_encoding": _HEADS},
    "Gemma4AudioRelativePositionEmbedding": {"pos_proj": _TABLE},
    "Qwen3_5GatedDeltaNet": {"conv1d_kernel": _CHANNELS},
    "RWKV7TimeMix": dict.fromkeys(("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2"), _TABLE),
}

_EXPERT_LAYERS = {
    *("MixtralMoeExperts", "QwenMoeExperts", "Qwen3MoeExperts", "Qwen3_5MoeExperts"),
    *("Gemma4MoEBlock", "GptOssExperts"),
}
_TABLES = {
    *("PositionEmbedding", "RelativeEmbedding", "WindowAttention", "T5MultiHeadAttention"),
    *("AddRelativePositionalEmbedding", "AddPositionalEmbedding", "DeiTEmbeddings"),
    *("DINOV2Embedding", "XLNetEncoder"),
}


def are_experts(layer: Any) -> bool:
    """Whether a layer applies the matrices of all its experts to all tokens."""
    return not _EXPERT_LAYERS.isdisjoint(_names(layer))


def is_table(layer: Any) -> bool:
    """Whether a layer looks its own matrices up or adds them, without multiplications."""
    return not _TABLES.isdisjoint(_names(layer))


def _names(layer: Any) -> list[str]:
    """The names of the classes of a layer that are keras-hub's."""
    kinds = type(layer).__mro__
    return [kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] == "keras_hub"]
