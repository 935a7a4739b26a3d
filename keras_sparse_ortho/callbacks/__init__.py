"""Keras callbacks around sparse training."""

from keras_sparse_ortho.callbacks._density_logger import DensityLogger as DensityLogger

__all__ = ["DensityLogger"]
