"""`apply_masks`: given masks on the weights as they are."""

from collections.abc import Mapping

import keras
import numpy as np

from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError
from keras_sparse_ortho.models import prunable_weights, refuse_unfit
from keras_sparse_ortho.parametrizations import FixedMask
from keras_sparse_ortho.pruning._wrapping import wrap
from keras_sparse_ortho.saliency import Saliency


def apply_masks(
    model: keras.Model,
    masks: Mapping[str, np.ndarray] | Saliency,
    kernels: Mapping[str, np.ndarray] | None = None,
) -> keras.Model:
    """Gives kernels fixed masks: `w_e = w` where a mask is live, and 0 elsewhere.

    Args:
        model: A built Keras 3 model: Sequential, functional, nested, or written as a class.
        masks: From weight path to a bool array of its shape, or a `Saliency`. Kernels that are not
            named stay dense.
        kernels: From weight path to new values, such as those that an initializer found for the
            mask. The other weights keep theirs.

    Returns:
        A new model, not compiled. A model written as a class cannot be cloned: its layers are
        wrapped in place, it is returned itself, and is to be compiled again.

    Raises:
        NotPrunableError: A mask without live entries (layer collapse), of another shape or type;
            weights that are wrapped already or not finite.
        UnknownWeightError: A path that no weight has.

    Example:

    >>> import keras
    >>> import keras_sparse_ortho as kso
    >>> dense = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, name="a")])
    >>> model = apply_masks(dense, kso.saliency.magnitude(dense, 0.25))
    >>> kso.prunable_weights(model, flops=False)
    [<a/kernel shape=(8, 4), density=0.25>]
    """
    table = masks.masks if isinstance(masks, Saliency) else masks
    known = {weight.path: weight for weight in prunable_weights(model, flops=False)}
    for path in (*table, *(kernels or {})):
        if path not in known or path not in table:
            raise UnknownWeightError(
                "`masks` must name prunable weights, and `kernels` some of them. There are: "
                f"{', '.join(known) or 'none'}. Received: {path!r}"
            )
    for path, mask in table.items():
        mask = np.asarray(mask)
        if mask.dtype != bool or mask.shape != known[path].shape or not mask.any():
            raise NotPrunableError(
                f"The mask of '{path}' must be a bool array of shape {known[path].shape} with at "
                f"least one live entry. Received: dtype {mask.dtype}, shape {mask.shape}, "
                f"{np.count_nonzero(mask)} live"
            )
    weights = [known[path] for path in known if path in table]
    refuse_unfit(model, weights, "no kernel that is named by `masks`")
    return wrap(model, weights, {p: FixedMask(mask=m) for p, m in table.items()}, kernels)
