"""`FixedMask`: a mask that stays as it was set."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._keras_internals import in_stateless_scope
from keras_sparse_ortho.errors import DensityError, NotPrunableError
from keras_sparse_ortho.initializers import SparseInitializer
from keras_sparse_ortho.orthogonal import check_density, largest_mask, live_count
from keras_sparse_ortho.parametrizations._parametrization import Parametrization
from keras_sparse_ortho.parametrizations._prunable_weight import PrunableWeight


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class FixedMask(Parametrization):
    """Effective weight `w_e = w` where the mask is live, and exactly 0 elsewhere.

    The gradient is that of `w_e`: exactly zero on masked entries, so momentum, Adam moments and
    global-norm clipping see a sparse gradient. The raw weight is zero there too, so weight decay,
    saved files and `quantize` are sparse as well. Where the mask comes from, in this order:

    1. `mask`, if given;
    2. the weight's initializer, if it is one of ours (`ExactOrthogonal`, ...): its own mask, with
       the true axes of the layer;
    3. `density`: the `round(density * size)` weights of largest magnitude, ties to the lower flat
       index, as the weight is when the wrapper is built.

    Args:
        density: Live fraction, in (0, 1], or `None`.
        mask: Bool array of the weight's shape, or `None`.

    Raises:
        NotPrunableError: When built, if none of the three applies; if the weight is not finite; or
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

    def __init__(self, density: float | None = None, mask: np.ndarray | None = None) -> None:
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
        self.density = None if density is None else check_density(density)
        self._given = mask
        self._weight: PrunableWeight | None = None
        self.mask: Any = None

    @property
    def weight(self) -> PrunableWeight:
        """The weight it was built for."""
        if self._weight is None:
            raise ValueError("This FixedMask is not built: wrap a layer with it and build that.")
        return self._weight

    def build(self, weight: PrunableWeight, add_weight: Callable[..., Any]) -> None:
        """Creates the mask as a bool variable that is saved with the model."""
        self._weight = weight
        self.mask = add_weight(
            name="mask",
            shape=weight.shape,
            dtype="bool",
            trainable=False,
            # As an initializer, so that a layer built inside a scope that only traces shapes gets
            # its mask when Keras initializes the variables after it.
            initializer=self._initialize,
        )

    def effective(self, value: Any) -> Any:
        """`where(mask, w, 0)`; unlike a product it gives 0 for masked infinities and gradients."""
        return keras.ops.where(self.mask.value, value, keras.ops.zeros((), dtype=value.dtype))

    def mask_value(self) -> np.ndarray:
        """Which entries are live, as a NumPy bool array."""
        return keras.ops.convert_to_numpy(self.mask)

    def assign_mask(self, mask: np.ndarray) -> None:
        """Sets another mask, and the raw weight to zero where it is not live."""
        mask = np.asarray(mask)
        if mask.shape != self.weight.shape or mask.dtype != bool:
            raise ValueError(
                f"The mask of '{self.weight.path}' is a bool array of shape {self.weight.shape}. "
                f"Received: dtype {mask.dtype}, shape {mask.shape}"
            )
        self.mask.assign(mask)
        self.bake()

    def twin(self) -> "FixedMask":
        """An unbuilt FixedMask with the same density and given mask, for another weight."""
        return FixedMask(None if self._given is not None else self.density, self._given)

    def get_config(self) -> dict[str, Any]:
        """The density alone: a given mask is saved as a variable."""
        return {"density": self.density}

    def _initialize(self, shape: tuple[int, ...], dtype: Any = None) -> Any:
        if in_stateless_scope():  # a placeholder, of which Keras only uses the shape
            return keras.ops.zeros(shape, dtype="bool")
        mask = self._initial_mask()
        raw = self.weight.variable
        raw.assign(keras.ops.where(mask, raw.value, keras.ops.zeros((), dtype=raw.dtype)))
        return keras.ops.convert_to_tensor(mask)

    def _initial_mask(self) -> np.ndarray:
        weight = self.weight
        value = weight.raw_value()
        if not np.isfinite(value).all():
            raise NotPrunableError(
                f"The weight '{weight.path}' is not finite and cannot be masked. "
                f"Received: {np.count_nonzero(~np.isfinite(value))} infinite or NaN entries"
            )
        if self._given is not None:
            if self._given.shape != weight.shape:
                raise ValueError(
                    f"The mask for '{weight.path}' must have its shape {weight.shape}. "
                    f"Received: mask of shape {self._given.shape}"
                )
            return self._given
        if isinstance(weight.initializer, SparseInitializer):
            return self._adopt(weight.initializer, value)
        if self.density is None:
            raise NotPrunableError(
                f"FixedMask() has no mask for '{weight.path}': give it a `density` or a `mask`, or "
                "the layer one of our initializers. "
                f"Received: initializer={weight.initializer.__class__.__name__}"
            )
        return largest_mask(np.abs(value), live_count(self.density, value.size))

    def _adopt(self, initializer: SparseInitializer, value: np.ndarray) -> np.ndarray:
        weight = self.weight
        # A layout that the user set holds; else the registry knows the layer's true axes.
        layout = weight.layout if initializer.layout is None else None
        kernel, mask = initializer.sample(weight.shape, layout=layout)
        if self.density is not None and live_count(self.density, mask.size) != mask.sum():
            raise DensityError(
                f"The initializer of '{weight.path}' has a mask of density {mask.mean():.6g}. "
                f"Received: density={self.density!r}"
            )
        if not value[~mask].any():
            return mask
        # Drawn without knowing the layer, along the wrong axes, and not touched since?
        drawn, _ = initializer.sample(weight.shape, weight.variable.dtype)
        if not np.array_equal(drawn.astype(value.dtype), value):
            raise NotPrunableError(
                f"The weight '{weight.path}' has been changed since its initializer drew it, and "
                "the initializer's mask would drop entries that are not zero. An initializer alone "
                "holds no mask: wrap the layer before training, or prune by magnitude with "
                "FixedMask(density) on a layer whose initializer is a usual one, or with "
                "sparsify(model, density, initializer=None). "
                f"Received: {np.count_nonzero(value[~mask])} nonzero entries outside the mask"
            )
        weight.variable.assign(kernel)
        return mask
