"""What scores the entries of kernels: SNIP, GraSP, SynFlow, magnitude, random."""

from keras_sparse_ortho.saliency._baselines import magnitude as magnitude
from keras_sparse_ortho.saliency._baselines import random as random
from keras_sparse_ortho.saliency._by_name import SALIENCIES as SALIENCIES
from keras_sparse_ortho.saliency._by_name import saliency_by_name as saliency_by_name
from keras_sparse_ortho.saliency._grasp import grasp as grasp
from keras_sparse_ortho.saliency._saliency import Saliency as Saliency
from keras_sparse_ortho.saliency._snip import snip as snip
from keras_sparse_ortho.saliency._synflow import synflow as synflow

# Public; the other names above are for the other rooms.
__all__ = ["Saliency", "grasp", "magnitude", "random", "snip", "synflow"]
