"""Whether zeros of a kernel are zeros in the tensor that holds it, whatever its form is there."""

import numpy as np
import pytest

from keras_sparse_ortho.export._flatbuffer import StoredWeight, WeightZeros
from keras_sparse_ortho.export._zeros import find_zeros

pytestmark = pytest.mark.numpy_only


def kernel(*shape, density=0.4, seed=0):
    rng = np.random.default_rng(seed)
    value = rng.normal(size=shape).astype("float32")
    return value * (rng.random(shape) < density)


def stored(value, dtype="float32", zero=0, axis=None, name="tensor"):
    """A tensor of a file; integers by a scale for the whole, or along an axis."""
    value = np.asarray(value, "float32")
    scale = 1.0
    if dtype == "int8":
        others = tuple(k for k in range(value.ndim) if k != axis or axis is None)
        scale = np.maximum(np.abs(value).max(axis=others, keepdims=True), 1e-3) / 100
        values = np.rint(value / scale).astype("int8") + np.int8(zero)
    else:
        values = value.astype(dtype)
    zeros = int(np.count_nonzero(values == zero))
    about = WeightZeros(name, value.shape, dtype, value.size, zeros)
    return StoredWeight(about, values, zero, scale)


CHANNELS = np.random.default_rng(9).uniform(0.2, 3, 8).astype("float32")
PLACES = np.array([3, 0, 5, 5, 2, 9, 1, 0])

# A kernel, and what the converter makes of it.
FORMS = {
    "as it is": (kernel(12, 8), lambda k: k),
    "transposed": (kernel(12, 8), lambda k: k.T),
    "square": (kernel(8, 8), lambda k: k.T),
    "heads": (kernel(8, 2, 6), lambda k: k.transpose(1, 2, 0).reshape(12, 8)),
    "convolution": (kernel(3, 3, 4, 8), lambda k: k.transpose(3, 0, 1, 2)),
    "depthwise": (kernel(3, 3, 4, 2), lambda k: k.reshape(1, 3, 3, 8)),
    "pointwise": (kernel(1, 1, 12, 8), lambda k: k[0, 0].T),
    "normalized": (kernel(3, 3, 4, 8), lambda k: (k * CHANNELS).transpose(3, 0, 1, 2)),
    "normalized depthwise": (kernel(3, 3, 8, 1), lambda k: k.reshape(1, 3, 3, 8) * CHANNELS),
    "slice": (kernel(12, 8), lambda k: k[None, :5]),
    "gate": (kernel(6, 32), lambda k: k[:, 8:16].T),
    "looked up": (kernel(12, 8), lambda k: k[PLACES].reshape(2, 4, 8)),
    "looked up, transposed": (
        kernel(12, 8),
        lambda k: k[PLACES].reshape(2, 4, 8).transpose(2, 0, 1),
    ),
}
STORAGE = [{}, {"dtype": "float16"}, {"dtype": "int8"}, {"dtype": "int8", "axis": 0, "zero": -7}]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("storage", STORAGE, ids=["float32", "float16", "int8", "int8 by channel"])
def test_a_lost_zero_is_seen_in_every_form(form, storage):
    value, convert = FORMS[form]
    others = [stored(kernel(*np.shape(convert(value)), seed=seed), **storage) for seed in (5, 6)]

    def found(tensor):
        file = [others[0], stored(tensor, **storage, name="its"), others[1]]
        return find_zeros([("path", value)], file)

    good = found(convert(value))
    assert (good.lost, good.absent) == (None, ())
    bad = np.array(convert(value))
    if bad.size == value.size:  # other parts may have the zeros of a part by chance
        dead = np.argwhere(bad == 0)
        bad[tuple(dead[len(dead) // 2])] = np.abs(bad).max() / 20
        zeros = value.size - np.count_nonzero(value)
        assert found(bad).lost == (
            f"kernel 'path' has {zeros} zeros of {value.size}, "
            "of which 1 are not zero in its tensor 'its'"
        )


def test_what_is_computed_from_a_kernel_is_not_the_kernel():
    """None of them has its zeros, and none has lost them."""
    table, bias = kernel(12, 8), np.arange(1, 9, dtype="float32")
    computed = {
        "with a bias": (table + bias)[None],
        "normalized": (table - table.mean(1, keepdims=True)) / table.std(1, keepdims=True),
        "a product": table @ kernel(8, 8, density=1, seed=1),
        "of another size": kernel(3, 5),
        "nothing": np.zeros((12, 8)),
    }
    for what, value in computed.items():
        for storage in STORAGE:
            found = find_zeros([("table", table)], [stored(value, **storage)])
            assert (found.lost, found.absent) == (None, ("table",)), (what, storage)


def test_kernels_of_one_size():
    """Not the number of zeros says which tensor is whose."""
    one, other = kernel(8, 8), kernel(8, 8, density=0.8, seed=1)
    kernels = [("one", one), ("other", other)]
    assert find_zeros(kernels, [stored(other), stored(one)]) == (None, ())
    assert find_zeros(kernels, [stored(other)]).absent == ("one",)
    twin = [*kernels, ("twin", one)]  # equal constants become one
    assert find_zeros(twin, [stored(other.T), stored(one)]) == (None, ())
    spoilt = other.copy()
    spoilt[tuple(np.argwhere(other == 0)[0])] = 1e-9
    more = stored(np.zeros_like(one))  # in all there are as many zeros as before
    assert "'other'" in find_zeros(kernels, [stored(spoilt), stored(one), more]).lost


def test_kernels_without_zeros_and_of_nothing_else():
    dense, nothing = kernel(4, 6, density=1), np.zeros((4, 6), "float32")
    assert find_zeros([("dense", dense)], []) == (None, ())
    assert find_zeros([("nothing", nothing)], [stored(nothing.T)]) == (None, ())
    assert find_zeros([("nothing", nothing)], [stored(dense)]).absent == ("nothing",)
