"""EOI: parity with a plain loop, exact orthogonality and counts, no dead outputs, refusals."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.orthogonal import (
    KernelLayout,
    NByM,
    covering_count,
    dead_outputs,
    exact_orthogonal,
    least_count,
    live_count,
)
from tests.orthogonal.checks import (
    assert_orthogonal,
    covering_rotations,
    dead_inputs,
    random_rotations,
)

pytestmark = pytest.mark.numpy_only


def plain_loop(shape, limit, seed):
    """`[I | 0]`, one rotation of two columns after the other, as long as the entries fit."""
    rows, width = sorted(shape)
    matrix, rng = np.eye(rows, width), np.random.default_rng(seed)
    while True:
        drawn = random_rotations(width, max(3 * width, 64), rng)
        for i, j, cos, sin in drawn.tolist():
            a, b = matrix[:, i].copy(), matrix[:, j].copy()
            more = np.count_nonzero((a != 0) | (b != 0)) * 2 - np.count_nonzero(
                a
            )
            count = np.count_nonzero(matrix)
            if count == limit or count + more - np.count_nonzero(b) > limit:
                return matrix.T if shape[0] > shape[1] else matrix
            matrix[:, i], matrix[:, j] = cos * a + sin * b, cos * b - sin * a


# Few rotations a column (the sparse product), and many (dense rows from density 0.1 on).
@pytest.mark.parametrize("density", [0.02, 0.1, 0.5])
@pytest.mark.parametrize(
    "shape", [(64, 64), (64, 200), (200, 64), (256, 256), (300, 512)]
)
def test_parity_with_a_plain_loop(shape, density):
    options = {"seed": 1, "start": "published"}
    kernel, mask = exact_orthogonal(shape, density, dtype=np.float64, **options)
    expected = plain_loop(shape, live_count(density, math.prod(shape)), 1)
    np.testing.assert_allclose(kernel, expected, atol=1e-12)
    assert mask[expected != 0].all()
    in_float32, _ = exact_orthogonal(shape, density, **options)
    np.testing.assert_allclose(in_float32, expected, atol=1e-6)


def check(shape, density, layout=None, gain=1.0, seed=0):
    kernel, mask = exact_orthogonal(
        shape, density, layout=layout, gain=gain, seed=seed
    )
    assert kernel.shape == mask.shape == tuple(shape)
    assert kernel.dtype == np.float32
    assert mask.dtype == bool
    assert mask.sum() == live_count(density, math.prod(shape))
    assert not kernel[~mask].any()
    canonical = (layout or KernelLayout.convolution()).to_canonical(kernel)
    center = canonical[
        (
            ...,
            *((taps - 1) // 2 for taps in canonical.shape[2:-2]),
            slice(None),
            slice(None),
        )
    ]
    assert np.count_nonzero(center) == np.count_nonzero(kernel)
    for matrix in center.reshape(-1, *center.shape[-2:]):
        assert_orthogonal(matrix, gain, 1e-6 * max(1.0, gain**2))
    return kernel, mask


@pytest.mark.parametrize("density", [0.01, 0.1, 0.45, 1.0])
@pytest.mark.parametrize(
    "shape",
    [
        (257, 257),
        (127, 521),
        (521, 127),
        (1, 1021),
        (1021, 1),
        (784, 300),
        (1024, 1024),
    ],
)
def test_larger_matrices_and_primes(shape, density):
    if live_count(density, math.prod(shape)) < min(shape):
        with pytest.raises(DensityError):
            check(shape, density)
    else:
        check(shape, density)


KERNELS = [
    ((4, 16, 32), None),
    ((3, 3, 3, 8, 16), None),
    ((3, 5, 8, 32), KernelLayout.convolution(groups=4)),
    ((3, 3, 24, 1), KernelLayout.depthwise()),
    ((4, 4, 16, 8), KernelLayout.transposed_convolution()),
    ((3, 3, 8, 48), KernelLayout.recurrent(3)),
    ((32, 4, 8), KernelLayout.einsum("abc,cde->abde")),
    ((4, 8, 24), KernelLayout.einsum("abde,dec->abc")),
    ((6, 10, 20), KernelLayout.einsum("abc,bcd->abd")),
]


@pytest.mark.parametrize(("shape", "layout"), KERNELS)
def test_kernels_of_every_layout(shape, layout):
    for density in (0.15, 0.5, 1.0):
        check(shape, density, layout, gain=1.5, seed=3)


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
        (
            (100, 400),
            None,
            "at least 100 live entries: the least density is 0.0025",
        ),
        (
            (400, 100),
            None,
            "at least 100 live entries: the least density is 0.0025",
        ),
        (
            (3, 3, 16, 32),
            None,
            "at least 16 live entries: the least density is 0.00347222",
        ),
        (
            (3, 3, 24, 1),
            KernelLayout.depthwise(),
            "24 live entries: the least density is 0.11",
        ),
        (
            (16, 64),
            KernelLayout.recurrent(4),
            "64 live entries: the least density is 0.0625",
        ),
    ],
)
def test_too_low_a_density_is_refused_with_the_least_one(shape, layout, least):
    with pytest.raises(DensityError, match=least):
        exact_orthogonal(shape, 0.001, layout=layout)
    check(shape, least_count(shape, layout) / math.prod(shape), layout)


@pytest.mark.parametrize(
    "density", [0, -0.5, 1.0001, math.nan, math.inf, "0.1", True, [0.1]]
)
def test_what_is_no_density_is_refused(density):
    with pytest.raises(
        DensityError,
        match=r"`density` must be .*\(0, 1\]\..* Received: density=",
    ):
        exact_orthogonal((8, 8), density)


def test_angles_are_uniform():
    drawn = random_rotations(50, 4000, np.random.default_rng(0))
    assert (
        (drawn["first"] >= 0)
        & (drawn["first"] < 50)
        & (drawn["first"] != drawn["second"])
    ).all()
    np.testing.assert_allclose(
        drawn["cos"] ** 2 + drawn["sin"] ** 2, 1.0, atol=1e-14
    )
    angles = np.arctan2(drawn["sin"], drawn["cos"]) % (2 * np.pi)
    counts, _ = np.histogram(angles, bins=16, range=(0, 2 * np.pi))
    # Chi-square, 15 degrees, p = 0.001.
    assert ((counts - 250) ** 2 / 250).sum() < 37.7


def test_pairs_are_uniform():
    drawn = random_rotations(6, 30000, np.random.default_rng(0))
    counts = np.zeros((6, 6))
    np.add.at(counts, (drawn["first"], drawn["second"]), 1)
    off = counts[~np.eye(6, dtype=bool)]
    # Chi-square, 29 degrees, p = 0.001.
    assert ((off - 1000) ** 2 / 1000).sum() < 58.3


def test_the_gain_and_the_generator():
    rng = np.random.default_rng(5)
    first, _ = exact_orthogonal((16, 16), 0.3, seed=rng)
    second, _ = exact_orthogonal((16, 16), 0.3, seed=rng)
    assert (first != second).any()
    with pytest.raises(
        ValueError, match=r"`gain` must be finite. Received: gain=nan"
    ):
        exact_orthogonal((16, 16), 0.3, gain=math.nan)
    with pytest.raises(
        ValueError, match=r'"covering" or "published". Received: start=None'
    ):
        exact_orthogonal((16, 16), 0.3, start=None)


def test_shapes_that_do_not_fit():
    crossed = KernelLayout(inputs=(0,), outputs=(-2,))
    for error, shape, layout, message in (
        (
            LayoutError,
            (8, 30),
            KernelLayout.recurrent(4),
            "divided into 1 groups of 4 gates",
        ),
        (LayoutError, (8, 30), crossed, "must be distinct axes of the kernel"),
        (LayoutError, (0, 8), None, "must be positive"),
        (DensityError, (8,), None, r"rank 2 or more.*shape=\(8,\)"),
    ):
        with pytest.raises(error, match=message):
            exact_orthogonal(shape, 0.5, layout=layout)
    with pytest.raises(
        LayoutError, match="`groups` must be a positive integer"
    ):
        KernelLayout.convolution(groups=0)
    with pytest.raises(LayoutError, match="form 'input,kernel->output'"):
        KernelLayout.einsum("ab->ba")


@pytest.mark.parametrize(("shape", "layout"), KERNELS)
def test_layouts_are_reversible(shape, layout):
    layout = layout or KernelLayout.convolution()
    kernel = np.arange(math.prod(shape)).reshape(shape)
    canonical = layout.to_canonical(kernel)
    assert canonical.shape == layout.canonical_shape(shape)
    np.testing.assert_array_equal(
        layout.from_canonical(canonical, shape), kernel
    )
    assert KernelLayout.from_config(layout.get_config()) == layout


def test_a_single_entry_has_either_sign():
    def signs(*args, **kwargs):
        drawn = (
            exact_orthogonal(*args, gain=2.0, seed=k, **kwargs)[0]
            for k in range(16)
        )
        return {float(kernel.sum()) for kernel in drawn}

    assert signs((1, 1), 1.0) == {2.0, -2.0}
    assert signs((2, 1), 0.5, structure=NByM(1, 2)) == {2.0, -2.0}


TAPS = st.lists(st.integers(1, 4), max_size=3).map(tuple)
SIDE = st.integers(1, 12)


@st.composite
def kernels(draw):
    """Shape, layout, taps, and the matrices at the center tap by plain indexing."""
    taps, inputs, outputs = draw(TAPS), draw(SIDE), draw(SIDE)
    parts = draw(st.sampled_from([1, 1, 3, 4]))
    kind = draw(st.sampled_from(["groups", "depthwise", "transposed", "gates"]))
    if kind == "depthwise":
        shape, layout = (*taps, inputs, outputs), KernelLayout.depthwise()
        return shape, layout, taps, lambda center: center[:, None]
    if kind == "transposed":
        shape, layout = (
            (*taps, outputs, inputs),
            KernelLayout.transposed_convolution(),
        )
        return shape, layout, taps, lambda center: [center.T]
    layout = KernelLayout.convolution(parts)
    if kind == "gates":
        taps, layout = (), KernelLayout.recurrent(parts)
    return (
        (*taps, inputs, parts * outputs),
        layout,
        taps,
        lambda k: np.split(k, parts, axis=1),
    )


@given(
    kernel_of=kernels(),
    density=st.floats(1e-3, 1.0),
    gain=st.sampled_from([1.0, 0.25, math.sqrt(2), -1.0]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200)
def test_every_matrix_is_orthogonal_and_every_count_exact(
    kernel_of, density, gain, seed
):
    shape, layout, taps, matrices = kernel_of
    if round(density * math.prod(shape)) < least_count(shape, layout):
        with pytest.raises(DensityError, match="the least density is"):
            check(shape, density, layout, gain, seed)
        return
    kernel, _ = check(shape, density, layout, gain, seed)
    for matrix in matrices(kernel[tuple((size - 1) // 2 for size in taps)]):
        assert_orthogonal(matrix, gain)


def test_trainable_zeros_of_a_convolution_lie_all_over_the_kernel():
    shape = (3, 3, 24, 24)
    taps = np.zeros((3, 3))
    for seed in range(20):
        kernel, mask = exact_orthogonal(shape, 0.3, seed=seed)
        taps += (mask & (kernel == 0)).sum(axis=(2, 3))
    off = np.delete(taps.reshape(-1), 4)
    # 8 equal taps: chi-square with 7 degrees of freedom, p = 0.001, and less for the fixed sum.
    assert ((off - off.mean()) ** 2 / off.mean()).sum() < 24.3


@given(
    taps=st.lists(st.integers(1, 3), max_size=3),
    inputs=st.one_of(st.integers(1, 30), st.sampled_from([1, 31, 53])),
    outputs=st.one_of(st.integers(1, 30), st.sampled_from([1, 37, 60])),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_every_entry_of_the_count_goes_to_an_output_and_input_of_its_own_first(
    taps, inputs, outputs, share, seed
):
    shape = (*taps, inputs, outputs)
    least, size = least_count(shape), math.prod(shape)
    # Half of the draws between the least count and twice what covers all.
    count = least + round(share * min(2 * max(inputs, outputs), size - least))
    kernel, mask = exact_orthogonal(shape, count / size, seed=seed)
    assert mask.sum() == count
    assert dead_outputs(kernel) == max(0, covering_count(shape) - count)
    assert dead_inputs(kernel) == (
        max(0, inputs - count) if inputs > outputs else 0
    )
    assert_orthogonal(kernel[tuple((size - 1) // 2 for size in taps)])


@pytest.mark.parametrize(
    ("shape", "layout", "covering"),
    [
        ((3, 3, 4, 64), KernelLayout.convolution(groups=4), 64),
        ((8, 160), KernelLayout.recurrent(4), 160),
        ((3, 3, 12, 3), KernelLayout.depthwise(), 36),
        ((3, 48, 20), KernelLayout.transposed_convolution(), 48),
        ((16, 4, 10), KernelLayout.einsum("abc,cde->abde"), 40),
    ],
)
def test_groups_gates_and_depthwise_kernels_are_covered(
    shape, layout, covering
):
    least = least_count(shape, layout)
    assert covering_count(shape, layout) == covering
    for count in (least, (least + covering) // 2, covering, 2 * covering):
        kernel, mask = exact_orthogonal(
            shape, count / math.prod(shape), seed=3, layout=layout
        )
        assert mask.sum() == count
        assert dead_outputs(kernel, layout) == max(0, covering - count)


def test_dead_outputs_are_counted_along_the_layout():
    mask = np.zeros((3, 3, 6, 4), dtype=bool)
    assert dead_outputs(mask) == 4
    assert dead_outputs(mask, KernelLayout.transposed_convolution()) == 6
    assert dead_outputs(mask, KernelLayout.depthwise()) == 24
    mask[2, 0, 5, 1] = True
    assert dead_outputs(mask) == 3
    assert dead_outputs(mask, KernelLayout.depthwise()) == 23


def test_the_published_start_leaves_outputs_dead():
    kernel, _ = exact_orthogonal(
        (3, 3, 24, 48), 0.02, seed=0, start="published"
    )
    assert dead_outputs(kernel) == 24


def test_columns_of_a_row_share_its_norm_in_a_balanced_way():
    """By `log2(r)` rotations each: if one column were rotated with all, half would end at 4^-32."""
    medians = []
    for seed in range(50):
        kernel, _ = exact_orthogonal((1, 64), 1.0, seed=seed, dtype=np.float64)
        medians.append(np.median(kernel[0] ** 2))
    # E[ln cos^2] is -2 ln 2 for a uniform angle, so that the median is about 4^-6.
    assert 4.0**-7 < np.exp(np.mean(np.log(medians))) < 4.0**-5


def test_which_columns_stay_empty_is_random():
    hits = np.zeros(20)
    for seed in range(400):
        rotations = covering_rotations(4, 20, 12, np.random.default_rng(seed))
        assert len(rotations) == 8
        assert len(set(rotations["second"].tolist())) == 8
        hits[rotations["second"]] += 1
    assert not hits[:4].any()
    # 16 columns, 8 of them at a time: chi-square with 15 degrees of freedom, p = 0.001.
    assert ((hits[4:] - 200) ** 2 / 100).sum() * 15 / 16 < 37.7
