"""EOI: one sparse, exactly (semi-)orthogonal matrix from random Givens rotations."""

import math

import numpy as np

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal._density_law import rotations_for_density
from keras_sparse_ortho.orthogonal._product import (
    SPARSE_FIRST,
    SPARSE_UNTIL,
    SPARSE_WIDTH,
    write_product,
)
from keras_sparse_ortho.orthogonal._rotations import AngleLaw, Rotations, cos_sin
from keras_sparse_ortho.orthogonal._supports import Supports

# Roots z of the closed form at these densities: from `[I | 0]` they give the numbers of rotations
# without a solver. Another root may change the last bit of kernels that are pinned.
_ROOTS = {SPARSE_UNTIL: 1.063, SPARSE_FIRST: 8.172}


def write_orthogonal(
    out: np.ndarray,
    count: int,
    gain: float,
    rng: np.random.Generator,
    angles: AngleLaw = None,
    rotations: Rotations | None = None,
    *,
    cover: bool = True,
) -> None:
    """Writes `gain` times a sparse orthogonal matrix into a zeroed C-contiguous 2-D array.

    With `n` the shorter and `m` the longer side, the `n x m` matrix `[I | 0]` is rotated while
    its support fits `count` entries, and transposed if `out` is tall. Its support may hold fewer
    than `count` entries (by less than one rotation's gain), never more.

    With `cover`, the empty columns get an entry each first, as many as `count` allows; explicit
    `rotations` replace these rotations, too.
    """
    rows, width = sorted(out.shape)
    if count < rows:
        raise DensityError(f"An orthogonal {rows} x {width} matrix has at least {rows} entries.")
    if width == 1:
        out[0, 0] = gain if rng.random() < 0.5 else -gain
        return
    start = Rotations.none()
    if rotations is not None:
        rotations = _longest_fitting(rotations, rows, width, count)
    else:
        if cover:
            start = covering_rotations(rows, width, count, rng, angles)
        rotations = draw_until(rows, width, count, rng, angles, start)
    sequence = start + rotations
    sparse = _sparse_part(len(sequence), rows, width, len(start))
    write_product(out, gain, sequence, sparse)


def covering_rotations(
    rows: int, width: int, limit: int, rng: np.random.Generator, angles: AngleLaw = None
) -> Rotations:
    """Rotations that spread the entries of `[I | 0]` over empty columns, one entry to each.

    Every empty column is rotated once, with a column that has an entry in row `k mod n`. Each
    round doubles the columns that are not empty, so that the `r` columns of a row share its norm
    after `log2(r)` rounds; rotating all of them with the same column instead would leave the last
    one about `2^-r` of it. Which columns stay empty, if `limit` does not suffice, is random.
    """
    order = np.arange(width)
    order[rows:] = rows + np.argsort(rng.random(width - rows))
    place = np.arange(rows, min(width, limit))
    # The largest `rows * 2^k` that is not above the place.
    _, exponent = np.frexp(place // rows)
    source = place - (rows << (exponent.astype(np.int64) - 1))
    return Rotations(order[source], order[place], *cos_sin(angles, len(place), rng))


def draw_until(
    rows: int,
    width: int,
    limit: int,
    rng: np.random.Generator,
    angles: AngleLaw = None,
    start: Rotations | None = None,
) -> Rotations:
    """Draws random rotations up to the first that takes the support over `limit` entries.

    `start` holds the covering rotations that come before them, which are not returned.
    """
    supports = Supports(rows, width)
    if start:
        supports.apply(start)
    # Three quarters of the way (in density) need no counting: the closed form says how many
    # rotations that is, and the count afterwards whether it was right for this draw.
    safe = 0
    if limit < rows * width and 0.75 * limit > supports.live:
        density = 0.75 * limit / (rows * width)
        safe = rotations_for_density(density, width, rows if start else None)
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


def _sparse_part(rotations: int, rows: int, width: int, covering: int) -> int:
    """How many of the rotations, of which the first ones cover, to multiply as sparse matrices."""
    if width < SPARSE_WIDTH:
        return 0
    if rotations <= _rotations_at(SPARSE_UNTIL, rows, width, covering):
        return rotations
    return _rotations_at(SPARSE_FIRST, rows, width, covering)


def _rotations_at(density: float, rows: int, width: int, covering: int) -> int:
    if not covering:
        return int((width - 1) / 2 * math.log(width / _ROOTS[density]))
    if density * rows <= 1:
        return 0
    return covering + rotations_for_density(density, width, rows)
