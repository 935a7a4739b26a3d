"""Quantization-aware training: `quantize_aware`, and the layers that it places."""

from typing import TYPE_CHECKING

from keras_sparse_ortho.quantization._fake_quantize import (
    FakeQuantize,
    fixed_ranges,
    has_trained_ranges,
    integers_of,
    ranges_of,
)
from keras_sparse_ortho.quantization._keeps_range import keeps_range
from keras_sparse_ortho.quantization._kernel_rounding import (
    ROUNDINGS,
    Rounding,
    kernel_rounding,
)
from keras_sparse_ortho.quantization._quantize_wrapper import (
    QuantizeWrapper,
    innermost,
)

if TYPE_CHECKING:
    from keras_sparse_ortho.quantization._equalize import equalize
    from keras_sparse_ortho.quantization._quantize_aware import quantize_aware
    from keras_sparse_ortho.quantization._round_biases import round_biases

_FILES = {
    "equalize": "_equalize",
    "quantize_aware": "_quantize_aware",
    "round_biases": "_round_biases",
}

__all__ = [
    "equalize",
    "keeps_range",
    "kernel_rounding",
    "quantize_aware",
    "round_biases",
]
