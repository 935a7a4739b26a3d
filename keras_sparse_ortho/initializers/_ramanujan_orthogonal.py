"""`RamanujanOrthogonal`: permuted dense orthogonal blocks (SAO)."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._checks import check_integer, check_number
from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.initializers._sparse_initializer import (
    LayoutLike,
    SparseInitializer,
    numpy_dtype,
)
from keras_sparse_ortho.orthogonal import KernelLayout, center_of, least_count, random_orthogonal


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class RamanujanOrthogonal(SparseInitializer):
    """Square kernels of permuted dense orthogonal blocks: sparsity-aware orthogonal (SAO).

    `K = gain P diag(Q_1, ..., Q_{width / degree}) R`, with dense orthogonal `Q_k` of size
    `degree` and random permutations `P`, `R`: exactly orthogonal, of density `degree / width`.
    With `relu=True`, `K = gain / sqrt(2) [[M, -M], [-M, M]]` with such an `M` of half the width
    and degree: `K^T K = gain^2 [[I, -I], [-I, I]]` has half the rank, so `K` is not orthogonal; it
    scales vectors `(x, -x)` by `sqrt(2) gain` and maps vectors `(x, x)` to zero.
    Convolutions have the matrix at their center tap, and only its block entries are live.

    Args:
        degree: Live inputs of every output, and live outputs of every input. Divides the width.
            As a pattern in `sparsify(model, density, "uniform", RamanujanOrthogonal(...))` it is
            replaced by the degree that gives the density of each kernel.
        gain: Scale of the kernel.
        seed: Integer or `None` (drawn now).
        relu: Whether to use the construction for ReLU, where degree and width are even.
        layout: Meaning of the axes; see `ExactOrthogonal`.

    Raises:
        LayoutError: At a call, for a kernel that is not square, or a width that the degree does
            not divide; the message names the nearest degrees that do. In `sparsify`, the nearest
            densities.

    Limits: in spite of its name, which is the paper's, the support is not a Ramanujan graph. The
    construction, here as there, gives disjoint complete bipartite graphs: the second singular
    value of the support equals the first, `degree`, for every degree less than the width, so it
    is not an expander. `ExactOrthogonal` connects the whole layer, at any density and shape.

    Example:

    >>> kernel, mask = RamanujanOrthogonal(4, seed=0).sample((16, 16))
    >>> int(mask.sum()), bool(np.allclose(kernel @ kernel.T, np.eye(16), atol=1e-6))
    (64, True)

    Reference:

    - Esguerra et al., "Sparsity-Aware Orthogonal Initialization of Deep Neural Networks" (IEEE
      Access 2023)
    """

    isometry = "exact"

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
        self, shape: Sequence[int], dtype: Any = None, layout: KernelLayout | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        shape = tuple(int(size) for size in shape)
        target = numpy_dtype(dtype)
        layout = self.resolve_layout(shape, layout) or KernelLayout.convolution()
        canonical = layout.canonical_shape(shape)
        width, step = canonical[-1], self._step
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
        self, density: float, seed: int, shape: Sequence[int], layout: KernelLayout | None = None
    ) -> "RamanujanOrthogonal":
        """The same with the degree `density * taps * width`, if there is one."""
        layout = self.resolve_layout(shape, layout) or KernelLayout.convolution()
        canonical = layout.canonical_shape(tuple(shape))
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
        return type(self).from_config({**self.get_config(), "degree": round(degree), "seed": seed})

    def least_counts(
        self, shape: Sequence[int], layout: KernelLayout | None = None
    ) -> tuple[int, int]:
        least = least_count(shape, self.resolve_layout(shape, layout))
        return least, least

    def get_config(self) -> dict[str, Any]:
        own = {"degree": self.degree, "gain": self.gain, "relu": self.relu}
        return {**super().get_config(), **own}

    @property
    def _step(self) -> int:
        return 2 if self.relu else 1

    def _rule(self, width: int) -> str:
        even = ", both even (`relu=True`)" if self.relu else ""
        return f"`degree` must divide the width {width}{even}"

    def _admissible(self, canonical_shape: Sequence[int]) -> list[int]:
        """The degrees that a kernel can have."""
        inputs, width = canonical_shape[-2:]
        if inputs != width or width % self._step:
            even = "square kernels of even width" if self.relu else "square kernels"
            raise LayoutError(
                f"RamanujanOrthogonal needs {even}; ExactOrthogonal takes every shape. "
                f"Received: {inputs} inputs x {width} outputs"
            )
        return [d for d in range(self._step, width + 1, self._step) if width % d == 0]


def _nearest(fit: list[int], degree: float) -> list[int]:
    """The next admissible degrees below and above, if there are any."""
    below, above = [d for d in fit if d < degree], [d for d in fit if d > degree]
    return below[-1:] + above[:1]
