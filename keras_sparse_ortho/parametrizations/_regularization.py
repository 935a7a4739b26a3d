"""Weight decay through the loss, on top of what a variable has."""

from typing import Any

import keras


class _Sum(keras.regularizers.Regularizer):  # Keras 3.10 takes no other callables
    """The sum of two regularizers."""

    def __init__(self, first: Any, second: Any) -> None:
        self._terms = (first, second)

    def __call__(self, value: Any) -> Any:
        return self._terms[0](value) + self._terms[1](value)


def add_weight_decay(variable: Any, strength: float) -> None:
    """Adds `strength / 2 * sum(variable ** 2)` to the loss of every model with the variable.

    Its gradient is `strength * variable`, the L2 of papers on pruning; Keras' own `L2(c)` is
    `c * sum(variable ** 2)`. A regularizer that the variable has stays.
    """
    decay = keras.regularizers.L2(strength / 2)
    own = variable.regularizer
    variable.regularizer = decay if own is None else _Sum(own, decay)
