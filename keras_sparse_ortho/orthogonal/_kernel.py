"""Exactly orthogonal kernels of every shape: what their axes mean, and EOI in each matrix."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.random import Generator

from keras_sparse_ortho._checks import (
    check_density,
    check_integer,
    other_keywords,
)
from keras_sparse_ortho._types import Config
from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.orthogonal._counts import (
    apportion,
    live_count,
    unmask_at_random,
)
from keras_sparse_ortho.orthogonal._eoi import DrawOptions, write_orthogonal


@dataclasses.dataclass(frozen=True)
class KernelLayout:
    """Says what the axes of a kernel mean: one matrix for each tap, group and gate.

    In the canonical shape `(batch, groups * gates, *spatial, inputs, outputs)` every `(inputs,
    outputs)` slice is a matrix. Axes not named are spatial. Negative axes fit every dimension.

    Args:
        inputs: tuple of int. Axes that are summed over, in order. Empty: one input (depthwise).
        outputs: tuple of int. Axes that number the outputs, flattened in this order.
        batch: tuple of int. Axes of independent matrices (depthwise channels).
        groups: int. Convolution groups: equal parts of the outputs, each connected to its own
            inputs; the input axis has length `in / groups`.
        gates: int. Gates of a recurrent kernel: equal parts of the outputs, each orthogonal.

    Raises LayoutError for axes, groups or gates that do not fit the kernel.

    Examples:
        >>> KernelLayout.convolution(groups=2).matrix_shape((3, 3, 8, 32))
        (8, 16)
        >>> KernelLayout.recurrent(gates=4).matrix_shape((64, 256))
        (64, 64)
        >>> KernelLayout.einsum("abc,cde->abde").matrix_shape((128, 8, 16))
        (128, 128)
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    batch: tuple[int, ...] = ()
    groups: int = 1
    gates: int = 1

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs", "batch"):
            axes = getattr(self, name)
            if isinstance(axes, int):
                axes = (axes,)
            # JSON turns tuples into lists.
            object.__setattr__(self, name, tuple(map(int, axes)))
        for name in ("groups", "gates"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int)
                or value < 1
            ):
                raise LayoutError(
                    f"`{name}` must be a positive integer. Received: {name}={value}"
                )

    @classmethod
    def dense(cls) -> KernelLayout:
        """`(in, out)`: Dense, SimpleRNN, and an Embedding's `(words, features)`."""
        return cls(inputs=(-2,), outputs=(-1,))

    @classmethod
    def convolution(cls, groups: int = 1) -> KernelLayout:
        """`(*spatial, in / groups, out)`: Conv1D, Conv2D, Conv3D."""
        return cls(inputs=(-2,), outputs=(-1,), groups=groups)

    @classmethod
    def transposed_convolution(cls) -> KernelLayout:
        """`(*spatial, out, in)`: Conv1DTranspose, Conv2DTranspose, Conv3DTranspose."""
        return cls(inputs=(-1,), outputs=(-2,))

    @classmethod
    def depthwise(cls) -> KernelLayout:
        """`(*spatial, channels, depth_multiplier)`: one matrix of one row for each channel."""
        return cls(inputs=(), outputs=(-1,), batch=(-2,))

    @classmethod
    def recurrent(cls, gates: int) -> KernelLayout:
        """`(in, gates * units)`: kernels and recurrent kernels of LSTM (4) and GRU (3)."""
        return cls(inputs=(-2,), outputs=(-1,), gates=gates)

    @classmethod
    def einsum(cls, equation: str) -> KernelLayout:
        """The layout of an EinsumDense kernel: its inputs are the axes that are summed over."""
        data, kernel, output = einsum_axes(equation)
        inputs = []
        outputs = []
        batch = []
        for axis, letter in enumerate(kernel):
            if letter not in data:
                outputs.append(axis)
            elif letter in output:
                batch.append(axis)
            else:
                inputs.append(axis)
        return cls(tuple(inputs), tuple(outputs), tuple(batch))

    def get_config(self) -> Config:
        config = dataclasses.asdict(self)
        for name in ("inputs", "outputs", "batch"):
            config[name] = list(config[name])
        return config

    @classmethod
    def from_config(cls, config: Config) -> KernelLayout:
        removed = ("strides", "transposed")  # in older files
        return cls(
            **{
                name: value
                for name, value in config.items()
                if name not in removed
            }
        )

    @property
    def parts(self) -> int:
        """Equal parts of the outputs, with a matrix each."""
        return self.groups * self.gates

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Inputs and outputs of one matrix: the last two axes of `canonical_shape`."""
        *_, inputs, outputs = self.canonical_shape(shape)
        return inputs, outputs

    def matrices(self, shape: Sequence[int]) -> int:
        """Number of matrices at one tap: batch times groups times gates."""
        batch, part_count, *_ = self.canonical_shape(shape)
        return batch * part_count

    def canonical_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape `(batch, parts, *spatial, inputs, outputs)` of a kernel of shape `shape`."""
        shape = tuple(int(size) for size in shape)
        axes = self._resolved(shape)
        spatial = [shape[axis] for axis in axes.spatial]
        batch, inputs, outputs = (
            math.prod(shape[axis] for axis in group)
            for group in (axes.batch, axes.inputs, axes.outputs)
        )
        if outputs % self.parts:
            raise LayoutError(
                f"The {outputs} outputs of a kernel of shape {shape} cannot be divided into "
                f"{self.groups} groups of {self.gates} gates. Received: layout={self}"
            )
        return (batch, self.parts, *spatial, inputs, outputs // self.parts)

    def to_canonical(self, kernel: np.ndarray) -> np.ndarray:
        """Moves a kernel to `(batch, parts, *spatial, inputs, outputs)`; a view where possible."""
        batch, part_count, *taps, inputs, outputs = self.canonical_shape(
            kernel.shape
        )
        order = self._resolved(kernel.shape).in_order
        moved = kernel.transpose(order).reshape(
            batch, *taps, inputs, part_count, outputs
        )
        return np.moveaxis(moved, -2, 1)

    def from_canonical(
        self,
        canonical: np.ndarray,
        shape: Sequence[int],
    ) -> np.ndarray:
        """The inverse of `to_canonical`, for a kernel of shape `shape`."""
        order = self._resolved(shape).in_order
        moved = np.moveaxis(canonical, 1, -2)
        moved = moved.reshape([shape[axis] for axis in order])
        return moved.transpose(np.argsort(order))

    def _resolved(self, shape: Sequence[int]) -> _Axes:
        """The axes of a kernel of a shape, none negative."""
        rank = len(shape)
        batch, inputs, outputs = (
            tuple(axis + rank if axis < 0 else axis for axis in axes)
            for axes in (self.batch, self.inputs, self.outputs)
        )
        role_axes = batch + inputs + outputs
        if len(set(role_axes)) < len(role_axes) or any(
            not 0 <= axis < rank for axis in role_axes
        ):
            raise LayoutError(
                f"The layout's axes must be distinct axes of the kernel of shape {tuple(shape)}. "
                f"Received: layout={self}"
            )
        if any(size < 1 for size in shape):
            raise LayoutError(
                f"All dimensions of a kernel must be positive. Received: {shape=}"
            )
        spatial = tuple(axis for axis in range(rank) if axis not in role_axes)
        return _Axes(batch, spatial, inputs, outputs)


class _Axes(NamedTuple):
    """The axes of a kernel by meaning."""

    batch: tuple[int, ...]
    spatial: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def in_order(self) -> tuple[int, ...]:
        """All axes in the order of the canonical shape, without the parts of the outputs."""
        return self.batch + self.spatial + self.inputs + self.outputs


def einsum_axes(
    equation: str,
    rank: int = 0,
) -> tuple[list[str], list[str], list[str]]:
    """Letters of input, kernel and output; of an input of `rank`, digits for its ellipsis."""
    try:
        operands, output = equation.replace(" ", "").split("->")
        data, kernel = operands.split(",")
    except ValueError:
        raise LayoutError(
            "An einsum equation must have the form 'input,kernel->output'. "
            f"Received: equation={equation!r}"
        ) from None
    letters = data.replace("...", "")
    digits = [str(k) for k in range(rank - len(letters))]

    def axes_of(term: str) -> list[str]:
        before, ellipsis, after = term.partition("...")
        if not ellipsis:
            return list(term)
        return [*before, *digits, *after]

    return axes_of(data), axes_of(kernel), axes_of(output)


class Structure(abc.ABC):
    """Base of `Block` and `NByM`: patterns of live entries that orthogonal kernels can have.

    Shapes are canonical (`KernelLayout`). Live counts are multiples of `unit`, `least` to `most`.
    """

    def check(self, canonical_shape: Sequence[int]) -> None:  # noqa: B027 (some fit any)
        """Raises a `LayoutError` for a shape that the structure does not fit."""

    @abc.abstractmethod
    def unit(self, canonical_shape: Sequence[int]) -> int:
        """The live count is a multiple of this."""

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
        self,
        canonical_shape: Sequence[int],
        count: int,
        density: float,
        options: DrawOptions,
    ) -> tuple[np.ndarray, np.ndarray]:
        """A float64 kernel and its mask with `count` live entries, both of the canonical shape."""

    def live_count(
        self,
        canonical_shape: Sequence[int],
        density: float,
    ) -> int:
        """Live entries at `density`: the nearest multiple of `unit`, or a DensityError."""
        value = check_density(density)
        size = math.prod(canonical_shape)
        unit = self.unit(canonical_shape)
        count = round(value * size / unit) * unit
        minimum = self.least(canonical_shape)
        maximum = self.most(canonical_shape)
        if not minimum <= count <= maximum:
            word, bound = (
                ("least", minimum) if count < minimum else ("largest", maximum)
            )
            raise DensityError(
                f"An exactly orthogonal kernel of {describe(canonical_shape)} with the structure "
                f"{self} has {minimum} to {maximum} live entries: the {word} density is "
                f"{bound / size:.6g}. Received: density={density!r} ({count} entries)"
            )
        return count

    def get_config(self) -> Config:
        return dataclasses.asdict(self)  # type: ignore[call-overload]

    @classmethod
    def from_config(cls, config: Config) -> Structure:
        return cls(**config)

    def _shares(
        self,
        canonical_shape: Sequence[int],
        at_center: int,
        count: int,
        options: DrawOptions,
    ) -> list[int]:
        """The entries `at_center`, or more to cover, in units and shared among the matrices."""
        batch, part_count, *_ = canonical_shape
        entries = max(at_center, self.least(canonical_shape))
        if options.cover:
            covering = min(self.covering(canonical_shape), count)
            entries = max(entries, covering)
        units = entries // self.unit(canonical_shape)
        return apportion(units, [1.0] * (batch * part_count))

    def _check_sides(self, *names: str) -> None:
        """Makes the fields of these names positive integers, or raises a ValueError."""
        for name in names:
            side = check_integer(name, getattr(self, name))
            object.__setattr__(self, name, side)


def describe(canonical_shape: Sequence[int]) -> str:
    """`64 inputs x 128 outputs`, with taps and matrices if there are several."""
    batch, part_count, *taps, inputs, outputs = canonical_shape
    text = f"{inputs} inputs x {outputs} outputs"
    if taps:
        text += f" at {math.prod(taps)} taps"
    if batch * part_count > 1:
        text += f" in {batch * part_count} matrices"
    return text


def center_of(canonical_shape: Sequence[int]) -> tuple[int, ...]:
    """Index of the center tap, `(k - 1) // 2` along each spatial axis."""
    return tuple((taps - 1) // 2 for taps in canonical_shape[2:-2])


@other_keywords
def least_count(
    shape: Sequence[int],
    layout: KernelLayout | None = None,
    taps: str = "center",
) -> int:
    """Fewest live entries of an exactly orthogonal kernel: `min(in, out)` for each matrix.

    Args:
        shape: tuple of int. Kernel shape in Keras layout.
        layout: KernelLayout. Meaning of the axes. Default: `(*spatial, in, out)`.
        taps: str. As in `exact_orthogonal`: with `"all"`, `min(taps * in, out)`.

    Examples:
        >>> least_count((100, 256)), least_count((3, 3, 16, 32))
        (100, 16)
    """
    layout = layout or default_layout(shape)
    return layout.matrices(shape) * min(_matrix_shape(layout, shape, taps))


@other_keywords
def covering_count(
    shape: Sequence[int], layout: KernelLayout | None = None
) -> int:
    """Fewest live entries of an exactly orthogonal kernel without dead outputs: `out` a matrix.

    >>> covering_count((100, 400)), covering_count((400, 100))
    (400, 100)
    """
    layout = layout or default_layout(shape)
    _, outputs = layout.matrix_shape(shape)
    return layout.matrices(shape) * outputs


@other_keywords
def dead_outputs(kernel: np.ndarray, layout: KernelLayout | None = None) -> int:
    """Number of outputs of a kernel, or of its mask, without a nonzero entry.

    Under ReLU such a unit stays dead unless its bias or normalization changes it.

    Args:
        kernel: array. Kernel in Keras layout.
        layout: KernelLayout. Meaning of its axes. Default: `(*spatial, in, out)`.

    Examples:
        >>> dead_outputs(np.array([[1.0, 0.0, 0.5], [0.0, 0.0, 2.0]]))
        1
    """
    layout = layout or default_layout(kernel.shape)
    is_nonzero = layout.to_canonical(np.asarray(kernel)) != 0
    batch, part_count, *_, outputs = is_nonzero.shape
    is_live = is_nonzero.reshape(batch, part_count, -1, outputs).any(axis=2)
    return is_live.size - int(is_live.sum())


@other_keywords
def exact_orthogonal(
    shape: Sequence[int],
    density: float,
    *,
    gain: float = 1.0,
    seed: int | Generator | None = None,
    layout: KernelLayout | None = None,
    structure: Structure | None = None,
    start: str = "covering",
    taps: str = "center",
    dtype: type = np.float32,
) -> tuple[np.ndarray, np.ndarray]:
    """Draws a sparse kernel that is exactly orthogonal, and its bool mask (EOI).

    For a matrix with `n` the shorter and `m` the longer side, `[I | 0]` (`n x m`) is multiplied by
    random Givens rotations while its live entries fit the density, and transposed if the kernel is
    tall:

        K^T K = gain^2 I   (tall or square)    or    K K^T = gain^2 I   (wide).

    The first `m - n` rotations give every empty column an entry, as far as the count allows (the
    covering start): outputs of zeros would stay dead under ReLU. Then zeros are unmasked at random
    up to exactly `round(density * size)` entries; training may move them.

    A convolution gets one such matrix for each group at its center tap `(k - 1) // 2` and zeros
    elsewhere (delta-orthogonal); random unmasking covers the whole kernel. The center tap has the
    density of the kernel, or what covering all columns takes. With stride 1, circular padding and
    no fewer outputs than inputs the layer keeps the norm of its input.

    Args:
        shape: tuple of int. In Keras layout, e.g. `(in, out)` or `(*spatial, in / groups, out)`.
        density: float in (0, 1]. Live fraction.
        gain: float. Scale of the kernel.
        seed: int, NumPy generator, or `None` for fresh randomness. The same integer gives the same
            kernel and mask on every machine.
        layout: KernelLayout. Meaning of the axes. Default: `(*spatial, in, out)`.
        structure: Structure. Pattern of the live entries in all matrices and taps: `Block(rows,
            cols)`, also with `regular=True`, or `NByM(n, m)`; default: none. The live count is then
            the nearest that the structure allows.
        start: str. `"covering"`; or `"published"`: `[I | 0]` as in the paper, which at low
            densities leaves outputs of wide kernels zero.
        taps: str. Where the matrices of a convolution are. `"center"`: at the center tap, as dense
            as the kernel. `"dense_center"`: there, with density `min(taps d, sqrt(d))`, as in the
            authors' runs with normalization. `"all"`: one matrix `(taps * in, out)` a group, as in
            `keras.initializers.Orthogonal`; the map is no isometry then.
        dtype: type. Floating type of the kernel. All arithmetic is in float64.

    Raises:
        DensityError: A density outside (0, 1], below `least_count`, or beyond the structure's.
        LayoutError: A shape that does not fit the layout or the structure.
        ValueError: An unknown option; a `structure` with other `taps`.

    Limits: training does not keep orthogonality. With strides the map is no exact isometry.

    Examples:
        >>> kernel, mask = exact_orthogonal((64, 128), 0.1, seed=0)
        >>> int(mask.sum()), bool(np.allclose(kernel @ kernel.T, np.eye(64), atol=1e-6))
        (819, True)

    References: Nowak et al., "Sparser, Better, Deeper, Stronger" (ICML 2024), arXiv 2406.01755;
    Xiao et al. (ICML 2018), arXiv 1806.05393, for the delta-orthogonal embedding
    """
    shape = tuple(int(size) for size in shape)
    layout = layout or default_layout(shape)
    check_options(structure, start, taps)
    options = DrawOptions(
        np.random.default_rng(seed), gain, cover=start != "published"
    )
    if structure is not None:
        return _draw_structure(
            shape, density, layout, structure, options, dtype
        )
    kernel = _draw_matrices(shape, density, layout, taps, options, dtype)
    mask = kernel != 0
    kernel = np.ascontiguousarray(layout.from_canonical(kernel, shape))
    mask = np.ascontiguousarray(layout.from_canonical(mask, shape))
    unmask_at_random(mask, live_count(density, mask.size), options.rng)
    return kernel, mask


def _draw_structure(
    shape: tuple[int, ...],
    density: float,
    layout: KernelLayout,
    structure: Structure,
    options: DrawOptions,
    dtype: type,
) -> tuple[np.ndarray, np.ndarray]:
    """The kernel and the mask of `exact_orthogonal` with a structure."""
    canonical_shape = layout.canonical_shape(shape)
    structure.check(canonical_shape)
    count = structure.live_count(canonical_shape, density)
    kernel, mask = structure.draw(
        canonical_shape, count, float(density), options
    )
    kernel = np.ascontiguousarray(layout.from_canonical(kernel, shape))
    mask = np.ascontiguousarray(layout.from_canonical(mask, shape))
    return kernel.astype(dtype, copy=False), mask


def _draw_matrices(
    shape: tuple[int, ...],
    density: float,
    layout: KernelLayout,
    taps: str,
    options: DrawOptions,
    dtype: type,
) -> np.ndarray:
    """The kernel of `exact_orthogonal` without a structure, in its canonical shape.

    Args:
        shape: tuple of int. In Keras layout.
        density: float in (0, 1]. The matrices have at most as many entries as the kernel.
        layout: KernelLayout.
        taps: str. As in `exact_orthogonal`.
        options: DrawOptions.
        dtype: type.
    """
    matrices = layout.matrices(shape)
    matrix_shape = _matrix_shape(layout, shape, taps)
    canonical_shape = layout.canonical_shape(shape)
    size = math.prod(shape)
    count = live_count(density, size)
    fewest = matrices * min(matrix_shape)
    if count < fewest:
        raise DensityError(
            f"An exactly orthogonal kernel of shape {shape} needs at least {fewest} "
            f"live entries: the least density is {fewest / size:.6g}. "
            f"Received: density={density!r} ({count} entries)"
        )
    if options.cover:
        fewest = matrices * max(matrix_shape)
    share = count / size
    if taps == "dense_center":
        share = min(math.prod(canonical_shape[2:-2]) * share, math.sqrt(share))
    entries = live_count(share, matrices * math.prod(matrix_shape))
    entries = min(max(entries, fewest), count)
    center = () if taps == "all" else center_of(canonical_shape)
    kernel: np.ndarray = np.zeros(canonical_shape, dtype=dtype)
    if matrix_shape == (1, 1):  # all at once: depthwise ones are many
        single_entries: tuple[Any, ...] = (..., *center, 0, 0)
        is_positive = options.rng.random(kernel[single_entries].shape) < 0.5
        kernel[single_entries] = np.where(
            is_positive, options.gain, -options.gain
        )
        return kernel
    counts = apportion(entries, [1.0] * matrices)
    for matrix, matrix_count in zip(
        np.ndindex(canonical_shape[:2]), counts, strict=True
    ):
        values = kernel[(*matrix, *center)].reshape(matrix_shape)
        write_orthogonal(values, matrix_count, options)
        if taps == "all":  # the diagonal of `[I | 0]` is of no one tap
            values[...] = values[options.rng.permutation(len(values))]
    return kernel


def check_options(
    structure: Structure | None,
    start: str,
    taps: str,
) -> None:
    """Raises a ValueError for an unknown option, or one that a structure does not take."""
    if start not in ("covering", "published"):
        raise ValueError(
            f'`start` must be "covering" or "published". Received: {start=}'
        )
    if taps not in ("center", "dense_center", "all"):
        raise ValueError(
            f'`taps` must be "center", "dense_center" or "all". Received: {taps=}'
        )
    if structure is not None and taps != "center":
        raise ValueError(
            "With a `structure` the matrix is at the center tap: leave out `taps`. "
            f"Received: structure={structure}, {taps=}"
        )


def _matrix_shape(
    layout: KernelLayout,
    shape: Sequence[int],
    taps: str,
) -> tuple[int, int]:
    """Inputs and outputs of one matrix; with `taps="all"` it has the inputs of all taps."""
    _, _, *spatial, inputs, outputs = layout.canonical_shape(shape)
    if taps == "all":
        inputs *= math.prod(spatial)
    return inputs, outputs


def default_layout(shape: Sequence[int]) -> KernelLayout:
    """`(*spatial, in, out)`; refuses vectors."""
    if len(shape) < 2:
        raise DensityError(
            f"Orthogonal kernels need rank 2 or more. Received: {shape=}"
        )
    return KernelLayout.convolution()
