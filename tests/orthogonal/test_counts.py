"""Exact counts, largest remainders, ties and random filling."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_sparse_ortho.orthogonal import apportion, live_count, unmask_at_random

pytestmark = pytest.mark.numpy_only


@given(st.integers(0, 10**9), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=20))
def test_apportioned_parts_sum_up_and_lie_within_one_of_their_share(total, weights):
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
    if live > round(1000 * target):
        with pytest.raises(ValueError, match=r"must have at most .* live"):
            unmask_at_random(mask, round(1000 * target), rng)
        return
    unmask_at_random(mask, round(1000 * target), rng)
    assert mask.sum() == round(1000 * target)
    assert mask[before].all()


@pytest.mark.parametrize("added", [3, 9, 14])  # by rejection, and from the list of dead entries
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
