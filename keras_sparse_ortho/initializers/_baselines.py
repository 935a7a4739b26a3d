"""Baselines of EOI: random masks (`RandomSparse`), SAO and AI."""

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np
from numpy.random import Generator

from keras_sparse_ortho._checks import (
    check_density,
    check_integer,
    check_number,
    other_keywords,
)
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
        if (
            isinstance(self.initializer, SparseInitializer)
            or self.initializer is None
        ):
            raise ValueError(
                "`initializer` must be a dense Keras initializer. "
                f"Received: initializer={initializer!r}"
            )

    def sample(
        self,
        shape: Sequence[int],
        dtype: Any = None,
        layout: Layout = None,
    ) -> Sampled:
        """See `SparseInitializer.sample`."""
        target = numpy_dtype(dtype)
        density = self.need_density(self.density)
        layout = self.resolve_layout(shape, layout)
        mask = _random_mask(shape, density, self._draw_seed)
        if depthwise_outputs(shape, layout):
            scores = np.random.default_rng(self._draw_seed).random(tuple(shape))
            mask = floored_mask(
                scores, layout, live_count(density, scores.size)
            )
        initializer = _with_fans_of(layout, mask.ndim, self.initializer)
        # Rounded later.
        drawn_dtype = "float64" if target == np.float64 else "float32"
        kernel = to_numpy(initializer(shape, dtype=drawn_dtype)) * mask
        if self.rescale:
            kernel = kernel * _fan_scale(mask, layout)
        return kernel.astype(target), mask

    def at_density(
        self,
        density: float,
        seed: int,
        shape: Sequence[int],
        layout: Layout = None,
    ) -> SparseInitializer:
        """See `SparseInitializer.at_density`."""
        config = self.get_config()
        dense = config["initializer"]
        if "seed" in dense["config"]:
            config["initializer"] = {
                **dense,
                "config": {**dense["config"], "seed": seed},
            }
        return self.from_config({**config, "density": density, "seed": seed})


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

    def sample(
        self,
        shape: Sequence[int],
        dtype: Any = None,
        layout: Layout = None,
    ) -> Sampled:
        """See `SparseInitializer.sample`."""
        target = numpy_dtype(dtype)
        layout = self.resolve_layout(shape, layout)
        canonical = layout.canonical_shape(shape)
        width = canonical[-1]
        degrees = self._possible_degrees(canonical)
        if self.degree not in degrees:
            nearest = _nearest(degrees, self.degree)
            raise LayoutError(
                f"{self._rule(width)}; the nearest degrees that do are {nearest}"
                f". Received: degree={self.degree}"
            )
        rng = np.random.default_rng(self._draw_seed)
        center = center_of(canonical)
        values = np.zeros(canonical)
        for matrix in np.ndindex(canonical[:2]):
            values[(*matrix, *center)] = self.gain * self._draw_matrix(
                width, rng
            )
        kernel = np.ascontiguousarray(layout.from_canonical(values, shape))
        return kernel.astype(target), kernel != 0

    def _draw_matrix(self, width: int, rng: Generator) -> np.ndarray:
        """One matrix of gain 1: permuted blocks, with `relu` in four copies."""
        size = width // self._step
        degree = self.degree // self._step
        rows = rng.random(size).argsort().reshape(-1, degree, 1)
        columns = rng.random(size).argsort().reshape(-1, 1, degree)
        matrix = np.zeros((size, size))
        matrix[rows, columns] = random_orthogonal(size // degree, degree, rng)
        if not self.relu:
            return matrix
        return np.block([[matrix, -matrix], [-matrix, matrix]]) / np.sqrt(2.0)

    @property
    def _step(self) -> int:
        """Degree and width are multiples of this."""
        return 2 if self.relu else 1

    def at_density(
        self,
        density: float,
        seed: int,
        shape: Sequence[int],
        layout: Layout = None,
    ) -> SparseInitializer:
        """See `SparseInitializer.at_density`."""
        canonical = self.resolve_layout(shape, layout).canonical_shape(shape)
        width = canonical[-1]
        degrees = self._possible_degrees(canonical)
        density_of_one = width / math.prod(canonical[2:])  # of degree 1
        exact_degree = density / density_of_one
        degree = round(exact_degree)
        if degree not in degrees or abs(exact_degree - degree) * width > 0.5:
            nearest = [
                f"{candidate * density_of_one:.9g} (degree {candidate})"
                for candidate in _nearest(degrees, exact_degree)
            ]
            raise LayoutError(
                f"{self._rule(width)}; the nearest densities of this kernel that allow it are "
                f"{' and '.join(nearest)}. "
                f"Received: density={density:.6g}, a degree of {exact_degree:.6g}"
            )
        return self.from_config(
            {**self.get_config(), "degree": degree, "seed": seed}
        )

    def least_counts(
        self,
        shape: Sequence[int],
        layout: Layout = None,
    ) -> tuple[int, int]:
        least = least_count(shape, self.resolve_layout(shape, layout))
        return least, least

    def _rule(self, width: int) -> str:
        even = ", both even (`relu=True`)" if self.relu else ""
        return f"`degree` must divide the width {width}{even}"

    def _possible_degrees(self, canonical_shape: Sequence[int]) -> list[int]:
        """The degrees that a kernel can have; a LayoutError if there are none."""
        *_, inputs, width = canonical_shape
        step = self._step
        if inputs != width or width % step:
            kernels = (
                "square kernels of even width"
                if self.relu
                else "square kernels"
            )
            raise LayoutError(
                f"RamanujanOrthogonal needs {kernels}; ExactOrthogonal takes every shape. "
                f"Received: {inputs} inputs x {width} outputs"
            )
        return [
            degree
            for degree in range(step, width + 1, step)
            if width % degree == 0
        ]


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

    def sample(
        self,
        shape: Sequence[int],
        dtype: Any = None,
        layout: Layout = None,
    ) -> Sampled:
        """See `SparseInitializer.sample`."""
        target = numpy_dtype(dtype)
        layout = self.resolve_layout(shape, layout)
        batch, parts, *rows, columns = layout.canonical_shape(shape)
        rng = np.random.default_rng(self._draw_seed)
        mask = _random_mask(shape, self.density, rng)
        # Their norms start at about `gain`.
        vectors = batch * parts * min(math.prod(rows), columns)
        scale = self.gain * np.sqrt(vectors / mask.sum())
        start = rng.normal(size=mask.shape, scale=scale)
        kernel = approximate_isometry(
            start,
            mask,
            gain=self.gain,
            layout=layout,
            max_iterations=self.max_iterations,
        )
        return kernel.astype(target), mask


def _random_mask(
    shape: Sequence[int],
    density: float,
    seed: int | Generator,
) -> np.ndarray:
    """A uniformly random mask with exactly `round(density * size)` live entries."""
    mask = np.zeros(tuple(int(size) for size in shape), dtype=bool)
    unmask_at_random(
        mask, live_count(density, mask.size), np.random.default_rng(seed)
    )
    return mask


def _fan_scale(mask: np.ndarray, layout: KernelLayout) -> np.ndarray:
    """The factor `sqrt(fan_in / live_o)` of each entry of a kernel."""
    live = layout.to_canonical(mask)
    input_axes = tuple(range(2, live.ndim - 1))
    live_fans = live.sum(axis=input_axes, keepdims=True)
    fan_in = live.size // live_fans.size
    scale = np.sqrt(fan_in / np.maximum(live_fans, 1))
    return layout.from_canonical(np.broadcast_to(scale, live.shape), mask.shape)


def _with_fans_of(
    layout: KernelLayout,
    rank: int,
    dense: keras.initializers.Initializer,
) -> keras.initializers.Initializer:
    """The dense initializer with the fans of a layout, as newer versions of Keras use them."""
    if (
        rank < 3
        or layout.batch
        or rank != len(layout.inputs) + len(layout.outputs)
    ):
        return dense
    if not isinstance(dense, keras.initializers.VarianceScaling):
        return dense
    config = dense.get_config()
    # Set by the user, or an older version.
    if config.get("input_axes", ()) is not None:
        return dense
    config["seed"] = dense.seed
    config["input_axes"] = list(layout.inputs)
    config["output_axes"] = list(layout.outputs)
    return type(dense).from_config(config)


def _nearest(degrees: list[int], degree: float) -> list[int]:
    """The next lower and the next higher of ascending degrees, where there are such."""
    below = [candidate for candidate in degrees if candidate < degree]
    above = [candidate for candidate in degrees if candidate > degree]
    return below[-1:] + above[:1]
