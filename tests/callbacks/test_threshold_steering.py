"""Which entries `TargetDensity` keeps: the cut over several weights, and the steering of it."""

import functools
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.callbacks import ThresholdSteering
from keras_sparse_ortho.callbacks._target_density import Entries, cut, floored_cut, floors_of
from keras_sparse_ortho.errors import DensityError, NotPrunableError
from keras_sparse_ortho.parametrizations import critical_offsets, threshold_function
from keras_sparse_ortho.schedules import Constant, Linear

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


class Threshold:
    """`|w| > exp(s + offset)`, so that the critical offset is `log |w| - s`."""

    counted = "entries"

    def __init__(self, value, s=0.0, path="w"):
        self.value, self.s = np.asarray(value), s
        shape, size = self.value.shape, self.value.size
        self.weight = SimpleNamespace(path=path, shape=shape, size=size, layout=None)
        self.steered = self.value
        self.offset = SimpleNamespace(value=None, assign=self._assign)
        self.frozen = False

    def _assign(self, value):
        self.offset.value = value

    def scales(self):
        return np.abs(self.value)

    def critical_offsets(self):
        with np.errstate(divide="ignore"):
            return np.log(self.scales()) - self.s

    def freeze(self, mask):
        self.frozen, self.value = True, self.value * mask
        return mask

    def live(self):
        return np.abs(self.value) > np.exp(self.s + self.offset.value)


def thresholds():
    rng = np.random.default_rng(0)
    shapes, starts = ((8, 4), (5, 3, 2)), (0.0, 0.5)
    return [
        Threshold(rng.normal(size=shape), s, f"w{k}")
        for k, (shape, s) in enumerate(zip(shapes, starts, strict=True))
    ]


def test_the_count_follows_the_schedule_and_is_frozen_at_its_end():
    own = thresholds()
    schedule = Linear(0.25, 2, 8, frequency=2)
    steering = ThresholdSteering(0.25, schedule)
    steering.begin(own, None, None)  # with a schedule the length is not needed
    due = [step for step in range(20) if steering.is_due(step, 1)]
    assert due == [2, 4, 6, *range(8, 20)]  # until it is frozen, as where a run is resumed
    for step in (2, 4, 6):
        assert steering.steer(step) == []
        assert own[0].offset.value == own[1].offset.value
        assert sum(t.live().sum() for t in own) == round(schedule.at(step) * 62)
    frozen = steering.steer(11)
    assert [t for t, _ in frozen] == own
    assert sum(mask.sum() for _, mask in frozen) == round(0.25 * 62)
    assert steering.thresholds == []
    assert not any(steering.is_due(step, 1) for step in range(9, 20))
    assert steering.steer(12) == []


def test_without_freezing_it_is_set_again_and_again():
    own = thresholds()
    steering = ThresholdSteering(0.5, Linear(0.5, 0, 6, frequency=3), freeze=False)
    steering.begin(own, None, None)
    for step in (0, 3, 6, 9):
        assert steering.is_due(step, 1)
        assert steering.steer(step) == []
    assert [step for step in range(6, 20) if steering.is_due(step, 1)] == [6, 9, 12, 15, 18]
    assert [step for step in range(6, 20, 4) if steering.is_due(step, 4)] == [6, 10, 14, 18]
    assert steering.is_due_at_end(17, 1)
    assert sum(t.live().sum() for t in own) == 31


def test_what_is_due_at_the_end():
    steering = ThresholdSteering(0.5, Constant(0.5, frequency=5))  # which does not end
    steering.begin(thresholds(), None, None)
    assert all(steering.is_due_at_end(step, 1) for step in range(11))  # at whatever step that is
    steering = ThresholdSteering(0.5, Linear(0.5, 2, 8, frequency=3))
    steering.begin(thresholds(), None, None)
    assert [step for step in range(11) if steering.is_due_at_end(step, 1)] == [2, 5, 8, 9, 10]


def test_by_default_the_density_falls_over_seven_tenths():
    steering = ThresholdSteering(0.5, frequency=100)
    steering.begin(thresholds(), 10, 20)
    assert [step for step in range(142) if steering.is_due(step, 1)] == [0, 100, 140, 141]
    for epochs, steps in ((None, 20), (10, None)):
        with pytest.raises(ValueError, match=r"needs a `schedule`.*Received: schedule=None"):
            steering.begin(thresholds(), epochs, steps)


def test_refusals():
    with pytest.raises(DensityError, match="Received: density=2"):
        ThresholdSteering(2)
    with pytest.raises(ValueError, match=r"`frequency`.*Received: frequency=0"):
        ThresholdSteering(0.5, frequency=0)
    own = thresholds()
    own[1].counted = "ranks"
    with pytest.raises(NotPrunableError, match=r"Received: .*\['entries', 'ranks'\]"):
        ThresholdSteering(0.5).begin(own, 1, 1)


def test_a_weight_that_loses_all_entries_is_named_once():
    own = [Threshold([3.0, 4.0, 5.0], path="large"), Threshold([0.1, 0.2], path="small")]
    steering = ThresholdSteering(0.6, Constant(0.6), floor=0.0)
    steering.begin(own, None, None)
    with pytest.warns(UserWarning, match=r"without a live entry.*Received: \['small'\]"):
        steering.steer(0)
    steering.steer(100)  # every warning is an error here


def test_floors_are_those_of_the_final_density_from_the_start():
    rng = np.random.default_rng(0)
    large, small = (
        Threshold(1 + rng.random((8, 5)), path="large"),
        Threshold(0.001 + 0.001 * rng.random((5, 4)), path="small"),
    )
    steering = ThresholdSteering(0.2, Linear(0.2, 0, 80, frequency=1), floor=1.0)
    steering.begin([large, small], None, None)
    steering.steer(10)  # at a density of 0.9, where ERK would leave more than 14 of `small`
    assert (large.live().sum(), small.live().sum()) == (40, 14)
    with pytest.warns(UserWarning, match=r"at their floor.*Received: \['small'\]"):
        steering.steer(80)


def test_floors_that_exceed_the_total_give_way():
    many = [Threshold(np.ones((8, 8)), path="a"), Threshold(np.ones((4, 2)), path="b")]
    floors = functools.partial(floors_of, many, [64, 8])
    assert sum(floors(0.25, 1.0)) == 18 == round(0.25 * 72)
    assert floors(0.03, 1.0) == [1, 1]  # 2 of 72
    many[0].dies_at_once, many[1].dies_at_once = 8, 2
    assert floors(10 / 72, 1.0) == [8, 2]  # a channel of each, as a share of 10 is more
    assert floors(9 / 72, 1.0) == [0, 0]
    assert floors(0.25, 0.0) == [0, 0]


@pytest.mark.parametrize(("value", "s"), [([1.0, np.nan], 0.0), ([1.0, 2.0], np.nan)])
def test_what_is_not_a_number_has_no_density(value, s):
    steering = ThresholdSteering(0.5, Constant(0.5))
    steering.begin([Threshold(value, s)], None, None)
    with pytest.raises(NotPrunableError, match=r"'w' is not finite, or its threshold.*Received: "):
        steering.steer(0)
