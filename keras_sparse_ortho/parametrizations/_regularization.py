"""Weight decay through the loss, on top of a variable's own regularizer."""

from collections.abc import Callable
from typing import Any

import keras

_SUMS_OVER_ENTRIES = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class _Sum(keras.regularizers.Regularizer):  # Keras 3.10 accepts no other callables
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


class _Dense(keras.regularizers.Regularizer):
    """A regularizer of the dense kernel, for its live values."""

    def __init__(self, regularizer: Any, dense: Callable[[Any], Any]) -> None:
        self._regularizer = regularizer
        self._dense = dense

    def __call__(self, values: Any) -> Any:
        return self._regularizer(self._dense(keras.ops.convert_to_tensor(values)))


def of_values(regularizer: Any, dense: Callable[[Any], Any]) -> Any:
    """The regularizer of live values that equals one of the kernel, `dense(values)`."""
    if regularizer is None or type(regularizer) in _SUMS_OVER_ENTRIES:
        return regularizer
    return _Dense(regularizer, dense)
