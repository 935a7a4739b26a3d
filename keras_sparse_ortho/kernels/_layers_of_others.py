"""Layers of keras-hub that own matrices, known by name: none of it is imported."""

from typing import Any

from keras_sparse_ortho.orthogonal import KernelLayout

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

# By package and class: matrices that are not called `kernel`, `*_kernel` or `embeddings`, or are
# laid out otherwise.
_KNOWN: dict[str, dict[str, dict[str, KernelLayout]]] = {
    "keras_hub": {
        "MixtralMoeExperts": {
            "expert_feedforward_gate_dense": _EXPERTS,
            "expert_feedforward_intermediate_dense": _EXPERTS,
            "expert_feedforward_output_dense": _EXPERTS,
        },
        "QwenMoeExperts": _FUSED_EXPERTS,
        "Qwen3MoeExperts": _FUSED_EXPERTS,
        "Qwen3_5MoeExperts": _FUSED_EXPERTS,
        "Gemma4MoEBlock": dict.fromkeys(("gate_proj", "up_proj", "down_proj"), _EXPERTS),
        # Gate and input of a GPT-OSS expert take turns, so that they are one matrix here.
        "GptOssExperts": {"gate_up_proj": _EXPERTS, "down_proj": _EXPERTS},
        "RelativeEmbedding": {"rel_embedding": _TABLE},
        "WindowAttention": {"relative_position_bias_table": _TABLE},
        "AddRelativePositionalEmbedding": {"rel_pos_h": _TABLE, "rel_pos_w": _TABLE},
        "AddPositionalEmbedding": {"pos_embed": _MAP},
        "DeiTEmbeddings": {"position_embedding": _ONE_TABLE},
        "DINOV2Embedding": {"position_embeddings": _ONE_TABLE},
        "XLNetEncoder": {"segment_encoding": _HEADS},
        "Gemma4AudioRelativePositionEmbedding": {"pos_proj": _TABLE},
        "Qwen3_5GatedDeltaNet": {"conv1d_kernel": _CHANNELS},
        "RWKV7TimeMix": dict.fromkeys(("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2"), _TABLE),
    },
}

_EXPERT_LAYERS = frozenset(
    {"MixtralMoeExperts", "QwenMoeExperts", "Qwen3MoeExperts", "Qwen3_5MoeExperts"}
    | {"Gemma4MoEBlock", "GptOssExperts"}
)
_TABLES = frozenset(
    {"PositionEmbedding", "RelativeEmbedding", "WindowAttention", "T5MultiHeadAttention"}
    | {"AddRelativePositionalEmbedding", "AddPositionalEmbedding", "DeiTEmbeddings"}
    | {"DINOV2Embedding", "XLNetEncoder"}
)


def known_by_name(layer: Any) -> dict[str, KernelLayout]:
    """The matrices of a layer of a package that is not imported here; empty for other layers."""
    for package, name in _names(layer):
        known = _KNOWN.get(package, {}).get(name)
        if known is not None:
            return known
    return {}


def are_experts(layer: Any) -> bool:
    """Whether a layer applies the matrices of all experts to all tokens."""
    return any(p in _KNOWN and name in _EXPERT_LAYERS for p, name in _names(layer))


def is_table(layer: Any) -> bool:
    """Whether the matrices that a layer itself owns are looked up or added: no multiplications."""
    return any(p in _KNOWN and name in _TABLES for p, name in _names(layer))


def _names(layer: Any) -> list[tuple[str, str]]:
    """The packages and names of the classes of a layer."""
    return [(kind.__module__.partition(".")[0], kind.__name__) for kind in type(layer).__mro__]
