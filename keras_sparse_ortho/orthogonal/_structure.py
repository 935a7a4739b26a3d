"""The base of structures: patterns of live entries that exactly orthogonal kernels can have."""

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._checks import check_density, check_integer
from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal._rotations import DrawOptions


class Structure(abc.ABC):
    """Base of the value types `Block` and `NByM`.

    All shapes are canonical, `(batch, parts, *taps, inputs, outputs)`; see `KernelLayout`. The
    live count is a multiple of `unit`, from `least` to `most`.
    """

    def check(self, canonical_shape: Sequence[int]) -> None:  # noqa: B027 (some fit any)
        """Raises a `LayoutError` for a shape that the structure does not fit."""

    @abc.abstractmethod
    def unit(self, canonical_shape: Sequence[int]) -> int:
        """What the live count is a multiple of."""

    @abc.abstractmethod
    def least(self, canonical_shape: Sequence[int]) -> int:
        """Fewest live entries of an exactly orthogonal kernel with this structure."""

    @abc.abstractmethod
    def covering(self, canonical_shape: Sequence[int]) -> int:
        """Fewest live entries of such a kernel without dead outputs or inputs, where possible."""

    def most(self, canonical_shape: Sequence[int]) -> int:
        """Most live entries that the structure allows."""
        return math.prod(canonical_shape)

    @abc.abstractmethod
    def draw(
        self, canonical_shape: Sequence[int], count: int, density: float, options: DrawOptions
    ) -> tuple[np.ndarray, np.ndarray]:
        """A float64 kernel and its mask with `count` live entries, both of the canonical shape."""

    def live_count(self, canonical_shape: Sequence[int], density: float) -> int:
        """Live entries at `density`: the nearest multiple of `unit`, ties to even.

        DensityError below `least` or above `most`; the message names the bound.
        """
        value = check_density(density)
        size = math.prod(canonical_shape)
        unit = self.unit(canonical_shape)
        count = round(value * size / unit) * unit
        least, most = self.least(canonical_shape), self.most(canonical_shape)
        if count < least or count > most:
            bound = ("least", least) if count < least else ("largest", most)
            raise DensityError(
                f"An exactly orthogonal kernel of {describe(canonical_shape)} with the structure "
                f"{self} has {least} to {most} live entries: the {bound[0]} density is "
                f"{bound[1] / size:.6g}. Received: density={density!r} ({count} entries)"
            )
        return count

    def get_config(self) -> dict[str, Any]:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Structure":
        return cls(**config)


def describe(canonical_shape: Sequence[int]) -> str:
    """`64 inputs x 128 outputs`, with taps and matrices if there are several."""
    batch, parts, *taps, inputs, outputs = canonical_shape
    text = f"{inputs} inputs x {outputs} outputs"
    if taps:
        text += f" at {math.prod(taps)} taps"
    return text + (f" in {batch * parts} matrices" if batch * parts > 1 else "")


def center_of(canonical_shape: Sequence[int]) -> tuple[int, ...]:
    """Index of the center tap, `(k - 1) // 2` along each spatial axis."""
    return tuple((taps - 1) // 2 for taps in canonical_shape[2:-2])


def positive_integers(structure: Structure, *names: str) -> None:
    """Refuses fields that are not positive integers."""
    for name in names:
        object.__setattr__(structure, name, check_integer(name, getattr(structure, name)))
