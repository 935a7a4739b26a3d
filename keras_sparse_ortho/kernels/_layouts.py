"""The registry of kernels by class of layer: which weights are kernels, and their layouts."""

import functools

import keras

from keras_sparse_ortho._keras_internals import (
    created_trainable,
    own_variables,
)
from keras_sparse_ortho.kernels._layer_kinds import (
    LayerWrapper,
    SparseLayer,
)
from keras_sparse_ortho.kernels._storage import initializer_attribute
from keras_sparse_ortho.orthogonal import KernelLayout

Layouts = dict[str, KernelLayout | None]
"""The layout of each kernel by its name; `None` for `(*spatial, in, out)`."""


@functools.singledispatch
def kernel_layouts(layer: keras.layers.Layer) -> Layouts:
    """Names the kernels among a layer's own weights (`variable.name`), each with its layout.

    Dispatches on the class of `layer`, subclasses included, not on layers inside it. Keras' layers
    are registered, those of keras-hub known by name. In others the weights called `kernel`,
    `*_kernel` and `embeddings` count, of rank 2 or more, with the default layout `(*spatial, in,
    out)` (`None`). A weight that its layer creates with `trainable=False` is a constant and does
    not count; freezing a layer changes nothing. Register a custom layer with other kernels, or with
    `{}` to keep it dense:

    >>> import keras
    >>> class Bilinear(keras.layers.Layer):
    ...     def build(self, input_shape):
    ...         self.form = self.add_weight(shape=(input_shape[-1], 4, 4), name="form")
    >>> _ = kernel_layouts.register(
    ...     Bilinear, lambda layer: {"form": KernelLayout(inputs=(0,), outputs=(1, 2))})
    >>> kernel_layouts(Bilinear())
    {'form': KernelLayout(inputs=(0,), outputs=(1, 2), ...)}
    """
    if _is_preprocessing(layer):
        return {}
    # It computes with TensorFlow's variables, not with these.
    if isinstance(layer, keras.layers.TFSMLayer):
        return {}
    layouts: Layouts = {}
    for variable in created_trainable(layer):
        name = variable.name
        is_kernel = name in ("kernel", "embeddings") or name.endswith("_kernel")
        if is_kernel and len(variable.shape) >= 2:
            layouts[name] = None
    for class_name in _hub_names(layer):
        if class_name in _OF_KERAS_HUB:
            layouts |= _OF_KERAS_HUB[class_name]
            break
    return layouts


def declares_kernels(layer: keras.layers.Layer) -> bool:
    """Whether a layer's kernels are declared, so that none of its other weights is one."""
    if hasattr(layer, "get_prunable_weights"):  # the duck type of TFMOT
        return True
    if isinstance(layer, SparseLayer | LayerWrapper) or _is_of_keras(
        type(layer)
    ):
        return True
    if _is_preprocessing(layer):
        return True
    kinds = [kind for kind in type(layer).__mro__ if kind is not object]
    return any(
        kind in kernel_layouts.registry
        for kind in kinds
        if not _is_of_keras(kind)
    )


def _is_preprocessing(layer: keras.layers.Layer) -> bool:
    """Whether a layer prepares data, so that its matrices are constants: of Fourier transforms."""
    # keras-hub's converters of sounds, images and text have one base class.
    return isinstance(
        layer, keras.layers.STFTSpectrogram
    ) or "PreprocessingLayer" in _hub_names(layer)


def constants(layer: keras.layers.Layer) -> set[int]:
    """The weights, by `id`, of a layer of Keras (or a subclass) that it computes itself.

    These are weights that it creates with `trainable=False`, and Fourier matrices. Weights that
    Keras quantized are not trainable either, and stay kernels. A layer that its user has registered
    says itself what its kernels are.

    Args:
        layer: Layer. Built.
    """
    registered = next(
        kind for kind in type(layer).__mro__ if kind in kernel_layouts.registry
    )
    if (
        not _is_of_keras(registered)
        or getattr(layer, "quantization_mode", None) is not None
    ):
        return set()
    trained = {id(variable) for variable in created_trainable(layer)}
    constants = set()
    for variable in own_variables(layer):
        initializer = None
        attribute = initializer_attribute(layer, variable.name)
        if attribute is not None:
            initializer = getattr(layer, attribute)
        if id(variable) not in trained or isinstance(
            initializer, keras.initializers.STFT
        ):
            constants.add(id(variable))
    return constants


def _is_of_keras(kind: type) -> bool:
    # Keras' layers around somebody else's functions or modules do not know what these hold.
    foreign = (
        keras.layers.TorchModuleWrapper,
        keras.layers.JaxLayer,
        keras.layers.FlaxLayer,
        keras.layers.TFSMLayer,
    )
    return kind.__module__.partition(".")[0] == "keras" and not issubclass(
        kind, foreign
    )


# keras-hub's layers are known by name: nothing of it is imported.
_TABLE = KernelLayout.dense()  # (entries, features), as of an Embedding
# (1, entries, features).
_ONE_TABLE = KernelLayout(inputs=(1,), outputs=(2,), batch=(0,))
# (1, height, width, features).
_MAP = KernelLayout(inputs=(1, 2), outputs=(3,), batch=(0,))
_HEADS = KernelLayout(inputs=(0,), outputs=(1, 2))  # (in, heads, features)
_CHANNELS = KernelLayout(inputs=(), outputs=(), batch=(0,))  # (channels, taps)
# (experts, in, out).
_EXPERTS = KernelLayout(inputs=(1,), outputs=(2,), batch=(0,))
# Side by side.
_TWO_EACH = KernelLayout(inputs=(1,), outputs=(2,), batch=(0,), gates=2)

# By class: matrices that are not called `kernel`, `*_kernel` or `embeddings`, or have other axes.
_OF_EXPERTS: dict[str, dict[str, KernelLayout]] = {
    "MixtralMoeExperts": {
        f"expert_feedforward_{name}_dense": _EXPERTS
        for name in ("gate", "intermediate", "output")
    },
    **{
        kind: {
            "expert_feedforward_gate_dense": _TWO_EACH,
            "expert_feedforward_output_dense": _EXPERTS,
        }
        for kind in ("QwenMoeExperts", "Qwen3MoeExperts", "Qwen3_5MoeExperts")
    },
    "Gemma4MoEBlock": dict.fromkeys(
        ("gate_proj", "up_proj", "down_proj"), _EXPERTS
    ),
    # GPT-OSS interleaves gate and input, so that they count as one matrix.
    "GptOssExperts": {"gate_up_proj": _EXPERTS, "down_proj": _EXPERTS},
}
_OF_KERAS_HUB: dict[str, dict[str, KernelLayout]] = {
    **_OF_EXPERTS,
    "RelativeEmbedding": {"rel_embedding": _TABLE},
    "WindowAttention": {"relative_position_bias_table": _TABLE},
    "AddRelativePositionalEmbedding": {
        "rel_pos_h": _TABLE,
        "rel_pos_w": _TABLE,
    },
    "AddPositionalEmbedding": {"pos_embed": _MAP},
    "DeiTEmbeddings": {"position_embedding": _ONE_TABLE},
    # The other table, `position_embeddings`, is neither trained nor used.
    "DINOV2Embedding": {"interpolated_position_embeddings": _ONE_TABLE},
    "XLNetEncoder": {"segment_encoding": _HEADS},
    "Gemma4AudioRelativePositionEmbedding": {"pos_proj": _TABLE},
    "Qwen3_5GatedDeltaNet": {"conv1d_kernel": _CHANNELS},
    "RWKV7TimeMix": dict.fromkeys(
        ("w1", "w2", "a1", "a2", "v1", "v2", "g1", "g2"), _TABLE
    ),
}

_TABLES = {
    "PositionEmbedding",
    "RelativeEmbedding",
    "WindowAttention",
    "T5MultiHeadAttention",
    "AddRelativePositionalEmbedding",
    "AddPositionalEmbedding",
    "DeiTEmbeddings",
    "DINOV2Embedding",
    "XLNetEncoder",
}


def are_experts(layer: keras.layers.Layer) -> bool:
    """Whether a layer applies the matrices of all its experts to all tokens."""
    return not _OF_EXPERTS.keys().isdisjoint(_hub_names(layer))


def is_table(layer: keras.layers.Layer) -> bool:
    """Whether a layer looks its own matrices up or adds them, without multiplications."""
    return not _TABLES.isdisjoint(_hub_names(layer))


def _hub_names(layer: keras.layers.Layer) -> list[str]:
    kinds = type(layer).__mro__
    return [
        kind.__name__
        for kind in kinds
        if kind.__module__.partition(".")[0] == "keras_hub"
    ]
