"""Layers that cannot be wrapped, each with its reason."""

from typing import Any

import keras

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.kernels import is_sparse_layer, walk


def refuse_unwrappable(layer: Any, *, around_others: bool = False) -> None:
    """Raises for a layer whose weights cannot be replaced during its call.

    Args:
        layer: The layer.
        around_others: Whether layers inside it may be wrapped already.
    """
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
