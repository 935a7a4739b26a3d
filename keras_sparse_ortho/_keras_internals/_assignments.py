"""Variables that check the arrays assigned to them."""

from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np

from keras_sparse_ortho._keras_internals._layers import (
    own_variables,
)
from keras_sparse_ortho._types import TensorLike

Read = Callable[[keras.Variable], np.ndarray]
"""Gives the array that a variable has, or will get."""

Check = Callable[[Read], None]


def check_assignments(variable: keras.Variable, check: Check) -> None:
    """Lets a variable check arrays assigned to it; `check` gets a reader, and raises ValueError.

    Keras' `set_weights` and `load_own_variables` ask no layer. Tensors are not checked: they are
    the package's own, or of a compiled step.
    """
    vars(variable)["assign"] = _CheckedAssignment(variable, check)


def check_given(
    variables: Sequence[keras.Variable], values: Sequence[TensorLike]
) -> None:
    """Checks the arrays for all variables of a layer before the first is assigned."""
    if len(variables) != len(values):
        return  # Keras says so
    new_values = {
        id(variable): value
        for variable, value in zip(variables, values, strict=True)
    }

    def read(variable: keras.Variable) -> np.ndarray:
        return _array(new_values[id(variable)])

    for variable in variables:
        check = check_of(variable)
        if check is not None:
            check(read)


def check_stored(
    layer: keras.layers.Layer, store: Mapping[str, TensorLike]
) -> None:
    """The same for a file in which the layer's own variables are numbered."""
    variables = own_variables(layer)
    numbers = [str(number) for number in range(len(variables))]
    names = list(store.keys())
    if len(names) != len(variables):
        return  # Keras says so
    if set(names) != set(numbers):
        raise ValueError(
            f"The file must have the variables {', '.join(numbers)} for the layer {layer.name!r}; "
            f"it is damaged. Received: {', '.join(names)}"
        )
    check_given(variables, [store[number] for number in numbers])


def check_of(variable: keras.Variable) -> Check | None:
    """The check of a variable's assignments, or `None`."""
    assign = vars(variable).get("assign")
    if not isinstance(assign, _CheckedAssignment):
        return None
    return assign.check


class _CheckedAssignment:
    """The `assign` of one variable. An object, which copies of models can copy."""

    def __init__(self, variable: keras.Variable, check: Check) -> None:
        self.variable = variable
        self.check = check

    def __call__(self, value: TensorLike) -> object:
        if not _is_tensor(value):
            array = np.asarray(value)

            def read(variable: keras.Variable) -> np.ndarray:
                return array if variable is self.variable else _array(variable)

            self.check(read)
        return type(self.variable).assign(self.variable, value)


def _array(value: TensorLike) -> np.ndarray:
    if _is_tensor(value):
        return keras.ops.convert_to_numpy(value)
    return np.asarray(value)


def _is_tensor(value: TensorLike) -> bool:
    return isinstance(value, keras.Variable) or bool(keras.ops.is_tensor(value))
