"""Shrinking: a trained model to the smallest LiteRT file that keeps what was asked for."""

from keras_sparse_ortho._foreign_names import answer
from keras_sparse_ortho.shrinking._examples import Examples
from keras_sparse_ortho.shrinking._judge import (
    Judge,
    OutputScore,
    Score,
    closeness,
    same_class,
)
from keras_sparse_ortho.shrinking._search import Search
from keras_sparse_ortho.shrinking._shrink import chosen, shrink
from keras_sparse_ortho.shrinking._shrink_report import ShrinkReport, Trial

__all__ = ["ShrinkReport", "Trial", "shrink"]

answer(__name__)
