"""Ranks that are counted on the device: NumPy's masks, bit for bit."""

import functools
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho import _ranking
from keras_sparse_ortho._ranking import (
    between,
    counts_at_least,
    drop_and_grow_on_device,
    largest_magnitudes,
    neighbours,
    on_bounds,
    random_order,
    random_order_on_device,
    rank,
    ranked_on,
    ranks_on_device,
)
from keras_sparse_ortho._values import to_numpy
from keras_sparse_ortho.callbacks._drop_and_grow import drop_and_grow
from keras_sparse_ortho.orthogonal import largest_mask

SHAPE = (6, 5)
SIZE = 30
DTYPES = ("float32", "bfloat16", "float16")
# Ties, both zeros, neighbours, the smallest and the largest of float16 and of float32.
few = st.sampled_from([0.0, -0.0, 0.5, -0.5, 2.0, 6e-8, -6e-8, 65504.0, 1.0, -1.0009765625])
any_ = st.floats(width=32, allow_nan=False, allow_infinity=False)
values = st.lists(few, min_size=SIZE, max_size=SIZE) | st.lists(
    few | any_, min_size=SIZE, max_size=SIZE
)
# One shape, as every shape is compiled.
examples = settings(max_examples=30)


def tensor(numbers, dtype):
    """A tensor of finite numbers, and what NumPy has of it."""
    largest = 65504.0 if dtype == "float16" else 3e38
    numbers = np.clip(np.array(numbers, np.float32).reshape(SHAPE), -largest, largest)
    made = keras.ops.convert_to_tensor(numbers, dtype=dtype)
    return made, to_numpy(made)


def bits(magnitudes):
    return np.abs(magnitudes.astype(np.float32)).view(np.int32)


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES)
@examples
@given(values, st.integers(0, SIZE))
def test_masks_of_the_largest_magnitudes_are_those_of_numpy(dtype, numbers, count):
    made, array = tensor(numbers, dtype)
    mask, not_finite = largest_magnitudes(made, count)
    np.testing.assert_array_equal(to_numpy(mask), largest_mask(np.abs(array), count))
    assert not_finite == 0


@pytest.mark.core
def test_entries_that_are_not_finite_are_counted():
    wrong = [np.inf, -np.inf, np.nan]
    for dtype in DTYPES:
        made = keras.ops.convert_to_tensor(np.array(wrong + [1.0] * 27).reshape(SHAPE), dtype=dtype)
        assert largest_magnitudes(made, 3)[1] == 3
    made = keras.ops.convert_to_tensor(np.array(wrong + [1.0] * 27, np.float32).reshape(SHAPE))
    mask = np.ones(SHAPE, bool)
    like = keras.Variable(mask, dtype="bool", trainable=False)
    rng = np.random.default_rng(0)
    assert drop_and_grow_on_device(made, like.value, 3, made, rng, like) is None


@examples
@given(st.lists(st.integers(-1, 3), min_size=SIZE, max_size=SIZE), st.data())
def test_the_rank_of_integers(numbers, data):
    keys = np.array(numbers, np.int32).reshape(SHAPE) * (2**31 - 1) // 3  # the largest there is
    ranked = np.sort(keys[keys >= 0])[::-1]
    if not ranked.size:
        return
    count = data.draw(st.integers(1, ranked.size))
    least, above, equal = rank(keras.ops.convert_to_tensor(keys), count)
    assert int(to_numpy(least)) == ranked[count - 1]
    assert above == np.count_nonzero(keys > ranked[count - 1])
    assert equal == np.count_nonzero(keys == ranked[count - 1])


@pytest.mark.core
@pytest.mark.parametrize("one", [(1, 1), (1, 5)], ids=["one group", "columns"])
@settings(max_examples=30)
@given(values, st.data())
def test_counts_neighbours_and_masks_between_bounds(one, numbers, data):
    made, array = tensor(numbers, "float32")
    own, groups = bits(array), one[1]
    bound = st.sampled_from([0, 1, *np.unique(own).tolist(), _ranking.INFINITE])
    rows = st.lists(bound, min_size=groups, max_size=groups)
    low, high = np.sort([data.draw(rows), data.draw(rows)], axis=0)
    counts = to_numpy(on_bounds(counts_at_least, made, np.stack([low, high]), one=one))
    assert counts.tolist() == [(own >= bound).sum() for bound in (low, high)]
    below, above = map(to_numpy, on_bounds(neighbours, made, low, one=one))
    columns = own if groups > 1 else own.reshape(-1, 1)
    for k in range(groups):
        smaller = columns[:, k][columns[:, k] < low[k]]
        others = columns[:, k][columns[:, k] >= low[k]]
        assert below[k] == smaller.max(initial=-1)
        assert above[k] == others.min(initial=2**31 - 1)
    ties = np.flatnonzero((own >= low) & (own < high))
    missing = data.draw(st.integers(0, ties.size))
    expected = own >= high
    expected.reshape(-1)[ties[:missing]] = True
    found = on_bounds(between, made, low, high, missing, one=one)
    np.testing.assert_array_equal(to_numpy(found), expected)


@pytest.mark.core
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=30)
@given(values, st.lists(few, min_size=SIZE, max_size=SIZE), st.integers(1, 2**20), st.data())
def test_dropping_and_growing_draws_as_numpy_does(dtype, numbers, scores, pattern, data):
    made, array = tensor(numbers, dtype)
    grown, by = tensor(np.abs(scores), dtype)
    mask = np.random.default_rng(pattern).random(SHAPE) < 0.4
    count = data.draw(st.integers(0, int(mask.sum())))
    like = keras.Variable(mask, dtype="bool", trainable=False)
    rng, same = np.random.default_rng(pattern), np.random.default_rng(pattern)
    found = drop_and_grow_on_device(made, like.value, count, grown, rng, like)
    expected = drop_and_grow(array, mask, count, by, same)
    np.testing.assert_array_equal(to_numpy(found), expected)
    assert rng.random() == same.random()


@pytest.mark.core
def test_random_orders_are_the_same_everywhere_and_look_random():
    shape = (251, 400)
    here = random_order(shape, 7)
    there = to_numpy(random_order_on_device(shape, 7))
    np.testing.assert_array_equal(here * 2.0**31, there)
    assert here.min() >= 0
    assert here.max() < 1
    assert np.unique(here).size > here.size * 0.9999
    other = random_order(shape, 8)
    for a, b in ((here, other), (here[1:], here[:-1]), (here[:, 1:], here[:, :-1])):
        assert abs(np.corrcoef(a.reshape(-1), b.reshape(-1))[0, 1]) < 5 / np.sqrt(a.size)
    # A tenth of the largest is spread evenly over lines.
    chosen = (here > np.quantile(here, 0.9)).sum(axis=0)
    spread = chosen.var() / (shape[0] * 0.1 * 0.9)
    assert 0.8 < spread < 1.2


def test_where_ranks_are_made_follows_the_tensor_or_the_override():
    short = keras.Variable(np.zeros(3, np.float32))
    assert not ranks_on_device(short)
    with ranked_on("device"):
        assert ranks_on_device(short)
        with ranked_on("host"):
            assert not ranks_on_device(short)
        assert not ranks_on_device(SimpleNamespace(dtype="float64", shape=(3,)))
    assert not ranks_on_device(short)
    with pytest.raises(ValueError, match="Received: place='gpu'"), ranked_on("gpu"):
        pass


# --- on JAX: sharded, and lowered for accelerators ------------------------------------------------

PROGRAMS = ("largest", "rank", "counts", "columns", "around", "between", "live", "dead", "order")


def programs():
    """The compiled parts of an update, each with arguments for a sharded array."""
    one, column = (1, 1), (1, 16)
    bound, columns = np.zeros((15, 1), np.int32), np.zeros((15, 16), np.int32)
    live = np.ones((64, 16), bool)
    return {
        "largest": (_ranking._largest_magnitudes, ("value", np.int32(20))),
        "rank": (_ranking._rank, ("keys", np.int32(20))),
        "counts": (functools.partial(counts_at_least, one=one), ("value", bound)),
        "columns": (functools.partial(counts_at_least, one=column), ("value", columns)),
        "around": (functools.partial(neighbours, one=one), ("value", bound[0])),
        "between": (
            functools.partial(between, one=one),
            ("value", bound[0], bound[0], np.int32(3)),
        ),
        "live": (_ranking._keys_of_live, ("value", live)),
        "dead": (_ranking._keys_of_dead, ("value", live, live)),
        "order": (
            functools.partial(_ranking._hashed, shape=(64, 16)),
            (np.zeros(2, np.int32),),
        ),
    }


def arguments(given_, value):
    import jax

    keys = jax.lax.bitcast_convert_type(value, "int32") & 0x7FFFFFFF
    return [{"value": value, "keys": keys}.get(a, a) if isinstance(a, str) else a for a in given_]


@pytest.mark.jax_only
@pytest.mark.parametrize("name", PROGRAMS)
def test_lowered_for_accelerators_an_update_has_no_call_to_the_host_and_no_sort(name):
    import jax

    function, given_ = programs()[name]
    value = jax.numpy.zeros((64, 16))
    traced = jax.jit(function).trace(*arguments(given_, value))
    for platform in ("tpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        for word in ("custom_call", "callback", "infeed", "outfeed", "sort", "dynamic_", "f64"):
            assert word not in text, (platform, word)
        assert "?x" not in text


@pytest.mark.jax_only
@pytest.mark.parametrize("name", ["largest", "rank", "counts", "between"])
def test_sharded_over_devices_only_counts_are_exchanged(name):
    import re

    import jax

    function, given_ = programs()[name]
    value = jax.device_put(np.ones((64, 16), np.float32), by_rows())
    text = jax.jit(function).lower(*arguments(given_, value)).compile().as_text()
    for kind in ("all-gather", "all-to-all", "collective-permute"):
        assert kind not in text
    exchanged = re.findall(r"= (\(.*?\)|\S+) all-reduce\(", text)
    assert exchanged
    assert {shape for one in exchanged for shape in re.findall(r"\w+\[.*?\]", one)} == {"s32[]"}


def by_rows():
    import jax

    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ["rows"])
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("rows"))


@pytest.mark.jax_only
def test_sharded_masks_are_those_of_numpy():
    import jax

    rng = np.random.default_rng(0)
    array = rng.integers(-3, 4, (64, 16)).astype(np.float32)
    value = jax.device_put(array, by_rows())
    for count in (0, 1, 100, 700, 1024):
        mask = largest_magnitudes(value, count)[0]
        np.testing.assert_array_equal(to_numpy(mask), largest_mask(np.abs(array), count))
    mask = rng.random(array.shape) < 0.3
    like = keras.Variable(mask, dtype="bool", trainable=False)
    live = jax.device_put(mask, by_rows())
    scores = random_order(array.shape, 3)
    found = drop_and_grow_on_device(
        value, live, 50, jax.device_put(scores, by_rows()), np.random.default_rng(1), like
    )
    expected = drop_and_grow(array, mask, 50, scores.astype(np.float32), np.random.default_rng(1))
    np.testing.assert_array_equal(to_numpy(found), expected)
