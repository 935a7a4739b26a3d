"""Features that no table has ahead of the core; they may change in any release."""

from keras_sparse_ortho._other_names import public_names
from keras_sparse_ortho.contrib._load_dense_weights import load_dense_weights
from keras_sparse_ortho.contrib._reorder_channels import reorder_channels
from keras_sparse_ortho.contrib._scanned_stack import ScannedStack

__all__ = ["ScannedStack", "load_dense_weights", "reorder_channels"]

__getattr__, __dir__ = public_names(__name__, __all__)
