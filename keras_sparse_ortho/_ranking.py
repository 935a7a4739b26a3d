"""Ranks that are counted where a tensor is: sums of ones, and no sort.

The magnitude of a float is ordered as its bits are. So the k-th largest of a tensor is found bit by
bit, by counting how many entries are at least a candidate; a tensor that is shared out over devices
needs to exchange these counts, and nothing else. On CPUs NumPy's selection is several times faster,
which is why `ranks_on_device` is false there; both give the same masks, bit for bit.
"""

import contextlib
import math
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import compiled_once
from keras_sparse_ortho._values import placed, to_numpy

# Bits of a float32 that is not finite: at least these.
INFINITE = 0x7F800000
# Of int32: the bits of a magnitude are at most this.
LARGEST = 2**31 - 1
# Two bits of the result in each pass over the entries.
_BITS = 2
_PLACES = ("device", "host")
_place: ContextVar[str | None] = ContextVar("place", default=None)


@contextlib.contextmanager
def ranked_on(place: str) -> Iterator[None]:
    """Ranks weights on the "device" or on the "host", wherever they are; for tests."""
    if place not in _PLACES:
        raise ValueError(f"`place` must be one of {_PLACES}. Received: place={place!r}")
    token = _place.set(place)
    try:
        yield
    finally:
        _place.reset(token)


def ranks_on_device(variable: Any) -> bool:
    """Whether entries of a variable are ranked where they are, and not by NumPy.

    That is where they are on an accelerator. Variables of float64, and those of 2**31 entries and
    more, are ranked by NumPy.
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
    return _integer(_number(chosen))


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
    elif backend == "torch":
        import torch

        bits = value.contiguous().view(torch.int32)
    else:
        raise NotImplementedError(
            f"Bits of floats need TensorFlow, JAX or torch. Received: Keras backend {backend!r}"
        )
    return keras.ops.bitwise_and(bits, LARGEST)


def largest_magnitudes(value: Any, count: int) -> tuple[Any, int]:
    """A bool mask of the `count` largest magnitudes, ties to the lower flat index.

    Args:
        value: A float tensor of the backend.
        count: How many, from 0 to its size.

    Returns:
        The mask; and how many entries are not finite, with which it means nothing.
    """
    mask, wrong = compiled_once(_largest_magnitudes)(value, _argument(count))
    return mask, _integer(wrong)


def rank(keys: Any, count: int) -> tuple[Any, int, int]:
    """The key of rank `count`, counted from the largest, which has rank 1.

    Args:
        keys: int32 tensor. Negative entries have no rank.
        count: At least 1, and at most the number of entries with a rank.

    Returns:
        The key as a tensor, how many keys are larger, and how many are equal.
    """
    least, above, equal = compiled_once(_rank)(keys, _argument(count))
    return least, _integer(above), _integer(equal)


def counts_at_least(value: Any, least: np.ndarray, one: tuple[int, ...]) -> np.ndarray:
    """How many magnitudes have bits of at least so much, for each of several bounds.

    Args:
        value: A float tensor of the backend.
        least: Bounds, (m, groups); the groups are the entries along the axes of `one`.
        one: The shape of one number for each group, which broadcasts to that of `value`.

    Returns:
        (m,) counts of all groups together.
    """
    counts = compiled_once(_counts_at_least, one=one)(value, _argument(least))
    return to_numpy(counts)


def neighbours(value: Any, least: np.ndarray, one: tuple[int, ...]) -> tuple[Any, Any]:
    """For each group the largest bits of a magnitude below a bound, and the least not below it.

    Args:
        value: A float tensor of the backend.
        least: Bounds, (groups,).
        one: As for `counts_at_least`.

    Returns:
        Two arrays (groups,): -1, and the largest int32, where there is none.
    """
    below, above = compiled_once(_neighbours, one=one)(value, _argument(least))
    return to_numpy(below), to_numpy(above)


def between(
    value: Any, low: np.ndarray, high: np.ndarray, missing: int, one: tuple[int, ...]
) -> Any:
    """A bool mask of magnitudes of at least `high`, and of the first of at least `low`.

    Args:
        value: A float tensor of the backend.
        low: Bounds on the bits, (groups,).
        high: Others, none of them smaller.
        missing: How many of those between the bounds, by flat index.
        one: As for `counts_at_least`.
    """
    arguments = [_argument(part) for part in (low, high, missing)]
    return compiled_once(_between, one=one)(value, *arguments)


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

    # Of 31 bits the first alone, so that no candidate overflows.
    least = narrowed(ops.zeros((), "int32"), ops.cast(30, "int32"), 1)
    least = ops.fori_loop(
        0,
        30 // _BITS,
        lambda i, found: narrowed(found, ops.cast(30 - _BITS * (i + 1), "int32"), 2**_BITS - 1),
        least,
    )
    return least, _number(keys > least), _number(keys == least)


def _first(chosen: Any, count: Any) -> Any:
    """Of the entries that are true the first `count` by flat index, found bit by bit as well."""
    ops = keras.ops
    index = flat_index(chosen.shape)

    def narrowed(shift: Any, end: Any) -> tuple[Any, Any]:
        candidate = end + ops.left_shift(ops.cast(1, "int32"), shift)
        fits = _number(ops.logical_and(chosen, index < candidate)) <= count
        return shift - 1, ops.where(fits, candidate, end)

    # Mostly all of them are wanted, and nothing is to be done.
    all_ = _number(chosen) <= count
    start = ops.where(all_, ops.cast(-1, "int32"), ops.cast(30, "int32"))
    _, end = ops.while_loop(lambda shift, _: shift >= 0, narrowed, (start, ops.zeros((), "int32")))
    return ops.logical_and(chosen, ops.logical_or(all_, index < end))


def _counts_at_least(value: Any, least: Any, one: tuple[int, ...]) -> Any:
    bits = magnitude_bits(value)
    bounds = range(least.shape[0])
    return keras.ops.stack([_number(bits >= keras.ops.reshape(least[j], one)) for j in bounds])


def _neighbours(value: Any, least: Any, one: tuple[int, ...]) -> tuple[Any, Any]:
    ops = keras.ops
    bits = magnitude_bits(value)
    is_above = bits >= ops.reshape(least, one)
    below = ops.where(is_above, ops.cast(-1, "int32"), bits)
    above = ops.where(is_above, bits, ops.cast(LARGEST, "int32"))
    axes = tuple(axis for axis, size in enumerate(one) if size != bits.shape[axis])
    if axes:  # to torch no axes are all of them
        below, above = ops.max(below, axis=axes), ops.min(above, axis=axes)
    return ops.reshape(below, (-1,)), ops.reshape(above, (-1,))


def _between(value: Any, low: Any, high: Any, missing: Any, one: tuple[int, ...]) -> Any:
    ops = keras.ops
    bits = magnitude_bits(value)
    above = bits >= ops.reshape(high, one)
    ties = ops.logical_and(ops.logical_not(above), bits >= ops.reshape(low, one))
    return ops.logical_or(above, _first(ties, missing))


def flat_index(shape: Any) -> Any:
    """The flat index of every entry, as sums along the axes: these are made where the entries are.

    (A reshaped range would first be made whole on every device.)
    """
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
    """Integers for a compiled function: as NumPy's, which JAX takes for equal on all processes."""
    array = np.asarray(numbers, np.int32)
    return keras.ops.convert_to_tensor(array) if keras.backend.backend() == "torch" else array


def _integer(tensor: Any) -> int:
    return int(to_numpy(tensor))


def _platforms(value: Any) -> set[str]:
    """Of the devices that a tensor is on, in lower case."""
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
    """`drop_and_grow` on tensors: the same mask, bit for bit, from the same generator.

    Only counts come to the host; where equals are to be drawn from, their places do, too.

    Args:
        value: The weight, a tensor.
        mask: Which entries are live, a bool tensor.
        count: How many to drop, from 0 to the number of live entries.
        scores: Of the weight's shape: floats of which the largest magnitudes grow, or int32 that is
            not negative.
        rng: Decides between equals.
        like: The variable of the mask.

    Returns:
        The new mask; `None` if the weight is not finite.
    """
    keys, not_finite = compiled_once(_keys_of_live)(value, mask)
    if int(to_numpy(not_finite)):
        return None
    dropped = _chosen(keys, count, rng, like)
    kept, keys = compiled_once(_keys_of_dead)(placed(scores, like), mask, dropped)
    return keras.ops.logical_or(kept, _chosen(keys, count, rng, like))


def random_order(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Numbers in [0, 1) in pseudo-random order: those of `random_order_on_device`, over 2**31."""
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
    """int32 numbers that are not negative, each a hash of the flat index and the seed.

    Wellons' `lowbias32` twice, with a key before each: made of integers alone, it is the same
    everywhere, and no number has to be carried to the device.
    """
    keys = np.array(_keys(seed), np.uint32).view(np.int32)
    return compiled_once(_hashed, shape=shape)(keys)


# Of `lowbias32`, github.com/skeeto/hash-prospector.
_FACTORS = (0x7FEB352D, 0x846CA68B)


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
    """Larger for smaller magnitudes, -1 where it is not live; and how many are not finite."""
    ops = keras.ops
    bits = magnitude_bits(value)
    not_finite = ops.sum(ops.cast(bits >= INFINITE, "int32"))
    return ops.where(live, LARGEST - bits, ops.cast(-1, "int32")), not_finite


def _keys_of_dead(scores: Any, live: Any, dropped: Any) -> tuple[Any, Any]:
    """What is kept; and larger keys for larger scores, -1 for what is kept."""
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
