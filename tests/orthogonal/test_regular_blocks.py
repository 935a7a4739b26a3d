"""Regular blocks: equal fans, exactly orthogonal, the dense kernel and the live blocks the same."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import linprog

from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.orthogonal import (
    Block,
    KernelLayout,
    best_blocks,
    check_pattern,
    exact_orthogonal,
    fan_step,
    regular_blocks,
    regular_pattern,
)
from tests.orthogonal.checks import assert_orthogonal, complete

pytestmark = pytest.mark.numpy_only


BLOCKS = st.sampled_from(
    [(1, 1), (4, 4), (2, 6), (6, 4), (1, 8), (8, 1), (5, 3)]
)
TAPS = st.sampled_from([(), (), (3,), (2, 3)])


@st.composite
def kernels(draw):
    """Shape in Keras layout, the layout, and inputs and outputs of a block."""
    rows, cols = draw(BLOCKS)
    inputs, outputs = (
        rows * draw(st.integers(1, 13)),
        cols * draw(st.integers(1, 13)),
    )
    kind = draw(
        st.sampled_from(["dense", "groups", "gates", "transposed", "batch"])
    )
    if kind == "dense":
        return (inputs, outputs), KernelLayout.dense(), rows, cols
    if kind == "gates":
        return (inputs, 4 * outputs), KernelLayout.recurrent(4), rows, cols
    if kind == "batch":
        return (
            (3, inputs, outputs),
            KernelLayout((1,), (2,), batch=(0,)),
            rows,
            cols,
        )
    taps = draw(TAPS)
    if kind == "transposed":
        return (
            (*taps, outputs, inputs),
            KernelLayout.transposed_convolution(),
            rows,
            cols,
        )
    return (
        (*taps, inputs, 2 * outputs),
        KernelLayout.convolution(groups=2),
        rows,
        cols,
    )


@given(
    kernel_of=kernels(),
    share=st.floats(0.0, 1.0),
    gain=st.sampled_from([1.0, math.sqrt(2), -0.5]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_regular_exactly_orthogonal_and_the_same_dense(
    kernel_of, share, gain, seed
):
    shape, layout, rows, cols = kernel_of
    structure = Block(rows, cols, regular=True)
    batch, parts, *taps, inputs, outputs = canonical = layout.canonical_shape(
        shape
    )
    grid = inputs // rows, outputs // cols
    times = max(1, round(share * math.gcd(*grid)))
    options = {
        "gain": gain,
        "seed": seed,
        "layout": layout,
        "dtype": np.float64,
    }
    drawn = regular_blocks(shape, times / math.gcd(*grid), structure, **options)

    # The live blocks: fans, count, both lists.
    fan_in, fan_out = times * fan_step(*grid), times * fan_step(*grid[::-1])
    assert drawn.blocks.shape == (batch, parts, grid[1], fan_in, rows, cols)
    assert drawn.inputs_of.shape == (batch, parts, grid[1], fan_in)
    assert drawn.inputs_of.dtype == np.int32
    outputs_of = np.repeat(np.arange(grid[1]), fan_in)
    for pattern in drawn.inputs_of.reshape(batch * parts, -1):
        check_pattern(pattern, outputs_of, [fan_out] * grid[0])
    assert drawn.density == times / math.gcd(*grid)
    count = structure.live_count(canonical, drawn.density)
    assert drawn.live == count == times * structure.unit(canonical)

    # The dense kernel, drawn from the same seed.
    kernel, mask = exact_orthogonal(
        shape, drawn.density, structure=structure, **options
    )
    np.testing.assert_array_equal(layout.to_canonical(kernel), drawn.dense())
    np.testing.assert_array_equal(layout.to_canonical(mask), drawn.mask())
    assert mask.sum() == count
    assert not kernel[~mask].any()

    # Read without the lists: every tap has the same blocks, every line equally many.
    live = layout.to_canonical(mask).reshape(
        batch * parts, -1, grid[0], rows, grid[1], cols
    )
    whole = live.sum(axis=(3, 5))
    assert set(whole.reshape(-1).tolist()) <= {0, rows * cols}
    assert (whole == whole[:, :1]).all()
    assert ((whole > 0).sum(axis=2) == fan_in).all()
    assert ((whole > 0).sum(axis=3) == fan_out).all()

    values = layout.to_canonical(kernel)
    at_center = values[
        (slice(None), slice(None), *((size - 1) // 2 for size in taps))
    ]
    assert np.count_nonzero(at_center) == np.count_nonzero(values)
    for matrix in at_center.reshape(-1, inputs, outputs):
        assert matrix.any(axis=0).all()
        assert matrix.any(axis=1).all()
        assert_orthogonal(matrix, gain, 1e-12)


def test_the_product_of_live_blocks_is_that_of_the_kernel():
    for shape in ((24, 60), (48, 30), (32, 40)):
        drawn = regular_blocks(shape, 0.5, Block(4, 5, regular=True), seed=2)
        blocks, inputs_of = drawn.blocks[0, 0], drawn.inputs_of[0, 0]
        slots = (
            inputs_of.ravel().argsort(kind="stable").reshape(shape[0] // 4, -1)
        )
        x = np.random.default_rng(0).standard_normal((7, shape[0]))
        by_block = x.reshape(7, -1, 4)[:, inputs_of]
        y = np.einsum("njkr,jkrc->njc", by_block, blocks).reshape(7, -1)
        np.testing.assert_allclose(y, x @ drawn.dense()[0, 0], atol=1e-12)
        # The transposed product, with gathers only.
        back = np.einsum("njc,jkrc->njkr", y.reshape(7, -1, 5), blocks).reshape(
            7, -1, 4
        )
        back = back[:, slots].sum(axis=2).reshape(7, -1)
        np.testing.assert_allclose(back, y @ drawn.dense()[0, 0].T, atol=1e-12)


def zero_blocks(drawn):
    return float((drawn.blocks == 0).all(axis=(-1, -2)).mean())


@pytest.mark.parametrize("inputs", [512, 640])
@pytest.mark.parametrize("outputs", [512, 1536])
@pytest.mark.parametrize("density", [0.05, 0.2, 1.0])
def test_few_live_blocks_are_zero(inputs, outputs, density):
    drawn = regular_blocks(
        (inputs, outputs), density, Block(8, 8, regular=True), seed=0
    )
    # A seventh is what products of 2, 3 and 5 miss at most; overlaps and odd lines take the rest.
    assert zero_blocks(drawn) <= (0.2 if density < 1.0 else 0.0)
    assert_dense_or_zero(drawn)


def assert_dense_or_zero(drawn):
    live = drawn.blocks.any(axis=(-1, -2))
    assert (drawn.blocks[live] != 0).all()


@pytest.mark.parametrize(("rows", "cols"), [(130, 130), (256, 64)])
def test_large_blocks(rows, cols):
    drawn = regular_blocks(
        (2 * rows, 4 * cols), 0.5, Block(rows, cols, regular=True), seed=0
    )
    assert_dense_or_zero(drawn)
    assert_orthogonal(drawn.dense()[0, 0], atol=1e-12)


@pytest.mark.parametrize("lines", [3, 5, 7, 11, 13])
def test_numbers_of_lines_that_no_matching_divides(lines):
    for times in range(1, lines + 1):
        drawn = regular_blocks(
            (2 * lines, 2 * lines),
            times / lines,
            Block(2, 2, regular=True),
            seed=times,
        )
        share = zero_blocks(drawn)
        assert share == 0.0 if times in (1, lines) else share <= 0.55
        assert_orthogonal(drawn.dense()[0, 0], atol=1e-12)


def test_no_two_outputs_of_a_widening_kernel_are_parallel():
    """At the least density of all, where every output block has inputs of its own."""
    kernel = regular_blocks(
        (32, 128), 0.125, Block(4, 4, regular=True), seed=3
    ).dense()[0, 0]
    directions = kernel / np.sqrt((kernel**2).sum(axis=0))
    cosines = np.abs(directions.T @ directions) - np.eye(128)
    assert cosines.max() < 0.9999


@given(
    lines=st.integers(1, 12),
    groups=st.integers(1, 12),
    share=st.floats(0.0, 1.0),
    kept=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_what_can_be_completed_is(lines, groups, share, kept, seed):
    rng = np.random.default_rng(seed)
    fan = fan_step(groups, lines) * max(
        1, round(share * math.gcd(lines, groups))
    )
    live = np.zeros((lines, groups), dtype=bool)
    np.put_along_axis(
        live, regular_pattern(groups, lines, fan, rng).astype(int), True, axis=1
    )
    # Some of a regular pattern, so there is a way.
    live &= rng.random(live.shape) < kept
    before = live.copy()
    assert complete(live, fan, lines * fan // groups, rng)
    assert (live.sum(axis=1) == fan).all()
    assert (live.sum(axis=0) == lines * fan // groups).all()
    assert live[before].all()


def test_what_cannot_be_completed_is_told():
    # The third line needs two groups, but only the third group misses lines.
    live = np.array([[1, 1, 0], [1, 1, 0], [0, 0, 0]], dtype=bool)
    assert not complete(live, 2, 2, np.random.default_rng(0))


def test_seeds():
    structure = Block(4, 4, regular=True)
    first, other = (
        regular_blocks((64, 96), 0.25, structure, seed=s) for s in (1, 2)
    )
    assert (first.inputs_of != other.inputs_of).any()
    half = regular_blocks((64, 96), 0.25, structure, seed=1, dtype=np.float32)
    assert half.blocks.dtype == np.float32
    np.testing.assert_array_equal(half.blocks, first.blocks.astype(np.float32))


def test_wide_kernels_never_have_a_dense_form():
    width, structure = 16384, Block(128, 128, regular=True)
    tracemalloc.start()
    try:
        drawn = regular_blocks(
            (width, width), 0.05, structure, seed=0, dtype=np.float32
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert abs(drawn.density - 0.05) <= 128 / width / 2
    # The float32 result, and a float64 copy with what changes at once; dense it would take 1 GiB.
    assert peak <= 4 * drawn.live + 1.4 * 8 * drawn.live
    # Rows of blocks j and l are orthogonal, where they meet: a few of them.
    lines, inputs_of = (
        drawn.blocks[0, 0].astype(np.float64),
        drawn.inputs_of[0, 0],
    )
    for j in range(4):
        for other in (
            j,
            *np.flatnonzero(np.isin(inputs_of, inputs_of[j]).any(axis=1))[:8],
        ):
            _, here, there = np.intersect1d(
                inputs_of[j], inputs_of[other], return_indices=True
            )
            gram = np.einsum("krc,krd->cd", lines[j, here], lines[other, there])
            assert np.abs(gram - (other == j) * np.eye(128)).max() <= 1e-6


def test_densities():
    structure = Block(8, 8, regular=True)
    assert regular_blocks((64, 64), 0.3, structure, seed=0).density == 0.25
    # I = 8, J = 12.
    assert regular_blocks((64, 96), 0.3, structure, seed=0).density == 0.25
    assert (
        structure.least((1, 1, 64, 96))
        == structure.covering((1, 1, 64, 96))
        == 24 * 64
    )
    with pytest.raises(
        DensityError,
        match=r"has 512 to 4096 live entries: the least .* 0.125. R",
    ):
        exact_orthogonal((64, 64), 0.05, structure=structure)
    with pytest.raises(
        DensityError, match=r"the least density is 1. Received: density=0.4"
    ):
        regular_blocks((56, 88), 0.4, structure)
    with pytest.raises(
        DensityError, match=r"must be in \(0, 1\]. Received: density=1.5"
    ):
        regular_blocks((64, 64), 1.5, structure)


def test_refusals():
    structure = Block(8, 8, regular=True)
    assert repr(structure) == "Block(rows=8, cols=8, regular=True)"
    assert Block.from_config(structure.get_config()) == structure != Block(8, 8)
    with pytest.raises(
        LayoutError, match=r"regular=True\) needs inputs divisible by 8.*60 inp"
    ):
        regular_blocks((60, 64), 0.5, structure)
    with pytest.raises(
        ValueError, match=r"`regular` must be a bool. Received: regular=1"
    ):
        Block(8, 8, regular=1)
    with pytest.raises(
        ValueError,
        match=r"regular=True\): .*Received: structure=Block\(rows=8, c",
    ):
        regular_blocks((64, 64), 0.5, Block(8, 8))
    with pytest.raises(
        ValueError,
        match=r"must be a NumPy floating type. Received: dtype=<class",
    ):
        regular_blocks((64, 64), 0.5, structure, dtype=int)
    with pytest.raises(
        ValueError, match=r"`gain` must be finite. Received: gain=nan"
    ):
        regular_blocks((64, 64), 0.5, structure, gain=math.nan)


@pytest.mark.parametrize("seed", range(12))
def test_the_shorter_side_may_be_padded(seed):
    rng = np.random.default_rng(seed)
    width, count = int(rng.integers(21, 40)), int(rng.integers(2, 7))
    # At most a twentieth is padding.
    short = width * count - int(rng.integers(1, count))
    longer = (count * int(rng.integers(1, 4)), int(rng.integers(width, 50)))
    sides = [(short, width), (longer[0] * longer[1], longer[1])]
    (inputs, rows), (outputs, cols) = sides if seed % 2 else sides[::-1]
    block = Block(rows, cols, regular=True)
    parts = math.gcd(count, longer[0])
    density = int(rng.integers(1, parts + 1)) / parts
    kernel, mask = exact_orthogonal(
        (inputs, outputs), density, seed=seed, structure=block, dtype=np.float64
    )
    assert_orthogonal(kernel, atol=1e-12)
    assert mask.sum() == round(density * inputs * outputs)
    assert kernel.any(axis=0).all()
    assert kernel.any(axis=1).all()
    # Every entry of the longer side has as many blocks, those of the shorter one too.
    assert (
        len({*(mask.sum(axis=0 if inputs == short else 1) > 0).tolist()}) == 1
    )
    drawn = regular_blocks((inputs, outputs), density, block, seed=seed)
    assert drawn.live == mask.sum()
    np.testing.assert_array_equal(drawn.dense()[0, 0], kernel)
    np.testing.assert_array_equal(drawn.mask()[0, 0], mask)
    # What is stored has as many nonzero entries: the padding is zero.
    assert np.count_nonzero(drawn.blocks) == np.count_nonzero(kernel)


@pytest.mark.parametrize(
    ("shape", "block", "possible"),
    [
        ((1000, 1024), (32, 32), True),
        ((1024, 1000), (32, 32), True),
        ((1024, 1000), (16, 32), True),
        ((1000, 1000), (32, 32), False),  # both sides
        (
            (1000, 1000),
            (32, 50),
            False,
        ),  # the padded side would be the longer one
        ((1030, 1024), (33, 32), False),
        ((1024, 10), (32, 16), False),  # more than a twentieth
        ((48, 64), (32, 32), False),  # two blocks of 24
    ],
)
def test_where_padding_is_possible(shape, block, possible):
    regular = Block(*block, regular=True)
    assert regular.divides(shape) == possible
    assert not Block(32, 32).divides((1000, 1024))


@given(
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 40),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=200, deadline=None)
def test_fans_are_equal_both_ways(inputs, outputs, share, seed):
    step = fan_step(inputs, outputs)
    fan = step * max(1, round(share * math.gcd(inputs, outputs)))
    rng = np.random.default_rng(seed)
    patterns = np.stack(
        [regular_pattern(inputs, outputs, fan, rng) for _ in range(2)]
    )
    assert patterns.shape == (2, outputs, fan)
    assert patterns.dtype == np.int32
    assert (np.diff(patterns) > 0).all()
    for pattern in patterns:
        outputs_of = np.repeat(np.arange(outputs), fan)
        check_pattern(
            pattern.ravel(), outputs_of, [outputs * fan // inputs] * inputs
        )


def test_trades_reach_all_of_a_larger_set():
    """The 90 patterns of 4 x 4 with two in each line (OEIS A001499)."""
    rng = np.random.default_rng(1)
    counts: dict[bytes, int] = {}
    for _ in range(4500):
        key = regular_pattern(4, 4, 2, rng).tobytes()
        counts[key] = counts.get(key, 0) + 1
    assert len(counts) == 90
    # 89 degrees, 0.001.
    assert sum((count - 50) ** 2 / 50 for count in counts.values()) < 135


def damaged(place, value):
    pattern = regular_pattern(6, 6, 3, np.random.default_rng(0))
    pattern[place] = value
    return pattern


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (damaged((2, 1), 6), r"integers from 0 to 5. Received: array\(\["),
        (damaged((0, 0), -1), r"from 0 to 5. Received"),
        (damaged(3, [1, 4, 1]), r"at most once for an output block. Received"),
        (
            np.array([[0, 1], [0, 2], [0, 3], [1, 2]]),
            r"its count, \[2, 2, 2, 2\]. Received",
        ),
        (
            np.array([[0.0, 1.0]]),
            r"integers from 0 to 3.*Received: array\(\[0., 1.\]\)",
        ),
        (np.zeros((0, 2), dtype=int), r"Received: array\(\[\]"),
    ],
)
def test_damage_is_named(pattern, text):
    lines, fan = pattern.shape
    inputs = 6 if fan == 3 else 4
    uses = [lines * fan // inputs] * inputs
    with pytest.raises(ValueError, match=text):
        check_pattern(pattern.ravel(), np.repeat(np.arange(lines), fan), uses)


@pytest.mark.parametrize("seed", range(4))
def test_the_best_blocks_with_few_counts(seed):
    rng = np.random.default_rng(seed)
    lines = rng.normal(size=(48, 1)) + rng.normal(size=(1, 40))
    scores = np.exp(lines + rng.normal(size=(48, 40)))
    whole = scores.repeat(2, axis=0).repeat(3, axis=1)[None, None]
    found = best_blocks(Block(2, 3), whole, 6 * 300, rng)[0, 0]
    live = found.reshape(48, 2, 40, 3).any(axis=(1, 3))
    assert live.sum() == 300 == found.sum() / 6
    assert all(len({*live.sum(axis=axis)}) <= 8 for axis in (0, 1))
    largest = np.sort(scores.ravel())[-300:].sum()
    assert 0.93 * largest < scores[live].sum() < largest
    # Of all patterns with these counts nearly the best, as a linear program finds it.
    sums = np.concatenate(
        [np.kron(np.eye(48), np.ones(40)), np.tile(np.eye(40), 48)]
    )
    fans = np.concatenate([live.sum(axis=1), live.sum(axis=0)])
    best = linprog(-scores.ravel(), A_eq=sums, b_eq=fans, bounds=(0, 1))
    assert scores[live].sum() > -0.995 * best.fun
