"""`lift`: a budget of another method made possible for exactly orthogonal kernels."""

from typing import Any

from keras_sparse_ortho.budgets._allocation import allocate
from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.models import weights_of


def lift(model: Any, budget: Budget) -> Budget:
    """The budget nearest to another one that exactly orthogonal kernels can have.

    An orthogonal kernel cannot be sparser than `least_density` of its shape, and methods that
    learn or score densities know nothing of that. Here weight `k` gets
    `clip(scale * density_k * size_k, least_k, size_k)` live entries, with the one `scale` that
    keeps the global count: weights below their least density get it, and the rest pays in
    proportion. `Budget.lifted` names those that were lifted.

    Args:
        model: A built Keras model, or a list of `PrunableWeight`, with the weights of the budget.
        budget: Densities, e.g. those that STR, SNIP or a published table ends with.

    Raises:
        BudgetError: A budget for other weights; a global count below what orthogonal kernels need.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> model = keras.Sequential([keras.Input((100,)), keras.layers.Dense(100, name="a"),
    ...                           keras.layers.Dense(10, name="b")])
    >>> lift(model, kso.Budget({"a/kernel": 0.002, "b/kernel": 0.5}))
    <Budget of 2 weights, density 0.0472727, 520 of 11000 live
      a/kernel  0.01        100 of 10000  (lifted to the least orthogonal density)
      b/kernel  0.42        420 of 1000>
    """
    weights = [weight for weight in weights_of(model) if weight.path in budget]
    plan = budget.for_weights(weights)
    relative = [plan[weight.path] for weight in weights]
    return allocate(weights, plan.live / plan.size, relative, orthogonal=True)
