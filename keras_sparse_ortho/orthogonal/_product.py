"""The values: `[I | 0]` times a sequence of rotations, sparsely or densely.

A column rotation costs as much as its two columns have live entries. While these are few, whole
levels of disjoint rotations are multiplied as sparse matrices; once a column is mostly full, two
contiguous rows of the transpose are rotated at a time. Neither uses BLAS, whose kernels differ
between processors in the last bit.
"""

import numpy as np
import scipy.sparse

from keras_sparse_ortho.orthogonal._rotations import Rotations
from keras_sparse_ortho.orthogonal._supports import schedule

# From this width on the sparse product is faster than dense row rotations up to a density of 0.4.
# A denser kernel goes through it only up to 0.1, which costs little, and densely from there: the
# sparse form of a dense matrix would need more memory than the matrix.
SPARSE_WIDTH = 256
SPARSE_UNTIL = 0.4
SPARSE_FIRST = 0.1
# Rows that are multiplied, or columns that are transposed, at a time: few enough for the cache.
_ROW_BLOCK = 256
_TILE = 64


class SparseProduct:
    """`[I | 0] G_1 ... G_t`, of shape `(rows, width)`, as a product of two sparse factors.

    The product is a balanced tree: two factors of half the rotations each have about the square
    root of the live entries a row, so that the last multiplication costs little more than writing
    its result, and all others together less. Every depth of the tree is one multiplication of
    block-diagonal stacks. The factors stand in bit-reversed order: at every depth the first half
    of the stack are the left factors, the second half their right ones.
    """

    def __init__(self, rotations: Rotations, rows: int, width: int) -> None:
        if not len(rotations):
            self._left = scipy.sparse.csr_array(scipy.sparse.eye_array(rows, width))
            self._right = scipy.sparse.csr_array(scipy.sparse.eye_array(width))
            return
        indptr, indices, data, blocks = _level_stack(rotations, width)
        while True:
            blocks //= 2
            half = blocks * width
            cut = indptr[half]
            # Left block b meets the rows of right block b.
            shift = np.arange(blocks, dtype=np.int32) * np.int32(width)
            shift = np.repeat(shift, np.diff(indptr[: half + 1 : width]))
            left = scipy.sparse.csr_array(
                (data[:cut], indices[:cut] + shift, indptr[: half + 1]), shape=(half, half)
            )
            right = scipy.sparse.csr_array(
                (data[cut:], indices[cut:], indptr[half:] - cut), shape=(half, width)
            )
            if blocks == 1:
                break
            product = left @ right
            indptr, indices, data = product.indptr, product.indices, product.data
        self._left, self._right = left[:rows], right

    def write(self, out: np.ndarray, gain: float, *, transposed: bool) -> None:
        """Writes `gain` times the product, or its transpose, into a zeroed C-contiguous array."""
        left, right = self._left, self._right
        if transposed:
            left, right = right.T.tocsr(), left.T.tocsr()
        left = left * gain
        width = out.shape[1]
        for start in range(0, out.shape[0], _ROW_BLOCK):
            part = out[start : start + _ROW_BLOCK]
            product = left[start : start + _ROW_BLOCK] @ right
            position = np.repeat(np.arange(0, part.size, width), np.diff(product.indptr))
            position += product.indices
            part.reshape(-1)[position] = product.data


def _level_stack(
    rotations: Rotations, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """The levels of both halves of the sequence as one CSR stack in bit-reversed order."""
    middle = len(rotations) // 2
    halves = [schedule(rotations[:middle], width), schedule(rotations[middle:], width)]
    deepest = max(int(levels.max(initial=0)) for levels in halves)
    bits = max(deepest, 1).bit_length()
    blocks = 2 << bits
    block = np.concatenate([halves[0], halves[1] + (1 << bits)])
    start = _bit_reversed(block, bits + 1) * width
    i, j = start + rotations.first, start + rotations.second

    entries = np.ones(blocks * width, dtype=np.int32)
    entries[i] = entries[j] = 2
    indptr = np.zeros(blocks * width + 1, dtype=np.int32)
    np.cumsum(entries, out=indptr[1:])
    indices = np.empty(indptr[-1], dtype=np.int32)
    data = np.ones(indptr[-1])
    indices[indptr[:-1]] = np.tile(np.arange(width, dtype=np.int32), blocks)
    data[indptr[i]] = data[indptr[j]] = rotations.cos
    indices[indptr[i] + 1], data[indptr[i] + 1] = rotations.second, -rotations.sin
    indices[indptr[j] + 1], data[indptr[j] + 1] = rotations.first, rotations.sin
    return indptr, indices, data, blocks


def _bit_reversed(numbers: np.ndarray, bits: int) -> np.ndarray:
    result = np.zeros_like(numbers)
    for k in range(bits):
        result |= ((numbers >> k) & 1) << (bits - 1 - k)
    return result


def write_product(out: np.ndarray, gain: float, rotations: Rotations, sparse: int) -> None:
    """Writes `gain [I | 0] G_1 ... G_t`, transposed if `out` is tall, into a zeroed array.

    The first `sparse` rotations are multiplied as sparse matrices, the others applied to rows.
    """
    rows, width = sorted(out.shape)
    tall = out.shape[0] > out.shape[1]
    if 0 < len(rotations) <= sparse:
        SparseProduct(rotations, rows, width).write(out, gain, transposed=tall)
        return
    columns = np.zeros((width, rows))
    SparseProduct(rotations[:sparse], rows, width).write(columns, gain, transposed=True)
    rotate_rows(columns, rotations[sparse:])
    if tall:
        out[...] = columns
    else:
        write_transpose(columns, out)


def rotate_rows(transposed: np.ndarray, rotations: Rotations) -> None:
    """Applies column rotations to a matrix given by its float64 transpose, in place."""
    rows = list(transposed)
    from_x = np.empty(transposed.shape[1])
    from_y = np.empty(transposed.shape[1])
    sequence = zip(*(array.tolist() for array in rotations._arrays()), strict=True)
    for i, j, cos, sin in sequence:
        x, y = rows[i], rows[j]
        np.multiply(x, sin, out=from_x)
        np.multiply(y, sin, out=from_y)
        np.multiply(x, cos, out=x)
        np.multiply(y, cos, out=y)
        np.add(x, from_y, out=x)
        np.subtract(y, from_x, out=y)


def write_transpose(matrix: np.ndarray, out: np.ndarray) -> None:
    """`out[...] = matrix.T`, in tiles that stay in the cache, casting on the way."""
    for start in range(0, len(matrix), _TILE):
        out[:, start : start + _TILE] = matrix[start : start + _TILE].T
