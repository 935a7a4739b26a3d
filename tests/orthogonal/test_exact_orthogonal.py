"""EOI: parity with a plain loop, exact orthogonality, exact counts, refusals."""

import math

import numpy as np
import pytest

from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.orthogonal import (
    KernelLayout,
    NByM,
    Rotations,
    exact_orthogonal,
    least_count,
    live_count,
)

pytestmark = pytest.mark.numpy_only


def plain_loop(shape, limit, seed):
    """`[I | 0]`, one rotation of two columns after the other, as long as the entries fit."""
    rows, width = sorted(shape)
    matrix, rng = np.eye(rows, width), np.random.default_rng(seed)
    while True:
        drawn = Rotations.draw(width, max(3 * width, 64), rng)
        for i, j, cos, sin in zip(drawn.first, drawn.second, drawn.cos, drawn.sin, strict=True):
            a, b = matrix[:, i].copy(), matrix[:, j].copy()
            more = np.count_nonzero((a != 0) | (b != 0)) * 2 - np.count_nonzero(a)
            count = np.count_nonzero(matrix)
            if count == limit or count + more - np.count_nonzero(b) > limit:
                return matrix.T if shape[0] > shape[1] else matrix
            matrix[:, i], matrix[:, j] = cos * a + sin * b, cos * b - sin * a


# Few rotations a column (the sparse product), and many (dense rows from density 0.1 on).
@pytest.mark.parametrize("density", [0.02, 0.1, 0.5])
@pytest.mark.parametrize("shape", [(64, 64), (64, 200), (200, 64), (256, 256), (300, 512)])
def test_parity_with_a_plain_loop(shape, density):
    options = {"seed": 1, "start": "published"}
    kernel, mask = exact_orthogonal(shape, density, dtype=np.float64, **options)
    expected = plain_loop(shape, live_count(density, math.prod(shape)), 1)
    np.testing.assert_allclose(kernel, expected, atol=1e-12)
    assert mask[expected != 0].all()
    in_float32, _ = exact_orthogonal(shape, density, **options)
    np.testing.assert_allclose(in_float32, expected, atol=1e-6)


def check(shape, density, layout=None, gain=1.0, seed=0, **kwargs):
    kernel, mask = exact_orthogonal(shape, density, layout=layout, gain=gain, seed=seed, **kwargs)
    assert kernel.shape == mask.shape == tuple(shape)
    assert kernel.dtype == np.float32
    assert mask.dtype == bool
    assert mask.sum() == live_count(density, math.prod(shape))
    assert not kernel[~mask].any()
    layout = layout or KernelLayout.convolution()
    canonical = layout.to_canonical(kernel).astype(np.float64)
    taps = canonical.shape[2:-2]
    center = tuple((k - 1) // 2 for k in taps)
    for index in np.ndindex(canonical.shape[:2]):
        matrix = canonical[(*index, *center)]
        matrix = matrix if matrix.shape[0] >= matrix.shape[1] else matrix.T
        error = np.abs(matrix.T @ matrix - gain**2 * np.eye(matrix.shape[1])).max()
        assert error <= 1e-6 * max(1.0, gain**2)
        # Nothing lies off the center tap.
        canonical[(*index, *center)] = 0.0
    assert not canonical.any()
    return kernel, mask


@pytest.mark.parametrize("density", [0.01, 0.05, 0.1, 0.3, 0.45, 0.8, 1.0])
@pytest.mark.parametrize(
    "shape", [(257, 257), (127, 521), (521, 127), (1, 1021), (1021, 1), (784, 300), (1024, 1024)]
)
def test_larger_matrices_and_primes(shape, density):
    if live_count(density, math.prod(shape)) < min(shape):
        with pytest.raises(DensityError):
            check(shape, density)
    else:
        check(shape, density)


CONVOLUTIONS = [
    ((3, 16, 32), KernelLayout.convolution()),
    ((4, 16, 32), None),
    ((3, 3, 16, 32), None),
    ((2, 2, 31, 17), None),
    ((3, 5, 8, 8), None),
    ((1, 1, 64, 16), None),
    ((3, 3, 3, 8, 16), None),
    ((3, 3, 8, 32), KernelLayout.convolution(groups=4)),
    ((3, 3, 2, 32), KernelLayout.convolution(groups=16)),
    ((3, 3, 24, 1), KernelLayout.depthwise()),
    ((5, 12, 4), KernelLayout.depthwise()),
    ((4, 4, 16, 8), KernelLayout.transposed_convolution()),
    ((16, 64), KernelLayout.recurrent(4)),
    ((20, 48), KernelLayout.recurrent(3)),
    ((3, 3, 8, 32), KernelLayout.recurrent(4)),
    ((32, 4, 8), KernelLayout.einsum("abc,cde->abde")),
    ((4, 8, 24), KernelLayout.einsum("abde,dec->abc")),
    ((6, 10, 20), KernelLayout.einsum("abc,bcd->abd")),
]


@pytest.mark.parametrize(("shape", "layout"), CONVOLUTIONS)
def test_kernels_of_every_layout(shape, layout):
    for density in (0.15, 0.5, 1.0):
        check(shape, density, layout, gain=1.5, seed=3)


@pytest.mark.parametrize("taps", [(3, 3), (4, 2), (1, 5)])
def test_a_circular_convolution_keeps_the_norm(taps):
    channels, filters, size = 12, 20, 8
    kernel, _ = check((*taps, channels, filters), 0.1)
    x = np.random.default_rng(0).normal(size=(size, size, channels))
    y = np.zeros((size, size, filters))
    for a in range(taps[0]):
        for b in range(taps[1]):
            shift = ((taps[0] - 1) // 2 - a, (taps[1] - 1) // 2 - b)
            y += np.roll(x, shift, axis=(0, 1)) @ kernel[a, b].astype(np.float64)
    assert abs(np.linalg.norm(y) / np.linalg.norm(x) - 1.0) < 1e-5


def test_the_density_of_the_center_tap():
    shape, layout = (3, 3, 32, 32), KernelLayout.convolution()

    def center(density):
        kernel, _ = check(shape, density, layout)
        return np.count_nonzero(kernel[1, 1]) / 1024

    # A rotation adds up to a few dozen entries, so the support ends somewhat under its limit.
    assert 0.24 < center(0.3) <= 0.3
    # Lifted to what orthogonality needs.
    assert center(0.005) == 32 / 1024


@pytest.mark.parametrize(
    ("shape", "layout", "least"),
    [
        ((100, 400), None, "at least 100 live entries: the least density is 0.0025"),
        ((400, 100), None, "at least 100 live entries: the least density is 0.0025"),
        ((3, 3, 16, 32), None, "at least 16 live entries: the least density is 0.00347222"),
        ((3, 3, 24, 1), KernelLayout.depthwise(), "24 live entries: the least density is 0.11"),
        ((16, 64), KernelLayout.recurrent(4), "64 live entries: the least density is 0.0625"),
    ],
)
def test_too_low_a_density_is_refused_with_the_least_one(shape, layout, least):
    with pytest.raises(DensityError, match=least):
        exact_orthogonal(shape, 0.001, layout=layout)
    check(shape, least_count(shape, layout) / math.prod(shape), layout)


@pytest.mark.parametrize("density", [0, -0.5, 1.0001, math.nan, math.inf, "0.1", True, [0.1]])
def test_what_is_no_density_is_refused(density):
    with pytest.raises(DensityError, match=r"`density` must be .*\(0, 1\]\..* Received: density="):
        exact_orthogonal((8, 8), density)


def test_angle_laws():
    def angles(law):
        drawn = Rotations.draw(50, 4000, np.random.default_rng(0), law)
        assert ((drawn.first >= 0) & (drawn.first < 50) & (drawn.first != drawn.second)).all()
        np.testing.assert_allclose(drawn.cos**2 + drawn.sin**2, 1.0, atol=1e-14)
        return np.arctan2(drawn.sin, drawn.cos) % (2 * np.pi)

    uniform = angles(None)
    counts, _ = np.histogram(uniform, bins=16, range=(0, 2 * np.pi))
    assert ((counts - 250) ** 2 / 250).sum() < 37.7  # chi-square, 15 degrees, p = 0.001
    np.testing.assert_allclose(angles(0.3), 0.3)
    ranged = angles((0.5, 1.5))
    assert 0.5 <= ranged.min() < 0.51
    assert 1.49 < ranged.max() <= 1.5
    np.testing.assert_allclose(angles(lambda rng, count: np.full(count, 2.0)), 2.0)
    for bad in ("uniform", (1, 2, 3), math.inf):
        with pytest.raises(ValueError, match=r"`angles` must be None"):
            exact_orthogonal((8, 8), 0.5, angles=bad)
    with pytest.raises(ValueError, match=r"must return .* finite angles"):
        exact_orthogonal((8, 8), 0.5, angles=lambda rng, count: np.zeros(3))


def test_pairs_are_uniform():
    drawn = Rotations.draw(6, 30000, np.random.default_rng(0))
    counts = np.zeros((6, 6))
    np.add.at(counts, (drawn.first, drawn.second), 1)
    off = counts[~np.eye(6, dtype=bool)]
    assert ((off - 1000) ** 2 / 1000).sum() < 58.3  # chi-square, 29 degrees, p = 0.001


def test_the_gain_and_the_generator():
    rng = np.random.default_rng(5)
    first, _ = exact_orthogonal((16, 16), 0.3, seed=rng)
    second, _ = exact_orthogonal((16, 16), 0.3, seed=rng)
    assert (first != second).any()
    with pytest.raises(ValueError, match=r"`gain` must be finite. Received: gain=nan"):
        exact_orthogonal((16, 16), 0.3, gain=math.nan)


def test_shapes_that_do_not_fit():
    with pytest.raises(LayoutError, match="cannot be divided into 1 groups of 4 gates"):
        exact_orthogonal((8, 30), 0.5, layout=KernelLayout.recurrent(4))
    with pytest.raises(LayoutError, match="must be distinct axes of the kernel"):
        exact_orthogonal((8, 30), 0.5, layout=KernelLayout(inputs=(0,), outputs=(-2,)))
    with pytest.raises(LayoutError, match="must be positive"):
        exact_orthogonal((0, 8), 0.5)
    with pytest.raises(LayoutError, match="`groups` must be a positive integer"):
        KernelLayout.convolution(groups=0)
    with pytest.raises(LayoutError, match="form 'input,kernel->output'"):
        KernelLayout.einsum("ab->ba")
    with pytest.raises(DensityError, match=r"rank 2 or more.*shape=\(8,\)"):
        exact_orthogonal((8,), 0.5)


@pytest.mark.parametrize(("shape", "layout"), CONVOLUTIONS)
def test_layouts_are_reversible(shape, layout):
    layout = layout or KernelLayout.convolution()
    kernel = np.arange(math.prod(shape)).reshape(shape)
    canonical = layout.to_canonical(kernel)
    assert canonical.shape == layout.canonical_shape(shape)
    np.testing.assert_array_equal(layout.from_canonical(canonical, shape), kernel)
    assert KernelLayout(**layout.get_config()) == layout


def test_matrices_of_one_entry_take_one_random_number_each():
    kernel, _ = exact_orthogonal(
        (3, 3, 24, 1), 0.25, gain=1.5, seed=4, layout=KernelLayout.depthwise()
    )
    rng = np.random.default_rng(4)
    signs = [1.5 if rng.random() < 0.5 else -1.5 for _ in range(24)]
    np.testing.assert_array_equal(kernel[1, 1, :, 0], np.float32(signs))


def test_a_single_entry_has_either_sign():
    def signs(*args, **kwargs):
        drawn = (exact_orthogonal(*args, gain=2.0, seed=k, **kwargs)[0] for k in range(16))
        return {float(kernel.sum()) for kernel in drawn}

    assert signs((1, 1), 1.0) == {2.0, -2.0}
    assert signs((2, 1), 0.5, structure=NByM(1, 2)) == {2.0, -2.0}
