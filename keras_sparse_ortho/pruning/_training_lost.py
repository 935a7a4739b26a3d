"""Whether weights that are to be drawn anew have been trained, or loaded, before."""

import warnings
from typing import Any

import numpy as np

from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.kernels import PrunableWeight

# Drawing large kernels again would take as long as the work itself; training changes small ones,
# too.
_MOST_ENTRIES = 2**18


def warn_of_training_lost(model: Any, weights: list[PrunableWeight]) -> None:
    """Warns if the optimizer has stepped, or a kernel is not what its initializer leaves."""
    reason = _steps(model) or _changed(weights)
    if reason:
        warnings.warn(
            "sparsify draws the kernels anew, so that what they hold is lost. To keep trained "
            f"weights and mask them, call keras_sparse_ortho.prune(model, density). {reason}",
            stacklevel=4,
        )


def _steps(model: Any) -> str | None:
    iterations = getattr(getattr(model, "optimizer", None), "iterations", None)
    steps = 0 if iterations is None else int(to_numpy(iterations))
    return f"Received: a model whose optimizer has made {steps} steps" if steps else None


def _changed(weights: list[PrunableWeight]) -> str | None:
    for weight in sorted(weights, key=lambda weight: weight.size):
        initializer = weight.initializer
        # Of others it is not known that they give the same values again.
        seed = getattr(initializer, "seed", None)
        if not isinstance(seed, int) or isinstance(initializer, SparseInitializer):
            continue
        if weight.size > _MOST_ENTRIES:
            return None
        drawn = to_numpy(initializer(weight.shape, dtype=weight.variable.dtype))
        if _are_proportional(drawn, weight.raw_value()):
            return None
        return (
            f"Received: the weight '{weight.path}', which is not what its initializer "
            f"{type(initializer).__name__} leaves"
        )
    return None


def _are_proportional(drawn: np.ndarray, value: np.ndarray) -> bool:
    """Whether two kernels are the same but for a factor.

    EinsumDense draws with the fans of its equation, which its initializer does not show.
    """
    square = np.vdot(drawn, drawn)
    factor = np.vdot(drawn, value) / square if square > 0 else 1.0
    # Of the largest entry: near zero a uniform draw is the difference of larger numbers.
    rounding = 1e-6 * float(np.abs(value).max(initial=0.0))
    return bool(np.abs(drawn * factor - value).max(initial=0.0) <= rounding)
