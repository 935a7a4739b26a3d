"""Starts with even degrees, and matrices on all taps or at a denser center tap."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.orthogonal import (
    Block,
    KernelLayout,
    dead_outputs,
    exact_orthogonal,
    least_count,
    live_count,
)
from tests.orthogonal.checks import assert_orthogonal

pytestmark = pytest.mark.numpy_only


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 70), st.integers(1, 70), st.floats(0, 1), st.integers(0, 2**16))
def test_matrices_of_every_shape_and_count(inputs, outputs, share, seed):
    least, size = min(inputs, outputs), inputs * outputs
    count = round(least + share * (size - least))
    kernel, mask = exact_orthogonal(
        (inputs, outputs), count / size, start="even", seed=seed, dtype=np.float64
    )
    assert mask.sum() == count
    assert not kernel[~mask].any()
    assert_orthogonal(kernel, atol=1e-13)
    if count >= max(inputs, outputs):
        assert kernel.any(0).all()
        assert kernel.any(1).all()


@pytest.mark.parametrize("density", [0.05, 0.1, 0.3])
@pytest.mark.parametrize("shape", [(128, 128), (64, 256), (300, 100)])
def test_degrees_and_norms_are_even(shape, density):
    kernel, mask = exact_orthogonal(shape, density, start="even", seed=1, dtype=np.float64)
    assert np.count_nonzero(kernel) >= 0.96 * mask.sum()
    longer = int(shape[0] < shape[1])
    norms = np.linalg.norm(kernel, axis=1 - longer)
    assert norms.max() / norms.min() < 1.3  # cells whose supports overlap move them a little
    assert (
        np.ptp(norms)
        < 0.5 * np.ptp(np.linalg.norm(exact_orthogonal(shape, density, seed=1)[0], axis=1 - longer))
        or shape[0] == shape[1]
    )
    masks = [exact_orthogonal(shape, density, start=s, seed=1)[1] for s in ("even", "covering")]
    for axis in (0, 1):
        even, random = (m.sum(axis).std() / m.sum(axis).mean() for m in masks)
        assert even < random
    degrees = mask.sum(1 - longer)
    assert degrees.max() <= 2 * degrees.min()


@pytest.mark.parametrize("start", ["covering", "even"])
@pytest.mark.parametrize("shape", [(3, 3, 24, 48), (3, 3, 48, 24), (3, 3, 1, 24), (5, 16, 8)])
def test_on_all_taps_it_is_one_matrix_of_taps_and_inputs(shape, start):
    kernel, mask = exact_orthogonal(shape, 0.2, taps="all", start=start, seed=3)
    matrix = kernel.reshape(-1, shape[-1])
    assert_orthogonal(matrix)
    assert mask.sum() == live_count(0.2, mask.size)
    assert np.count_nonzero(kernel) > 0.95 * mask.sum()
    assert dead_outputs(kernel) == 0
    assert least_count(shape, taps="all") == min(matrix.shape)


def test_groups_on_all_taps():
    layout = KernelLayout.convolution(groups=2)
    kernel, mask = exact_orthogonal((3, 3, 8, 32), 0.3, taps="all", layout=layout, seed=0)
    for group in np.split(kernel, 2, axis=-1):
        assert_orthogonal(group.reshape(72, 16))
    assert mask.sum() == live_count(0.3, mask.size)


def test_the_center_tap_is_as_dense_as_the_authors_have_it():
    shape, density = (3, 3, 64, 64), 0.05
    found = {}
    for taps in ("center", "dense_center"):
        kernel, mask = exact_orthogonal(shape, density, taps=taps, start="published", seed=0)
        assert_orthogonal(kernel[1, 1])
        assert np.count_nonzero(kernel) == np.count_nonzero(kernel[1, 1])
        assert mask.sum() == live_count(density, mask.size)
        found[taps] = np.count_nonzero(kernel[1, 1]) / 64**2
    assert found["center"] == pytest.approx(density, rel=0.05)
    assert found["dense_center"] == pytest.approx(min(9 * density, math.sqrt(density)), rel=0.02)


def test_fewer_outputs_are_dead_with_a_dense_center():
    shapes = [(3, 3, 1, 24), (3, 3, 24, 48), (3, 3, 48, 48)]
    dead = {
        taps: sum(
            dead_outputs(exact_orthogonal(s, 0.12, taps=taps, start="published", seed=7)[0])
            for s in shapes
        )
        for taps in ("center", "dense_center")
    }
    assert dead["dense_center"] < dead["center"]


@pytest.mark.parametrize("option", [{"taps": "shift"}, {"start": "odd"}])
def test_unknown_names_are_refused(option):
    with pytest.raises(ValueError, match=r"must be \"c.* Received: "):
        exact_orthogonal((3, 3, 4, 4), 0.5, **option)


@pytest.mark.parametrize("option", [{"taps": "all"}, {"taps": "dense_center"}, {"start": "even"}])
def test_structures_do_not_ignore_them(option):
    with pytest.raises(ValueError, match="With a `structure` the matrix is at the center tap"):
        exact_orthogonal((3, 3, 8, 8), 0.5, structure=Block(4, 1), **option)
