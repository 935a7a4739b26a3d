"""Which entries `TargetDensity` keeps: the cut over several weights, and the steering of it."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.callbacks import ThresholdSteering
from keras_sparse_ortho.callbacks._target_density import Entries, cut, floored_cut, floors_of
from keras_sparse_ortho.schedules import Constant, Linear

pytestmark = pytest.mark.numpy_only


def sorted_masks(entries, count):
    """The masks by a stable sort of everything; by scale where offsets are infinite."""
    everything = np.concatenate([one.critical.reshape(-1) for one in entries])
    scales = np.concatenate([one.scales.reshape(-1) for one in entries])
    second = np.where(np.isposinf(everything), scales, 0.0)
    live = np.zeros(everything.size, bool)
    live[np.lexsort((-second, -everything))[:count]] = True
    parts = np.split(live, np.cumsum([one.critical.size for one in entries])[:-1])
    return [part.reshape(one.critical.shape) for part, one in zip(parts, entries, strict=True)]


def check(entries, count):
    made = cut(entries, count)
    for mask, wanted in zip(made.masks, sorted_masks(entries, count), strict=True):
        np.testing.assert_array_equal(mask, wanted)
    everything = np.concatenate([one.critical.reshape(-1) for one in entries])
    infinite = np.isposinf(everything).sum()
    assert made.unreachable == (infinite if infinite > count else 0)
    (offset,) = set(made.offsets)
    assert np.isfinite(offset)
    ranked = np.sort(everything)[::-1]
    with np.errstate(invalid="ignore"):  # of two that are infinite
        apart = count in (0, ranked.size) or ranked[count - 1] - ranked[count] > 1e-9
    if apart and not (count < ranked.size and ranked[count] == np.inf) and ranked[-1] > -np.inf:
        assert (everything > offset).sum() == count


few = [-np.inf, -1.5, -1e-30, -0.0, 0.0, 0.25, 0.5, np.inf]  # so that there are ties
values = st.sampled_from(few) | st.floats(-4, 4)
rows = st.lists(st.lists(values, min_size=1, max_size=6), min_size=1, max_size=4)


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
    for place, (one, share, floor) in enumerate(zip(made, shares, floors, strict=True)):
        least = min(floor, np.count_nonzero(one.critical > -np.inf))
        assert share >= least
        assert place not in found.held or share == least
    assert np.isfinite(found.offsets).all()
    plain = [mask.sum() for mask in sorted_masks(made, count)]
    if all(one >= floor for one, floor in zip(plain, floors, strict=True)):
        assert (shares, found.held) == (plain, [])


def thresholds(**options):
    """Two weights as `ThresholdSteering` sees them before it steers."""
    made = [SimpleNamespace(counted="entries", frozen=False, **options) for _ in range(2)]
    for one, size in zip(made, (64, 8), strict=True):
        one.weight = SimpleNamespace(path=f"w{size}", shape=(8, size // 8), size=size, layout=None)
    return made


def steering(schedule, steps=None, **options):
    made = ThresholdSteering(0.5, schedule, **options)
    made.take(thresholds())
    made.resolve(steps)
    return made


def due(steering, *steps):
    return [step for step in range(*steps) if steering.is_due(step, (*steps, 1)[2])]


def test_when_the_offset_is_set():
    # Until it is frozen, as where a run is resumed; without freezing again and again.
    assert due(steering(Linear(0.25, 2, 8, frequency=2)), 0, 20) == [2, 4, 6, *range(8, 20)]
    open_ended = steering(Linear(0.5, 0, 6, frequency=3), freeze=False)
    assert due(open_ended, 0, 20) == [0, 3, 6, 9, 12, 15, 18]
    assert due(open_ended, 6, 20, 4) == [6, 10, 14, 18]
    # By default the density falls over seven tenths of the run.
    assert due(steering(None, 200, frequency=100), 0, 142) == [0, 100, 140, 141]


def test_what_is_due_at_the_end():
    endless = steering(Constant(0.5, frequency=5))
    assert all(endless.is_due_at_end(step, 1) for step in range(11))  # at whatever step that is
    ending = steering(Linear(0.5, 2, 8, frequency=3))
    assert [step for step in range(11) if ending.is_due_at_end(step, 1)] == [2, 5, 8, 9, 10]


def test_floors_that_exceed_the_total_give_way():
    many = thresholds()
    floors = functools.partial(floors_of, many, [64, 8])
    assert sum(floors(0.25, 1.0)) == 18 == round(0.25 * 72)
    assert floors(0.03, 1.0) == [1, 1]  # 2 of 72
    many[0].dies_at_once, many[1].dies_at_once = 8, 2
    assert floors(10 / 72, 1.0) == [8, 2]  # a channel of each, as a share of 10 is more
    assert floors(9 / 72, 1.0) == [0, 0]
    assert floors(0.25, 0.0) == [0, 0]
