"""Exactly orthogonal kernels of every shape: what their axes mean, and EOI in each matrix."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho._checks import check_density, check_integer, other_keywords
from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.orthogonal._counts import apportion, live_count, unmask_at_random
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
            # JSON turns tuples into lists.
            axes = (axes,) if isinstance(axes, int) else tuple(int(axis) for axis in axes)
            object.__setattr__(self, name, axes)
        for name in ("groups", "gates"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise LayoutError(f"`{name}` must be a positive integer. Received: {name}={value}")

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
        axes = list(enumerate(kernel))
        return cls(
            inputs=tuple(k for k, name in axes if name in data and name not in output),
            outputs=tuple(k for k, name in axes if name not in data),
            batch=tuple(k for k, name in axes if name in data and name in output),
        )

    def get_config(self) -> dict[str, Any]:
        config = dataclasses.asdict(self)
        return {name: list(v) if isinstance(v, tuple) else v for name, v in config.items()}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> KernelLayout:
        removed = ("strides", "transposed")  # in older files
        return cls(**{name: value for name, value in config.items() if name not in removed})

    @property
    def parts(self) -> int:
        return self.groups * self.gates

    def matrix_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Inputs and outputs of one matrix: the last two axes of `canonical_shape`."""
        *_, inputs, outputs = self.canonical_shape(shape)
        return inputs, outputs

    def matrices(self, shape: Sequence[int]) -> int:
        """Number of matrices at one tap: batch times groups times gates."""
        batch, parts, *_ = self.canonical_shape(shape)
        return batch * parts

    def canonical_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape `(batch, parts, *spatial, inputs, outputs)` of a kernel of shape `shape`."""
        shape = tuple(int(size) for size in shape)
        batch, spatial, inputs, outputs = (
            [shape[axis] for axis in axes] for axes in self._resolved(shape)
        )
        total = math.prod(outputs)
        if total % self.parts:
            raise LayoutError(
                f"The {total} outputs of a kernel of shape {shape} cannot be divided into "
                f"{self.groups} groups of {self.gates} gates. Received: layout={self}"
            )
        return (math.prod(batch), self.parts, *spatial, math.prod(inputs), total // self.parts)

    def to_canonical(self, kernel: np.ndarray) -> np.ndarray:
        """Moves a kernel to `(batch, parts, *spatial, inputs, outputs)`; a view where possible."""
        batch, spatial, inputs, outputs = self._resolved(kernel.shape)
        _, parts, *taps, rows, columns = canonical = self.canonical_shape(kernel.shape)
        moved = kernel.transpose(*batch, *spatial, *inputs, *outputs)
        moved = moved.reshape(canonical[0], *taps, rows, parts, columns)
        return np.moveaxis(moved, -2, 1)

    def from_canonical(
        self,
        canonical: np.ndarray,
        shape: Sequence[int],
    ) -> np.ndarray:
        """The inverse of `to_canonical`, for a kernel of shape `shape`."""
        order = [axis for axes in self._resolved(shape) for axis in axes]
        moved = np.moveaxis(canonical, 1, -2).reshape([shape[axis] for axis in order])
        return moved.transpose(np.argsort(order))

    def _resolved(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        rank = len(shape)
        batch, inputs, outputs = (
            tuple(axis + rank if axis < 0 else axis for axis in axes)
            for axes in (self.batch, self.inputs, self.outputs)
        )
        flat = batch + inputs + outputs
        if len(set(flat)) < len(flat) or any(not 0 <= axis < rank for axis in flat):
            raise LayoutError(
                f"The layout's axes must be distinct axes of the kernel of shape {tuple(shape)}. "
                f"Received: layout={self}"
            )
        if any(size < 1 for size in shape):
            raise LayoutError(f"All dimensions of a kernel must be positive. Received: {shape=}")
        return batch, tuple(axis for axis in range(rank) if axis not in flat), inputs, outputs


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
    more = [str(k) for k in range(rank - len(data.replace("...", "")))]
    parts = (letters.partition("...") for letters in (data, kernel, output))
    data_, kernel_, out = ([*head, *(more if dots else ()), *tail] for head, dots, tail in parts)
    return data_, kernel_, out


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

    def live_count(self, canonical_shape: Sequence[int], density: float) -> int:
        """Live entries at `density`: the nearest multiple of `unit`, or a DensityError."""
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
    def from_config(cls, config: dict[str, Any]) -> Structure:
        return cls(**config)

    def _shares(
        self,
        canonical_shape: Sequence[int],
        at_center: int,
        count: int,
        options: DrawOptions,
    ) -> list[int]:
        """The entries `at_center`, or more to cover, in units and shared among the matrices."""
        batch, parts, *_ = canonical_shape
        most = max(at_center, self.least(canonical_shape))
        if options.cover:
            most = max(most, min(self.covering(canonical_shape), count))
        return apportion(most // self.unit(canonical_shape), [1.0] * (batch * parts))

    def _check_sides(self, *names: str) -> None:
        for name in names:
            object.__setattr__(self, name, check_integer(name, getattr(self, name)))


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
    return layout.matrices(shape) * min(_sides(layout, shape, taps))


def covering_count(shape: Sequence[int], layout: KernelLayout | None = None) -> int:
    """Fewest live entries of an exactly orthogonal kernel without dead outputs: `out` a matrix.

    >>> covering_count((100, 400)), covering_count((400, 100))
    (400, 100)
    """
    layout = layout or default_layout(shape)
    return layout.matrices(shape) * layout.matrix_shape(shape)[1]


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
    live = layout.to_canonical(np.asarray(kernel)) != 0
    batch, parts, *_, outputs = live.shape
    return int((~live.reshape(batch, parts, -1, outputs).any(axis=2)).sum())


@other_keywords()
def exact_orthogonal(
    shape: Sequence[int],
    density: float,
    *,
    gain: float = 1.0,
    seed: int | np.random.Generator | None = None,
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
    rng = np.random.default_rng(seed)
    check_options(structure, start, taps)
    options = DrawOptions(rng, gain, start != "published")
    canonical_shape = layout.canonical_shape(shape)
    if structure is not None:
        structure.check(canonical_shape)
        live_entries = structure.live_count(canonical_shape, density)
        drawn = structure.draw(canonical_shape, live_entries, float(density), options)
        values, live = (np.ascontiguousarray(layout.from_canonical(v, shape)) for v in drawn)
        return values.astype(dtype, copy=False), live
    size, count = math.prod(shape), live_count(density, math.prod(shape))
    matrices, sides = layout.matrices(shape), _sides(layout, shape, taps)
    if count < matrices * min(sides):
        raise DensityError(
            f"An exactly orthogonal kernel of shape {shape} needs at least {matrices * min(sides)} "
            f"live entries: the least density is {matrices * min(sides) / size:.6g}. "
            f"Received: density={density!r} ({count} entries)"
        )
    least = matrices * (max(sides) if options.cover else min(sides))
    share = count / size
    if taps == "dense_center":
        share = min(math.prod(canonical_shape[2:-2]) * share, math.sqrt(share))
    most = min(max(live_count(share, matrices * math.prod(sides)), least), count)
    center = () if taps == "all" else center_of(canonical_shape)
    kernel: np.ndarray = np.zeros(canonical_shape, dtype=dtype)
    if sides == (1, 1):  # all at once: depthwise ones are many
        index: tuple[Any, ...] = (..., *center, 0, 0)
        signs = rng.random(kernel[index].shape) < 0.5
        kernel[index] = np.where(signs, gain, -gain)
    else:
        counts = apportion(most, [1.0] * matrices)
        for matrix, entries in zip(np.ndindex(canonical_shape[:2]), counts, strict=True):
            part = kernel[(*matrix, *center)].reshape(sides)
            write_orthogonal(part, entries, options)
            if taps == "all":  # the diagonal of `[I | 0]` is of no one tap
                part[...] = part[rng.permutation(len(part))]
    mask = kernel != 0
    kernel, mask = (np.ascontiguousarray(layout.from_canonical(v, shape)) for v in (kernel, mask))
    unmask_at_random(mask, count, rng)
    return kernel, mask


def check_options(
    structure: Structure | None,
    start: str,
    taps: str,
) -> None:
    if start not in ("covering", "published"):
        raise ValueError(f'`start` must be "covering" or "published". Received: {start=}')
    if taps not in ("center", "dense_center", "all"):
        raise ValueError(f'`taps` must be "center", "dense_center" or "all". Received: {taps=}')
    if structure is not None and taps != "center":
        raise ValueError(
            "With a `structure` the matrix is at the center tap: leave out `taps`. "
            f"Received: structure={structure}, {taps=}"
        )


def _sides(
    layout: KernelLayout,
    shape: Sequence[int],
    taps: str,
) -> tuple[int, int]:
    *_, inputs, outputs = canonical = layout.canonical_shape(shape)
    return (math.prod(canonical[2:-2]) if taps == "all" else 1) * inputs, outputs


def default_layout(shape: Sequence[int]) -> KernelLayout:
    """`(*spatial, in, out)`; refuses vectors."""
    if len(shape) < 2:
        raise DensityError(f"Orthogonal kernels need rank 2 or more. Received: {shape=}")
    return KernelLayout.convolution()
