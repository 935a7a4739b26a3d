"""Which layers can be wrapped, or the reason why not."""

from collections.abc import Callable
from typing import Any

import keras

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import is_sparse_layer, walk


def refuse_unwrappable(layer: Any, *, around_others: bool = False) -> None:
    """Raises for a layer whose weights cannot be replaced in a call, `around_others` that are."""
    for inner, path in walk(layer, layer.name):
        reason = None
        if getattr(inner, "transparent_path", False):
            if around_others and inner is not layer:
                continue
            reason = "it is wrapped already"
        elif is_sparse_layer(inner):
            reason = "it holds its live blocks only. Strip it first, then wrap the plain layer"
        elif isinstance(inner, keras.layers.SpectralNormalization):
            reason = (
                "SpectralNormalization assigns its kernel in every call. Leave one of the two out"
            )
        elif getattr(inner, "lora_enabled", False):
            reason = (
                "LoRA is enabled, and its update of the kernel is dense. Prune first, strip, "
                "and enable LoRA on the plain model"
            )
        elif getattr(inner, "quantization_mode", None) is not None:
            reason = "it is quantized. Prune first, strip, then quantize"
        if reason:
            raise NotPrunableError(
                f"The layer '{path}' cannot be wrapped: {reason}. "
                f"Received: layer={inner.__class__.__name__}"
            )


def refuse_dense_updates(layer: Any) -> Callable[[], None]:
    """Lets a layer with a parametrized weight refuse `quantize` and `enable_lora`; undoes it."""
    names = ("quantize", "enable_lora")
    kept = {name: vars(layer)[name] for name in names if name in vars(layer)}  # Keras wraps them

    def quantize(*args: Any, **kwargs: Any) -> None:
        # Keras' own type: `Model.quantize` warns of such layers, and leaves them as they are.
        raise NotImplementedError(
            f"The layer '{layer.name}' cannot be quantized while it is wrapped. Strip the model "
            "first (keras_sparse_ortho.strip), and quantize the plain one. "
            f"Received: quantize of {type(layer).__name__}"
        )

    def enable_lora(*args: Any, **kwargs: Any) -> None:
        raise NotPrunableError(
            f"LoRA cannot be enabled on '{layer.name}' while it is wrapped: Keras' update of the "
            "kernel is dense. Strip the model first (keras_sparse_ortho.strip), and enable it on "
            "the plain one. "
            f"Received: enable_lora of {type(layer).__name__}"
        )

    # Not by setattr, with which Keras and its backends look at what is set.
    vars(layer).update(quantize=quantize, enable_lora=enable_lora)

    def undo() -> None:
        for name in names:
            vars(layer).pop(name, None)
        vars(layer).update(kept)

    return undo


def variable_dtype(layer: Any) -> str:
    """The dtype of a layer's variables; ValueError where a file has named no dtype."""
    policy = getattr(layer, "dtype_policy", None)
    if not isinstance(policy, keras.dtype_policies.DTypePolicy):
        raise ValueError(
            f"The layer '{layer.name}' must have a dtype policy of Keras. Received: dtype={policy}"
        )
    dtype: str = layer.variable_dtype
    return dtype
