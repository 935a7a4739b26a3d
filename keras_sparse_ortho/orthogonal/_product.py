"""The values: `[I | 0]` times a sequence of rotations, sparsely or densely.

A column rotation costs as much as its two columns have live entries. While these are few, whole
levels of disjoint rotations are multiplied as sparse matrices (`sparse_product`); once a column is
mostly full, two contiguous rows of the transpose are rotated at a time (`rotate_rows`). Neither
uses BLAS, whose kernels differ between processors in the last bit.
"""

import numpy as np
import scipy.sparse

from keras_sparse_ortho.orthogonal._rotations import Rotations
from keras_sparse_ortho.orthogonal._supports import schedule

_TILE = 64


def sparse_product(rotations: Rotations, rows: int, width: int) -> scipy.sparse.csr_array:
    """Returns `[I | 0] G_1 ... G_t`, of shape `(rows, width)`, in float64.

    The product is a balanced tree: two factors of half the rotations each have about the square
    root of the live entries a row, so that the last multiplication costs little more than writing
    its result, and all others together less. Every depth of the tree is one multiplication of
    block-diagonal stacks. The factors stand in bit-reversed order: at every depth the first half
    of the stack are the left factors, the second half their right ones.
    """
    if not len(rotations):
        return scipy.sparse.csr_array(scipy.sparse.eye_array(rows, width))
    indptr, indices, data, blocks = _level_stack(rotations, width)
    while blocks > 1:
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
        product = (left[:rows] if blocks == 1 else left) @ right
        indptr, indices, data = product.indptr, product.indices, product.data
    return product


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


def scatter(product: scipy.sparse.csr_array, out: np.ndarray) -> None:
    """Writes the entries of a CSR matrix into a zeroed array of its shape, casting them.

    `out` is contiguous in either order; an order of its own is written through a copy.
    """
    rows, columns = product.shape
    lengths = np.diff(product.indptr)
    if out.flags.c_contiguous:
        position = np.repeat(np.arange(0, rows * columns, columns), lengths)
        position += product.indices
        out.reshape(-1)[position] = product.data
    elif out.flags.f_contiguous:
        position = product.indices * np.int64(rows)
        position += np.repeat(np.arange(rows), lengths)
        out.T.reshape(-1)[position] = product.data
    else:
        whole = np.zeros(out.shape, dtype=out.dtype)
        scatter(product, whole)
        out[...] = whole


def write_transpose(matrix: np.ndarray, out: np.ndarray) -> None:
    """`out[...] = matrix.T`, in tiles that stay in the cache, casting on the way."""
    for start in range(0, len(matrix), _TILE):
        out[:, start : start + _TILE] = matrix[start : start + _TILE].T
