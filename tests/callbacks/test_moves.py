"""What is chosen, on arrays: which entries of a weight move, and which ones thresholds keep."""

import functools
import itertools
from types import SimpleNamespace

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from keras_sparse_ortho.callbacks import (
    Entries,
    ThresholdSteering,
    cut,
    drop_and_grow,
    floored_cut,
    floors_of,
    largest,
    move_blocks,
    move_regular,
)
from keras_sparse_ortho.orthogonal import Block, KernelLayout, exact_orthogonal
from keras_sparse_ortho.schedules import Constant, Linear
from tests.helpers import assert_same

pytestmark = pytest.mark.numpy_only


def drawn(mask, rng, ties):
    """Values on a mask, and the scores of all entries."""
    draw = (
        rng.integers(0, 3, mask.shape).astype(float)
        if ties
        else rng.normal(size=mask.shape)
    )
    return draw * mask, rng.permutation(draw.reshape(-1)).reshape(mask.shape)


@hypothesis.given(
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
    st.floats(0, 1),
    st.booleans(),
)
def test_counts_and_choices(shape, seed, share, ties):
    rng = np.random.default_rng(seed)
    mask = rng.random(shape) < 0.5
    value, scores = drawn(mask, rng, ties)
    live = np.count_nonzero(mask)
    count = int(share * live)
    before = mask.copy()
    after = drop_and_grow(
        value, mask, count, scores, np.random.default_rng(seed)
    )
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
    assert drop_and_grow(
        value, mask, 1, np.array([0.0, 5.0, 4.0]), rng
    ).tolist() == [1, 1, 0]
    assert drop_and_grow(
        value, mask, 1, np.array([9.0, 3.0, 4.0]), rng
    ).tolist() == [1, 0, 1]
    # A full layer has nowhere else to go.
    assert drop_and_grow(
        np.arange(4.0), np.ones(4, bool), 3, np.arange(4.0), rng
    ).all()


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
    st.integers(1, 3),
    st.integers(1, 9),
    st.integers(0, 2**32 - 1),
    st.floats(0, 1),
    st.booleans(),
)
def test_fans_counts_and_what_is_dropped(matrices, lines, seed, share, ties):
    rng = np.random.default_rng(seed)
    live = regular(matrices, lines, 1 + seed % lines, rng)
    value, scores = drawn(live, rng, ties)
    magnitudes = np.abs(value)
    count, before = int(share * live.sum()), live.copy()
    after = move_regular(
        magnitudes, live, count, scores, np.random.default_rng(seed)
    )
    np.testing.assert_array_equal(live, before)
    for axis in (1, 2):
        np.testing.assert_array_equal(after.sum(axis=axis), live.sum(axis=axis))
    left, stayed = live & ~after, live & after
    assert left.sum() <= count
    if left.any() and stayed.any():
        assert magnitudes[left].max() <= np.sort(magnitudes[live])[count - 1]
    # What has come scores at least as much, in sum, as what has left.
    assert scores[after & ~live].sum() >= scores[left].sum() - 1e-9


@pytest.mark.parametrize("seed", range(20))
def test_the_best_of_all_ways(seed):
    rng = np.random.default_rng(seed)
    live = regular(1, 4, 2, rng)
    scores = rng.normal(size=live.shape)
    after = move_regular(live * 1.0, live, 8, scores, rng)[0]
    rows = [
        np.array(row)
        for row in itertools.product([0, 1], repeat=4)
        if sum(row) == 2
    ]
    ways = [np.stack(way) for way in itertools.product(rows, repeat=4)]
    best = max(
        (scores[0] * way).sum() for way in ways if (way.sum(axis=0) == 2).all()
    )
    assert (scores[0] * after).sum() == pytest.approx(best, abs=1e-9)


CASES = [
    (Block(4, 1), (16, 24), None),
    (Block(4, 8), (3, 3, 8, 16), None),
    (Block(4, 2, regular=True), (3, 32, 16), None),
    (Block(2, 4, regular=True), (16, 64), KernelLayout.recurrent(4)),
]


def sums(structure, array):
    *outer, inputs, outputs = array.shape
    grid = (
        *outer,
        inputs // structure.rows,
        structure.rows,
        outputs // structure.cols,
    )
    taps = tuple(range(2, len(outer))) if structure.regular else ()
    return array.reshape(*grid, structure.cols).sum(axis=(*taps, -3, -1))


@pytest.mark.parametrize(("structure", "shape", "layout"), CASES, ids=str)
@hypothesis.given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.booleans())
@hypothesis.settings(max_examples=25)
def test_blocks_move_as_a_whole(structure, shape, layout, seed, share, ties):
    rng = np.random.default_rng(seed)
    layout = layout or KernelLayout.convolution()
    _, mask = exact_orthogonal(
        shape, 0.25, seed=seed, structure=structure, layout=layout
    )
    mask = np.ascontiguousarray(layout.to_canonical(mask))
    value, scores = drawn(mask, rng, ties)
    scores = np.abs(scores)
    live, before = np.count_nonzero(mask), mask.copy()
    count = int(share * live)
    after = move_blocks(
        structure, value, mask, count, scores, np.random.default_rng(seed)
    )
    np.testing.assert_array_equal(mask, before)
    assert after.dtype == bool
    assert np.count_nonzero(after) == live
    assert np.count_nonzero(after & ~mask) <= count

    unit = structure.rows * structure.cols
    unit *= np.prod(mask.shape[2:-2], dtype=int) if structure.regular else 1
    blocks = sums(structure, after)
    assert set(np.unique(blocks)) <= {0, unit}
    value, scores = sums(structure, np.abs(value)), sums(structure, scores)
    was, now = sums(structure, mask) > 0, blocks > 0
    left, stayed = was & ~now, was & now
    if structure.regular:
        for axis in (-2, -1):
            np.testing.assert_array_equal(
                now.sum(axis=axis), was.sum(axis=axis)
            )
    elif (now & ~was).any() and (~now).any():
        assert scores[now & ~was].min() >= scores[~now].max()
    count //= unit
    # What left is among the smallest that there were.
    if left.any() and stayed.any():
        was_live = np.abs(value[left | stayed])
        assert np.abs(value[left]).max() <= np.sort(was_live)[count - 1]


def sorted_masks(entries, count):
    """The masks by a stable sort of everything; by scale where offsets are infinite."""
    everything = np.concatenate([one.critical.reshape(-1) for one in entries])
    scales = np.concatenate([one.scales.reshape(-1) for one in entries])
    second = np.where(np.isposinf(everything), scales, 0.0)
    live = np.zeros(everything.size, bool)
    live[np.lexsort((-second, -everything))[:count]] = True
    parts = np.split(
        live, np.cumsum([one.critical.size for one in entries])[:-1]
    )
    return [
        part.reshape(one.critical.shape)
        for part, one in zip(parts, entries, strict=True)
    ]


def check(entries, count):
    made = cut(entries, count)
    assert_same(made.masks, sorted_masks(entries, count))
    everything = np.concatenate([one.critical.reshape(-1) for one in entries])
    infinite = np.isposinf(everything).sum()
    assert made.unreachable == (infinite if infinite > count else 0)
    (offset,) = set(made.offsets)
    assert np.isfinite(offset)
    ranked = np.sort(everything)[::-1]
    with np.errstate(invalid="ignore"):  # of two that are infinite
        apart = (
            count in (0, ranked.size)
            or ranked[count - 1] - ranked[count] > 1e-9
        )
    if (
        apart
        and not (count < ranked.size and ranked[count] == np.inf)
        and ranked[-1] > -np.inf
    ):
        assert (everything > offset).sum() == count


few = [
    -np.inf,
    -1.5,
    -1e-30,
    -0.0,
    0.0,
    0.25,
    0.5,
    np.inf,
]  # so that there are ties
values = st.sampled_from(few) | st.floats(-4, 4)
rows = st.lists(
    st.lists(values, min_size=1, max_size=6), min_size=1, max_size=4
)


def entries(row):
    return Entries(np.array(row), np.arange(len(row)) % 3.0)


@given(rows, st.data())
def test_masks_and_offset_are_those_of_a_stable_sort(rows, data):
    made = [entries(row) for row in rows]
    check(made, data.draw(st.integers(0, sum(map(len, rows)))))


@settings(max_examples=60)
@given(rows, st.data())
def test_floors_are_kept_and_the_count_is_exact(rows, data):
    made = [entries(row) for row in rows]
    count = data.draw(st.integers(1, sum(map(len, rows))))
    floors = [data.draw(st.integers(0, len(row))) for row in rows]
    while sum(floors) > count:
        floors[np.argmax(floors)] -= 1
    found = floored_cut(made, count, floors)
    shares = [mask.sum() for mask in found.masks]
    assert sum(shares) == count
    for place, (one, share, floor) in enumerate(
        zip(made, shares, floors, strict=True)
    ):
        least = min(floor, np.count_nonzero(one.critical > -np.inf))
        assert share >= least
        assert place not in found.at_floor or share == least
    assert np.isfinite(found.offsets).all()
    plain = [mask.sum() for mask in sorted_masks(made, count)]
    if all(one >= floor for one, floor in zip(plain, floors, strict=True)):
        assert (shares, found.at_floor) == (plain, [])


def thresholds(**options):
    """Two weights as `ThresholdSteering` sees them before it steers."""
    made = [
        SimpleNamespace(counted="entries", frozen=False, **options)
        for _ in range(2)
    ]
    for one, size in zip(made, (64, 8), strict=True):
        one.weight = SimpleNamespace(
            path=f"w{size}", shape=(8, size // 8), size=size, layout=None
        )
    return made


def steering(schedule, steps=None, **options):
    made = ThresholdSteering(0.5, schedule, **options)
    made.take(thresholds())
    made.resolve(steps)
    return made


def due(steering, *steps):
    return [
        step for step in range(*steps) if steering.is_due(step, (*steps, 1)[2])
    ]


def test_when_the_offset_is_set():
    # Until it is frozen, as where a run is resumed; without freezing again and again.
    assert due(steering(Linear(0.25, 2, 8, frequency=2)), 0, 20) == [
        2,
        4,
        6,
        *range(8, 20),
    ]
    open_ended = steering(Linear(0.5, 0, 6, frequency=3), freeze=False)
    assert due(open_ended, 0, 20) == [0, 3, 6, 9, 12, 15, 18]
    assert due(open_ended, 6, 20, 4) == [6, 10, 14, 18]
    # By default the density falls over seven tenths of the run.
    assert due(steering(None, 200, frequency=100), 0, 142) == [0, 100, 140, 141]


def test_what_is_due_at_the_end():
    endless = steering(Constant(0.5, frequency=5))
    # At whatever step that is.
    assert all(endless.is_due_at_end(step, 1) for step in range(11))
    ending = steering(Linear(0.5, 2, 8, frequency=3))
    assert [step for step in range(11) if ending.is_due_at_end(step, 1)] == [
        2,
        5,
        8,
        9,
        10,
    ]


def test_floors_that_exceed_the_total_give_way():
    many = thresholds()
    floors = functools.partial(floors_of, many, [64, 8])
    assert sum(floors(0.25, 1.0)) == 18 == round(0.25 * 72)
    assert floors(0.03, 1.0) == [1, 1]  # 2 of 72
    many[0].dies_at_once, many[1].dies_at_once = 8, 2
    # A channel of each, as a share of 10 is more.
    assert floors(10 / 72, 1.0) == [
        8,
        2,
    ]
    assert floors(9 / 72, 1.0) == [0, 0]
    assert floors(0.25, 0.0) == [0, 0]
