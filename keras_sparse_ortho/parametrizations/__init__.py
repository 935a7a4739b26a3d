"""How a raw variable becomes the effective weight of its layer."""

from keras_sparse_ortho.parametrizations._adoption import adopt_mask as adopt_mask
from keras_sparse_ortho.parametrizations._fixed_mask import FixedMask as FixedMask
from keras_sparse_ortho.parametrizations._parametrization import (
    Parametrization as Parametrization,
)
from keras_sparse_ortho.parametrizations._prunable_weight import PrunableWeight as PrunableWeight
from keras_sparse_ortho.parametrizations._selection import Selection as Selection

__all__ = [
    "FixedMask",
    "Parametrization",
    "PrunableWeight",
    "Selection",
    "adopt_mask",
]
