"""`shift_taps`: a matrix spread over the taps of a convolution by shifts on both sides."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from keras_sparse_ortho.orthogonal._polyphase import Polyphase


def shift_taps(
    matrix: np.ndarray, input_shifts: Any, output_shifts: Any, taps: Sequence[int]
) -> np.ndarray:
    """The convolution kernel whose entries are those of a matrix, each at a tap of its own.

        K[u, i, o] = H[i, o]   where   u = a(i) + b(o),   else 0.

    Under circular padding this is the matrix at every position, between a shift of each input
    channel and one of each output channel: with an orthogonal matrix the convolution is one, too.
    `exact_orthogonal(..., taps="shift")` draws matrix and shifts at random.

    Args:
        matrix: `H`, of shape `(inputs, outputs)`.
        input_shifts: `a`, integers of shape `(axes, inputs)`.
        output_shifts: `b`, integers of shape `(axes, outputs)`; may be negative, as may `a`.
        taps: Shape of the window, one size for each spatial axis.

    Returns:
        The kernel, `(*taps, inputs, outputs)`.

    Raises:
        ValueError: Shifts of another shape, or such that take a nonzero entry out of the window.

    Example:

    >>> kernel = shift_taps(np.array([[0.6, 0.8]]), [[0]], [[0, 2]], taps=(3,))
    >>> kernel[:, 0].tolist()
    [[0.6, 0.0], [0.0, 0.0], [0.0, 0.8]]
    """
    matrix = np.asarray(matrix)
    shifts = []
    for name, given, channels in (
        ("input_shifts", input_shifts, matrix.shape[0]),
        ("output_shifts", output_shifts, matrix.shape[1]),
    ):
        table = np.asarray(given)
        if table.shape != (len(taps), channels) or table.dtype.kind not in "iu":
            raise ValueError(
                f"`{name}` must be integers of shape {(len(taps), channels)}, one for each spatial "
                f"axis and channel. Received: shape={table.shape}, dtype={table.dtype}"
            )
        shifts.append(table.astype(np.int64))
    row, column = np.nonzero(matrix)
    place = shifts[0][:, row] + shifts[1][:, column]
    outside = (place < 0) | (place >= np.array(taps, dtype=np.int64).reshape(-1, 1))
    if outside.any():
        entry = int(np.argmax(outside.any(axis=0)))
        raise ValueError(
            f"Shifts must keep every nonzero entry in the window of {tuple(taps)} taps. Received: "
            f"tap {tuple(place[:, entry].tolist())} for input {row[entry]}, output {column[entry]}"
        )
    kernel = np.zeros((*taps, *matrix.shape), dtype=matrix.dtype)
    window = Polyphase(taps, [1] * len(taps), matrix.shape[0])
    window.write(kernel, place, row, column, matrix[row, column])
    return kernel
