"""`Channels`: masks in which inputs of a kernel are live or dead as a whole."""

import dataclasses
import math
from collections.abc import Sequence

from keras_sparse_ortho._checks import check_integer
from keras_sparse_ortho.errors import LayoutError


@dataclasses.dataclass(frozen=True)
class Channels:
    """Inputs of a kernel that are live or dead as a whole, for all outputs and at all taps.

    A `structure` for `prune` with `score="obs"`, `"wanda"` or `"magnitude"`; `remove_channels` then
    removes channels that nothing reads. Live counts are rounded to whole groups, at least one.

    Args:
        group: int. Consecutive inputs that are live or dead together: 1 for channels of a
            feed-forward or a convolution, the width of a head for the projection behind attention.
            Behind Flatten all positions of a channel are one input, in functional models.

    Raises LayoutError when a kernel is pruned whose inputs `group` does not divide.

    Limits: pass `prune` an `include` with the kernels whose inputs nothing else reads. Inputs on a
    residual stream have other readers, so none is removed.

    Examples:
        >>> import keras, numpy as np, keras_sparse_ortho as kso
        >>> layers = [keras.layers.Dense(8, "relu", name="up"), keras.layers.Dense(3)]
        >>> model = keras.Sequential([keras.Input((6,)), *layers])
        >>> pruned = kso.prune(model, 0.5, structure=Channels(), exclude="up")
        >>> [tuple(layer.kernel.shape) for layer in kso.remove_channels(pruned).layers]
        [(6, 4), (4, 3)]

    Reference: Frantar and Alistarh, "Optimal Brain Compression" (NeurIPS 2022), arXiv 2208.11580,
    for groups
    """

    group: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", check_integer("group", self.group))

    def check(self, canonical_shape: Sequence[int]) -> None:
        inputs = canonical_shape[-2]
        if inputs % self.group:
            raise LayoutError(
                f"{self} needs inputs divisible by {self.group}; change the group, or `exclude` "
                f"the layer. Received: {inputs} inputs"
            )

    def nearest(
        self,
        canonical_shape: Sequence[int],
        count: int,
    ) -> int:
        _, _, *taps, _, outputs = canonical_shape
        unit = math.prod(taps) * self.group * outputs
        return max(round(count / unit), 1) * unit
