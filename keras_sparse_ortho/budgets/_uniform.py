"""The uniform budget: the same density everywhere."""

from typing import Any

from keras_sparse_ortho.budgets._allocation import allocate
from keras_sparse_ortho.budgets._budget import Budget
from keras_sparse_ortho.kernels import Selection, choose
from keras_sparse_ortho.models import weights_of


def uniform(
    model: Any,
    density: float,
    *,
    dense_first: bool = False,
    dense_last: bool = False,
    include: Selection = None,
    exclude: Selection = None,
    orthogonal: bool = True,
) -> Budget:
    """Every weight has the same density `d`.

    With `dense_first` or `dense_last` those weights stay dense, and the others share what is
    left, so that the global density is still `density`.

    Args:
        model: A built Keras model, or a list of `PrunableWeight`.
        density: Global live fraction over the selected weights, in (0, 1]; the total is exactly
            `round(density * size)`.
        dense_first: Whether the first weight stays dense.
        dense_last: Whether the last weight stays dense.
        include: Which weights: paths, layers, regular expressions or a predicate. Default: all.
        exclude: Which weights not.
        orthogonal: Whether weights are lifted to the least density of an orthogonal kernel.

    Raises:
        BudgetError: A global density that the bounds do not allow.

    Example:

    >>> import keras
    >>> model = keras.Sequential([keras.Input((20,)), keras.layers.Dense(10, name="a"),
    ...                           keras.layers.Dense(10, name="b")])
    >>> uniform(model, 0.5)
    <Budget of 2 weights, density 0.5, 150 of 300 live
      a/kernel  0.5         100 of 200
      b/kernel  0.5         50 of 100>
    """
    weights = choose(weights_of(model), include, exclude)
    ends = [*(weights[:1] if dense_first else []), *(weights[-1:] if dense_last else [])]
    dense = [weight.path for weight in ends]
    relative = [1.0] * len(weights)
    return allocate(weights, density, relative, orthogonal=orthogonal, dense=dense)
