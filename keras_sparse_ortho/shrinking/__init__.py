"""Shrinking: a trained model to the smallest LiteRT file that keeps what was asked for."""

from keras_sparse_ortho._foreign_names import answer
from keras_sparse_ortho.shrinking._activations import Activations
from keras_sparse_ortho.shrinking._examples import Examples
from keras_sparse_ortho.shrinking._judge import (
    Judge,
    OutputScore,
    Score,
    closeness,
    same_class,
)
from keras_sparse_ortho.shrinking._micro_report import MicroReport, least_loss
from keras_sparse_ortho.shrinking._micro_search import (
    MicroCosts,
    MicroSearch,
    MicroTrials,
)
from keras_sparse_ortho.shrinking._microcontroller import (
    Microcontroller,
    MicroFigures,
)
from keras_sparse_ortho.shrinking._narrowing import Narrowing, width_table
from keras_sparse_ortho.shrinking._search import Search
from keras_sparse_ortho.shrinking._shrink import shrink
from keras_sparse_ortho.shrinking._shrink_report import ShrinkReport, Trial
from keras_sparse_ortho.shrinking._smallest_file import chosen
from keras_sparse_ortho.shrinking._trials import Terms, Trials, shortly
from keras_sparse_ortho.shrinking._width_shares import WidthShares

__all__ = ["MicroFigures", "MicroReport", "ShrinkReport", "Trial", "shrink"]

answer(__name__)
