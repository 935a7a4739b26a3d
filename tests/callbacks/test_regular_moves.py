"""Open ends joined anew: fans of both sides stay, and no join has a larger score."""

import itertools

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from keras_sparse_ortho.callbacks._drop_and_grow import move_regular

pytestmark = pytest.mark.numpy_only


def regular(matrices, lines, fan, rng):
    """Circulants under random orders of both sides."""
    live = np.zeros((matrices, lines, lines), bool)
    for matrix in live:
        steps = rng.permutation(lines)[:fan]
        places = (np.arange(lines)[:, None] + steps) % lines
        np.put_along_axis(matrix, places, True, axis=1)
        matrix[...] = matrix[rng.permutation(lines)][:, rng.permutation(lines)]
    return live


@hypothesis.given(
    st.integers(1, 3), st.integers(1, 9), st.integers(0, 2**32 - 1), st.floats(0, 1), st.booleans()
)
def test_fans_counts_and_what_is_dropped(matrices, lines, seed, share, ties):
    rng = np.random.default_rng(seed)
    live = regular(matrices, lines, 1 + seed % lines, rng)
    draw = rng.integers(0, 3, live.shape).astype(float) if ties else rng.normal(size=live.shape)
    magnitudes, scores = np.abs(draw) * live, rng.permutation(draw.reshape(-1)).reshape(live.shape)
    count, before = int(share * live.sum()), live.copy()
    after = move_regular(magnitudes, live, count, scores, np.random.default_rng(seed))
    np.testing.assert_array_equal(live, before)
    for axis in (1, 2):
        np.testing.assert_array_equal(after.sum(axis=axis), live.sum(axis=axis))
    left, stayed = live & ~after, live & after
    assert left.sum() <= count
    if left.any() and stayed.any():
        assert magnitudes[left].max() <= np.sort(magnitudes[live])[count - 1]
    # What has come scores at least as much, in sum, as what has left.
    assert scores[after & ~live].sum() >= scores[left].sum() - 1e-9
    again = move_regular(magnitudes, live, count, scores, np.random.default_rng(seed))
    np.testing.assert_array_equal(after, again)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all_ways(seed):
    rng = np.random.default_rng(seed)
    live = regular(1, 4, 2, rng)
    scores = rng.normal(size=live.shape)
    after = move_regular(live * 1.0, live, 8, scores, rng)[0]
    rows = [np.array(row) for row in itertools.product([0, 1], repeat=4) if sum(row) == 2]
    ways = [np.stack(way) for way in itertools.product(rows, repeat=4)]
    best = max((scores[0] * way).sum() for way in ways if (way.sum(axis=0) == 2).all())
    assert (scores[0] * after).sum() == pytest.approx(best, abs=1e-9)


def test_a_single_one_stays():
    live = np.eye(5, dtype=bool)[None]
    scores = np.arange(25.0).reshape(1, 5, 5)
    after = move_regular(live * 1.0, live, 1, scores, np.random.default_rng(0))
    np.testing.assert_array_equal(after, live)
