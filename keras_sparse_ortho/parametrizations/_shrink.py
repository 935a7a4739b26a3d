"""The soft threshold as one operation with its own gradient."""

from typing import Any

import keras


def shrink(value: Any, threshold: Any) -> Any:
    """`sign(w) * relu(|w| - t)`: exactly 0 where `|w| <= t`, with its own gradients.

        dL/dw = dL/dw_e where w_e is not 0, else 0
        dL/dt = -sum(dL/dw_e * sign(w_e))

    Written out, as differentiating the formula keeps more of it in memory and reads it more often;
    the sum over the kernel is what it costs more than a mask.

    Args:
        value: The tensor `w`.
        threshold: `t >= 0`, a scalar, or of the rank of `w` with dimensions that broadcast.
    """
    ops = keras.ops
    scalar = len(threshold.shape) == 0
    axes = [k for k, size in enumerate(threshold.shape) if size != value.shape[k]]

    @ops.custom_gradient
    def shrunk(w: Any, t: Any) -> tuple[Any, Any]:
        # As a difference, which is 0 for w = t = 0: an entry frozen at 0 gets no gradient.
        effective = w - ops.clip(w, -t, t)

        def gradient(*args: Any, upstream: Any = None) -> tuple[Any, Any]:
            if upstream is None:
                (upstream,) = args
            live = ops.where(effective != 0, upstream, ops.zeros((), dtype=w.dtype))
            terms = upstream * ops.sign(effective)
            if not scalar:
                return live, -ops.sum(terms, axis=axes, keepdims=True)
            # In two steps: on CPUs XLA is slow to sum to a scalar, and makes one step of two sums.
            columns = ops.sum(ops.reshape(terms, (-1, terms.shape[-1])), axis=0)
            return live, -ops.dot(columns, ops.ones_like(columns))

        return effective, gradient

    # TensorFlow would ask for the gradient of a variable as one that the function hides; a reshape
    # makes a tensor of it without a copy.
    return shrunk(ops.reshape(value, value.shape), ops.reshape(threshold, threshold.shape))
