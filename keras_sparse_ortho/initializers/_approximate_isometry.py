"""`ApproximateIsometry`: kernels as orthogonal as their mask allows (AI)."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_density, check_number
from keras_sparse_ortho._keras_internals import restored
from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.initializers._sparse_initializer import (
    LayoutLike,
    SparseInitializer,
    numpy_dtype,
)
from keras_sparse_ortho.orthogonal import (
    KernelLayout,
    approximate_isometry,
    check_stops,
    live_count,
    unmask_at_random,
)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class ApproximateIsometry(SparseInitializer):
    """Kernels with a random or given mask, made as orthogonal as the mask allows (AI).

    Draws a mask of exactly `round(density * size)` live entries with normal values; then minimises
    `||W W^T - gain^2 I||_F^2` (the smaller Gram matrix) over the live entries by L-BFGS; see
    `keras_sparse_ortho.orthogonal.approximate_isometry`.

    Args:
        density: Live fraction, in (0, 1]. `None` with `mask`.
        gain: Scale of the kernel, positive.
        seed: Integer or `None` (drawn now), for mask and start.
        mask: Bool array: the mask to use, for kernels of its shape; `None` draws one.
        max_iterations: Most iterations of L-BFGS.
        tolerance: Relative error of the Gram matrix to stop at.
        min_decrease: Stops when an iteration lowers the squared error by less than this fraction.
        layout: Meaning of the axes; see `ExactOrthogonal`.

    Raises:
        DensityError: A density outside (0, 1]; both `density` and `mask`, or neither.
        ValueError: At a call, for a shape that is not that of the mask.

    Limits: slow and, at low density, far from an isometry. A seed gives the same mask everywhere,
    but values differ between machines as their BLAS does. Every draw runs the minimisation: as the
    initializer of a layer it runs in `build`, and again when its mask is adopted;
    `sparsify(model, density, initializer=ApproximateIsometry(1.0))` runs it once. A given mask is
    stored in the config entry by entry.

    Example:

    >>> kernel, mask = ApproximateIsometry(0.5, seed=1).sample((16, 32))
    >>> int(mask.sum()), bool(np.allclose(kernel @ kernel.T, np.eye(16), atol=1e-3))
    (256, True)

    Reference: as for `approximate_isometry`, Lee et al. (ICLR 2020).
    """

    isometry = "approximate"

    @other_keywords()
    def __init__(
        self,
        density: float | None,
        gain: float = 1.0,
        seed: int | None = None,
        *,
        mask: np.ndarray | None = None,
        max_iterations: int = 1000,
        tolerance: float = 1e-5,
        min_decrease: float = 1e-6,
        layout: LayoutLike = None,
    ) -> None:
        super().__init__(seed, layout)
        if isinstance(mask, dict):
            mask = restored(mask)
        if mask is not None:
            mask = np.array(mask)
            if mask.dtype != bool or not mask.any():
                raise ValueError(
                    "`mask` must be a bool array with at least one live entry. "
                    f"Received: mask of dtype {mask.dtype} with {np.count_nonzero(mask)} live"
                )
            if density is not None:
                raise DensityError(
                    "`density` must be None with a `mask`, which has its own. "
                    f"Received: density={density!r}"
                )
        else:
            density = check_density(density)
        self.gain = check_number("gain", gain)
        if self.gain <= 0:
            raise ValueError(f"`gain` must be positive. Received: {gain=}")
        self.tolerance = check_number("tolerance", tolerance)
        self.min_decrease = check_number("min_decrease", min_decrease)
        check_stops(max_iterations, self.tolerance, self.min_decrease)
        self.density = density
        self.mask = mask
        self.max_iterations = int(max_iterations)

    def sample(
        self, shape: Sequence[int], dtype: Any = None, layout: KernelLayout | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        shape = tuple(int(size) for size in shape)
        target = numpy_dtype(dtype)
        layout = self.resolve_layout(shape, layout) or KernelLayout.convolution()
        batch, parts, *rows, columns = layout.canonical_shape(shape)
        rng = np.random.default_rng(self._draw_seed)
        if self.mask is None:
            assert self.density is not None
            mask = np.zeros(shape, dtype=bool)
            unmask_at_random(mask, live_count(self.density, mask.size), rng)
        elif self.mask.shape == shape:
            mask = self.mask.copy()
        else:
            raise ValueError(
                f"The `mask` is for kernels of shape {self.mask.shape}. Received: shape={shape}"
            )
        # The vectors along the shorter side start with norms of about `gain`.
        vectors = batch * parts * min(int(np.prod(rows)), columns)
        start = rng.normal(size=shape, scale=self.gain * np.sqrt(vectors / mask.sum()))
        kernel = approximate_isometry(
            start,
            mask,
            gain=self.gain,
            layout=layout,
            max_iterations=self.max_iterations,
            tolerance=self.tolerance,
            min_decrease=self.min_decrease,
        )
        return kernel.astype(target), mask

    def at_density(
        self, density: float, seed: int, shape: Sequence[int], layout: KernelLayout | None = None
    ) -> "ApproximateIsometry":
        if self.mask is not None:
            raise DensityError(
                "An ApproximateIsometry with a `mask` has no density for a budget to set. Use it "
                "as the initializer of the layer, and call keras_sparse_ortho.apply_masks(model). "
                f"Received: density={density:.6g}, mask of shape {self.mask.shape}"
            )
        return self.from_config({**self.get_config(), "density": density, "seed": seed})

    def get_config(self) -> dict[str, Any]:
        names = ("density", "gain", "max_iterations", "tolerance", "min_decrease")
        own = {name: getattr(self, name) for name in names}
        mask = keras.saving.serialize_keras_object(self.mask)
        return {**super().get_config(), **own, "mask": mask}
