"""`ExactOrthogonal`: EOI as a Keras initializer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import keras
import numpy as np

from keras_sparse_ortho._checks import (
    check_density,
    check_number,
    other_keywords,
)
from keras_sparse_ortho._keras_internals import restored
from keras_sparse_ortho.initializers._sparse_initializer import (
    Layout,
    LayoutLike,
    Sampled,
    SparseInitializer,
    numpy_dtype,
)
from keras_sparse_ortho.orthogonal import (
    Block,
    GivenBlocks,
    Mirror,
    Mirrored,
    NByM,
    RegularBlocks,
    Structure,
    StructureLike,
    as_structure,
    check_options,
    covering_count,
    exact_orthogonal,
    least_count,
    regular_blocks,
)

# Here, as `orthogonal` does not import Keras.
for _structure in (
    Block,
    GivenBlocks,
    NByM,
):
    keras.saving.register_keras_serializable(package="keras_sparse_ortho")(
        _structure
    )


@keras.saving.register_keras_serializable(package="keras_sparse_ortho")
class ExactOrthogonal(SparseInitializer):
    """Sparse kernels that are exactly orthogonal, from random Givens rotations (EOI).

    For a `(in, out)` kernel, with exactly `round(density * size)` live entries,

        K^T K = gain^2 I   (in >= out)    or    K K^T = gain^2 I   (in <= out),

    to float32 rounding; `keras_sparse_ortho.orthogonal.exact_orthogonal` has the construction.
    Recurrent kernels get such a matrix for each gate, attention projections one between the model
    dimension and the flattened heads. Training moves every entry unless `sparsify` or
    `keras_sparse_ortho.PrunableLayer` adopts the mask.

    Args:
        density: float in (0, 1]. Live fraction. `None` as a pattern for `sparsify`, which sets it.
        gain: float, scale of the kernel, e.g. `sqrt(2)` for ReLU; or `"auto"` as a pattern for
            `sparsify`, which chooses it by the next layers:

            - normalization: the norm of the layer's default initializer under the same mask;
            - an odd activation such as tanh: `keras_sparse_ortho.analysis.critical_gain`, with the
              standard deviation of a `RandomNormal` bias initializer;
            - another activation: `E[phi(z)^2]^(-1/2)`, `sqrt(2)` for ReLU;
            - the output of the model, or another linear layer: 1.
        seed: int or `None` (drawn now). Gives the same kernel and mask on every backend and
            machine, and for every kernel of one shape: give layers different seeds, as `sparsify`
            does.
        layout: KernelLayout, or callable `shape -> KernelLayout`. Meaning of the axes; `None` for
            `(*spatial, in, out)`. Set it for EinsumDense, grouped, depthwise or transposed
            convolutions and recurrent kernels; a wrapped layer knows its own.
        structure: As in `exact_orthogonal`, or a short form: `"2:4"`, `"32x32"`, `(32, 32)`.
        start, taps: As in `exact_orthogonal`. Default of `taps`: `"center"`; where `sparsify`
            chooses the gain and normalization follows, `"all"`.
        mirrored: bool, `"outputs"` or `"inputs"`. Kernels that keep norms through ReLU. With a
            sparse orthogonal `H` of half the inputs and half the outputs, drawn as above,

                K = gain / sqrt(2) [[H, -H], [-H, H]].

            Pre-activations `(u, -u)` stay of this form: `relu((u, -u)) K = gain / sqrt(2) (u H,
            -u H)`, an exact isometry at `gain=sqrt(2)` where `H` is one, for GELU and SiLU as
            well. `"outputs"` is `[H, -H]`, with all inputs: the first layer, which makes `(u, -u)`
            of any input. `"inputs"` is `[H; -H]`, with all outputs: the last one, which reads it.
            As a pattern of `sparsify`, `True` is `"outputs"` in the first kernels of a model that
            is a graph, and `"inputs"` in the last ones. `K` has half the rank of an orthogonal
            kernel: `K^T K = gain^2 [[I, -I], [-I, I]]` for a tall `H`. The sides that are mirrored
            must be even. With a `structure`, `H` has it.

    Raises:
        DensityError, LayoutError: At a call, as `exact_orthogonal`; an odd side that is mirrored,
            groups or gates in a mirrored kernel.
        ValueError: Unknown options; at a call, `gain="auto"`, as nothing says what follows.

    Limits: float16 and bfloat16 kernels are orthogonal up to their rounding. For dense orthogonal
    kernels use `keras.initializers.Orthogonal`.

    Examples:
        >>> import keras
        >>> layer = keras.layers.Dense(64, kernel_initializer=ExactOrthogonal(0.1, seed=1))
        >>> layer.build((None, 128))
        >>> int((keras.ops.convert_to_numpy(layer.kernel) != 0).sum()) <= 819
        True

    Reference: Nowak et al. (ICML 2024), arXiv 2406.01755.
    """

    isometry = "exact"
    settings = ("density", "gain", "structure", "start", "taps", "mirrored")
    removed: ClassVar = dict.fromkeys(
        ("norms", "center_density", "rotations", "angles")
    )

    @other_keywords
    def __init__(
        self,
        density: float | None = None,
        gain: float | str = 1.0,
        seed: int | None = None,
        *,
        layout: LayoutLike = None,
        structure: StructureLike | None = None,
        start: str = "covering",
        taps: str | None = None,
        mirrored: Mirror = False,
    ) -> None:
        super().__init__(seed, layout)
        self.density = None if density is None else check_density(density)
        self.gain = _check_gain(gain)
        self.structure = _check_structure(structure)
        check_options(self.structure, start, taps or "center")
        self.start = start
        self.taps = taps
        self.mirrored = _check_mirrored(mirrored)

    @property
    def drawn_structure(self) -> Structure | None:
        """The structure that kernels are drawn with: that of a mirrored one, around `structure`."""
        if self.mirrored is False:
            return self.structure
        return Mirrored(self.mirrored, self.structure, self.taps or "center")

    def sample(
        self,
        shape: Sequence[int],
        dtype: Any = None,
        layout: Layout = None,
    ) -> Sampled:
        """See `SparseInitializer.sample`."""
        target = numpy_dtype(dtype)
        structure = self.drawn_structure
        taps = self.taps or "center"
        if isinstance(structure, Mirrored):
            taps = "center"  # it has those of its own
        kernel, mask = exact_orthogonal(
            shape,
            self.need_density(self.density),
            structure=structure,
            start=self.start,
            taps=taps,
            **self._draw_arguments(shape, layout, target),
        )
        return kernel.astype(target, copy=False), mask

    def sample_blocks(
        self,
        shape: Sequence[int],
        layout: Layout = None,
    ) -> RegularBlocks | None:
        structure = self.structure
        if not isinstance(structure, Block) or not structure.regular:
            return None
        target = numpy_dtype(None)
        density = self.need_density(self.density)
        arguments = self._draw_arguments(shape, layout, target)
        mirror = self.drawn_structure
        if isinstance(mirror, Mirrored):
            drawn = mirror.regular_blocks(shape, density, **arguments)
        else:
            drawn = regular_blocks(shape, density, structure, **arguments)
        return dataclasses.replace(
            drawn, blocks=drawn.blocks.astype(target, copy=False)
        )

    def _draw_arguments(
        self,
        shape: Sequence[int],
        layout: Layout,
        target: np.dtype,
    ) -> dict[str, Any]:
        """The arguments that `exact_orthogonal` and `regular_blocks` have in common."""
        if isinstance(self.gain, str):
            raise ValueError(
                'gain="auto" needs keras_sparse_ortho.sparsify(model, density, initializer=...), '
                "which knows what follows each layer; elsewhere give a number. "
                f"Received: gain={self.gain!r}"
            )
        return {
            "gain": self.gain,
            "seed": self._draw_seed,
            "layout": self.resolve_layout(shape, layout),
            "dtype": np.float64 if target == np.float64 else np.float32,
        }

    def least_counts(
        self,
        shape: Sequence[int],
        layout: Layout = None,
    ) -> tuple[int, int]:
        layout = self.resolve_layout(shape, layout)
        *_, inputs, outputs = canonical_shape = layout.canonical_shape(shape)
        structure = self.drawn_structure
        if structure is None:
            least_live = least_count(shape, layout, self.taps or "center")
            covering = covering_count(shape, layout)
        else:
            structure.check(canonical_shape)
            least_live = structure.least(canonical_shape)
            covering = structure.covering(canonical_shape)
        if isinstance(structure, Mirrored):
            *_, inputs, outputs = structure.half_shape(canonical_shape)
        # A tall kernel has no zero output.
        if self.start == "published" or inputs >= outputs:
            return least_live, least_live
        return least_live, max(least_live, covering)

    def but_with(self, **settings: Any) -> ExactOrthogonal:
        """This pattern with other settings."""
        return self.from_config({**self.get_config(), **settings})


def _check_gain(gain: float | str) -> float | str:
    """Returns a gain, or raises a ValueError."""
    if not isinstance(gain, str):
        return check_number("gain", gain)
    if gain != "auto":
        raise ValueError(
            f'`gain` must be a number or "auto". Received: gain={gain!r}'
        )
    return gain


def _check_mirrored(mirrored: object) -> Mirror:
    """Returns an argument `mirrored`, or raises a ValueError."""
    if isinstance(mirrored, bool) or mirrored in ("outputs", "inputs"):
        return mirrored
    raise ValueError(
        '`mirrored` must be True, False, "outputs" (a first layer) or "inputs" (a last one). '
        f"Received: mirrored={mirrored!r}"
    )


def _check_structure(
    structure: StructureLike | dict[str, Any] | None,
) -> Structure | None:
    """The structure for a short form or a configuration of one, or raises a ValueError."""
    if structure is None:
        return None
    if isinstance(structure, dict):
        structure = restored(structure)
    structure = as_structure(structure)
    if not isinstance(structure, Structure):
        raise ValueError(
            f"`structure` must be Block, NByM or None. Received: {structure=}"
        )
    return structure
