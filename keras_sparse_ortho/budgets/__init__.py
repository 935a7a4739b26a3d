"""How much of every layer is live."""

from keras_sparse_ortho.budgets._budget import Budget as Budget
from keras_sparse_ortho.budgets._erdos_renyi import er as er
from keras_sparse_ortho.budgets._erdos_renyi import erk as erk
from keras_sparse_ortho.budgets._uniform import uniform as uniform

__all__ = ["Budget", "er", "erk", "uniform"]
