"""The cut between entries that live and those that die, over several weights."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.callbacks._threshold_cut import Entries, cut, floored_cut
from keras_sparse_ortho.parametrizations import critical_offsets, threshold_function

pytestmark = pytest.mark.numpy_only
FEW = [0.0, -0.0, 0.25, -0.25, 0.5, 0.999, 1.0, -3.0, 1e-30, 1e-45]
SHAPES = ((4, 3), (2, 5))


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


@pytest.mark.parametrize("g", ["sigmoid", "exp", "softplus"])
@settings(max_examples=40)
@given(st.data())
def test_masks_and_offset_are_those_of_a_stable_sort(g, data):
    number = st.sampled_from(FEW) | st.floats(-4, 4, width=32)
    made = []
    for shape in SHAPES:
        size = int(np.prod(shape))
        value = np.reshape(data.draw(st.lists(number, min_size=size, max_size=size)), shape)
        channels = data.draw(st.booleans())
        s = st.floats(-9, 3, width=32)
        own = data.draw(st.lists(s, min_size=shape[1], max_size=shape[1]) if channels else s)
        scales = np.abs(value.astype(np.float32))
        offsets = critical_offsets(threshold_function(g), scales, np.float32(own))
        made.append(Entries(offsets, scales))
    check(made, data.draw(st.integers(0, 22)))


values = st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 0.25, 0.5, np.inf])
rows = st.lists(st.lists(values, min_size=1, max_size=6), min_size=1, max_size=4)


def entries(row):
    return Entries(np.array(row), np.arange(len(row)) % 3.0)


@given(rows, st.data())
def test_ties_and_infinite_offsets(rows, data):
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
