"""Variables that refuse arrays which are not indices of their layer, whoever assigns them."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals._graphs import own_variables

Read = Callable[[Any], np.ndarray]
"""Gives the array that a variable has, or is to get."""


def check_assignments(variable: Any, check: Callable[[Read], None]) -> None:
    """Lets a variable check the arrays that are assigned to it.

    Keras' `set_weights`, of a model as of a layer, and its default `load_own_variables` assign one
    variable after the other, and ask no layer. Tensors are not checked: they are the package's
    own, or Keras' on its way out of a compiled step.

    Args:
        variable: The variable.
        check: Raises ValueError for what is no value; called with what reads arrays.
    """
    vars(variable)["assign"] = _CheckedAssignment(variable, check)


def check_given(variables: Sequence[Any], values: Sequence[Any]) -> None:
    """Checks the arrays for all variables of a layer before the first is assigned."""
    if len(variables) != len(values):
        return  # Keras says so
    given = {id(v): value for v, value in zip(variables, values, strict=True)}
    for variable in variables:
        if (check := check_of(variable)) is not None:
            check(lambda other: _array(given[id(other)]))


def check_stored(layer: Any, store: Any) -> None:
    """The same for a file in which the layer's own variables are numbered."""
    own = own_variables(layer)
    numbers = [str(number) for number in range(len(own))]
    found = list(store.keys())
    if len(found) != len(own):
        return  # Keras says so
    if set(found) != set(numbers):
        raise ValueError(
            f"The file must have the variables {', '.join(numbers)} for the layer '{layer.name}'; "
            f"it is damaged. Received: {', '.join(found)}"
        )
    check_given(own, [store[number] for number in numbers])


def check_of(variable: Any) -> Callable[[Read], None] | None:
    """The check of a variable that has one."""
    checked = vars(variable).get("assign")
    return checked.check if isinstance(checked, _CheckedAssignment) else None


class _CheckedAssignment:
    """The `assign` of one variable. An object, which copies of models can copy."""

    def __init__(self, variable: Any, check: Callable[[Read], None]) -> None:
        self.variable = variable
        self.check = check

    def __call__(self, value: Any) -> Any:
        if not (keras.ops.is_tensor(value) or isinstance(value, keras.Variable)):
            array = np.asarray(value)
            self.check(lambda other: array if other is self.variable else _array(other))
        return type(self.variable).assign(self.variable, value)


def _array(value: Any) -> np.ndarray:
    is_held = keras.ops.is_tensor(value) or isinstance(value, keras.Variable)
    return keras.ops.convert_to_numpy(value) if is_held else np.asarray(value)
