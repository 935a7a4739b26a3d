"""The window of a convolution as its strides see it: polyphase rows, each with taps of its own.

A convolution with stride `s` along an axis, `y[p] = sum_u K[u] x[s p + u]`, reads its input as `s`
interleaved phases `x_f[p] = x[s p + f]`. With `u = s v + f` it is a convolution of stride 1,

    y[p] = sum_f sum_v K[s v + f] x_f[p + v],

of `s` times as many inputs, the rows `(phase, input)`. Phase `f` has the places
`v = 0 ... ceil((k - f) / s) - 1` of a window of `k` taps. A transposed convolution is the adjoint,
with inputs and outputs in each other's place.
"""

import math
from collections.abc import Sequence

import numpy as np

from keras_sparse_ortho.orthogonal._layout import KernelLayout


class Polyphase:
    """Rows `(phase, channel)` and places of a window.

    Attributes:
        rows: Number of rows, phases that the window reaches times `channels`.
        phase: Integer array `(axes, rows)`: the phase of each row.
        places: Integer array `(axes, rows)`: how many taps its phase has.
    """

    def __init__(self, taps: Sequence[int], strides: Sequence[int], channels: int) -> None:
        self.taps = tuple(taps)
        self.strides = tuple(strides)
        self.channels = channels
        reached = [min(k, s) for k, s in zip(taps, strides, strict=True)]
        self.rows = math.prod(reached) * channels
        phases = np.indices(reached).reshape(len(reached), math.prod(reached))
        self.phase = np.repeat(phases, channels, axis=1)
        by_axis = np.array([taps, strides]).reshape(2, -1, 1)
        self.places = -(-(by_axis[0] - self.phase) // by_axis[1])

    @classmethod
    def of(cls, shape: Sequence[int], layout: KernelLayout) -> "Polyphase":
        """Those of one matrix of a kernel; the channels are inputs, or outputs if transposed."""
        _, _, *taps, inputs, outputs = layout.canonical_shape(shape)
        channels = outputs if layout.transposed else inputs
        return cls(taps, layout.tap_strides(shape), channels)

    def write(
        self,
        part: np.ndarray,
        place: np.ndarray,
        row: np.ndarray,
        column: np.ndarray,
        values: np.ndarray,
    ) -> None:
        """Writes entries into a zeroed kernel `(*taps, channels, columns)`.

        Args:
            part: The kernel.
            place: Integer array `(axes, entries)`: place of each entry within its phase.
            row: Integer array `(entries,)`: their rows.
            column: Integer array `(entries,)`: their columns.
            values: Array `(entries,)`.
        """
        strides = np.array(self.strides, dtype=np.int64).reshape(-1, 1)
        tap = strides * place + self.phase[:, row]
        part[(*tap, row % self.channels, column)] = values

    def shift_lines(
        self, place: np.ndarray, row: np.ndarray, line: np.ndarray, rng: np.random.Generator
    ) -> None:
        """Shifts the entries of each line (sorted by lines) by as much, within the window.

        The shifts are uniform over all that keep every entry among the places of its row.
        """
        if not place.size:
            return
        begins = np.flatnonzero(np.diff(line, prepend=-1))
        low = np.minimum.reduceat(place, begins, axis=1)
        room = np.minimum.reduceat(self.places[:, row] - 1 - place, begins, axis=1)
        shift = (rng.random(low.shape) * (low + room + 1)).astype(np.int64) - low
        place += np.repeat(shift, np.diff(begins, append=len(line)), axis=1)


def write_shifted(
    part: np.ndarray, matrix: np.ndarray, window: Polyphase, rng: np.random.Generator
) -> None:
    """Spreads a matrix over the taps of a zeroed kernel: `K(z) = S_a(z) H S_b(z)`.

    Row `i` is shifted by `a(i)`, uniform over the lower half of its places, then column `o` by a
    `b(o)` that is uniform over all shifts that keep its live entries in the window.
    """
    row_shift = (rng.random(window.places.shape) * (window.places // 2 + 1)).astype(np.int64)
    column, row = np.nonzero(matrix.T)  # sorted by columns
    place = row_shift[:, row]
    window.shift_lines(place, row, column, rng)
    window.write(part, place, row, column, matrix[row, column])


def to_polyphase(kernel: np.ndarray, layout: KernelLayout) -> np.ndarray:
    """A strided convolution as one of stride 1 between phases.

    Returns:
        An array `(batch, groups * gates, *places, inputs, outputs)` with the two sides of
        `layout.polyphase_shape`: tap `s v + f` of an input stands at place `v` of the input's
        phase `f`, the inputs of phase 0 first (of a transposed convolution: outputs). With strides
        of 1 this is `layout.to_canonical(kernel)`. The convolution is an isometry under circular
        padding if `sum_v A[v] A[v + w]^T` is the identity for `w = 0` and zero for all other `w`.

    Example:

    >>> kernel = np.arange(3.0).reshape(3, 1, 1)
    >>> to_polyphase(kernel, KernelLayout.convolution(strides=2))[0, 0, :, :, 0].tolist()
    [[0.0, 1.0], [2.0, 0.0]]
    """
    canonical = layout.to_canonical(kernel)
    if layout.transposed:
        canonical = np.swapaxes(canonical, -1, -2)
    *matrices, channels, columns = canonical.shape
    taps, strides = matrices[2:], layout.tap_strides(kernel.shape)
    places = [-(-k // s) for k, s in zip(taps, strides, strict=True)]
    reached = [min(k, s) for k, s in zip(taps, strides, strict=True)]
    parts = np.zeros((math.prod(reached), *matrices[:2], *places, channels, columns))
    for part, phase in zip(parts, np.ndindex(*reached), strict=True):
        of_phase = tuple(slice(f, None, s) for f, s in zip(phase, strides, strict=True))
        found = canonical[(slice(None), slice(None), *of_phase)]
        part[tuple(slice(0, size) for size in found.shape)] = found
    rows = np.moveaxis(parts, 0, -3)
    rows = rows.reshape(*rows.shape[:-3], len(parts) * channels, columns)
    return np.swapaxes(rows, -1, -2) if layout.transposed else rows
