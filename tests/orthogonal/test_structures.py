"""Structured kernels: exactly orthogonal, exact counts, and every group counted."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.orthogonal import (
    Block,
    GivenBlocks,
    KernelLayout,
    NByM,
    dead_outputs,
    exact_orthogonal,
)
from tests.orthogonal.checks import assert_orthogonal, dead_inputs

pytestmark = pytest.mark.numpy_only

BLOCKS = [
    (1, 1),
    (4, 1),
    (16, 1),
    (1, 3),
    (1, 16),
    (3, 3),
    (4, 4),
    (2, 6),
    (6, 2),
]
PATTERNS = [(2, 4), (1, 4), (4, 8), (1, 2), (3, 3)]
STRUCTURES = [
    *(Block(*sides) for sides in BLOCKS),
    *(NByM(*sides) for sides in PATTERNS),
]


def live_in_groups(structure, mask):
    """Live entries of every block, or of every group of each output."""
    *_, inputs, outputs = mask.shape
    mask = mask.reshape(-1, inputs, outputs)
    if isinstance(structure, NByM):
        padded = np.pad(mask, ((0, 0), (0, -inputs % structure.m), (0, 0)))
        return padded.reshape(len(padded), -1, structure.m, outputs).sum(axis=2)
    rows, cols = structure.rows, structure.cols
    return mask.reshape(-1, inputs // rows, rows, outputs // cols, cols).sum(
        axis=(2, 4)
    )


@given(
    structure=st.sampled_from(STRUCTURES),
    inputs=st.integers(1, 12),
    outputs=st.integers(1, 12),
    taps=st.sampled_from([(), (), (3,), (2, 3)]),
    wide=st.booleans(),
    ragged=st.booleans(),  # whether groups may be shorter, and classes without outputs
    few=st.booleans(),  # half of the counts below what covers all
    share=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
    gain=st.sampled_from([1.0, math.sqrt(2)]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=300, deadline=None)
def test_blocks_and_n_by_m(
    structure, inputs, outputs, taps, wide, ragged, few, share, gain, seed
):
    if isinstance(structure, Block):
        ragged = False
        inputs, outputs = inputs * structure.rows, outputs * structure.cols
    elif not ragged:
        inputs *= structure.n
        outputs = max(outputs, structure.m // structure.n)
    if wide:
        outputs *= 4
    shape = (*taps, inputs, outputs)
    canonical = (1, 1, *shape)
    least, most, unit = (
        getattr(structure, name)(canonical)
        for name in ("least", "most", "unit")
    )
    covering = min(structure.covering(canonical), most)
    assert covering >= least
    span = 2 * (covering - least) + unit if few else most - least
    count = min(least + round(share * span / unit) * unit, most)
    options = {"structure": structure, "seed": seed}
    kernel, mask = exact_orthogonal(
        shape, count / math.prod(shape), gain=gain, **options
    )
    assert mask.shape == kernel.shape
    assert not kernel[~mask].any()
    matrix = kernel[tuple((size - 1) // 2 for size in taps)]
    assert np.count_nonzero(matrix) == np.count_nonzero(kernel)
    assert_orthogonal(matrix, gain)
    assert mask.sum() == count
    live = live_in_groups(structure, mask)
    if isinstance(structure, Block):
        assert {*live.reshape(-1).tolist()} <= {0, unit}
    else:
        assert live.max() <= structure.n
        if count == most and inputs % structure.m == 0:
            assert (live == structure.n).all()
            assert taps or (mask == (kernel != 0)).all()
    if ragged:
        return
    dead = dead_outputs(kernel) + dead_inputs(kernel)
    assert (dead == 0) == (count >= covering)
    if unit == 1:
        assert dead == max(0, covering - count)
    if inputs >= outputs:
        assert dead_outputs(kernel) == 0
    plain, _ = exact_orthogonal(
        shape, count / math.prod(shape), start="published", **options
    )
    assert dead <= dead_outputs(plain) + dead_inputs(plain)


@pytest.mark.parametrize("structure", [Block(4, 1), NByM(1, 2)])
def test_groups_and_gates(structure):
    for layout, shape in [
        (KernelLayout.convolution(groups=2), (3, 8, 16)),
        (KernelLayout.recurrent(4), (8, 32)),
    ]:
        kernel, mask = exact_orthogonal(
            shape, 0.5, seed=0, layout=layout, structure=structure
        )
        center = kernel[1] if len(shape) == 3 else kernel
        for matrix in np.split(center, layout.parts, axis=1):
            assert_orthogonal(matrix)
        assert mask.sum() % structure.unit(layout.canonical_shape(shape)) == 0


def test_refusals():
    for error, shape, density, structure, message in (
        (
            LayoutError,
            (64, 10),
            0.5,
            Block(1, 16),
            r"outputs divisible by 16.*`exclude`.*x 10 out",
        ),
        (DensityError, (8, 8), 0.6, NByM(2, 4), r"largest density is 0.5"),
        (DensityError, (64, 64), 0.1, Block(16, 1), r"least density is 0.25"),
        (ValueError, (64, 60), 0.5, Block(4, 3), r"must divide the other"),
    ):
        with pytest.raises(error, match=message):
            exact_orthogonal(shape, density, structure=structure)
    for kind, sides, message in (
        (NByM, (0, 4), r"positive integer"),
        (NByM, (3, 4), r"`n` must divide an `m`"),
        (NByM, (2, 10**9), r"`m` of at most 65,536.*m=1000000000"),
    ):
        with pytest.raises(ValueError, match=message):
            kind(*sides)


# --- `GivenBlocks`: exactly the given blocks are live ---------------------------------------------


def drawn_on(live, rows, cols, **options):
    lines = tuple("".join(map(str, 1 * line)) for line in live)
    given = GivenBlocks(rows, cols, lines)
    shape = *options.pop("taps", ()), live.shape[0] * rows, live.shape[1] * cols
    return exact_orthogonal(
        shape, float(live.mean()), seed=1, structure=given, **options
    )


@given(
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.sampled_from([(4, 4), (2, 6), (8, 2), (2, 8), (1, 3), (3, 1)]),
    st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_blocks_around_a_matching_are_exactly_orthogonal(grid, block, seed):
    rng = np.random.default_rng(seed)
    live = rng.random(grid) < 0.4
    # A way for every line of the shorter side: a block of the longer one for each of its own.
    sides = [(grid[axis] * block[axis], block[axis], axis) for axis in (0, 1)]
    (_, a, short), (_, b, long) = sorted(sides)
    groups, lines = grid[short], grid[long]
    if groups * max(a // b, 1) > lines * max(b // a, 1):
        return
    ways = live if short else live.T
    for group in range(groups):
        for part in range(max(a // b, 1)):
            ways[(group * max(a // b, 1) + part) // max(b // a, 1), group] = (
                True
            )
    kernel, mask = drawn_on(live, *block, gain=1.5)
    assert_orthogonal(kernel, 1.5)
    np.testing.assert_array_equal(mask, np.kron(live, np.ones(block)) > 0)
    assert not kernel[~mask].any()


def test_rotations_fill_blocks_that_are_all_live():
    kernel, _ = drawn_on(np.ones((6, 4), dtype=bool), 4, 4)
    assert (kernel != 0).all()


def test_other_blocks_are_orthogonal_and_scaled():
    live = np.array([[1, 1, 0], [0, 0, 0], [1, 1, 1]], dtype=bool)
    kernel, mask = drawn_on(live, 4, 4, gain=2.0, taps=(3,))
    assert not kernel[[0, 2]].any()
    assert (mask[0] == mask[1]).all()
    np.testing.assert_allclose(
        np.linalg.norm(kernel[1], axis=0), 2.0, rtol=1e-6
    )
    block = kernel[1, :4, :4]
    np.testing.assert_allclose(block.T @ block, 2 * np.eye(4), atol=1e-6)
    gates = KernelLayout.recurrent(3)
    kernel, _ = drawn_on(
        np.tile(np.eye(3, dtype=bool), (1, 3)), 4, 4, layout=gates
    )
    for gate in np.split(kernel, 3, axis=1):
        assert_orthogonal(gate)


def test_given_blocks_are_checked():
    for live in ((), ("10", "1"), ("12",)):
        with pytest.raises(ValueError, match="equal strings of 0 and 1"):
            GivenBlocks(4, 4, live)


def test_groups_that_lose_entries_in_steps_never_get_one_back():
    scores = np.random.default_rng(0).random((64, 32))
    groups, before = NByM(2, 4), np.ones(scores.shape, bool)
    for density in (0.9, 0.75, 0.6, 0.51, 0.5):
        count = round(density * scores.size)
        mask = groups.largest(scores, count)
        assert mask.sum() == count
        assert not (mask & ~before).any()
        live = mask.reshape(16, 4, 32).sum(axis=1)
        assert live.min() == max(2, int(4 * density))
        assert live.max() - live.min() <= 1
        before = mask
