"""The registry of kernels, the walk over a model that finds them, and choosing among these."""

import dataclasses
import functools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import keras

from keras_sparse_ortho._checks import is_integer
from keras_sparse_ortho._keras_internals import (
    ConvLSTMCell,
    created_trainable,
    own_variables,
    sublayers,
)
from keras_sparse_ortho.errors import UnknownWeightError
from keras_sparse_ortho.kernels._layer_kinds import (
    LayerWrapper,
    SparseLayer,
    WholeLayer,
    storages_of,
)
from keras_sparse_ortho.kernels._storage import PrunableWeight, initializer_attribute
from keras_sparse_ortho.orthogonal import KernelLayout

L = keras.layers

Selection: TypeAlias = (
    str
    | int
    | keras.layers.Layer
    | type[keras.layers.Layer]
    | Sequence[str | int | keras.layers.Layer | type[keras.layers.Layer]]
    | Callable[[PrunableWeight], bool]
    | None
)
"""Weight paths, layer paths, regular expressions, layers, classes of layers, indices (one or a
list); a predicate."""


@functools.singledispatch
def kernel_layouts(layer: Any) -> dict[str, KernelLayout | None]:
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
    if isinstance(layer, L.TFSMLayer):  # it computes with TensorFlow's variables, not with these
        return {}
    names = [v.name for v in created_trainable(layer) if len(v.shape) >= 2]
    layouts: dict[str, KernelLayout | None] = {
        name: None for name in names if name in ("kernel", "embeddings") or name.endswith("_kernel")
    }
    known = (_KNOWN[name] for name in _hub_names(layer) if name in _KNOWN)
    return {**layouts, **next(known, {})}


def declares_kernels(layer: Any) -> bool:
    """Whether a layer's kernels are declared, so that none of its other weights is one."""
    if hasattr(layer, "get_prunable_weights"):  # the duck type of TFMOT
        return True
    if isinstance(layer, SparseLayer | LayerWrapper) or _is_of_keras(type(layer)):
        return True
    if _is_preprocessing(layer):
        return True
    registered = [k for k in type(layer).__mro__ if k is not object and not _is_of_keras(k)]
    return any(kind in kernel_layouts.registry for kind in registered)


def _is_preprocessing(layer: Any) -> bool:
    """Whether a layer prepares data, so that its matrices are constants: of Fourier transforms."""
    # keras-hub's converters of sounds, images and text have one base class.
    return isinstance(layer, L.STFTSpectrogram) or "PreprocessingLayer" in _hub_names(layer)


def _constants(layer: Any) -> set[int]:
    """The weights, by `id`, of a layer of Keras (or a subclass) that it computes itself.

    These are weights that it creates with `trainable=False`, and Fourier matrices. Weights that
    Keras quantized are not trainable either, and stay kernels. A layer that its user has registered
    says itself what its kernels are.

    Args:
        layer: Layer. Built.
    """
    registered = next(kind for kind in type(layer).__mro__ if kind in kernel_layouts.registry)
    if not _is_of_keras(registered) or getattr(layer, "quantization_mode", None) is not None:
        return set()
    trained = {id(variable) for variable in created_trainable(layer)}
    constants = set()
    for variable in own_variables(layer):
        attribute = initializer_attribute(layer, variable.name)
        initializer = None if attribute is None else getattr(layer, attribute)
        if id(variable) not in trained or isinstance(initializer, keras.initializers.STFT):
            constants.add(id(variable))
    return constants


def _is_of_keras(kind: type) -> bool:
    # Keras' layers around somebody else's functions or modules do not know what these hold.
    others = (L.TorchModuleWrapper, L.JaxLayer, L.FlaxLayer, L.TFSMLayer)
    return kind.__module__.partition(".")[0] == "keras" and not issubclass(kind, others)


_KERAS: dict[tuple[type, ...], Callable[[Any], dict[str, KernelLayout | None]]] = {
    (L.Dense, L.Embedding): lambda _: dict.fromkeys(
        ("kernel", "embeddings", "reverse_embeddings"), KernelLayout.dense()
    ),
    (L.Conv1D, L.Conv2D, L.Conv3D): lambda layer: {
        "kernel": KernelLayout.convolution(layer.groups)
    },
    (L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose): lambda _: {
        "kernel": KernelLayout.transposed_convolution()
    },
    (L.DepthwiseConv1D, L.DepthwiseConv2D): lambda _: {"kernel": KernelLayout.depthwise()},
    (L.SeparableConv1D, L.SeparableConv2D): lambda _: {
        "depthwise_kernel": KernelLayout.depthwise(),
        "pointwise_kernel": KernelLayout.convolution(),
    },
    (L.EinsumDense,): lambda layer: {"kernel": KernelLayout.einsum(layer.equation)},
    (L.SimpleRNNCell,): lambda _: _gates(1),
    (L.GRUCell,): lambda _: _gates(3),
    (L.LSTMCell, ConvLSTMCell): lambda _: _gates(4),
}


def _gates(number: int) -> dict[str, KernelLayout | None]:
    return dict.fromkeys(("kernel", "recurrent_kernel"), KernelLayout.recurrent(number))


for _kinds, _layouts in _KERAS.items():
    for _kind in _kinds:
        kernel_layouts.register(_kind, _layouts)

# keras-hub's layers are known by name: nothing of it is imported.
_TABLE = KernelLayout.dense()  # (entries, features), as of an Embedding
_ONE_TABLE = KernelLayout(inputs=(1,), outputs=(2,), batch=(0,))  # (1, entries, features)
_MAP = KernelLayout(inputs=(1, 2), outputs=(3,), batch=(0,))  # (1, height, width, features)
_HEADS = KernelLayout(inputs=(0,), outputs=(1, 2))  # (in, heads, features)
_CHANNELS = KernelLayout(inputs=(), outputs=(), batch=(0,))  # (channels, taps)
_EXPERTS = KernelLayout(inputs=(1,), outputs=(2,), batch=(0,))  # (experts, in, out)
_TWO_EACH = KernelLayout(inputs=(1,), outputs=(2,), batch=(0,), gates=2)  # side by side

# By class: matrices that are not called `kernel`, `*_kernel` or `embeddings`, or have other axes.
_OF_EXPERTS: dict[str, dict[str, KernelLayout]] = {
    "MixtralMoeExperts": {
        f"expert_feedforward_{name}_dense": _EXPERTS for name in ("gate", "intermediate", "output")
    },
    **{
        kind: {
            "expert_feedforward_gate_dense": _TWO_EACH,
            "expert_feedforward_output_dense": _EXPERTS,
        }
        for kind in ("QwenMoeExperts", "Qwen3MoeExperts", "Qwen3_5MoeExperts")
    },
    "Gemma4MoEBlock": dict.fromkeys(("gate_proj", "up_proj", "down_proj"), _EXPERTS),
    # GPT-OSS interleaves gate and input, so that they count as one matrix.
    "GptOssExperts": {"gate_up_proj": _EXPERTS, "down_proj": _EXPERTS},
}
_KNOWN: dict[str, dict[str, KernelLayout]] = {
    **_OF_EXPERTS,
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

_TABLES = {
    *("PositionEmbedding", "RelativeEmbedding", "WindowAttention", "T5MultiHeadAttention"),
    *("AddRelativePositionalEmbedding", "AddPositionalEmbedding", "DeiTEmbeddings"),
    *("DINOV2Embedding", "XLNetEncoder"),
}


def are_experts(layer: Any) -> bool:
    """Whether a layer applies the matrices of all its experts to all tokens."""
    return not _OF_EXPERTS.keys().isdisjoint(_hub_names(layer))


def is_table(layer: Any) -> bool:
    """Whether a layer looks its own matrices up or adds them, without multiplications."""
    return not _TABLES.isdisjoint(_hub_names(layer))


def _hub_names(layer: Any) -> list[str]:
    kinds = type(layer).__mro__
    return [kind.__name__ for kind in kinds if kind.__module__.partition(".")[0] == "keras_hub"]


def _children(layer: Any) -> Iterator[tuple[Any, str]]:
    if isinstance(layer, WholeLayer):
        return
    for child in sublayers(layer):
        name = "" if isinstance(layer, LayerWrapper) else child.name
        yield child, name


def walk(
    layer: Any, path: str, children: Callable[[Any], Iterable[tuple[Any, str]]] = _children
) -> Iterator[tuple[Any, str]]:
    """Yields `layer` and every layer inside it with its path, each layer once, depth first."""
    seen: set[int] = set()

    def visit(current: Any, here: str) -> Iterator[tuple[Any, str]]:
        if id(current) in seen:
            return
        seen.add(id(current))
        yield current, here
        for child, name in children(current):
            yield from visit(child, _join(here, name) if name else here)

    yield from visit(layer, path)


def _join(path: str, name: Any) -> str:
    return f"{path}/{name}" if path else str(name)


def own_kernels(layer: Any, path: str) -> list[PrunableWeight]:
    """The kernels that a built layer itself owns; first those in its storages."""
    found = [
        dataclasses.replace(storage.weight, path=_join(path, name), storage=storage)
        for name, storage in storages_of(layer).items()
    ]
    held = {id(weight.variable) for weight in found}
    held |= {id(v) for child in sublayers(layer) for v in child.weights}
    if hasattr(layer, "get_prunable_weights"):  # the duck type of TFMOT
        layouts = dict.fromkeys((v.name for v in layer.get_prunable_weights()), None)
    else:
        layouts = kernel_layouts(layer)
        held |= _constants(layer)
    return found + [
        PrunableWeight(_join(path, v.name), v, layer, layouts[v.name])
        for v in layer.weights
        if v.name in layouts and id(v) not in held
    ]


def own_unregistered(layer: Any, path: str) -> list[PrunableWeight]:
    """The matrices that a layer itself owns and that are not known to be kernels."""
    # Created as trainable, with at least two axes longer than 1, and no `bias` or `*_bias`.
    if declares_kernels(layer):
        return []
    known = kernel_layouts(layer)
    found = []
    for v in created_trainable(layer):
        is_bias = v.name == "bias" or v.name.endswith("_bias")
        if v.name in known or is_bias or sum(size > 1 for size in v.shape) < 2:
            continue
        *batch, inputs, outputs = range(len(v.shape))  # likeliest
        layout = KernelLayout(inputs=(inputs,), outputs=(outputs,), batch=tuple(batch))
        found.append(PrunableWeight(_join(path, v.name), v, layer, layout, registered=False))
    return found


def find_kernels(layer: Any, path: str, *, unregistered: bool = False) -> list[PrunableWeight]:
    """All kernels at any depth of a layer, each once; then, if asked for, `unregistered` ones."""
    found: dict[int, PrunableWeight] = {}
    layers = list(walk(layer, path))
    kinds: dict[str, list[type]] = {}
    for inner, here in layers:
        kinds.setdefault(here, []).append(type(inner))
    for own in (own_kernels, own_unregistered) if unregistered else (own_kernels,):
        for inner, here in layers:
            names = here.split("/")
            above = [kinds.get("/".join(names[:k]), []) for k in range(len(names) + 1)]
            for weight in own(inner, here):
                inside = tuple(kind for listed in above for kind in listed)
                found.setdefault(id(weight.variable), dataclasses.replace(weight, inside=inside))
    return list(found.values())


def select(
    weights: Sequence[PrunableWeight],
    selection: Selection,
    argument: str,
    unregistered: Sequence[PrunableWeight] = (),
) -> list[PrunableWeight]:
    """Returns the weights that a selection names, all for `None`; UnknownWeightError if none."""
    # A string is the path of a weight or of a layer, or a regular expression that matches the whole
    # path or, if anchored by `^` or `$`, a part of it. A layer names all weights in it, a class of
    # layers those in all its layers, an integer the weight at this index of `prunable_weights`.
    if selection is None:
        return list(weights)
    names = names_in(selection)
    if names is None:
        return [weight for weight in weights if selection(weight)]  # type: ignore[operator]
    chosen: set[str] = set()
    for name in names:
        found = _named(weights, name)
        if not found:
            known = ", ".join(weight.path for weight in weights) or "none"
            if not isinstance(name, str):
                raise UnknownWeightError(
                    f"`{argument}` takes paths of weights and layers, regular expressions, layers "
                    "of the model with prunable weights, their classes, and indices of these "
                    f"weights, or a predicate. There are: {known}. Received: {argument}={name!r}"
                )
            hint, parts = "", [w.path for w in weights if _matches(re.search, name, w.path)]
            if parts:
                hint = (
                    " A regular expression must match the whole path: "
                    f"r'.*{name}.*' names {parts[0]!r}{' and others' if len(parts) > 1 else ''}."
                )
            if any(_is_named(name, weight.path) for weight in unregistered):
                hint += " It names an unregistered matrix: give its full path, or register it."
            raise UnknownWeightError(
                f"`{argument}` names no prunable weight. There are: {known}.{hint} "
                f"Received: {argument}={name!r}"
            )
        chosen |= found
    return [weight for weight in weights if weight.path in chosen]


def names_in(selection: Any) -> list[Any] | None:
    if isinstance(selection, str | keras.layers.Layer | type) or is_integer(selection):
        return [selection]
    return None if callable(selection) else list(selection)


def _named(weights: Sequence[PrunableWeight], name: Any) -> set[str]:
    if isinstance(name, str):
        return {weight.path for weight in weights if _is_named(name, weight.path)}
    if isinstance(name, keras.layers.Layer):
        inside = {id(layer) for layer, _ in walk(name, "")}
        return {weight.path for weight in weights if id(weight.owner) in inside}
    if isinstance(name, type):
        kinds = {weight.path: (type(weight.owner), *weight.inside) for weight in weights}
        return {path for path, found in kinds.items() if any(issubclass(k, name) for k in found)}
    listed = [weight.path for weight in weights if weight.registered]
    if is_integer(name) and -len(listed) <= name < len(listed):
        return {listed[name]}
    return set()


def _is_named(name: str, path: str) -> bool:
    if path == name or path.startswith(f"{name}/"):
        return True
    anchored = name.startswith("^") or name.endswith("$")
    return _matches(re.search if anchored else re.fullmatch, name, path)


def _matches(how: Callable[[str, str], object], name: str, path: str) -> bool:
    try:
        return how(name, path) is not None
    except re.error:
        return False


def choose(
    weights: Sequence[PrunableWeight],
    include: Selection,
    exclude: Selection,
    others: Sequence[PrunableWeight] = (),
) -> list[PrunableWeight]:
    """The weights that `include` selects, without those (or `others`) that `exclude` does."""
    chosen = select(weights, include, "include", others)
    if exclude is None:
        return chosen
    left_out = {weight.path for weight in select([*weights, *others], exclude, "exclude")}
    return [weight for weight in chosen if weight.path not in left_out]
