"""Ranking where a tensor is, on accelerators and shards: by counting, without a sort.

The bits of a float's magnitude are ordered as the magnitude is. So the k-th largest of a tensor is
found bit by bit, by counting how many entries are at least a candidate; devices that share a tensor
exchange only these counts. On CPUs NumPy's selection is several times faster, so `ranks_on_device`
is false there; both give the same masks, bit for bit.
"""

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import compiled_once
from keras_sparse_ortho._values import placed, to_numpy

# The bits of magnitudes that are not finite are at least INFINITE, those of any at most LARGEST.
INFINITE, LARGEST = 0x7F800000, 2**31 - 1
# Bits of the result that each pass over the entries finds.
_BITS = 2
# Of the hash `lowbias32`, github.com/skeeto/hash-prospector.
_FACTORS = (0x7FEB352D, 0x846CA68B)
_PLACES = ("device", "host")
_place: ContextVar[str | None] = ContextVar("place", default=None)


@contextlib.contextmanager
def ranked_on(place: str) -> Iterator[None]:
    """Ranks all weights on the "device" or on the "host"; for tests."""
    if place not in _PLACES:
        raise ValueError(f"`place` must be one of {_PLACES}. Received: place={place!r}")
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def ranks_on_device(variable: Any) -> bool:
    """Whether the entries of a variable are ranked where they are, and not by NumPy.

    That is so on accelerators, but for float64 and for 2**31 entries and more.
    """
    dtype = keras.backend.standardize_dtype(variable.dtype)
    if dtype == "float64" or math.prod(variable.shape) > LARGEST:
        return False
    place = _place.get()
    if place is not None:
        return place == "device"
    return any(platform != "cpu" for platform in _platforms(variable.value))


def number_of(chosen: Any) -> int:
    """How many entries of a bool tensor are true."""
    return int(to_numpy(_number(chosen)))


def magnitude_bits(value: Any) -> Any:
    """The bits of `|x|` as float32, int32: ordered as the magnitudes are, exactly."""
    value = keras.ops.cast(value, "float32")
    backend = keras.backend.backend()
    if backend == "jax":
        import jax

        bits = jax.lax.bitcast_convert_type(value, "int32")
    elif backend == "tensorflow":
        import tensorflow as tf

        bits = tf.bitcast(value, tf.int32)
    else:
        import torch

        bits = value.contiguous().view(torch.int32)
    return keras.ops.bitwise_and(bits, LARGEST)


def largest_magnitudes(value: Any, count: int) -> tuple[Any, int]:
    """A bool mask of the `count` largest magnitudes, ties to the lower flat index.

    Also returns how many entries are not finite; if there are any, the mask is meaningless.
    """
    mask, wrong = compiled_once(_largest_magnitudes)(value, _argument(count))
    return mask, int(to_numpy(wrong))


def rank(keys: Any, count: int) -> tuple[Any, int, int]:
    """The key of rank `count` (the largest has rank 1), how many are larger, and how many equal.

    Keys are int32; negative ones have no rank.
    """
    least, above, equal = compiled_once(_rank)(keys, _argument(count))
    return least, int(to_numpy(above)), int(to_numpy(equal))


def on_bounds(function: Callable[..., Any], value: Any, *numbers: Any, one: tuple[int, ...]) -> Any:
    """`counts_at_least`, `neighbours` or `between`, compiled, on the magnitudes of a tensor.

    Their bounds are bits. There is one for each group of entries: `one`, which broadcasts to
    `value`, is the shape of the bounds of all groups.
    """
    return compiled_once(function, one=one)(value, *map(_argument, numbers))


def _largest_magnitudes(value: Any, count: Any) -> tuple[Any, Any]:
    bits = magnitude_bits(value)
    least, above, _ = _rank(bits, count)
    mask = keras.ops.logical_or(bits > least, _first(bits == least, count - above))
    return mask, _number(bits >= INFINITE)


def _rank(keys: Any, count: Any) -> tuple[Any, Any, Any]:
    ops = keras.ops

    def narrowed(least: Any, shift: Any, candidates: int) -> Any:
        found = least
        for j in range(1, candidates + 1):
            candidate = least + ops.left_shift(ops.cast(j, "int32"), shift)
            found = ops.where(_number(keys >= candidate) >= count, candidate, found)
        return found

    # The first of 31 bits alone, so that no candidate overflows.
    least = narrowed(ops.zeros((), "int32"), ops.cast(30, "int32"), 1)
    least = ops.fori_loop(
        0,
        30 // _BITS,
        lambda i, found: narrowed(found, ops.cast(30 - _BITS * (i + 1), "int32"), 2**_BITS - 1),
        least,
    )
    return least, _number(keys > least), _number(keys == least)


def _first(chosen: Any, count: Any) -> Any:
    """The first `count` of the true entries by flat index, found bit by bit as well."""
    ops = keras.ops
    index = flat_index(chosen.shape)

    def narrowed(shift: Any, end: Any) -> tuple[Any, Any]:
        candidate = end + ops.left_shift(ops.cast(1, "int32"), shift)
        fits = _number(ops.logical_and(chosen, index < candidate)) <= count
        return shift - 1, ops.where(fits, candidate, end)

    # Mostly all of them are wanted, and there is nothing to search.
    all_ = _number(chosen) <= count
    start = ops.where(all_, ops.cast(-1, "int32"), ops.cast(30, "int32"))
    _, end = ops.while_loop(lambda shift, _: shift >= 0, narrowed, (start, ops.zeros((), "int32")))
    return ops.logical_and(chosen, ops.logical_or(all_, index < end))


def counts_at_least(value: Any, least: Any, one: tuple[int, ...]) -> Any:
    """How many magnitudes reach a bound, (m,), for each of several, (m, groups)."""
    bits = magnitude_bits(value)
    bounds = range(least.shape[0])
    return keras.ops.stack([_number(bits >= keras.ops.reshape(least[j], one)) for j in bounds])


def neighbours(value: Any, least: Any, one: tuple[int, ...]) -> tuple[Any, Any]:
    """For each group the largest bits below a bound, and the least not below it, (groups,).

    -1, and the largest int32, where there are none.
    """
    ops = keras.ops
    bits = magnitude_bits(value)
    is_above = bits >= ops.reshape(least, one)
    below = ops.where(is_above, ops.cast(-1, "int32"), bits)
    above = ops.where(is_above, bits, ops.cast(LARGEST, "int32"))
    axes = tuple(axis for axis, size in enumerate(one) if size != bits.shape[axis])
    if axes:  # to torch no axes are all of them
        below, above = ops.max(below, axis=axes), ops.min(above, axis=axes)
    return ops.reshape(below, (-1,)), ops.reshape(above, (-1,))


def between(value: Any, low: Any, high: Any, missing: Any, one: tuple[int, ...]) -> Any:
    """A bool mask of the magnitudes from `high` on, and of the first `missing` from `low` on."""
    ops = keras.ops
    bits = magnitude_bits(value)
    above = bits >= ops.reshape(high, one)
    ties = ops.logical_and(ops.logical_not(above), bits >= ops.reshape(low, one))
    return ops.logical_or(above, _first(ties, missing))


def flat_index(shape: Any) -> Any:
    """The flat index of every entry, as a sum over axes: a reshaped range would not be sharded."""
    index, stride = keras.ops.zeros((1,) * len(shape), "int32"), 1
    for axis in reversed(range(len(shape))):
        one = [1] * len(shape)
        one[axis] = shape[axis]
        steps = keras.ops.arange(0, shape[axis] * stride, stride, dtype="int32")
        index = index + keras.ops.reshape(steps, one)
        stride *= shape[axis]
    return index


def _number(chosen: Any) -> Any:
    """How many entries are true, int32."""
    return keras.ops.sum(keras.ops.cast(chosen, "int32"))


def _argument(numbers: Any) -> Any:
    """Integers for a compiled function: NumPy's, which JAX takes to be equal on all processes."""
    array = np.asarray(numbers, np.int32)
    return keras.ops.convert_to_tensor(array) if keras.backend.backend() == "torch" else array


def _platforms(value: Any) -> set[str]:
    """The platforms of the devices that a tensor is on, in lower case."""
    backend = keras.backend.backend()
    if backend == "jax":
        return {device.platform for device in value.sharding.device_set}
    if backend == "torch":
        return {value.device.type}
    # "/job:localhost/replica:0/task:0/device:CPU:0"; without a device it is on the host.
    name = str(getattr(value, "device", "")).rpartition("device:")[2]
    return {name.partition(":")[0].lower() or "cpu"}


def drop_and_grow_on_device(
    value: Any, mask: Any, count: int, scores: Any, rng: np.random.Generator, like: Any
) -> Any:
    """`drop_and_grow` on tensors: the same mask, bit for bit; `None` if a weight is not finite.

    Only counts come to the host, and the positions of equal entries if some are to be drawn. Scores
    are floats, of which the largest magnitudes grow, or int32 that are not negative. `like` is the
    variable of the mask.
    """
    keys, not_finite = compiled_once(_keys_of_live)(value, mask)
    if int(to_numpy(not_finite)):
        return None
    dropped = _chosen(keys, count, rng, like)
    kept, keys = compiled_once(_keys_of_dead)(placed(scores, like), mask, dropped)
    return keras.ops.logical_or(kept, _chosen(keys, count, rng, like))


def random_order(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Pseudo-random numbers in [0, 1): those of `random_order_on_device`, over 2**31."""
    index = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.uint32)
    for key in _keys(seed):
        index ^= np.uint32(key)
        index ^= index >> np.uint32(16)
        index *= np.uint32(_FACTORS[0])
        index ^= index >> np.uint32(15)
        index *= np.uint32(_FACTORS[1])
        index ^= index >> np.uint32(16)
    return (index >> np.uint32(1)).reshape(shape) / 2.0**31


def random_order_on_device(shape: tuple[int, ...], seed: int) -> Any:
    """Pseudo-random int32 that are not negative: hashes of the flat index and the seed.

    Wellons' `lowbias32` twice, with a key before each: integer arithmetic is the same everywhere.
    """
    keys = np.array(_keys(seed), np.uint32).view(np.int32)
    return compiled_once(_hashed, shape=shape)(keys)


def _keys(seed: int) -> list[int]:
    return [int(key) for key in np.random.SeedSequence(seed).generate_state(2)]


def _hashed(keys: Any, shape: tuple[int, ...]) -> Any:
    ops = keras.ops
    first, second = np.array(_FACTORS, np.uint32).view(np.int32).tolist()

    def mixed(x: Any, shift: int) -> Any:
        # A logical shift of a signed number.
        moved = ops.bitwise_and(ops.right_shift(x, shift), 2 ** (32 - shift) - 1)
        return ops.bitwise_xor(x, moved)

    index = flat_index(shape)
    for k in range(2):
        index = mixed(ops.bitwise_xor(index, ops.cast(keys[k], "int32")), 16)
        index = mixed(index * first, 15)
        index = mixed(index * second, 16)
    return ops.bitwise_and(ops.right_shift(index, 1), LARGEST)


def _keys_of_live(value: Any, live: Any) -> tuple[Any, Any]:
    """Keys, larger for smaller magnitudes and -1 where dead; and how many are not finite."""
    ops = keras.ops
    bits = magnitude_bits(value)
    keys = ops.where(live, LARGEST - bits, ops.cast(-1, "int32"))
    return keys, _number(bits >= INFINITE)


def _keys_of_dead(scores: Any, live: Any, dropped: Any) -> tuple[Any, Any]:
    """The live entries that were not dropped; and keys by score, -1 for these."""
    ops = keras.ops
    kept = ops.logical_and(live, ops.logical_not(dropped))
    is_integer = keras.backend.standardize_dtype(scores.dtype) == "int32"
    bits = scores if is_integer else magnitude_bits(scores)
    return kept, ops.where(kept, ops.cast(-1, "int32"), bits)


def _chosen(keys: Any, count: int, rng: np.random.Generator, like: Any) -> Any:
    """A bool mask of the `count` largest keys; which of several equals is drawn."""
    if not count:
        return keras.ops.zeros(keys.shape, dtype="bool")
    least, above, equal = rank(keys, count)
    if count - above == equal:
        return keys >= least
    ties = to_numpy(keys == least)
    drawn = np.zeros(ties.shape, dtype=bool)
    drawn.reshape(-1)[rng.choice(np.flatnonzero(ties), count - above, replace=False)] = True
    return keras.ops.logical_or(keys > least, placed(drawn, like))
