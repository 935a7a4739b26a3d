"""`GivenBlocks`: exactly the given blocks are live, exactly orthogonal where they allow it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.orthogonal import KernelLayout, exact_orthogonal
from keras_sparse_ortho.orthogonal._structures import GivenBlocks
from tests.orthogonal.checks import assert_orthogonal

pytestmark = pytest.mark.numpy_only


def drawn_on(live, rows, cols, **options):
    lines = tuple("".join(map(str, 1 * line)) for line in live)
    given = GivenBlocks(rows, cols, lines)
    shape = *options.pop("taps", ()), live.shape[0] * rows, live.shape[1] * cols
    return exact_orthogonal(shape, float(live.mean()), seed=1, structure=given, **options)


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([(4, 4), (2, 6), (8, 2), (2, 8), (1, 3), (3, 1)]),
    st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_blocks_around_a_matching_are_exactly_orthogonal(grid, block, seed):
    rng = np.random.default_rng(seed)
    live = rng.random(grid) < 0.4
    # A way for every line of the shorter side: a block of the longer one for each of its own.
    sides = [(grid[axis] * block[axis], block[axis], axis) for axis in (0, 1)]
    (_, a, short), (_, b, long) = sorted(sides)
    groups, lines = grid[short], grid[long]
    if groups * max(a // b, 1) > lines * max(b // a, 1):
        return
    ways = live if short else live.T
    for group in range(groups):
        for part in range(max(a // b, 1)):
            ways[(group * max(a // b, 1) + part) // max(b // a, 1), group] = True
    kernel, mask = drawn_on(live, *block, gain=1.5)
    assert_orthogonal(kernel, 1.5)
    np.testing.assert_array_equal(mask, np.kron(live, np.ones(block)) > 0)
    assert not kernel[~mask].any()


def test_rotations_fill_blocks_that_are_all_live():
    kernel, _ = drawn_on(np.ones((6, 4), dtype=bool), 4, 4)
    assert (kernel != 0).all()


def test_other_blocks_are_orthogonal_and_scaled():
    live = np.array([[1, 1, 0], [0, 0, 0], [1, 1, 1]], dtype=bool)
    kernel, mask = drawn_on(live, 4, 4, gain=2.0, taps=(3,))
    assert not kernel[[0, 2]].any()
    assert (mask[0] == mask[1]).all()
    np.testing.assert_allclose(np.linalg.norm(kernel[1], axis=0), 2.0, rtol=1e-6)
    block = kernel[1, :4, :4]
    np.testing.assert_allclose(block.T @ block, 2 * np.eye(4), atol=1e-6)
    gates = KernelLayout.recurrent(3)
    kernel, _ = drawn_on(np.tile(np.eye(3, dtype=bool), (1, 3)), 4, 4, layout=gates)
    for gate in np.split(kernel, 3, axis=1):
        assert_orthogonal(gate)


def test_the_blocks_are_checked():
    for live in ((), ("10", "1"), ("12",)):
        with pytest.raises(ValueError, match="equal strings of 0 and 1"):
            GivenBlocks(4, 4, live)
