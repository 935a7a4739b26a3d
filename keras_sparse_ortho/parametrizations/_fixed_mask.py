"""`FixedMask`: a mask that stays as it was set."""

import zlib
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho._optimizer_slots import zero_slots
from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho._values import assign
from keras_sparse_ortho.errors import DensityError, NotPrunableError
from keras_sparse_ortho.initializers import AnyDraw, Draw, SparseInitializer, adopt, draw
from keras_sparse_ortho.kernels import DenseGradient, PrunableWeight
from keras_sparse_ortho.orthogonal import largest_mask, live_count
from keras_sparse_ortho.parametrizations._parametrization import Masked

_PART = 1 << 16


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class FixedMask(Masked):
    """Effective weight `w_e = w` where the mask is live, and exactly 0 elsewhere.

    The gradient is that of `w_e`: exactly zero on masked entries, so momentum, Adam moments and
    global-norm clipping see a sparse gradient. The raw weight is zero there too, so weight decay,
    saved files and `quantize` are sparse as well. Where the mask comes from, in this order:

    1. `mask`, if given; an `initializer` beside it says what drew the mask;
    2. `initializer`, if given: kernel and mask are drawn again, with the true axes of the layer;
    3. the weight's own initializer, if it is one of ours (`ExactOrthogonal`, ...): its mask;
    4. `density`: the `round(density * size)` largest magnitudes, ties to the lower flat index.

    Args:
        density: Live fraction, in (0, 1], or `None`.
        mask: Bool array of the weight's shape, or `None`.
        initializer: One of our initializers, or `None`.
        drawn_digest: From a configuration: a digest of the weight as it was drawn.

    Raises:
        NotPrunableError: When built, if none of the four applies; if the weight is not finite; or
            if the initializer's mask would drop weights that have been trained.
        DensityError: When built, if `density` contradicts the initializer's or the mask's own.

    Limits: the dense kernel is stored and multiplied; masks save no time in training. `CompactMask`
    stores live entries only.

    Example:

    >>> import keras
    >>> from keras_sparse_ortho import PrunableLayer
    >>> layer = PrunableLayer(keras.layers.Dense(8), FixedMask(0.25))
    >>> layer.build((None, 16))
    >>> int(layer.parametrizations["kernel"].mask_value().sum())
    32
    """

    movable = True

    @other_keywords()
    def __init__(
        self,
        density: float | None = None,
        mask: np.ndarray | None = None,
        initializer: SparseInitializer | None = None,
        *,
        drawn_digest: int | None = None,
    ) -> None:
        super().__init__()
        initializer = keras.initializers.get(initializer)
        if initializer is not None and not isinstance(initializer, SparseInitializer):
            raise ValueError(
                "`initializer` must be one that draws a mask, such as ExactOrthogonal. "
                f"Received: initializer={initializer!r}"
            )
        self.density = None if density is None else check_density(density)
        self.initializer = initializer
        self._given = None if mask is None else self._checked(mask)
        # Then the layer's own initializer did not draw the mask, and in a file stands its density.
        self._was_given = mask is not None
        self._drawn_digest = drawn_digest

    def _checked(self, mask: Any) -> np.ndarray:
        mask = np.asarray(mask)
        live = int(np.count_nonzero(mask))
        if mask.dtype != bool or not live:
            raise ValueError(
                "`mask` must be a bool array with at least one live entry. "
                f"Received: mask of dtype {mask.dtype} with {live} live"
            )
        if self.density is not None and live_count(self.density, mask.size) != live:
            raise DensityError(
                f"`mask` has the density {live / mask.size:.6g}. Received: density={self.density!r}"
            )
        self.density = live / mask.size
        return mask

    def clone(self) -> "FixedMask":
        new = self._like(None if self._given is not None else self.density, self._given)
        new._was_given = self._was_given
        return new

    def of_class(self, kind: type["FixedMask"]) -> "FixedMask":
        """An unbuilt one of a class, which says how it is stored, with the same settings."""
        density = None if self._given is not None else self.density
        return kind(density, self._given, self.initializer)

    def for_density(self, density: float) -> "FixedMask":
        return self._like(density)

    def without_given(self) -> "FixedMask":
        if self._given is None:
            return self
        new = self._like(self.density)
        new._was_given = True
        return new

    def _like(self, density: float | None, mask: np.ndarray | None = None) -> "FixedMask":
        return type(self)(density, mask, self.initializer)

    def get_config(self) -> dict[str, Any]:
        initializer = self.initializer
        if initializer is not None:
            initializer = keras.initializers.serialize(initializer)
        config = {"density": self.density, "initializer": initializer}
        if self._drawn_digest is not None:
            config["drawn_digest"] = self._drawn_digest
        if self._was_given:
            config["mask_given"] = True
        return config

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "FixedMask":
        config = dict(config)
        was_given = config.pop("mask_given", False)
        new = cls(**config)
        new._was_given = was_given is True
        return new

    def mark_as_drawn(self, kernel: Any = None) -> None:
        """Notes that the raw weight is what its initializer has drawn.

        Args:
            kernel: What was drawn, where it is at hand: as an array it need not be fetched then.
        """
        if not isinstance(kernel, np.ndarray) or kernel.dtype.name != self.weight.variable.dtype:
            kernel = self.weight.raw_value(copy=False)
        self._drawn_digest = digest(kernel)

    def is_as_drawn(self) -> bool:
        drawn = self._drawn_digest
        return drawn is not None and drawn == digest(self.weight.raw_value(copy=False))

    def move(self, live: Any, optimizer: Any) -> None:
        """Sets another mask; grown entries start from zero, whatever was written under the mask."""
        changed = live ^ self.mask_value()
        self.assign_mask(live)
        zero_slots(optimizer, self.weight.variable, changed)

    def dense_gradient(self) -> DenseGradient:
        """With a mask of all live entries the gradient of the raw weight is the dense one."""
        return DenseGradient(
            variables=[self.weight.variable],
            values=lambda: [self.effective(self.weight.variable.value)],
            collect=lambda gradient: gradient,
            held=((self.mask, np.broadcast_to(True, self.shape)),),
        )

    @property
    def drawn_by(self) -> SparseInitializer | None:
        drawn_by = self.initializer
        if drawn_by is None and not self._was_given:
            drawn_by = self.weight.initializer
        return drawn_by if isinstance(drawn_by, SparseInitializer) else None

    def resolve(self, weight: PrunableWeight) -> AnyDraw:
        """The mask for a weight, by the four rules above; the weight is not changed."""
        if self._given is not None:
            if self._given.shape != weight.shape:
                raise ValueError(
                    f"The mask for '{weight.path}' must have its shape {weight.shape}. "
                    f"Received: mask of shape {self._given.shape}"
                )
            return Draw(self._given, None, self.initializer)
        if self.initializer is not None:
            return draw(weight, self.initializer)
        if isinstance(weight.initializer, SparseInitializer) and not self._was_given:
            drawn = adopt(weight, weight.initializer)
            live = int(np.count_nonzero(drawn.mask))
            if self.density is not None and live_count(self.density, drawn.mask.size) != live:
                raise DensityError(
                    f"The initializer of '{weight.path}' has a mask of density "
                    f"{live / drawn.mask.size:.6g}. Received: density={self.density!r}"
                )
            return drawn
        value = weight.finite_raw_value()
        if self.density is None:
            raise NotPrunableError(
                f"FixedMask() has no mask for '{weight.path}': give it a `density` or a `mask`, or "
                "the layer one of our initializers. "
                f"Received: initializer={weight.initializer.__class__.__name__}"
            )
        return Draw(largest_mask(np.abs(value), live_count(self.density, value.size)))

    def _initial_mask(self) -> np.ndarray:
        drawn = self.resolve(self.weight)
        self._given = None  # from here on the variable holds it
        if drawn.kernel is not None:
            assign(self.weight.variable, drawn.kernel)
        if drawn.fresh:
            self.mark_as_drawn()
        return drawn.mask


def digest(value: np.ndarray) -> int:
    """A number that tells whether a weight has changed in any bit."""
    flat, found = np.ascontiguousarray(value).reshape(-1), 0
    # In parts: a new array of the size of a kernel takes longer to get than to fill.
    for start in range(0, flat.size, _PART):
        # The sum turns -0.0, which a mask writes as 0.0, into that.
        found = zlib.crc32((flat[start : start + _PART] + 0.0).data, found)
    return found
