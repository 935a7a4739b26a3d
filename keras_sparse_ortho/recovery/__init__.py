"""Recovery: what pruning or quantization took from a trained model, without labels."""

from keras_sparse_ortho._foreign_names import public_names
from keras_sparse_ortho.recovery._distill import distill

__all__ = ["distill"]

__getattr__, __dir__ = public_names(__name__, __all__)
