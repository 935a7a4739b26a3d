"""Features that no table has ahead of the core; they may change in any release."""

from keras_sparse_ortho._foreign_names import public_names
from keras_sparse_ortho.contrib._reorder_channels import reorder_channels

__all__ = ["reorder_channels"]

__getattr__, __dir__ = public_names(__name__, __all__)
