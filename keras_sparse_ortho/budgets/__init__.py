"""How much of every layer is live."""

from keras_sparse_ortho.budgets._budget import (
    Budget,
    Orthogonal,
    allocate,
    er,
    erk,
    fit_structure,
    lift,
    needs_of,
    str_resnet50,
    uniform,
)

__all__ = ["Budget", "er", "erk", "lift", "str_resnet50", "uniform"]
