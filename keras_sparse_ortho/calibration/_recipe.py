"""`Recipe`: which entries of a kernel stay, and which values they get."""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np

from keras_sparse_ortho._keras_internals import warn_user
from keras_sparse_ortho.calibration._channels import Channels
from keras_sparse_ortho.calibration._moments import Moments
from keras_sparse_ortho.calibration._patterns import Blocks, Entries, Pattern
from keras_sparse_ortho.calibration._scores import LayerScore
from keras_sparse_ortho.calibration._solve import refit
from keras_sparse_ortho.errors import BudgetError, LayoutError
from keras_sparse_ortho.initializers import AnyDraw, Draw, PackedDraw
from keras_sparse_ortho.kernels import (
    PrunableWeight,
    as_matrices,
    canonical_shape,
    from_matrices,
)
from keras_sparse_ortho.orthogonal import Block, NByM, depthwise_outputs

_FAR = 0.1  # a deviation of a density that is worth a warning


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the kernels of a model are pruned one by one.

    Args:
        score: LayerScore that solves each kernel on the inputs of its layer; or
        scores: dict from path to the scores of entries; or
        masks: dict from path to the mask that the kernel gets.
        counts: dict from path to live entries, unless there are `masks`.
        structure: NByM, Channels or `None`.
        blocks: dict from path to the blocks that a kernel is pruned to.
        positions: dict from path to how many inputs behind a Flatten are one of its channels.
        refit: bool. Whether live entries of `scores` and `masks` get new values.
    """

    score: LayerScore | None = None
    counts: Mapping[str, int] | None = None
    masks: Mapping[str, np.ndarray] | None = None
    structure: NByM | Channels | None = None
    blocks: Mapping[str, Block] = dataclasses.field(default_factory=dict)
    positions: Mapping[str, int] = dataclasses.field(default_factory=dict)
    refit: bool = False
    scores: Mapping[str, np.ndarray] | None = dataclasses.field(
        default=None, repr=False
    )

    @property
    def uses_reference(self) -> bool:
        """Whether kernels are solved on the inputs in the model as given, too."""
        return self.score is not None and self.score.uses_reference

    def solved(
        self,
        weight: PrunableWeight,
        *moments: Moments,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Values and mask for inputs with these moments."""
        kernel = as_matrices(weight.finite_raw_value(), weight.layout)
        if self.score is not None:
            count = self._count(weight)
            kernel, mask = self.score.solve(
                kernel, count, self.pattern(weight), *moments
            )
        else:
            mask = self._mask(weight)
            if self.refit and moments:
                kernel = refit(kernel, mask, *moments)
        value = from_matrices(kernel, weight.shape, weight.layout)
        return value, from_matrices(mask, weight.shape, weight.layout)

    def draw(
        self,
        weight: PrunableWeight,
        value: np.ndarray,
        mask: np.ndarray,
    ) -> AnyDraw:
        """A kernel as it waits for its model."""
        block = self.blocks.get(weight.path)
        if block is None:
            return PackedDraw.of(value, mask, None)
        return Draw(mask, value, block=(block.rows, block.cols))

    def settings(self) -> str:
        """The recipe as text, without its arrays: their text is shortened."""
        plain = dataclasses.replace(self, masks=None, scores=None)
        return repr(plain)

    def arrays(self) -> dict[str, np.ndarray]:
        """The masks and scores of the recipe by a name."""
        arrays = {}
        for path, mask in sorted((self.masks or {}).items()):
            arrays[f"mask of {path}"] = np.asarray(mask)
        for path, scores in sorted((self.scores or {}).items()):
            arrays[f"scores of {path}"] = np.asarray(scores)
        return arrays

    def check(self, weights: Sequence[PrunableWeight]) -> None:
        """Refuses kernels that the structure does not fit, and more live entries than it allows."""
        if self.structure is None:
            return
        deviations = []
        for weight in weights:
            shape = self._shape(weight)
            try:
                self.structure.check(shape)
            except LayoutError as error:
                raise LayoutError(
                    f"The weight {weight.path!r} does not fit: {error}"
                ) from None
            assert self.counts is not None
            count = self._count(weight)
            deviations += other_density(
                repr(weight.path),
                count,
                self.counts[weight.path],
                weight.size,
            )
            if isinstance(self.structure, NByM) and count > self.structure.most(
                shape
            ):
                raise BudgetError(
                    f"{self.structure} allows at most {self.structure.most(shape)} live entries "
                    f"in {weight.path!r}. Received: {count}"
                )
        if deviations:
            text = "; ".join(deviations)
            warn_user(
                f"{self.structure} allows whole groups only. Received: {text}"
            )

    def pattern(self, weight: PrunableWeight) -> Pattern:
        """The pattern that a kernel is projected onto."""
        structure = self.blocks.get(weight.path, self.structure)
        shape = self._shape(weight)
        if isinstance(structure, Channels):
            rows_of_outputs = Block(structure.group, shape[-1])
            return Blocks(rows_of_outputs, shape, few=False)
        if isinstance(structure, Block):
            return Blocks(structure, shape)
        is_depthwise = depthwise_outputs(weight.shape, weight.layout) > 0
        floored = structure is None and is_depthwise
        return Entries(structure, math.prod(shape[2:-2]), floored)

    def _mask(self, weight: PrunableWeight) -> np.ndarray:
        """The given mask, or that of the largest scores, of matrices."""
        if self.masks is not None:
            return as_matrices(self.masks[weight.path], weight.layout)
        assert self.scores is not None
        scores = as_matrices(self.scores[weight.path], weight.layout)
        return self.pattern(weight).largest(scores, self._count(weight))

    def _count(self, weight: PrunableWeight) -> int:
        assert self.counts is not None
        count = self.counts[weight.path]
        if isinstance(self.structure, Channels):
            return self.structure.nearest(self._shape(weight), count)
        return max(count, 1)

    def _shape(self, weight: PrunableWeight) -> tuple[int, ...]:
        """The canonical shape; positions of a channel behind Flatten count as taps."""
        shape = canonical_shape(weight)
        times = self.positions.get(weight.path, 1)
        if times == 1:
            return shape
        *axes, inputs, outputs = shape
        return (*axes, times, inputs // times, outputs)


def other_density(
    name: str,
    count: int,
    budgeted: int,
    size: int,
) -> list[str]:
    """A warning's text for a density that is off by more than a tenth; else nothing."""
    if abs(count - budgeted) <= _FAR * budgeted:
        return []
    return [
        f"{name} has the density {count / size:.4g} instead of {budgeted / size:.4g}"
    ]
