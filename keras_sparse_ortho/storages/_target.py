"""`Target`, the form that one kernel takes, and `KernelChange`, what its layer has to know."""

import dataclasses
import functools
from collections.abc import Mapping

import numpy as np

from keras_sparse_ortho.initializers import AnyDraw, Draw
from keras_sparse_ortho.kernels import PrunableWeight, Storage
from keras_sparse_ortho.parametrizations import (
    FakeQuantization,
    Parametrization,
)


@dataclasses.dataclass(frozen=True)
class Target:
    """The form that one kernel of a model takes.

    Args:
        storage: str. Name of a storage form: `"masked"`, `"compact"`, `"blocks"`, `"dense"` (a
            plain layer of Keras), `"thin"` (two plain layers, for a product of two factors),
            `"rounded"` (the storage it has, with a quantizer), or a registered one.
        draw: The mask, and new values if it has any. `None`: the kernel keeps its mask.
        parametrization: Parametrization, in place of a fixed mask: a threshold or a schedule.
        block: `(rows, cols)`. Size of live blocks, unless the draw has it.
        quantizer: FakeQuantization of the effective kernel. `None`: not rounded.

    Examples:
        >>> import numpy as np
        >>> mask = np.eye(4, dtype=bool)
        >>> Target("compact", Draw(mask)).draw.live
        4
    """

    storage: str
    draw: AnyDraw | None = None
    parametrization: Parametrization | None = None
    block: tuple[int, int] | None = None
    quantizer: FakeQuantization | None = None

    @property
    def sets_values(self) -> bool:
        """Whether the kernel gets new values."""
        return self.draw is not None and self.draw.sets_values


@dataclasses.dataclass(frozen=True)
class KernelChange:
    """A kernel as it is in the given model, and what it becomes.

    Args:
        weight: PrunableWeight of the given model.
        target: Target for it.
    """

    weight: PrunableWeight
    target: Target

    @functools.cached_property
    def draw(self) -> AnyDraw | None:
        """The target's draw, or else the mask that the kernel has; `None` without either."""
        if self.target.draw is not None:
            return self.target.draw
        if self.weight.storage is not None:
            return mask_of(self.weight.storage)
        return None

    @property
    def mask_draw(self) -> AnyDraw:
        """The draw of a kernel that is known to have a mask."""
        draw = self.draw
        if draw is None:
            raise ValueError(
                f"A plan must say which entries of {self.weight.path!r} are live: give its Target "
                f"a `draw`. Received: {self.target}"
            )
        return draw

    def raw_value(self) -> np.ndarray:
        """The dense raw kernel of the given model."""
        return self.weight.raw_value()


def quantizer_of(
    changes: Mapping[str, KernelChange],
) -> FakeQuantization | dict[str, FakeQuantization] | None:
    """The quantizer of all kernels of a layer, or a dict where they differ; `None` for none."""
    quantizers = {
        name: change.target.quantizer
        for name, change in changes.items()
        if change.target.quantizer is not None
    }
    if not quantizers:
        return None
    first = next(iter(quantizers.values()))
    is_same_for_all = all(
        quantizer is first for quantizer in quantizers.values()
    )
    if is_same_for_all and len(quantizers) == len(changes):
        return first
    return quantizers


def mask_of(storage: Storage) -> Draw:
    """The mask of a storage as a draw without values; it tells the size of regular blocks."""
    return Draw(
        storage.mask_value(),
        None,
        storage.drawn_by,
        storage.is_as_drawn(),
        storage.block_size,
    )
