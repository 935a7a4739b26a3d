"""One update of dynamic sparse training on one weight, where its tensor is."""

from typing import Any

import keras
import numpy as np

from keras_sparse_ortho._backend import compiled_once
from keras_sparse_ortho._ranking import INFINITE, LARGEST, flat_index, magnitude_bits, rank
from keras_sparse_ortho._values import placed, to_numpy


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
