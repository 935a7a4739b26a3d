"""Regular patterns: equal fans both ways, every one of them reached, damage named."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.orthogonal import check_regular, fan_step, regular_pattern, slots_of

pytestmark = pytest.mark.numpy_only


@given(
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_fans_are_equal_both_ways(inputs, outputs, share, seed):
    step = fan_step(inputs, outputs)
    fan = step * max(1, round(share * math.gcd(inputs, outputs)))
    pattern = regular_pattern(inputs, outputs, fan, np.random.default_rng(seed))
    assert pattern.shape == (outputs, fan)
    assert pattern.dtype == np.int32
    assert (np.diff(pattern, axis=1) > 0).all()
    uses = np.bincount(pattern.reshape(-1), minlength=inputs)
    assert set(uses.tolist()) == {outputs * fan // inputs}
    check_regular(pattern, inputs)
    again = regular_pattern(inputs, outputs, fan, np.random.default_rng(seed))
    np.testing.assert_array_equal(pattern, again)
    # The transposed list has every slot once, and each of them holds its input.
    slots = slots_of(pattern, inputs)
    assert slots.dtype == np.int32
    assert (np.diff(slots, axis=1) > 0).all()
    assert sorted(slots.reshape(-1).tolist()) == list(range(outputs * fan))
    held = pattern.reshape(-1)[slots]
    np.testing.assert_array_equal(held, np.arange(inputs)[:, None] + 0 * held)


def test_slots_of_many_matrices():
    rng = np.random.default_rng(0)
    patterns = np.stack([regular_pattern(12, 8, 6, rng) for _ in range(6)]).reshape(2, 3, 8, 6)
    slots = slots_of(patterns, 12)
    assert slots.shape == (2, 3, 12, 4)
    for place in np.ndindex(2, 3):
        np.testing.assert_array_equal(slots[place], slots_of(patterns[place], 12))
    check_regular(patterns, 12)


@pytest.mark.parametrize("fan", [1, 2])
def test_all_patterns_are_equally_likely(fan):
    """Of 3 x 3 there are 6 with one and 6 with two in each line: chi-square, 5 degrees."""
    rng = np.random.default_rng(0)
    counts: dict[bytes, int] = {}
    for _ in range(1200):
        key = regular_pattern(3, 3, fan, rng).tobytes()
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 6
    assert sum((count - 200) ** 2 / 200 for count in counts.values()) < 20.5  # p = 0.001


def test_trades_reach_all_of_a_larger_set():
    """The 90 patterns of 4 x 4 with two in each line (OEIS A001499)."""
    rng = np.random.default_rng(1)
    counts: dict[bytes, int] = {}
    for _ in range(4500):
        key = regular_pattern(4, 4, 2, rng).tobytes()
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 90
    assert sum((count - 50) ** 2 / 50 for count in counts.values()) < 135  # 89 degrees, 0.001


@pytest.mark.parametrize(
    ("inputs", "outputs", "fan", "text"),
    [
        (6, 4, 4, r"multiple of 3 up to 6; the nearest are 3 and 6. Received: fan_in=4"),
        (6, 4, 9, r"multiple of 3 up to 6. Received: fan_in=9"),
        (6, 4, 0, r"Received: fan_in=0"),
        (6, 6, 2.0, r"Received: fan_in=2.0"),
    ],
)
def test_fans_that_no_pattern_has(inputs, outputs, fan, text):
    with pytest.raises(DensityError, match=text):
        regular_pattern(inputs, outputs, fan, np.random.default_rng(0))


def damaged(place, value):
    pattern = regular_pattern(6, 6, 3, np.random.default_rng(0))
    pattern[place] = value
    return pattern


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (damaged((2, 1), 6), r"from 0 to 5. Received: inputs_of\[2, 1\] = 6"),
        (damaged((0, 0), -1), r"from 0 to 5. Received: inputs_of\[0, 0\] = -1"),
        (damaged(3, [1, 4, 1]), r"once at most. Received: inputs_of\[3\] = \[1, 4, 1\]"),
        (np.array([[0, 1], [0, 2], [0, 3], [1, 2]]), r"block 3 used 1 times, input block 0 3"),
        (np.array([[0, 1], [0, 1]]), r"input block 2 used 0 times, input block 0 2 times"),
        (np.array([[0.0, 1.0]]), r"integer array.*Received: shape \(1, 2\), dtype float64"),
        (np.array([0, 1]), r"Received: shape \(2,\), dtype int"),
        (np.zeros((0, 2), dtype=int), r"Received: shape \(0, 2\)"),
    ],
)
def test_damage_is_named(pattern, text):
    with pytest.raises(ValueError, match=text):
        check_regular(pattern, 6 if pattern.shape[-1] == 3 else 4 if len(pattern) == 4 else 3)
