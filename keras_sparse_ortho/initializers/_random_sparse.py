"""`RandomSparse`: any Keras initializer times a random mask of exact count."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_density
from keras_sparse_ortho._other_names import other_keywords
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.initializers._sparse_initializer import (
    LayoutLike,
    SparseInitializer,
    numpy_dtype,
)
from keras_sparse_ortho.orthogonal import KernelLayout, live_count, unmask_at_random


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class RandomSparse(SparseInitializer):
    """A dense initialization times a uniformly random mask: the "base" of comparisons.

    `K = W * M` with `W` from `initializer` and exactly `round(density * size)` live entries in
    `M`. With `rescale=True` every output `o` is scaled by `sqrt(fan_in / live_o)`, its own live
    fan-in, so that its pre-activation keeps the variance that the dense initializer gave it.

    Args:
        density: Live fraction, in (0, 1]. `None` as a pattern for `sparsify`, which sets it.
        initializer: Keras initializer (name, instance or config) of the dense kernel.
        seed: Integer or `None` (drawn now), for the mask; the same integer gives the same mask on
            every backend. The values are those of `initializer` with its own seed.
        rescale: Whether to scale by the fan-in density.
        layout: Meaning of the axes, used by `rescale`; see `ExactOrthogonal`.

    Limits: the kernel is not orthogonal, and at low density outputs may have no live input; see
    `ExactOrthogonal`.

    Example:

    >>> kernel, mask = RandomSparse(0.25, "glorot_uniform", seed=3).sample((8, 16))
    >>> int(mask.sum())
    32
    """

    @other_keywords()
    def __init__(
        self,
        density: float | None = None,
        initializer: Any = "glorot_uniform",
        seed: int | None = None,
        *,
        rescale: bool = False,
        layout: LayoutLike = None,
    ) -> None:
        super().__init__(seed, layout)
        self.density = None if density is None else check_density(density)
        self.initializer = keras.initializers.get(initializer)
        self.rescale = bool(rescale)
        if isinstance(self.initializer, SparseInitializer) or self.initializer is None:
            raise ValueError(
                "`initializer` must be a dense Keras initializer. "
                f"Received: initializer={initializer!r}"
            )

    def sample(
        self, shape: Sequence[int], dtype: Any = None, layout: KernelLayout | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        shape = tuple(int(size) for size in shape)
        target = numpy_dtype(dtype)
        density = self.need_density(self.density)
        rng = np.random.default_rng(self._draw_seed)
        mask = np.zeros(shape, dtype=bool)
        unmask_at_random(mask, live_count(density, mask.size), rng)
        # In float32: float16 layers get the same values, rounded.
        wide = "float64" if target == np.float64 else "float32"
        layout = self.resolve_layout(shape, layout)
        dense = _with_fans_of(layout, len(shape), self.initializer)
        kernel = to_numpy(dense(shape, dtype=wide)) * mask
        if self.rescale:
            layout = layout or KernelLayout.convolution()
            live = layout.to_canonical(mask)
            fans = live.sum(axis=tuple(range(2, live.ndim - 1)), keepdims=True)
            scale = np.sqrt(live.size // fans.size / np.maximum(fans, 1))
            kernel = kernel * layout.from_canonical(np.broadcast_to(scale, live.shape), shape)
        return kernel.astype(target), mask

    def at_density(
        self, density: float, seed: int, shape: Sequence[int], layout: KernelLayout | None = None
    ) -> "RandomSparse":
        """The dense initializer gets the seed, too."""
        config = self.get_config()
        dense = config["initializer"]
        if "seed" in dense["config"]:
            dense = {**dense, "config": {**dense["config"], "seed": seed}}
        return self.from_config({**config, "density": density, "seed": seed, "initializer": dense})

    def get_config(self) -> dict[str, Any]:
        return {
            **super().get_config(),
            "density": self.density,
            "initializer": keras.initializers.serialize(self.initializer),
            "rescale": self.rescale,
        }


def _with_fans_of(layout: KernelLayout | None, rank: int, dense: Any) -> Any:
    """The dense initializer with the fans of a layout, as newer versions of Keras use them."""
    if layout is None or layout.batch or rank != len(layout.inputs) + len(layout.outputs):
        return dense
    config = dense.get_config() if isinstance(dense, keras.initializers.VarianceScaling) else {}
    if rank < 3 or config.get("input_axes", ()) is not None:
        return dense
    axes = {"input_axes": list(layout.inputs), "output_axes": list(layout.outputs)}
    return type(dense).from_config({**config, "seed": dense.seed, **axes})
