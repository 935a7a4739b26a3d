"""Mirrored kernels, through which sparse orthogonal matrices keep norms in spite of ReLU."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from numpy.typing import DTypeLike

from keras_sparse_ortho.errors import LayoutError
from keras_sparse_ortho.orthogonal._counts import unmask_at_random
from keras_sparse_ortho.orthogonal._eoi import DrawOptions
from keras_sparse_ortho.orthogonal._kernel import (
    KernelLayout,
    Structure,
    describe,
    exact_orthogonal,
)
from keras_sparse_ortho.orthogonal._n_by_m import NByM
from keras_sparse_ortho.orthogonal._regular_blocks import RegularBlocks
from keras_sparse_ortho.orthogonal._structures import Block, regular_blocks

Mirror = bool | Literal["outputs", "inputs"]
"""Whether a kernel is mirrored: on both sides, not at all, or on one side alone."""

_SIDE_COPIES: dict[Mirror, tuple[int, int]] = {
    True: (2, 2),
    "outputs": (1, 2),
    "inputs": (2, 1),
}
CANONICAL = KernelLayout(inputs=(-2,), outputs=(-1,), batch=(0, 1))
"""The layout of kernels of a canonical shape."""


@dataclasses.dataclass(frozen=True)
class Mirrored(Structure):
    """The form `[[H, -H], [-H, H]] / sqrt(2)` of a kernel, with `H` exactly orthogonal and sparse.

    `H` has half the inputs and half the outputs, its own start and, if there is one, its own
    structure. With `sides="outputs"` the kernel is `[H, -H] / sqrt(2)`, and `H` has all inputs;
    with `sides="inputs"` it is `[H; -H] / sqrt(2)`, and `H` has all outputs.

    Without a structure of `H`, the live count is exact: what the copies of `H` cannot share, at
    most 3 entries, are zeros at random places.

    Args:
        sides: `True`, `"outputs"` or `"inputs"`. The sides that are mirrored; `True` is both.
        structure: Structure of `H`, or `None`.
        taps: str. As in `exact_orthogonal`, for `H`.

    Raises LayoutError for a mirrored side that is odd, and for several groups or gates.
    """

    sides: Mirror = True
    structure: Structure | None = None
    taps: str = "center"

    def __str__(self) -> str:
        form = f"mirrored={self.sides!r}"
        if self.structure is None:
            return form
        return f"{form} of {self.structure}"

    @property
    def copies(self) -> int:
        """How often the kernel holds each entry of `H`, with either sign."""
        return math.prod(self._side_copies)

    @property
    def _side_copies(self) -> tuple[int, int]:
        """How often the inputs and the outputs of `H` stand in the kernel."""
        return _SIDE_COPIES[self.sides]

    def check(self, canonical_shape: Sequence[int]) -> None:
        half_shape = self.half_shape(canonical_shape)
        structure = self.structure
        if structure is None:
            return
        structure.check(half_shape)
        *_, half_inputs, half_outputs = half_shape
        row_step = 1
        column_step = 1
        if isinstance(structure, Block):
            row_step = structure.rows
            column_step = structure.cols
        elif isinstance(structure, NByM) and self.sides != "outputs":
            row_step = structure.m
        if half_inputs % row_step or half_outputs % column_step:
            raise LayoutError(
                f"The halves of a mirrored kernel must hold whole blocks or groups of {structure}. "
                f"Received: mirrored={self.sides!r}, a half of {describe(half_shape)}"
            )

    def half_shape(self, canonical_shape: Sequence[int]) -> tuple[int, ...]:
        """The canonical shape of `H`, or a LayoutError."""
        batch, part_count, *taps, inputs, outputs = canonical_shape
        if part_count > 1:
            raise LayoutError(
                "A mirrored kernel is one matrix, as its halves are those of the whole layer; "
                "`exclude` layers with several groups or gates. "
                f"Received: a kernel of {describe(canonical_shape)}"
            )
        input_copies, output_copies = self._side_copies
        if inputs % input_copies or outputs % output_copies:
            raise LayoutError(
                "The mirrored sides of a kernel must be even: `mirrored=True` mirrors inputs and "
                'outputs, "outputs" and "inputs" one of them. Change the width of the layer, or '
                f"`exclude` it. Received: mirrored={self.sides!r}, a kernel of "
                f"{describe(canonical_shape)}"
            )
        half_inputs = inputs // input_copies
        half_outputs = outputs // output_copies
        return (batch, part_count, *taps, half_inputs, half_outputs)

    def unit(self, canonical_shape: Sequence[int]) -> int:
        if self.structure is None:
            return 1
        half_shape = self.half_shape(canonical_shape)
        return self.copies * self.structure.unit(half_shape)

    def least(self, canonical_shape: Sequence[int]) -> int:
        half_shape = self.half_shape(canonical_shape)
        if self.structure is not None:
            return self.copies * self.structure.least(half_shape)
        return self.copies * self._singular_values(half_shape)

    def covering(self, canonical_shape: Sequence[int]) -> int:
        """As many as `H` needs for outputs without zeros; a tall `H` has none."""
        half_shape = self.half_shape(canonical_shape)
        if self.structure is not None:
            return self.copies * self.structure.covering(half_shape)
        *_, outputs = half_shape
        covering = self.copies * math.prod(half_shape[:2]) * outputs
        return max(covering, self.least(canonical_shape))

    def most(self, canonical_shape: Sequence[int]) -> int:
        half_shape = self.half_shape(canonical_shape)
        if self.structure is None:
            return math.prod(canonical_shape)
        return self.copies * self.structure.most(half_shape)

    def draw(
        self,
        canonical_shape: Sequence[int],
        count: int,
        density: float,
        options: DrawOptions,
    ) -> tuple[np.ndarray, np.ndarray]:
        """See `Structure.draw`."""
        half_shape = self.half_shape(canonical_shape)
        half_count = count // self.copies
        start = "published"
        if options.cover:
            start = "covering"
        half, half_mask = exact_orthogonal(
            half_shape,
            half_count / math.prod(half_shape),
            gain=options.gain / math.sqrt(2.0),
            seed=options.rng,
            layout=CANONICAL,
            structure=self.structure,
            start=start,
            taps=self.taps,
            dtype=np.float64,
        )
        kernel = self._mirror(half, -half)
        mask = self._mirror(half_mask, half_mask)
        unmask_at_random(mask, count, options.rng)
        return kernel, mask

    def _mirror(self, half: np.ndarray, negative: np.ndarray) -> np.ndarray:
        """The kernel, or its mask, of `H` and `-H`."""
        if self.sides == "inputs":
            return np.concatenate([half, negative], axis=-2)
        upper = np.concatenate([half, negative], axis=-1)
        if self.sides == "outputs":
            return upper
        lower = np.concatenate([negative, half], axis=-1)
        return np.concatenate([upper, lower], axis=-2)

    def regular_blocks(
        self,
        shape: Sequence[int],
        density: float,
        *,
        gain: float,
        seed: int,
        layout: KernelLayout,
        dtype: DTypeLike,
    ) -> RegularBlocks:
        """The live blocks of `exact_orthogonal` with this structure, whose blocks are regular."""
        assert isinstance(self.structure, Block)
        canonical_shape = layout.canonical_shape(shape)
        self.check(canonical_shape)
        count = self.live_count(canonical_shape, density)
        half_shape = self.half_shape(canonical_shape)
        drawn = regular_blocks(
            half_shape,
            count / math.prod(canonical_shape),
            self.structure,
            gain=gain / math.sqrt(2.0),
            seed=seed,
            layout=CANONICAL,
            dtype=dtype,
        )
        blocks = drawn.blocks
        inputs_of = drawn.inputs_of
        if self.sides != "outputs":
            blocks = np.concatenate([blocks, -blocks], axis=3)
            lower_inputs = inputs_of + drawn.in_blocks
            inputs_of = np.concatenate([inputs_of, lower_inputs], axis=3)
        if self.sides != "inputs":
            blocks = np.concatenate([blocks, -blocks], axis=2)
            inputs_of = np.concatenate([inputs_of, inputs_of], axis=2)
        return RegularBlocks(blocks, inputs_of, canonical_shape)

    def squared_norm(self, canonical_shape: Sequence[int]) -> float:
        """The sum of the squared entries of a kernel of gain 1."""
        half_shape = self.half_shape(canonical_shape)
        return self.copies * self._singular_values(half_shape) / 2

    def _singular_values(self, half_shape: Sequence[int]) -> int:
        """How many `H` has; with `taps="all"` it is one matrix of all taps."""
        batch, part_count, *taps, inputs, outputs = half_shape
        if self.taps == "all":
            inputs *= math.prod(taps)
        return batch * part_count * min(inputs, outputs)


def without_mirror(canonical: np.ndarray) -> np.ndarray:
    """The part `H` of a kernel that is mirrored, at the kernel's own gain; else the kernel.

    Args:
        canonical: array of a canonical shape.
    """
    folded = canonical
    for axis in (-2, -1):
        if folded.shape[axis] % 2 == 0:
            half, negative = np.split(folded, 2, axis=axis)
            if np.array_equal(half, -negative):
                folded = math.sqrt(2.0) * half
    return folded
