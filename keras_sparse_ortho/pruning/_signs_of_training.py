"""Whether the kernels of a model are trained, or as their initializers drew them."""

from __future__ import annotations

import keras
import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.initializers import (
    SparseInitializer,
)
from keras_sparse_ortho.kernels import PrunableWeight

# of a kernel that is drawn again; training changes small ones as well
_LARGEST_REDRAWN = 2**18


def signs_of_training(
    model: keras.Model, weights: list[PrunableWeight]
) -> str | None:
    """Signs that the optimizer has stepped, or a kernel is not as its initializer draws it."""
    iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
    if iterations is not None:
        steps = int(to_numpy(iterations))
        if steps > 0:
            return f"Received: a model whose optimizer has made {steps} steps"
    for weight in sorted(weights, key=lambda weight: weight.size):
        initializer = weight.initializer
        # Other initializers may not be reproducible.
        seed = getattr(initializer, "seed", None)
        if not isinstance(seed, int) or isinstance(
            initializer, SparseInitializer
        ):
            continue
        if weight.size > _LARGEST_REDRAWN:
            return None
        drawn = to_numpy(initializer(weight.shape, dtype=weight.variable.dtype))
        if _are_proportional(drawn, weight.raw_value()):
            return None
        return (
            f"Received: the weight {weight.path!r}, which differs from the draw of its initializer "
            f"{type(initializer).__name__}"
        )
    return None


def _are_proportional(drawn: np.ndarray, value: np.ndarray) -> bool:
    """Whether two kernels are equal up to a factor, such as from an equation's fans."""
    square = np.vdot(drawn, drawn)
    factor = 1.0
    if square > 0:
        factor = np.vdot(drawn, value) / square
    # Relative to the largest: small values of a uniform draw are differences of large ones.
    rounding = 1e-6 * float(np.abs(value).max(initial=0.0))
    return np.allclose(drawn * factor, value, rtol=0, atol=rounding)
