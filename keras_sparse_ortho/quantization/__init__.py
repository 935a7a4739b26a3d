"""Quantization-aware training: `quantize_aware`, and the layers that it places."""

from keras_sparse_ortho._other_names import public_names
from keras_sparse_ortho.quantization._fake_quantize import FakeQuantize
from keras_sparse_ortho.quantization._quantize_aware import quantize_aware
from keras_sparse_ortho.quantization._quantize_wrapper import QuantizeWrapper
from keras_sparse_ortho.quantization._quantize_wrapper import innermost as innermost
from keras_sparse_ortho.quantization._round_biases import biases_are_rounded as biases_are_rounded
from keras_sparse_ortho.quantization._round_biases import round_biases
from keras_sparse_ortho.quantization._trained import TrainedIntegers as TrainedIntegers
from keras_sparse_ortho.quantization._trained import fix_ranges as fix_ranges
from keras_sparse_ortho.quantization._trained import has_trained_ranges as has_trained_ranges
from keras_sparse_ortho.quantization._trained import keep_floats as keep_floats
from keras_sparse_ortho.quantization._trained import trained_integers as trained_integers
from keras_sparse_ortho.quantization._trained import without_ranges as without_ranges

# Public; the other names above are for `export`.
__all__ = ["FakeQuantize", "QuantizeWrapper", "quantize_aware", "round_biases"]

__getattr__, __dir__ = public_names(__name__, __all__)
