"""One update on one weight: which entries drop, which grow, and that counts stay."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from keras_sparse_ortho.callbacks._drop_and_grow import drop_and_grow, largest

pytestmark = pytest.mark.numpy_only


@hypothesis.given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
    st.floats(0, 1),
    st.booleans(),
)
def test_counts_and_choices(shape, seed, share, ties):
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < 0.5
    draw = rng.integers(0, 3, shape).astype(float) if ties else rng.normal(size=shape)
    value, scores = draw * mask, rng.permutation(draw.reshape(-1)).reshape(shape)
    live = np.count_nonzero(mask)
    count = int(share * live)
    before = mask.copy()
    after = drop_and_grow(value, mask, count, scores, np.random.default_rng(seed))
    np.testing.assert_array_equal(mask, before)
    assert after.shape == mask.shape
    assert np.count_nonzero(after) == live
    # What left is no larger than what stayed; what came scores no less than what did not.
    left, stayed = mask & ~after, mask & after
    if left.any() and stayed.any() and count < live:  # else all were dropped
        kept = np.sort(np.abs(value[mask]))[count:]
        assert np.abs(value[left]).max() <= kept.min()
    came, out = after & ~mask, ~after
    if came.any() and out.any():
        assert scores[came].min() >= scores[out].max()
    assert np.count_nonzero(came) <= count


def test_what_was_just_dropped_may_come_back():
    value, mask = np.array([2.0, 1.0, 0.0]), np.array([True, True, False])
    rng = np.random.default_rng(0)
    np.testing.assert_array_equal(
        drop_and_grow(value, mask, 1, np.array([0.0, 5.0, 4.0]), rng), mask
    )
    np.testing.assert_array_equal(
        drop_and_grow(value, mask, 1, np.array([9.0, 3.0, 4.0]), rng), [True, False, True]
    )
    # A full layer has nowhere else to go.
    full = np.ones(4, bool)
    np.testing.assert_array_equal(drop_and_grow(np.arange(4.0), full, 3, np.arange(4.0), rng), full)


def test_equals_are_drawn_evenly():
    rng = np.random.default_rng(0)
    counts = np.zeros(6, int)
    for _ in range(3000):
        chosen = largest(np.array([5.0, 1.0, 1.0, 1.0, 1.0, 0.0]), 3, rng)
        assert len(set(chosen)) == 3
        counts[chosen] += 1
    assert counts[0] == 3000
    assert counts[5] == 0
    assert np.abs(counts[1:5] - 1500).max() < 6 * np.sqrt(3000) / 2


def test_largest_refuses_counts_out_of_range():
    for count in (-1, 4):
        with pytest.raises(ValueError, match=rf"\[0, 3\]. Received: count={count}"):
            largest(np.zeros(3), count, np.random.default_rng(0))
