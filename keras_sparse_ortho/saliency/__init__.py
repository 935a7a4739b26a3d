"""Scores for the entries of kernels: SNIP, GraSP, SynFlow, magnitude, random, and your own."""

from keras_sparse_ortho._foreign_names import answer
from keras_sparse_ortho.saliency._grasp import grasp
from keras_sparse_ortho.saliency._loss_derivatives import LossDerivatives
from keras_sparse_ortho.saliency._magnitude import magnitude
from keras_sparse_ortho.saliency._random import random
from keras_sparse_ortho.saliency._saliency import Saliency
from keras_sparse_ortho.saliency._score import (
    SCORES,
    LossScore,
    ModelScore,
    Need,
    Score,
    as_score,
    is_model_score,
    register_score,
)
from keras_sparse_ortho.saliency._snip import snip
from keras_sparse_ortho.saliency._synflow import synflow

__all__ = [
    "LossDerivatives",
    "LossScore",
    "ModelScore",
    "Saliency",
    "Score",
    "grasp",
    "magnitude",
    "random",
    "register_score",
    "snip",
    "synflow",
]

answer(__name__)
