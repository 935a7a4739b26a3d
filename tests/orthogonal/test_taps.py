"""Matrices on all taps, or at a denser center tap."""

import math

import numpy as np
import pytest

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


@pytest.mark.parametrize(
    "shape", [(3, 3, 24, 48), (3, 3, 48, 24), (3, 3, 1, 24), (5, 16, 8)]
)
def test_on_all_taps_it_is_one_matrix_of_taps_and_inputs(shape):
    kernel, mask = exact_orthogonal(shape, 0.2, taps="all", seed=3)
    matrix = kernel.reshape(-1, shape[-1])
    assert_orthogonal(matrix)
    assert mask.sum() == live_count(0.2, mask.size)
    assert np.count_nonzero(kernel) > 0.95 * mask.sum()
    assert dead_outputs(kernel) == 0
    assert least_count(shape, taps="all") == min(matrix.shape)


def test_groups_on_all_taps():
    layout = KernelLayout.convolution(groups=2)
    kernel, mask = exact_orthogonal(
        (3, 3, 8, 32), 0.3, taps="all", layout=layout, seed=0
    )
    for group in np.split(kernel, 2, axis=-1):
        assert_orthogonal(group.reshape(72, 16))
    assert mask.sum() == live_count(0.3, mask.size)


def test_the_center_tap_is_as_dense_as_the_authors_have_it():
    shape, density = (3, 3, 64, 64), 0.05
    found = {}
    for taps in ("center", "dense_center"):
        kernel, mask = exact_orthogonal(
            shape, density, taps=taps, start="published", seed=0
        )
        assert_orthogonal(kernel[1, 1])
        assert np.count_nonzero(kernel) == np.count_nonzero(kernel[1, 1])
        assert mask.sum() == live_count(density, mask.size)
        found[taps] = np.count_nonzero(kernel[1, 1]) / 64**2
    assert found["center"] == pytest.approx(density, rel=0.05)
    assert found["dense_center"] == pytest.approx(
        min(9 * density, math.sqrt(density)), rel=0.02
    )


def test_fewer_outputs_are_dead_with_a_dense_center():
    shapes = [(3, 3, 1, 24), (3, 3, 24, 48), (3, 3, 48, 48)]
    dead = {
        taps: sum(
            dead_outputs(
                exact_orthogonal(s, 0.12, taps=taps, start="published", seed=7)[
                    0
                ]
            )
            for s in shapes
        )
        for taps in ("center", "dense_center")
    }
    assert dead["dense_center"] < dead["center"]


@pytest.mark.parametrize("option", [{"taps": "shift"}, {"start": "even"}])
def test_unknown_names_are_refused(option):
    with pytest.raises(ValueError, match=r"must be \"c.* Received: "):
        exact_orthogonal((3, 3, 4, 4), 0.5, **option)


@pytest.mark.parametrize("taps", ["all", "dense_center"])
def test_structures_do_not_ignore_them(taps):
    with pytest.raises(
        ValueError, match="With a `structure` the matrix is at the center tap"
    ):
        exact_orthogonal((3, 3, 8, 8), 0.5, structure=Block(4, 1), taps=taps)
