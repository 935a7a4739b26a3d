"""The cut between entries that live and those that die, over several weights."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho._ranking import ranked_on
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.callbacks import _offset_search
from keras_sparse_ortho.callbacks._floors import floored_cut
from keras_sparse_ortho.callbacks._offset_search import HostEntries, cut, entries_of
from keras_sparse_ortho.parametrizations import threshold_function

FEW = [0.0, -0.0, 0.25, -0.25, 0.5, 0.999, 1.0, -3.0, 1e-30, 1e-45]
SHAPES = ((4, 3), (2, 5))


class Weight:
    """As much of a `PrunableWeight` as is read."""

    def __init__(self, value):
        self.variable = keras.Variable(value)

    @property
    def shape(self):
        return tuple(self.variable.shape)

    def raw_value(self):
        return to_numpy(self.variable)

    finite_raw_value = raw_value


def threshold(value, s, g):
    function = threshold_function(g)
    weight = Weight(np.asarray(value, np.float32))
    magnitudes = (weight, np.asarray(s, np.float32), function.inverse)
    return SimpleNamespace(magnitudes=lambda: magnitudes)


def critical(one):
    """The critical offsets of a threshold in float64, by the formula."""
    weight, s, inverse = one.magnitudes()
    magnitudes = np.abs(weight.raw_value()).astype(np.float64)
    return inverse(magnitudes) - s.astype(np.float64)


def sorted_masks(offsets, count, scales=None):
    """The masks by a stable sort of everything; by scale where offsets are infinite."""
    everything = np.concatenate([c.reshape(-1) for c in offsets])
    second = np.zeros(everything.size)
    if scales is not None:
        scales = np.concatenate([one.reshape(-1) for one in scales])
        second = np.where(np.isposinf(everything), scales, 0.0)
    live = np.zeros(everything.size, bool)
    live[np.lexsort((-second, -everything))[:count]] = True
    parts = np.split(live, np.cumsum([c.size for c in offsets])[:-1])
    return [part.reshape(c.shape) for part, c in zip(parts, offsets, strict=True)]


def scales_of(thresholds):
    return [np.abs(one.magnitudes()[0].raw_value()) for one in thresholds]


def check(thresholds, count):
    """Both places give the masks of a sort, and one offset; which is returned."""
    offsets = [critical(one) for one in thresholds]
    expected = sorted_masks(offsets, count, scales_of(thresholds))
    found = {}
    for place in ("host", "device"):
        with ranked_on(place):
            entries = [entries_of(one) for one in thresholds]
            made = cut(entries, count)
            reach = made.unreachable()
            shares = made.shares()
            masks = [to_numpy(mask) for mask in made.masks()]
        for mask, wanted in zip(masks, expected, strict=True):
            np.testing.assert_array_equal(mask, wanted, err_msg=place)
        assert shares == [mask.sum() for mask in expected]
        infinite = sum(np.isposinf(c).sum() for c in offsets)
        assert reach == (infinite if infinite > count else 0)
        found[place] = made.offset()
    assert found["host"] == found["device"]
    everything = np.concatenate([c.reshape(-1) for c in offsets])
    offset, ranked = found["host"], np.sort(everything)[::-1]
    with np.errstate(invalid="ignore"):  # of two that are infinite
        apart = count in (0, ranked.size) or ranked[count - 1] - ranked[count] > 1e-9
    if apart and not (count < ranked.size and ranked[count] == np.inf) and ranked[-1] > -np.inf:
        assert (everything > offset).sum() == count
    assert np.isfinite(offset)
    return offset


@pytest.mark.core
@pytest.mark.parametrize("g", ["sigmoid", "exp", "softplus"])
@settings(max_examples=8)
@given(st.data())
def test_the_masks_are_those_of_a_sort_in_both_places(g, data):
    any_thresholds(g, data)


@pytest.mark.slow
@pytest.mark.parametrize("g", ["sigmoid", "exp", "softplus"])
@settings(max_examples=150)
@given(st.data())
def test_many_masks_are_those_of_a_sort_in_both_places(g, data):
    any_thresholds(g, data)


def any_thresholds(g, data):
    number = st.sampled_from(FEW) | st.floats(-4, 4, width=32)
    made = []
    for shape in SHAPES:
        value = data.draw(st.lists(number, min_size=int(np.prod(shape)), max_size=12))
        channels = data.draw(st.booleans())
        s = st.floats(-9, 3, width=32)
        own = data.draw(st.lists(s, min_size=shape[1], max_size=shape[1]) if channels else s)
        own = np.reshape(own, (1, shape[1])) if channels else own
        made.append(threshold(np.reshape(value[: np.prod(shape)], shape), own, g))
    check(made, data.draw(st.integers(0, 22)))


values = st.sampled_from([-np.inf, -1.5, -0.0, 0.0, 0.25, 0.5, np.inf])


@pytest.mark.numpy_only
@given(st.lists(st.lists(values, min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_critical_offsets_themselves_are_cut_as_by_a_stable_sort(rows, data):
    arrays = [np.array(row, data.draw(st.sampled_from(["float32", "float64"]))) for row in rows]
    count = data.draw(st.integers(0, sum(a.size for a in arrays)))
    made = cut([HostEntries(a) for a in arrays], count)
    for mask, wanted in zip(made.masks(), sorted_masks(arrays, count), strict=True):
        np.testing.assert_array_equal(mask, wanted)
    assert np.isfinite(made.offset())


@pytest.mark.numpy_only
@given(st.lists(st.floats(-50, 50), min_size=1, max_size=12, unique=True), st.data())
def test_so_many_critical_offsets_are_above_the_offset(offsets, data):
    offsets = np.array(offsets)
    count = data.draw(st.integers(0, offsets.size))
    # Where two are neighbours in floating point there is none between.
    if np.diff(np.sort(offsets)).min(initial=1.0) > 1e-9:
        made = cut([HostEntries(offsets)], count)
        assert np.count_nonzero(offsets > made.offset()) == count


@pytest.mark.numpy_only
def test_counts_outside_are_refused():
    own = HostEntries(np.zeros(3))
    with pytest.raises(ValueError, match="Received: count=4"):
        cut([own], 4)


@pytest.mark.numpy_only
@pytest.mark.parametrize("kind", ["normal", "columns", "zeros", "levels", "unreached"])
def test_large_weights_are_narrowed_by_a_sample_and_cut_exactly(kind, monkeypatch):
    rng = np.random.default_rng(0)
    first = rng.normal(size=(300, 256)).astype(np.float32)
    second = rng.normal(size=(70, 256)).astype(np.float32) * 0.01
    s = 0.5
    if kind == "columns":  # each with a threshold of its own, and a scale
        first *= np.geomspace(0.01, 1, 256, dtype=np.float32)
        s = rng.normal(size=(1, 256))
    if kind == "zeros":
        first[rng.random(first.shape) < 0.8] = 0
    if kind == "levels":
        first = np.round(first)
    if kind == "unreached":
        first *= 100  # larger than any sigmoid
    made = [threshold(first, s, "sigmoid"), threshold(second, -1.0, "sigmoid")]
    offsets = [critical(one) for one in made]
    for count in (1, 9_000, 40_000, 94_719):
        entries = [entries_of(one) for one in made]
        assert sum(one.size for one in entries) > _offset_search._FEW
        found = cut(entries, count)
        expected = sorted_masks(offsets, count, scales_of(made))
        for mask, wanted in zip(found.masks(), expected, strict=True):
            np.testing.assert_array_equal(mask, wanted)
        assert found.shares() == [mask.sum() for mask in expected]
        ranked = np.sort(np.concatenate([c.reshape(-1) for c in offsets]))[::-1]
        below, above = ranked[count], ranked[count - 1]
        if np.isfinite(below) and np.isfinite(above):
            assert found.offset() == pytest.approx((below + above) / 2, abs=1e-12)
        elif below == np.inf:
            assert found.offset() == ranked[np.isfinite(ranked)].max(initial=0) + 1


@pytest.mark.numpy_only
@settings(max_examples=60)
@given(st.lists(st.lists(values, min_size=1, max_size=6), min_size=1, max_size=4), st.data())
def test_floors_are_kept_and_the_count_is_exact(rows, data):
    arrays = [np.array(row) for row in rows]
    count = data.draw(st.integers(1, sum(a.size for a in arrays)))
    floors = [data.draw(st.integers(0, a.size)) for a in arrays]
    while sum(floors) > count:
        floors[np.argmax(floors)] -= 1
    made = floored_cut([HostEntries(a) for a in arrays], count, floors)
    shares, plain = made.shares(), [mask.sum() for mask in sorted_masks(arrays, count)]
    assert [mask.sum() for mask in made.masks()] == shares
    assert sum(shares) == count
    for place, (array_, share, floor) in enumerate(zip(arrays, shares, floors, strict=True)):
        least = min(floor, np.count_nonzero(array_ > -np.inf))
        assert share >= least
        assert place not in made.held or share == least
    assert np.isfinite(made.offsets()).all()
    if all(one >= floor for one, floor in zip(plain, floors, strict=True)):
        assert (shares, list(made.held)) == (plain, [])
