"""Recovery: what pruning or quantization took from a trained model, without labels."""

from keras_sparse_ortho._foreign_names import answer
from keras_sparse_ortho.recovery._distill import LOGITS, distill, with_features

__all__ = ["distill"]

answer(__name__)
