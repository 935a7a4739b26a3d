"""One update that keeps a structure: counts, choices, and the structure itself."""

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from keras_sparse_ortho.callbacks._drop_and_grow import move
from keras_sparse_ortho.orthogonal import Block, KernelLayout, NByM, exact_orthogonal

pytestmark = pytest.mark.numpy_only

CASES = [
    (Block(4, 1), (16, 24), None),
    (Block(4, 8), (3, 3, 8, 16), None),
    (Block(4, 2, regular=True), (3, 32, 16), None),
    (Block(2, 4, regular=True), (16, 64), KernelLayout.recurrent(4)),
    (NByM(2, 4), (16, 9), None),
    (NByM(1, 4), (2, 2, 8, 6), None),
    (NByM(2, 4), (3, 11, 6), None),
]


def sums(structure, array):
    *outer, inputs, outputs = array.shape
    grid = (*outer, inputs // structure.rows, structure.rows, outputs // structure.cols)
    taps = tuple(range(2, len(outer))) if structure.regular else ()
    return array.reshape(*grid, structure.cols).sum(axis=(*taps, -3, -1))


def groups(structure, mask):
    *outer, inputs, outputs = mask.shape
    padding = [(0, 0)] * mask.ndim
    padding[-2] = (0, -inputs % structure.m)
    return np.pad(mask, padding).reshape(*outer, -1, structure.m, outputs).sum(axis=-2)


@pytest.mark.parametrize(("structure", "shape", "layout"), CASES, ids=str)
@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.booleans())
@hypothesis.settings(max_examples=25)
def test_counts_structure_and_choices(structure, shape, layout, seed, share, ties):
    rng = np.random.default_rng(seed)
    layout = layout or KernelLayout.convolution()
    _, mask = exact_orthogonal(shape, 0.25, seed=seed, structure=structure, layout=layout)
    mask = np.ascontiguousarray(layout.to_canonical(mask))
    draw = rng.integers(0, 3, mask.shape).astype(float) if ties else rng.normal(size=mask.shape)
    value, scores = draw * mask, np.abs(rng.permutation(draw.reshape(-1)).reshape(mask.shape))
    live, before = np.count_nonzero(mask), mask.copy()
    count = int(share * live)
    after = move(structure, value, mask, count, scores, np.random.default_rng(seed))
    np.testing.assert_array_equal(mask, before)
    assert after.dtype == bool
    assert np.count_nonzero(after) == live
    assert np.count_nonzero(after & ~mask) <= count

    left, stayed = mask & ~after, mask & after
    if isinstance(structure, Block):
        unit = structure.rows * structure.cols
        unit *= np.prod(mask.shape[2:-2], dtype=int) if structure.regular else 1
        blocks = sums(structure, after)
        assert set(np.unique(blocks)) <= {0, unit}
        value, scores = sums(structure, np.abs(value)), sums(structure, scores)
        left, stayed = sums(structure, left) > 0, sums(structure, stayed) > 0
        was, now = sums(structure, mask) > 0, blocks > 0
        if structure.regular:
            for axis in (-2, -1):
                np.testing.assert_array_equal(now.sum(axis=axis), was.sum(axis=axis))
        elif (now & ~was).any() and (~now).any():
            assert scores[now & ~was].min() >= scores[~now].max()
        count //= unit
    else:
        assert groups(structure, after).max() <= structure.n
    # What left is among the smallest that there were.
    if left.any() and stayed.any():
        was_live = np.abs(value[left | stayed])
        assert np.abs(value[left]).max() <= np.sort(was_live)[count - 1]


def test_a_group_without_room_grows_nothing():
    value = np.array([[5.0], [4.0], [0], [0], [3.0], [1.0], [0], [0]])
    scores = np.array([[0.0], [0.0], [9.0], [8.0], [0.0], [0.0], [1.0], [2.0]])
    lines = [array[None, None] for array in (value, value != 0, scores)]
    rng = np.random.default_rng(0)
    after = move(NByM(2, 4), lines[0], lines[1], 1, lines[2], rng)[0, 0, :, 0]
    np.testing.assert_array_equal(after, [1, 1, 0, 0, 1, 0, 0, 1])
