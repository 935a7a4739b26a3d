"""`kernel_rounding`: how the kernels of a layer are rounded for a file of integers."""

import functools
from collections.abc import Iterable
from typing import Literal

import keras

from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    are_experts,
    is_table,
)

Rounding = Literal["by output", "by kernel", "by gate", "floats"]
ROUNDINGS: tuple[Rounding, ...] = (
    "by output",
    "by kernel",
    "by gate",
    "floats",
)


@functools.singledispatch
def kernel_rounding(layer: keras.layers.Layer) -> Rounding | None:
    """How the kernels of a layer are rounded, as LiteRT computes the layer; `None` if unknown.

    `"by output"`: a scale for each output, as in matrix products and convolutions. `"by kernel"`:
    one scale for a kernel, as in products of a stack of matrices (LiteRT's BATCH_MATMUL).
    `"by gate"`: one for each of an LSTM's four gates, as in LiteRT's operator for LSTMs.
    `"floats"`: not at all, as in embeddings and GRUs. `quantize_aware` rounds kernels
    of unknown layers by output, and warns. Dispatches on the class of `layer`, subclasses included.
    Register a layer of your own, by `register_layer` or here:

    >>> class Looked(keras.layers.Layer):
    ...     pass
    >>> _ = kernel_rounding.register(Looked, lambda layer: "floats")
    >>> kernel_rounding(Looked())
    'floats'
    """
    if is_table(layer) or are_experts(layer):
        return "by output"
    return None


def warn_of_unknown(
    kernels: Iterable[PrunableWeight], matrices: Iterable[PrunableWeight]
) -> None:
    """Warns of kernels of layers that are unknown here, and of matrices that are not kernels."""
    texts = [
        f"{kernel.path!r} of {_kind(kernel)}, rounded by output"
        for kernel in kernels
        if kernel_rounding(kernel.owner) is None
    ]
    texts += [
        f"{matrix.path!r} of {_kind(matrix)}, in floats" for matrix in matrices
    ]
    if texts:
        warn_user(
            "It is not known how LiteRT computes these layers in integers. Register their classes "
            "with keras_sparse_ortho.register_layer, or `exclude` them to keep them in floats "
            f"without this warning. Received: {'; '.join(texts)}"
        )


def _kind(weight: PrunableWeight) -> str:
    return type(weight.owner).__name__
