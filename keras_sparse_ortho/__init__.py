"""Sparse from the first step, exactly orthogonal at initialization, small when shipped."""

from keras_sparse_ortho import initializers as initializers
from keras_sparse_ortho import parametrizations as parametrizations
from keras_sparse_ortho.layers import PrunableLayer as PrunableLayer
