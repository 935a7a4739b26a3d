"""`JacobianSpectrum`: singular values of a Jacobian, or an estimate of how they are spread."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class JacobianSpectrum:
    """What `jacobian_singular_values` returns.

    Args:
        values: Singular values of shape `(samples, count)`, descending.
        weights: What share of all `min(inputs, outputs)` singular values of the sample each of
            them stands for, of the same shape; every row sums to 1.
        exact: Whether these are all the singular values, each with the same weight.
        shape: `(outputs, inputs)` of the Jacobian.
    """

    values: np.ndarray
    weights: np.ndarray
    exact: bool
    shape: tuple[int, int]

    @property
    def mean(self) -> float:
        """Mean singular value, over all of them and over samples."""
        return float((self.values * self.weights).sum(axis=1).mean())

    @property
    def max(self) -> float:
        """Largest singular value, averaged over samples."""
        return float(self.values.max(axis=1).mean())

    @property
    def min(self) -> float:
        """Smallest singular value, averaged over samples; an upper bound where not `exact`."""
        return float(self.values.min(axis=1).mean())

    def quantiles(self, q: float | Sequence[float]) -> np.ndarray:
        """The singular values at the given fractions of the distribution, all samples pooled.

        Args:
            q: Fractions in [0, 1]: the least value that at least this share does not exceed.
        """
        fractions = np.asarray(q, dtype="float64")
        if not ((fractions >= 0) & (fractions <= 1)).all():
            raise ValueError(f"`q` must hold fractions in [0, 1]. Received: q={q!r}")
        values, weights = self.values.reshape(-1), self.weights.reshape(-1)
        order = np.argsort(values)
        share = np.cumsum(weights[order]) / weights.sum()
        # Rounding of the sum may not push a quantile to the next value.
        index = np.searchsorted(share, fractions - 1e-12)
        return values[order][np.minimum(index, len(values) - 1)]

    def plot(self, ax: Any = None, bins: int = 50) -> Any:
        """Draws the distribution of the singular values; needs the extra `plot`.

        Args:
            ax: Axes of Matplotlib; new ones by default.
            bins: Number of bars.

        Returns:
            The axes.

        Raises:
            ImportError: Matplotlib is not installed.
        """
        if ax is None:
            try:
                import matplotlib.pyplot as plt
            except ImportError as error:
                raise ImportError(
                    "Plots need Matplotlib: install the extra `keras-sparse-ortho[plot]`. "
                    f"Received: {error}"
                ) from error
            ax = plt.figure(layout="constrained").add_subplot()
        shares = self.weights.reshape(-1) / len(self.weights)
        ax.hist(self.values.reshape(-1), bins=bins, weights=shares)
        ax.axvline(self.mean, color="black", linestyle="--", label=f"mean {self.mean:.3g}")
        ax.set_xlabel("singular value")
        ax.set_ylabel("share")
        ax.legend()
        return ax

    def __repr__(self) -> str:
        kind = "exact" if self.exact else "estimated"
        low, middle, high = self.quantiles([0.1, 0.5, 0.9])
        return (
            f"<JacobianSpectrum {kind}, {len(self.values)} samples, shape={self.shape}: "
            f"mean {self.mean:.6g}, min {self.min:.6g}, max {self.max:.6g}, "
            f"quantiles (.1, .5, .9) {low:.6g}, {middle:.6g}, {high:.6g}>"
        )
