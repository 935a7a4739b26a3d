"""Exact counts, masks of them, and the rotations that lead to a density."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal import (
    apportion,
    expected_density,
    largest_mask,
    largest_masks,
    live_count,
    unmask_at_random,
)
from tests.orthogonal.checks import (
    covering_rotations,
    random_rotations,
    rotations_for_density,
    unite,
)

pytestmark = pytest.mark.numpy_only


@given(
    st.integers(0, 10**9),
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20),
)
def test_apportioned_parts_sum_up_and_lie_within_one_of_their_share(
    total, weights
):
    parts = apportion(total, weights)
    assert sum(parts) == total
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part - total * weight / sum(weights)) < 1 + 1e-6


def test_live_count_rounds_half_to_even():
    assert [live_count(0.5, size) for size in (1, 3, 5, 7)] == [0, 2, 2, 4]


@pytest.mark.parametrize("live", [0, 10, 700, 950])
@pytest.mark.parametrize("target", [0.02, 0.3, 0.9, 0.999, 1.0])
def test_filling_is_exact_and_keeps_what_is_live(live, target):
    rng = np.random.default_rng(0)
    before = np.zeros((40, 25), dtype=bool)
    before.reshape(-1)[rng.permutation(1000)[:live]] = True
    mask = before.copy()
    unmask_at_random(mask, max(live, round(1000 * target)), rng)
    assert mask.sum() == max(live, round(1000 * target))
    assert mask[before].all()


@pytest.mark.parametrize(
    "added", [3, 9, 14]
)  # by rejection, and from the list of dead entries
def test_filling_is_uniform_over_the_dead_entries(added):
    rng = np.random.default_rng(1)
    start = np.zeros(20, dtype=bool)
    start[:4] = True
    counts = np.zeros(20)
    for _ in range(4000):
        mask = start.copy()
        unmask_at_random(mask, 4 + added, rng)
        counts += mask
    expected = 4000 * added / 16
    spread = expected * (1 - added / 16)
    # 15 degrees of freedom, p = 0.001, as the sum is fixed
    assert ((counts[4:] - expected) ** 2 / spread).sum() * 15 / 16 < 37.7


@given(
    st.integers(1, 300),
    st.sampled_from([np.float64, np.float32, np.int8]),
    st.data(),
)
def test_largest_mask_is_exact_and_breaks_ties_to_the_left(size, dtype, data):
    count = data.draw(st.integers(0, size))
    values = np.array(
        data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)),
        dtype,
    )
    expected = np.zeros(size, dtype=bool)
    expected[np.argsort(-values, kind="stable")[:count]] = True
    np.testing.assert_array_equal(largest_mask(values, count), expected)


@pytest.mark.parametrize("kind", ["normal", "sparse", "equal", "by column"])
def test_the_largest_of_many_values_are_exact(kind):
    """A sample says where to look; where it misleads, all values are ranked."""
    rng = np.random.default_rng(0)
    scores = [rng.normal(size=shape) ** 2 for shape in ((300, 256), (64, 64))]
    if kind == "sparse":
        scores = [score * (rng.random(score.shape) < 0.3) for score in scores]
    if kind == "equal":
        scores = [np.round(4.0 * score) for score in scores]
    if kind == "by column":  # a sample in steps of the width sees one column
        scores = [score * np.arange(score.shape[1]) ** 4 for score in scores]
    flat = np.concatenate([score.ravel() for score in scores])
    order = np.argsort(-flat, kind="stable")
    for count in (1, 100, flat.size // 3, flat.size - 1):
        masks = largest_masks(scores, count)
        joined = np.concatenate([mask.ravel() for mask in masks])
        assert set(np.flatnonzero(joined)) == set(order[:count])


def test_largest_mask_refuses():
    with pytest.raises(ValueError, match=r"in \[0, 3\]. Received: count=4"):
        largest_mask(np.ones(3), 4)
    with pytest.raises(ValueError, match="finite"):
        largest_mask(np.array([1.0, np.nan]), 1)


def test_several_arrays_are_ranked_together():
    arrays = [
        np.array([[2.0, 1.0], [0.0, 5.0]]),
        np.array([1.0]),
        np.array([0.0, 1.0, 7.0]),
    ]
    for count in range(9):
        masks = largest_masks(arrays, count)
        joined = np.concatenate([mask.reshape(-1) for mask in masks])
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        np.testing.assert_array_equal(joined, largest_mask(flat, count))
        assert [mask.shape for mask in masks] == [(2, 2), (1,), (3,)]


TABLE = {  # METHODS.md: rotations for d = .05, .1, .125, .3, .5
    128: (124, 174, 192, 272, 339),
    1024: (2064, 2470, 2611, 3258, 3797),
    4096: (11102, 12729, 13292, 15882, 18042),
}
DENSITIES = (0.05, 0.1, 0.125, 0.3, 0.5)


@pytest.mark.parametrize("width", TABLE)
def test_closed_form_and_chain_agree_with_the_table_within_one_rotation(width):
    for density, rotations in zip(DENSITIES, TABLE[width], strict=True):
        assert abs(rotations_for_density(density, width) - rotations) <= 1
        below, above = (
            expected_density(rotations + step, width) for step in (-1, 1)
        )
        assert below < density < above


@pytest.mark.parametrize("covering", [False, True])
@pytest.mark.parametrize(
    ("width", "rows"), [(32, 32), (64, 20), (256, 100), (30, 7), (128, 1)]
)
@pytest.mark.parametrize("turns", [0.0, 0.5, 1.0, 2.0])
def test_simulations_agree_within_three_standard_errors(
    width, rows, turns, covering
):
    count = int(turns * width)
    rng = np.random.default_rng(width + rows)
    draws = []
    for _ in range(400):
        supports = [1 << k if k < rows else 0 for k in range(width)]
        unite(
            supports,
            covering_rotations(rows, width if covering else rows, width, rng),
        )
        draws.append(
            unite(supports, random_rotations(width, count, rng))
            / (rows * width)
        )
    error = np.std(draws, ddof=1) / math.sqrt(len(draws))
    expected = expected_density(count, width, rows if covering else None)
    assert abs(np.mean(draws) - expected) <= 3 * error + 1e-12


@pytest.mark.parametrize("width", [128, 512])
def test_the_inverse_is_less_than_two_rotations_from_the_chain(width):
    for rows in (None, width, width // 2, width // 5, 9):
        for density in (0.02, 0.1, 0.4, 0.7, 0.95):
            if density < 1 / (rows or width):
                continue
            count = rotations_for_density(density, width, rows)
            below, above = (
                expected_density(max(0, count + k), width, rows)
                for k in (-2, 2)
            )
            assert below < density + 0.003
            assert density - 0.003 < above
    assert expected_density(150, width, width) == expected_density(150, width)
    assert rotations_for_density(0.1, width, width) == rotations_for_density(
        0.1, width
    )


@given(
    sides=st.integers(1, 80).flatmap(
        lambda m: st.tuples(st.just(m), st.integers(1, m))
    ),
    rotations=st.integers(0, 3000),
    covering=st.booleans(),
)
@example(
    sides=(28, 28), rotations=3000, covering=False
)  # 1.0000000000000002 as summed up
@example(sides=(67, 50), rotations=0, covering=True)  # 0.019999999999999997
@settings(max_examples=40)
def test_the_expected_density_is_a_density(sides, rotations, covering):
    width, rows = sides
    least = 1 / (rows if covering else width)
    assert (
        least
        <= expected_density(rotations, width, rows if covering else None)
        <= 1
    )


def test_edges():
    assert expected_density(0, 50) == 1 / 50
    assert expected_density(10, 1) == 1.0
    assert rotations_for_density(1 / 50, 50) <= 1
    assert rotations_for_density(1 / 5000, 5000) == 0
    assert expected_density(20000, 20) == pytest.approx(1.0)
    for bad in (0.001, 1.0, 0.0, 2.0):
        with pytest.raises(DensityError, match="Received"):
            rotations_for_density(bad, 100)
    assert expected_density(0, 1000, 10) == pytest.approx(0.1)
    with pytest.raises(
        DensityError, match=r"must be in \[1 / rows, 1\), here \[0.1, 1\)"
    ):
        rotations_for_density(0.09, 1000, rows=10)
    with pytest.raises(
        ValueError, match=r"`rows` must be at most `width`. Received: rows=6"
    ):
        expected_density(3, 5, rows=6)
    for rotations, width in ((-1, 5), (1.5, 5), (3, 0)):
        with pytest.raises(
            ValueError, match=r"must be (an integer of|a positive integer)"
        ):
            expected_density(rotations, width)
