"""`orthogonality_error` against the operator that a kernel is, written out as a matrix."""

import math

import numpy as np
import pytest

from keras_sparse_ortho.analysis import orthogonality_error
from keras_sparse_ortho.orthogonal import KernelLayout, exact_orthogonal

pytestmark = pytest.mark.numpy_only


def gram_error(matrix, gain=None):
    """`max |G - g^2 I| / g^2` with the smaller Gram matrix of a plain matrix."""
    gram = min(matrix.T @ matrix, matrix @ matrix.T, key=len)
    square = np.diagonal(gram).mean() if gain is None else gain**2
    return np.abs(gram - square * np.eye(len(gram))).max() / square


@pytest.mark.parametrize("gain", [None, 1.0, 1.7])
@pytest.mark.parametrize(
    "shape", [(5, 5), (9, 4), (4, 9), (1, 7), (7, 1), (1, 1)]
)
def test_matrices(shape, gain):
    kernel = np.random.default_rng(0).normal(size=shape)
    assert orthogonality_error(kernel, gain=gain) == pytest.approx(
        gram_error(kernel, gain), rel=1e-12, abs=1e-15
    )


@pytest.mark.parametrize(
    ("shape", "layout", "blocks"),
    [
        ((4, 12), KernelLayout.recurrent(3), lambda k: np.split(k, 3, axis=1)),
        (
            (1, 1, 2, 12),
            KernelLayout.convolution(groups=4),
            lambda k: np.split(k[0, 0], 4, axis=1),
        ),
        (
            (1, 1, 5, 3),
            KernelLayout.depthwise(),
            lambda k: [k[0, 0, c][None] for c in range(5)],
        ),
        (
            (1, 1, 3, 8),
            KernelLayout.transposed_convolution(),
            lambda k: [k[0, 0].T],
        ),
        (
            (6, 2, 3),
            KernelLayout.einsum("abc,cde->abde"),
            lambda k: [k.reshape(6, 6)],
        ),
        (
            (2, 3, 5),
            KernelLayout.einsum("abde,dec->abc"),
            lambda k: [k.reshape(6, 5)],
        ),
    ],
)
def test_the_worst_of_the_matrices_of_a_layout_counts(shape, layout, blocks):
    kernel = np.random.default_rng(2).normal(size=shape)
    expected = [gram_error(block, 1.2) for block in blocks(kernel)]
    assert orthogonality_error(kernel, layout, gain=1.2) == pytest.approx(
        max(expected), rel=1e-12
    )


def test_the_scale_is_that_of_each_kernel_unless_given():
    kernel, _ = exact_orthogonal(
        (20, 30), 0.2, seed=0, gain=3.0, dtype=np.float64
    )
    assert orthogonality_error(kernel) < 1e-14
    assert orthogonality_error(kernel, gain=3.0) < 1e-14
    assert orthogonality_error(kernel, gain=1.0) == pytest.approx(8.0)


def test_a_kernel_of_zeros_is_infinitely_far_from_orthogonal():
    for shape, layout in (
        ((3, 3, 4, 4), None),
        ((4, 8), KernelLayout.recurrent(2)),
    ):
        assert orthogonality_error(np.zeros(shape), layout) == math.inf


# --- convolutions --------------------------------------------------------------------------------


def operator(kernel, size):
    """The matrix of a circular convolution over a line or a square of `size`."""
    *taps, inputs, outputs = kernel.shape
    places = [size] * len(taps)
    found = np.zeros((*places, inputs, *places, outputs))
    for place in np.ndindex(*places):
        for tap in np.ndindex(*taps):
            source = tuple(
                (p + t) % size for p, t in zip(place, tap, strict=True)
            )
            found[(*source, slice(None), *place)] += kernel[tap]
    return found.reshape(size ** len(taps) * inputs, -1)


@pytest.mark.parametrize(
    "layout",
    [KernelLayout.convolution(), KernelLayout.transposed_convolution()],
)
@pytest.mark.parametrize(
    "shape", [(3, 4, 3), (4, 3, 2), (3, 2, 4, 2), (2, 2, 2, 5)]
)
def test_random_kernels_are_measured_by_their_operator(shape, layout):
    # A transposed one is the adjoint, which has the same matrix.
    kernel = np.random.default_rng(0).normal(size=shape)
    expected = gram_error(operator(kernel, 8), None)
    assert orthogonality_error(kernel, layout) == pytest.approx(
        expected, rel=1e-9
    )


def test_entries_beside_the_center_tap_count():
    kernel, _ = exact_orthogonal((3, 3, 8, 16), 0.05, seed=0, dtype=np.float64)
    assert orthogonality_error(kernel) < 1e-14
    kernel[0, 0, 0, 0] = 1e-3  # after a step of training
    assert orthogonality_error(kernel) > 1e-4
