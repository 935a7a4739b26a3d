"""`orthogonality_error` of strided kernels against the operator that they are."""

import numpy as np
import pytest

from keras_sparse_ortho.analysis import orthogonality_error
from keras_sparse_ortho.orthogonal import KernelLayout, exact_orthogonal

pytestmark = pytest.mark.numpy_only


def operator(kernel, strides, size):
    """The matrix of a circular convolution with strides, over a line or a square of `size`."""
    *taps, inputs, outputs = kernel.shape
    axes = len(taps)
    found = np.zeros((*[size] * axes, inputs, *[size // s for s in strides], outputs))
    for place in np.ndindex(*[size // s for s in strides]):
        for tap in np.ndindex(*taps):
            source = tuple((s * p + t) % size for s, p, t in zip(strides, place, tap, strict=True))
            found[(*source, slice(None), *place)] += kernel[tap]
    return found.reshape(size**axes * inputs, -1)


def gram_error(matrix):
    matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
    gram = matrix.T @ matrix
    square = np.diagonal(gram).mean()
    return np.abs(gram - square * np.eye(len(gram))).max() / square


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("shape", "strides"), [((3, 2, 9), (2,)), ((3, 4, 3), (2,)), ((3, 2, 2, 9), (2, 1))]
)
def test_random_kernels_are_measured_by_their_operator(shape, strides, transposed):
    kernel = np.random.default_rng(0).normal(size=shape)
    layout = KernelLayout.convolution(strides=strides)
    expected = gram_error(operator(kernel, strides, 8))
    if transposed:  # the adjoint, which has the same matrix and stores it by outputs, then inputs
        layout = KernelLayout.transposed_convolution(strides)
    assert orthogonality_error(kernel, layout) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    "layout",
    [
        KernelLayout.convolution(strides=2),
        KernelLayout.convolution(groups=2, strides=2),
        KernelLayout.transposed_convolution(2),
        KernelLayout.depthwise(2),
    ],
)
def test_exact_kernels_on_all_taps_have_none(layout):
    kernel, _ = exact_orthogonal((3, 3, 6, 14), 0.2, seed=0, taps="shift", layout=layout)
    assert orthogonality_error(kernel, layout) < 1e-6
    if layout.inputs and not layout.transposed:  # without its strides it is something else
        plain = KernelLayout(**{**layout.get_config(), "strides": ()})
        assert orthogonality_error(kernel, plain) > 0.1


def test_a_matrix_at_the_center_tap_is_judged_as_one():
    layout = KernelLayout.convolution(strides=2)
    kernel, _ = exact_orthogonal((3, 3, 8, 16), 0.05, seed=0, dtype=np.float64)
    assert orthogonality_error(kernel, layout) < 1e-14
    kernel[0, 0, 0, 0] = 1e-3  # after a step of training it is the convolution that counts
    assert orthogonality_error(kernel, layout) > 0.1
