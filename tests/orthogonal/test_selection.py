"""Masks of the largest entries: exact, ties to the left, whatever the values are."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_sparse_ortho.orthogonal import largest_mask, largest_masks

pytestmark = pytest.mark.numpy_only


@given(st.integers(1, 300), st.data())
def test_largest_mask_is_exact_and_breaks_ties_to_the_left(size, data):
    count = data.draw(st.integers(0, size))
    values = np.array(data.draw(st.lists(st.integers(0, 4), min_size=size, max_size=size)), float)
    mask = largest_mask(values, count)
    order = np.argsort(-values, kind="stable")
    expected = np.zeros(size, dtype=bool)
    expected[order[:count]] = True
    np.testing.assert_array_equal(mask, expected)


def test_largest_mask_refuses():
    with pytest.raises(ValueError, match=r"in \[0, 3\]. Received: count=4"):
        largest_mask(np.ones(3), 4)
    with pytest.raises(ValueError, match="finite"):
        largest_mask(np.array([1.0, np.nan]), 1)


SIZE = 300_001  # so many that a sample is drawn first
RNG = np.random.default_rng(0)
VALUES = {
    "normal": RNG.normal(size=SIZE),
    "float32": RNG.random(SIZE).astype(np.float32),
    "skewed": np.exp(30 * RNG.normal(size=SIZE)),
    "few": RNG.integers(-2, 3, SIZE).astype(float),
    "pruned": np.where(RNG.random(SIZE) < 0.9, -1.0, RNG.random(SIZE)),
    "equal": np.ones(SIZE),
    "one_large": np.eye(1, SIZE).ravel(),
    "sorted": np.arange(SIZE)[::-1].astype(float),
}


@pytest.mark.parametrize("name", VALUES)
def test_many_values(name):
    values = VALUES[name]
    order = np.argsort(-values, kind="stable")
    for count in (0, 1, 2, SIZE // 1000, SIZE // 10 + 1, 180_000, SIZE - 2, SIZE - 1, SIZE):
        expected = np.zeros(SIZE, dtype=bool)
        expected[order[:count]] = True
        np.testing.assert_array_equal(largest_mask(values, count), expected)


def test_several_arrays_are_ranked_together():
    arrays = [np.array([[2.0, 1.0], [0.0, 5.0]]), np.array([1.0]), np.array([0.0, 1.0, 7.0])]
    for count in range(9):
        masks = largest_masks(arrays, count)
        joined = np.concatenate([mask.reshape(-1) for mask in masks])
        flat = np.concatenate([array.reshape(-1) for array in arrays])
        np.testing.assert_array_equal(joined, largest_mask(flat, count))
        assert [mask.shape for mask in masks] == [(2, 2), (1,), (3,)]
