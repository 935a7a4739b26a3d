"""How dense a matrix is after t rotations: chain, closed form, table and simulation."""

import math

import numpy as np
import pytest

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal import Rotations, expected_density, rotations_for_density
from keras_sparse_ortho.orthogonal._eoi import covering_rotations
from keras_sparse_ortho.orthogonal._rotations import Supports

pytestmark = pytest.mark.numpy_only

TABLE = {  # METHODS.md: rotations for d = .05, .1, .125, .3, .5
    128: (124, 174, 192, 272, 339),
    1024: (2064, 2470, 2611, 3258, 3797),
    4096: (11102, 12729, 13292, 15882, 18042),
}
DENSITIES = (0.05, 0.1, 0.125, 0.3, 0.5)


@pytest.mark.parametrize("width", TABLE)
def test_the_closed_form_agrees_with_the_table_within_one_rotation(width):
    for density, rotations in zip(DENSITIES, TABLE[width], strict=True):
        assert abs(rotations_for_density(density, width) - rotations) <= 1


@pytest.mark.parametrize("width", TABLE)
def test_the_chain_agrees_with_the_table_within_one_rotation(width):
    for density, rotations in zip(DENSITIES, TABLE[width], strict=True):
        below, above = (expected_density(rotations + step, width) for step in (-1, 1))
        assert below < density < above


@pytest.mark.parametrize(("width", "rows"), [(32, 32), (64, 20), (256, 256)])
@pytest.mark.parametrize("density", [0.1, 0.3, 0.6])
def test_simulation_agrees_within_three_standard_errors(width, rows, density):
    count = rotations_for_density(density, width)
    rng = np.random.default_rng(width + rows)
    draws = []
    for _ in range(400):
        supports = Supports(rows, width)
        supports.apply(Rotations.draw(width, count, rng))
        draws.append(supports.live / (rows * width))
    error = np.std(draws, ddof=1) / math.sqrt(len(draws))
    assert abs(np.mean(draws) - expected_density(count, width)) < 3 * error


@pytest.mark.parametrize(("width", "rows"), [(48, 24), (64, 20), (256, 100), (30, 7), (128, 1)])
@pytest.mark.parametrize("turns", [0.0, 0.5, 1.0, 2.0])
def test_simulation_from_the_covering_start(width, rows, turns):
    count = int(turns * width)
    rng = np.random.default_rng(width + rows)
    draws = []
    for _ in range(400):
        supports = Supports(rows, width)
        supports.apply(covering_rotations(rows, width, width, rng))
        assert supports.live == width
        supports.apply(Rotations.draw(width, count, rng))
        draws.append(supports.live / (rows * width))
    error = np.std(draws, ddof=1) / math.sqrt(len(draws))
    assert abs(np.mean(draws) - expected_density(count, width, rows)) <= 3 * error + 1e-12


@pytest.mark.parametrize("rows", [512, 400, 256, 130, 32, 9])
def test_closed_form_and_chain_of_the_covering_start(rows):
    width = 512
    for density in (0.02, 0.1, 0.4, 0.7, 0.95):
        if density < 1 / rows:
            continue
        count = rotations_for_density(density, width, rows)
        by_chain = expected_density(count, width, rows)
        assert abs(by_chain - density) < 0.003
        assert abs(by_chain - expected_density(count, width, rows, exact=False)) < 0.002


def test_square_matrices_have_one_law_for_both_starts():
    for exact in (True, False):
        covering = expected_density(150, 128, 128, exact=exact)
        assert covering == expected_density(150, 128, exact=exact)
    assert rotations_for_density(0.1, 128, 128) == rotations_for_density(0.1, 128)


def test_closed_form_and_chain_are_less_than_two_rotations_apart():
    for width in (128, 512):
        for density in (0.02, 0.1, 0.5, 0.9):
            count = rotations_for_density(density, width)
            near = [expected_density(count + step, width) for step in (-2, 2)]
            assert near[0] < density < near[1]
            assert near[0] < expected_density(count, width, exact=False) < near[1]


def test_edges():
    assert expected_density(0, 50) == 1 / 50
    assert expected_density(10, 1) == 1.0
    assert rotations_for_density(1 / 50, 50) <= 1
    assert rotations_for_density(1 / 5000, 5000) == 0
    assert expected_density(20000, 20) == pytest.approx(1.0)
    assert expected_density(0, 4096, exact=False) == pytest.approx(1 / 4096, rel=1e-3)
    for bad in (0.001, 1.0, 0.0, 2.0):
        with pytest.raises(DensityError, match="Received"):
            rotations_for_density(bad, 100)
    assert expected_density(0, 1000, 10) == pytest.approx(0.1)
    assert expected_density(0, 5000, 1, exact=False) == pytest.approx(1.0, abs=1e-3)
    with pytest.raises(DensityError, match=r"must be in \[1 / rows, 1\), here \[0.1, 1\)"):
        rotations_for_density(0.09, 1000, rows=10)
    with pytest.raises(ValueError, match=r"`rows` must be at most `width`. Received: rows=6"):
        expected_density(3, 5, rows=6)
    for rotations, width in ((-1, 5), (1.5, 5), (3, 0)):
        with pytest.raises(ValueError, match=r"must be (an integer of|a positive integer)"):
            expected_density(rotations, width)
