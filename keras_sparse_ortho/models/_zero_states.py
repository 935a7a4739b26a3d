"""Stateful recurrent layers in calls that the user did not make."""

import contextlib
from collections.abc import Iterator
from typing import Any

import keras

from keras_sparse_ortho._keras_internals import replaced
from keras_sparse_ortho.kernels import walk


@contextlib.contextmanager
def from_zero_states(model: Any) -> Iterator[None]:
    """Inside, every call of a model starts its recurrent layers from zeros.

    Stateful layers keep the states that they have, and accept any batch size: with `stateful=True`
    Keras refuses all but the one they were built for.
    """
    with contextlib.ExitStack() as stack:
        for layer, _ in walk(model, ""):
            if isinstance(layer, keras.layers.RNN) and layer.stateful:
                stack.enter_context(replaced(layer, "stateful", False))
        yield
