"""Exact orthogonality and exact counts over random shapes, read without a `KernelLayout`."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal import KernelLayout, exact_orthogonal, least_count

pytestmark = pytest.mark.numpy_only

TAPS = st.lists(st.integers(1, 4), max_size=3).map(tuple)
SIDE = st.integers(1, 12)


@st.composite
def convolutions(draw):
    """Shape, layout, and the matrices at the center tap by plain indexing."""
    taps, inputs, outputs = draw(TAPS), draw(SIDE), draw(SIDE)
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    shape = (*taps, inputs, outputs * groups)

    def matrices(center):
        return [center[:, g * outputs : (g + 1) * outputs] for g in range(groups)]

    return shape, KernelLayout.convolution(groups), taps, matrices


@st.composite
def depthwise(draw):
    taps, channels, multiplier = draw(TAPS), draw(SIDE), draw(st.integers(1, 4))

    def matrices(center):
        return [center[c : c + 1] for c in range(channels)]

    return (*taps, channels, multiplier), KernelLayout.depthwise(), taps, matrices


@st.composite
def transposed(draw):
    taps, inputs, outputs = draw(TAPS), draw(SIDE), draw(SIDE)
    layout = KernelLayout.transposed_convolution()
    return (*taps, outputs, inputs), layout, taps, lambda center: [center.T]


@st.composite
def recurrent(draw):
    inputs, units, gates = draw(SIDE), draw(SIDE), draw(st.sampled_from([1, 3, 4]))

    def matrices(kernel):
        return np.split(kernel, gates, axis=1)

    return (inputs, gates * units), KernelLayout.recurrent(gates), (), matrices


@given(
    kernel_of=st.one_of(convolutions(), depthwise(), transposed(), recurrent()),
    density=st.floats(1e-3, 1.0),
    gain=st.sampled_from([1.0, 0.25, math.sqrt(2), -1.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=400)
def test_every_matrix_is_orthogonal_and_every_count_exact(kernel_of, density, gain, seed):
    shape, layout, taps, matrices = kernel_of
    count = round(density * math.prod(shape))
    kwargs = {"gain": gain, "seed": seed, "layout": layout}
    if count < least_count(shape, layout):
        with pytest.raises(DensityError, match="the least density is"):
            exact_orthogonal(shape, density, **kwargs)
        return
    kernel, mask = exact_orthogonal(shape, density, **kwargs)
    assert kernel.shape == mask.shape == shape
    assert kernel.dtype == np.float32
    assert mask.sum() == count
    assert not kernel[~mask].any()
    center = tuple((size - 1) // 2 for size in taps)
    assert np.count_nonzero(kernel) == np.count_nonzero(kernel[center])
    for matrix in matrices(kernel[center].astype(np.float64)):
        matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
        gram = matrix.T @ matrix
        assert np.abs(gram - gain**2 * np.eye(len(gram))).max() <= 1e-6


@given(
    rows=st.integers(1, 40),
    columns=st.integers(2, 40),
    density=st.floats(0.05, 1.0),
    seed=st.integers(0, 2**32),
)
def test_the_support_is_as_large_as_the_rotations_let_it_be(rows, columns, density, seed):
    """Trainable zeros are fewer than the one rotation that would not fit any more."""
    shape = (rows, columns)
    count = round(density * rows * columns)
    if count < min(shape):
        return
    kernel, mask = exact_orthogonal(shape, density, seed=seed)
    # A rotation adds at most one entry in each row to its two columns' supports.
    assert count - np.count_nonzero(kernel) < min(shape)
    if density == 1.0:
        assert np.count_nonzero(kernel) == mask.size


def test_trainable_zeros_of_a_convolution_lie_all_over_the_kernel():
    shape = (3, 3, 24, 24)
    taps = np.zeros((3, 3))
    for seed in range(20):
        kernel, mask = exact_orthogonal(shape, 0.3, seed=seed)
        taps += (mask & (kernel == 0)).sum(axis=(2, 3))
    assert not (np.delete(taps.reshape(-1), 4) == 0).any()
    off = np.delete(taps.reshape(-1), 4)
    # 8 equal taps: chi-square with 7 degrees of freedom, p = 0.001, and less for the fixed sum.
    assert ((off - off.mean()) ** 2 / off.mean()).sum() < 24.3
