"""Scores for the entries of kernels: SNIP, GraSP, SynFlow, magnitude, random."""

from keras_sparse_ortho.saliency._gradient_scores import SALIENCIES, grasp, saliency_by_name, snip
from keras_sparse_ortho.saliency._saliency import Saliency, magnitude, random
from keras_sparse_ortho.saliency._synflow import synflow

__all__ = ["Saliency", "grasp", "magnitude", "random", "snip", "synflow"]
