"""EOI: one sparse, exactly (semi-)orthogonal matrix from random Givens rotations."""

import math

import numpy as np

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal._density_law import rotations_for_density
from keras_sparse_ortho.orthogonal._product import SparseProduct, rotate_rows, write_transpose
from keras_sparse_ortho.orthogonal._rotations import AngleLaw, Rotations
from keras_sparse_ortho.orthogonal._supports import Supports

# From this width on the sparse product is faster than dense row rotations up to a density of 0.4.
# A denser kernel goes through it only up to 0.1, which costs little, and densely from there: the
# sparse form of a dense matrix would need more memory than the matrix. The roots z of the closed
# form at these densities turn them into numbers of rotations without a solver.
_SPARSE_WIDTH = 256
_ROOT_AT_04 = 1.063
_ROOT_AT_01 = 8.172


def write_orthogonal(
    out: np.ndarray,
    count: int,
    gain: float,
    rng: np.random.Generator,
    angles: AngleLaw = None,
    rotations: Rotations | None = None,
) -> None:
    """Writes `gain` times a sparse orthogonal matrix into a zeroed C-contiguous 2-D array.

    With `n` the shorter and `m` the longer side, the `n x m` matrix `[I | 0]` is rotated while
    its support fits `count` entries, and transposed if `out` is tall. Its support may hold fewer
    than `count` entries (by less than one rotation's gain), never more.
    """
    rows, width = sorted(out.shape)
    if count < rows:
        raise DensityError(f"An orthogonal {rows} x {width} matrix has at least {rows} entries.")
    if width == 1:
        out[0, 0] = gain if rng.random() < 0.5 else -gain
        return
    if rotations is None:
        rotations = draw_until(rows, width, count, rng, angles)
    else:
        rotations = _longest_fitting(rotations, rows, width, count)
    _write_product(out, gain, rotations)


def draw_until(
    rows: int, width: int, limit: int, rng: np.random.Generator, angles: AngleLaw = None
) -> Rotations:
    """Draws random rotations up to the first that takes the support over `limit` entries."""
    supports = Supports(rows, width)
    # Three quarters of the way (in density) need no counting: the closed form says how many
    # rotations that is, and the count afterwards whether it was right for this draw.
    safe = 0
    if limit < rows * width and 0.75 * limit > rows:
        safe = rotations_for_density(0.75 * limit / (rows * width), width)
    chunk = max(3 * width, 64)
    drawn = Rotations.draw(width, chunk, rng, angles)
    while len(drawn) < safe:
        drawn += Rotations.draw(width, chunk, rng, angles)
    if safe:
        ahead = supports.copy()
        ahead.apply(drawn[:safe])
        if ahead.live <= limit:
            supports = ahead
        else:
            safe = 0
    applied, done = supports.apply_while_fits(drawn[safe:], limit)
    total = safe + applied
    while not done:
        more = Rotations.draw(width, chunk, rng, angles)
        applied, done = supports.apply_while_fits(more, limit)
        drawn += more
        total += applied
    return drawn[:total]


def _longest_fitting(rotations: Rotations, rows: int, width: int, limit: int) -> Rotations:
    """The longest prefix of an explicit sequence whose support fits `limit` entries."""
    highest = max(rotations.first.max(initial=0), rotations.second.max(initial=0))
    if highest >= width:
        raise ValueError(
            f"`rotations` must name columns below the longer side of the kernel, {width}. "
            f"Received: column {highest}"
        )
    supports = Supports(rows, width)
    applied, _ = supports.apply_while_fits(rotations, limit, stop_at_limit=False)
    return rotations[:applied]


def _write_product(out: np.ndarray, gain: float, rotations: Rotations) -> None:
    rows, width = sorted(out.shape)
    tall = out.shape[0] > out.shape[1]
    if width >= _SPARSE_WIDTH and len(rotations) <= _rotations_at(_ROOT_AT_04, width):
        SparseProduct(rotations, rows, width).write(out, gain, transposed=tall)
        return
    sparse_part = _rotations_at(_ROOT_AT_01, width) if width >= _SPARSE_WIDTH else 0
    columns = np.zeros((width, rows))
    SparseProduct(rotations[:sparse_part], rows, width).write(columns, gain, transposed=True)
    rotate_rows(columns, rotations[sparse_part:])
    if tall:
        out[...] = columns
    else:
        write_transpose(columns, out)


def _rotations_at(root: float, width: int) -> int:
    return int((width - 1) / 2 * math.log(width / root))
