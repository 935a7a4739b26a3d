"""Baselines of EOI: random masks (`RandomSparse`), SAO and AI."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from keras_sparse_ortho._checks import check_density, check_integer, check_number, other_keywords
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.initializers._sparse_initializer import (
    Layout,
    LayoutLike,
    Sampled,
    SparseInitializer,
    numpy_dtype,
)
from keras_sparse_ortho.orthogonal import (
    KernelLayout,
    approximate_isometry,
    center_of,
    depthwise_outputs,
    floored_mask,
    least_count,
    live_count,
    random_orthogonal,
    unmask_at_random,
)


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class RandomSparse(SparseInitializer):
    """A dense initialization times a uniformly random mask: the "base" of comparisons.

    `K = W * M` with `W` from `initializer` and exactly `round(density * size)` live entries in `M`.
    In depthwise kernels each output gets a live entry, if there are enough.
    `rescale=True` scales each output `o` by `sqrt(fan_in / live_o)`, by its own live fan-in, which
    keeps the variance of its pre-activation.

    Args:
        density: float in (0, 1]. Live fraction. `None` as a pattern for `sparsify`, which sets it.
        initializer: str, Initializer or config. Keras initializer of the dense kernel.
        seed: int or `None` (drawn now). For the mask, the same on every backend; values come from
            `initializer` and its own seed.
        rescale: bool. Whether to scale by the live fan-in.
        layout: As in `ExactOrthogonal`; used by `rescale`.

    Examples:
        >>> kernel, mask = RandomSparse(0.25, "glorot_uniform", seed=3).sample((8, 16))
        >>> int(mask.sum())
        32
    """

    settings = ("density", "initializer", "rescale")

    @other_keywords
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

    def sample(self, shape: Sequence[int], dtype: Any = None, layout: Layout = None) -> Sampled:
        target = numpy_dtype(dtype)
        density = self.need_density(self.density)
        layout = self.resolve_layout(shape, layout)
        mask = _random_mask(shape, density, self._draw_seed)
        if depthwise_outputs(shape, layout):
            scores = np.random.default_rng(self._draw_seed).random(tuple(shape))
            mask = floored_mask(scores, layout, live_count(density, scores.size))
        wide = "float64" if target == np.float64 else "float32"  # rounded later
        kernel = to_numpy(_with_fans_of(layout, mask.ndim, self.initializer)(shape, dtype=wide))
        kernel = kernel * mask
        if self.rescale:
            live = layout.to_canonical(mask)
            fans = live.sum(axis=tuple(range(2, live.ndim - 1)), keepdims=True)
            scale = np.sqrt(live.size // fans.size / np.maximum(fans, 1))
            kernel = kernel * layout.from_canonical(np.broadcast_to(scale, live.shape), mask.shape)
        return kernel.astype(target), mask

    def at_density(
        self, density: float, seed: int, shape: Sequence[int], layout: Layout = None
    ) -> SparseInitializer:
        config = self.get_config()
        dense = config["initializer"]
        if "seed" in dense["config"]:
            dense = {**dense, "config": {**dense["config"], "seed": seed}}
        return self.from_config({**config, "density": density, "seed": seed, "initializer": dense})


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class RamanujanOrthogonal(SparseInitializer):
    """Square kernels of permuted dense orthogonal blocks: sparsity-aware orthogonal (SAO).

    `K = gain P diag(Q_1, ..., Q_{width / degree}) R`, with dense orthogonal `Q_k` of size `degree`
    and random permutations `P`, `R`: exactly orthogonal, of density `degree / width`. With
    `relu=True`, `K = gain / sqrt(2) [[M, -M], [-M, M]]` with such an `M` of half the width and
    degree: `K^T K = gain^2 [[I, -I], [-I, I]]` has half the rank, so `K` is not orthogonal; it
    scales vectors `(x, -x)` by `sqrt(2) gain` and maps vectors `(x, x)` to zero. In convolutions
    only block entries of the center tap are live.

    Args:
        degree: int. Live inputs of every output, and live outputs of every input; divides the
            width. `sparsify` sets it by the density of each kernel.
        gain: float. Scale of the kernel.
        seed: int or `None` (drawn now).
        relu: bool. Whether to use the construction for ReLU, with even degree and width.
        layout: As in `ExactOrthogonal`.

    At a call, raises LayoutError for a kernel that is not square, or a width that the degree does
    not divide, with the nearest degrees (in `sparsify`, densities) that do.

    Limits: despite the paper's name, the support is no Ramanujan graph, but disjoint complete
    bipartite ones. `ExactOrthogonal` connects the whole layer, at any shape.

    Examples:
        >>> kernel, mask = RamanujanOrthogonal(4, seed=0).sample((16, 16))
        >>> int(mask.sum()), bool(np.allclose(kernel @ kernel.T, np.eye(16), atol=1e-6))
        (64, True)

    Reference: Esguerra et al. (IEEE Access 2023).
    """

    isometry = "exact"
    settings = ("degree", "gain", "relu")

    @other_keywords
    def __init__(
        self,
        degree: int,
        gain: float = 1.0,
        seed: int | None = None,
        *,
        relu: bool = False,
        layout: LayoutLike = None,
    ) -> None:
        super().__init__(seed, layout)
        self.degree = check_integer("degree", degree)
        self.gain = check_number("gain", gain)
        self.relu = bool(relu)

    def sample(self, shape: Sequence[int], dtype: Any = None, layout: Layout = None) -> Sampled:
        target = numpy_dtype(dtype)
        layout = self.resolve_layout(shape, layout)
        canonical = layout.canonical_shape(shape)
        width, step = canonical[-1], 2 if self.relu else 1
        fit = self._admissible(canonical)
        if self.degree not in fit:
            raise LayoutError(
                f"{self._rule(width)}; the nearest degrees that do are {_nearest(fit, self.degree)}"
                f". Received: degree={self.degree}"
            )
        rng = np.random.default_rng(self._draw_seed)
        values = np.zeros(canonical)
        size, degree = width // step, self.degree // step
        for matrix in np.ndindex(canonical[:2]):
            part = np.zeros((size, size))
            rows, columns = (rng.random(size).argsort().reshape(-1, degree) for _ in range(2))
            blocks = random_orthogonal(size // degree, degree, rng)
            part[rows[:, :, None], columns[:, None, :]] = blocks
            if self.relu:
                part = np.block([[part, -part], [-part, part]]) / np.sqrt(2.0)
            values[(*matrix, *center_of(canonical))] = self.gain * part
        kernel = np.ascontiguousarray(layout.from_canonical(values, shape))
        return kernel.astype(target), kernel != 0

    def at_density(
        self, density: float, seed: int, shape: Sequence[int], layout: Layout = None
    ) -> SparseInitializer:
        canonical = self.resolve_layout(shape, layout).canonical_shape(shape)
        width = canonical[-1]
        fit = self._admissible(canonical)
        per_degree = width / math.prod(canonical[2:])  # density of degree 1
        degree = density / per_degree
        if round(degree) not in fit or abs(degree - round(degree)) * width > 0.5:
            near = [f"{d * per_degree:.9g} (degree {d})" for d in _nearest(fit, degree)]
            raise LayoutError(
                f"{self._rule(width)}; the nearest densities of this kernel that allow it are "
                f"{' and '.join(near)}. Received: density={density:.6g}, a degree of {degree:.6g}"
            )
        return self.from_config({**self.get_config(), "degree": round(degree), "seed": seed})

    def least_counts(self, shape: Sequence[int], layout: Layout = None) -> tuple[int, int]:
        least = least_count(shape, self.resolve_layout(shape, layout))
        return least, least

    def _rule(self, width: int) -> str:
        even = ", both even (`relu=True`)" if self.relu else ""
        return f"`degree` must divide the width {width}{even}"

    def _admissible(self, canonical_shape: Sequence[int]) -> list[int]:
        inputs, width = canonical_shape[-2:]
        step = 2 if self.relu else 1
        if inputs != width or width % step:
            even = "square kernels of even width" if self.relu else "square kernels"
            raise LayoutError(
                f"RamanujanOrthogonal needs {even}; ExactOrthogonal takes every shape. "
                f"Received: {inputs} inputs x {width} outputs"
            )
        return [d for d in range(step, width + 1, step) if width % d == 0]


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class ApproximateIsometry(SparseInitializer):
    """Kernels with a random mask, made as orthogonal as the mask allows (AI).

    Draws a mask of exactly `round(density * size)` live entries with normal values, and moves these
    by `keras_sparse_ortho.orthogonal.approximate_isometry`, which also takes given masks.

    Args:
        density: float in (0, 1]. Live fraction; DensityError for another.
        gain: positive float. Scale of the kernel.
        seed: int or `None` (drawn now). For mask and start.
        max_iterations: int. Most iterations of L-BFGS.
        layout: As in `ExactOrthogonal`.

    Limits: slow and, at low density, far from an isometry. A seed gives the same mask everywhere;
    values differ as BLAS does. Every draw runs the minimization: in `build`, when the mask is
    adopted, and once as a pattern in `sparsify`.

    Examples:
        >>> kernel, mask = ApproximateIsometry(0.5, seed=1).sample((16, 32))
        >>> int(mask.sum()), bool(np.allclose(kernel @ kernel.T, np.eye(16), atol=1e-3))
        (256, True)

    Reference: Lee et al. (ICLR 2020), arXiv 1906.06307.
    """

    isometry = "approximate"
    settings = ("density", "gain", "max_iterations")
    removed: ClassVar = {"mask": None, "tolerance": 1e-5, "min_decrease": 1e-6}

    @other_keywords
    def __init__(
        self,
        density: float,
        gain: float = 1.0,
        seed: int | None = None,
        *,
        max_iterations: int = 1000,
        layout: LayoutLike = None,
    ) -> None:
        super().__init__(seed, layout)
        self.density = check_density(density)
        self.gain = check_number("gain", gain)
        if self.gain <= 0:
            raise ValueError(f"`gain` must be positive. Received: {gain=}")
        self.max_iterations = check_integer("max_iterations", max_iterations)

    def sample(self, shape: Sequence[int], dtype: Any = None, layout: Layout = None) -> Sampled:
        target = numpy_dtype(dtype)
        layout = self.resolve_layout(shape, layout)
        batch, parts, *rows, columns = layout.canonical_shape(shape)
        rng = np.random.default_rng(self._draw_seed)
        mask = _random_mask(shape, self.density, rng)
        vectors = batch * parts * min(math.prod(rows), columns)  # their norms start at about `gain`
        start = rng.normal(size=mask.shape, scale=self.gain * np.sqrt(vectors / mask.sum()))
        kernel = approximate_isometry(
            start, mask, gain=self.gain, layout=layout, max_iterations=self.max_iterations
        )
        return kernel.astype(target), mask


def _random_mask(shape: Sequence[int], density: float, seed: int | np.random.Generator) -> Any:
    mask = np.zeros(tuple(int(size) for size in shape), dtype=bool)
    unmask_at_random(mask, live_count(density, mask.size), np.random.default_rng(seed))
    return mask


def _with_fans_of(layout: KernelLayout, rank: int, dense: Any) -> Any:
    """The dense initializer with the fans of a layout, as newer versions of Keras use them."""
    if layout.batch or rank != len(layout.inputs) + len(layout.outputs):
        return dense
    config = dense.get_config() if isinstance(dense, keras.initializers.VarianceScaling) else {}
    if rank < 3 or config.get("input_axes", ()) is not None:
        return dense
    axes = {"input_axes": list(layout.inputs), "output_axes": list(layout.outputs)}
    return type(dense).from_config({**config, "seed": dense.seed, **axes})


def _nearest(fit: list[int], degree: float) -> list[int]:
    below, above = [d for d in fit if d < degree], [d for d in fit if d > degree]
    return below[-1:] + above[:1]
