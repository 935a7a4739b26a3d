"""How much of every layer is live."""

from keras_sparse_ortho.budgets._budget import Budget as Budget
from keras_sparse_ortho.budgets._erdos_renyi import er as er
from keras_sparse_ortho.budgets._erdos_renyi import erk as erk
from keras_sparse_ortho.budgets._grasp import grasp as grasp
from keras_sparse_ortho.budgets._lift import lift as lift
from keras_sparse_ortho.budgets._magnitude import magnitude as magnitude
from keras_sparse_ortho.budgets._random import random as random
from keras_sparse_ortho.budgets._saliency import Saliency as Saliency
from keras_sparse_ortho.budgets._snip import snip as snip
from keras_sparse_ortho.budgets._str_resnet50 import str_resnet50 as str_resnet50
from keras_sparse_ortho.budgets._synflow import synflow as synflow
from keras_sparse_ortho.budgets._uniform import uniform as uniform

__all__ = [
    "Budget",
    "Saliency",
    "er",
    "erk",
    "grasp",
    "lift",
    "magnitude",
    "random",
    "snip",
    "str_resnet50",
    "synflow",
    "uniform",
]
