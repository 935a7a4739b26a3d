"""Taking over the mask that a weight's initializer drew."""

import numpy as np

from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import KernelLayout, SparseInitializer
from keras_sparse_ortho.kernels import PrunableWeight


def true_layout(weight: PrunableWeight, initializer: SparseInitializer) -> KernelLayout | None:
    """A layout that the user set holds; else the registry knows the layer's axes."""
    return weight.layout if initializer.layout is None else None


def adopt_mask(
    weight: PrunableWeight, initializer: SparseInitializer
) -> tuple[np.ndarray, np.ndarray | None]:
    """The mask that `initializer` drew for a weight, and a kernel to put there, or `None`.

    There is a kernel to put if the initializer, which sees only a shape, drew along the wrong
    axes, and the weight has not been touched since: the one along the layer's true axes.

    Raises:
        NotPrunableError: A weight that was changed, so that the mask would drop nonzero entries.
    """
    value = weight.raw_value()
    layout = true_layout(weight, initializer)
    kernel, mask = initializer.sample(weight.shape, layout=layout)
    if layout not in (None, KernelLayout.convolution()):
        drawn, _ = initializer.sample(weight.shape, weight.variable.dtype)
        if np.array_equal(drawn.astype(value.dtype), value):
            return mask, kernel
    if not value[~mask].any():
        return mask, None
    raise NotPrunableError(
        f"The weight '{weight.path}' has been changed since its initializer drew it, and the "
        "initializer's mask would drop entries that are not zero. An initializer alone holds no "
        "mask: wrap the layer before training, or prune by magnitude with "
        "sparsify(model, density, initializer=None). "
        f"Received: {np.count_nonzero(value[~mask])} nonzero entries outside the mask"
    )
