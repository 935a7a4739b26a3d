"""`FixedMask`: a mask that stays as it was set."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho.errors import DensityError, NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.orthogonal import largest_mask, live_count
from keras_sparse_ortho.parametrizations._adoption import adopt_mask, true_layout
from keras_sparse_ortho.parametrizations._masked import Masked


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class FixedMask(Masked):
    """Effective weight `w_e = w` where the mask is live, and exactly 0 elsewhere.

    The gradient is that of `w_e`: exactly zero on masked entries, so momentum, Adam moments and
    global-norm clipping see a sparse gradient. The raw weight is zero there too, so weight decay,
    saved files and `quantize` are sparse as well. Where the mask comes from, in this order:

    1. `mask`, if given;
    2. `initializer`, if given: kernel and mask are drawn anew, with the true axes of the layer;
    3. the weight's own initializer, if it is one of ours (`ExactOrthogonal`, ...): its mask, with
       the true axes of the layer;
    4. `density`: the `round(density * size)` weights of largest magnitude, ties to the lower flat
       index, as the weight is when the wrapper is built.

    Args:
        density: Live fraction, in (0, 1], or `None`.
        mask: Bool array of the weight's shape, or `None`.
        initializer: One of our initializers, or `None`.

    Raises:
        NotPrunableError: When built, if none of the four applies; if the weight is not finite; or
            if the initializer's mask would drop weights that have been trained.
        DensityError: When built, if `density` contradicts the initializer's or the mask's own.

    Limits: the dense kernel is stored and multiplied; masks save no time in training.

    Example:

    >>> import keras
    >>> from keras_sparse_ortho import PrunableLayer
    >>> layer = PrunableLayer(keras.layers.Dense(8), FixedMask(0.25))
    >>> layer.build((None, 16))
    >>> int(layer.parametrizations["kernel"].mask_value().sum())
    32
    """

    def __init__(
        self,
        density: float | None = None,
        mask: np.ndarray | None = None,
        initializer: SparseInitializer | None = None,
    ) -> None:
        initializer = keras.initializers.get(initializer)
        if initializer is not None and not isinstance(initializer, SparseInitializer):
            raise ValueError(
                "`initializer` must be one that draws a mask, such as ExactOrthogonal. "
                f"Received: initializer={initializer!r}"
            )
        if mask is not None:
            mask = np.asarray(mask)
            if mask.dtype != bool or not mask.any():
                raise ValueError(
                    "`mask` must be a bool array with at least one live entry. "
                    f"Received: mask of dtype {mask.dtype} with {np.count_nonzero(mask)} live"
                )
            share = np.count_nonzero(mask) / mask.size
            if density is not None and live_count(density, mask.size) != np.count_nonzero(mask):
                raise DensityError(
                    f"`mask` has the density {share:.6g}. Received: density={density!r}"
                )
            density = share
        super().__init__()
        self.density = None if density is None else check_density(density)
        self.initializer = initializer
        self._given = mask

    def twin(self) -> "FixedMask":
        """An unbuilt FixedMask with the same settings and given mask, for another weight."""
        density = None if self._given is not None else self.density
        return FixedMask(density, self._given, self.initializer)

    def for_density(self, density: float) -> "FixedMask":
        """An unbuilt FixedMask of this density."""
        return FixedMask(density, initializer=self.initializer)

    def get_config(self) -> dict[str, Any]:
        """Density and initializer: a given mask is saved as a variable, and its density."""
        initializer = self.initializer
        if initializer is not None:
            initializer = keras.initializers.serialize(initializer)
        return {"density": self.density, "initializer": initializer}

    def _initial_mask(self) -> np.ndarray:
        weight = self.weight
        value = weight.finite_raw_value()
        if self._given is not None:
            if self._given.shape != weight.shape:
                raise ValueError(
                    f"The mask for '{weight.path}' must have its shape {weight.shape}. "
                    f"Received: mask of shape {self._given.shape}"
                )
            return self._given
        if self.initializer is not None:
            layout = true_layout(weight, self.initializer)
            kernel, mask = self.initializer.sample(weight.shape, layout=layout)
            weight.variable.assign(kernel)
            return mask
        if isinstance(weight.initializer, SparseInitializer):
            return self._adopt(weight.initializer)
        if self.density is None:
            raise NotPrunableError(
                f"FixedMask() has no mask for '{weight.path}': give it a `density` or a `mask`, or "
                "the layer one of our initializers. "
                f"Received: initializer={weight.initializer.__class__.__name__}"
            )
        return largest_mask(np.abs(value), live_count(self.density, value.size))

    def _adopt(self, initializer: SparseInitializer) -> np.ndarray:
        mask, kernel = adopt_mask(self.weight, initializer)
        if self.density is not None and live_count(self.density, mask.size) != mask.sum():
            raise DensityError(
                f"The initializer of '{self.weight.path}' has a mask of density "
                f"{mask.mean():.6g}. Received: density={self.density!r}"
            )
        if kernel is not None:
            self.weight.variable.assign(kernel)
        return mask
