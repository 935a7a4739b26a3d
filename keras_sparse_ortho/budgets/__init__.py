"""How much of every layer is live."""

from keras_sparse_ortho._foreign_names import answer
from keras_sparse_ortho.budgets._allocation import allocate, fit_structure, lift
from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.budgets._by_name import er, erk, str_resnet50, uniform
from keras_sparse_ortho.budgets._needs import Orthogonal, needs_of

__all__ = ["Budget", "er", "erk", "lift", "str_resnet50", "uniform"]

answer(__name__)
