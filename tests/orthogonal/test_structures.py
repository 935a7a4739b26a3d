"""Structured kernels: exactly orthogonal, exact counts, and every group counted."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.orthogonal import (
    Block,
    KernelLayout,
    NByM,
    dead_outputs,
    exact_orthogonal,
)
from tests.orthogonal.checks import assert_orthogonal, dead_inputs

pytestmark = pytest.mark.numpy_only

BLOCKS = [(1, 1), (4, 1), (16, 1), (1, 3), (1, 16), (3, 3), (4, 4), (2, 6), (6, 2)]
TAPS = st.sampled_from([(), (), (3,), (2, 3)])


def check(kernel, mask, taps, gain):
    assert mask.shape == kernel.shape
    assert not kernel[~mask].any()
    matrix = kernel[tuple((size - 1) // 2 for size in taps)]
    assert np.count_nonzero(matrix) == np.count_nonzero(kernel)
    assert_orthogonal(matrix, gain)


def draw_or_refused(shape, density, structure, unit, **kwargs):
    count = round(density * math.prod(shape) / unit) * unit
    if structure.least((1, 1, *shape)) <= count <= structure.most((1, 1, *shape)):
        return exact_orthogonal(shape, density, structure=structure, **kwargs)
    with pytest.raises(DensityError, match="density is"):
        exact_orthogonal(shape, density, structure=structure, **kwargs)
    return None


@given(
    block=st.sampled_from(BLOCKS),
    grid=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    taps=TAPS,
    density=st.floats(0.02, 1.0),
    gain=st.sampled_from([1.0, math.sqrt(2)]),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=100, deadline=None)
def test_blocks(block, grid, taps, density, gain, seed):
    rows, cols = block
    shape = (*taps, grid[0] * rows, grid[1] * cols)
    drawn = draw_or_refused(shape, density, Block(rows, cols), rows * cols, gain=gain, seed=seed)
    if drawn is None:
        return
    kernel, mask = drawn
    check(kernel, mask, taps, gain)
    live = mask.reshape(-1, grid[0], rows, grid[1], cols).sum(axis=(2, 4))
    assert set(live.reshape(-1).tolist()) <= {0, rows * cols}
    # As `live_count` rounds: `density * live.size` may be another float at a tie.
    assert (live > 0).sum() == round(density * mask.size / (rows * cols))


@given(
    pattern=st.sampled_from([(2, 4), (1, 4), (4, 8), (1, 2), (3, 3)]),
    inputs=st.integers(1, 40),
    outputs=st.integers(1, 30),
    taps=TAPS,
    share=st.one_of(st.just(1.0), st.floats(0.02, 1.0)),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=80, deadline=None)
def test_n_by_m(pattern, inputs, outputs, taps, share, seed):
    n, m = pattern
    shape = (*taps, inputs, outputs)
    drawn = draw_or_refused(shape, share * n / m, NByM(n, m), 1, seed=seed)
    if drawn is None:
        return
    kernel, mask = drawn
    check(kernel, mask, taps, 1.0)
    padded = np.pad(mask.reshape(-1, inputs, outputs), ((0, 0), (0, -inputs % m), (0, 0)))
    live = padded.reshape(len(padded), -1, m, outputs).sum(axis=2)
    assert live.max() <= n
    assert live.sum() == round(share * n / m * mask.size)
    if share == 1.0 and inputs % m == 0:
        assert (live == n).all()
        assert taps or (mask == (kernel != 0)).all()


STRUCTURES = st.one_of(
    st.sampled_from(BLOCKS).map(lambda sides: Block(*sides)),
    st.sampled_from([(2, 4), (1, 4), (4, 8), (1, 2)]).map(lambda sides: NByM(*sides)),
)


@given(
    structure=STRUCTURES,
    inputs=st.integers(1, 12),
    outputs=st.integers(1, 12),
    taps=TAPS,
    wide=st.booleans(),
    share=st.floats(0.0, 1.0),
    seed=st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_structures_cover(structure, inputs, outputs, taps, wide, share, seed):
    if isinstance(structure, Block):
        inputs, outputs = inputs * structure.rows, outputs * structure.cols
    elif isinstance(structure, NByM):
        inputs *= structure.n
        outputs = max(outputs, structure.m // structure.n)  # else classes have no output
    if wide:
        outputs *= 4
    shape = (*taps, inputs, outputs)
    canonical = (1, 1, *shape)
    least, most, unit = (getattr(structure, name)(canonical) for name in ("least", "most", "unit"))
    covering = min(structure.covering(canonical), most)
    assert covering >= least
    # Half of the counts below what covers all.
    span = 2 * (covering - least) + unit
    count = min(least + round(share * span / unit) * unit, most)
    kernel, mask = exact_orthogonal(shape, count / math.prod(shape), structure=structure, seed=seed)
    check(kernel, mask, taps, 1.0)
    assert mask.sum() == count
    dead = dead_outputs(kernel) + dead_inputs(kernel)
    assert (dead == 0) == (count >= covering)
    if unit == 1:
        assert dead == max(0, covering - count)
    if inputs >= outputs:
        assert dead_outputs(kernel) == 0
    plain, _ = exact_orthogonal(
        shape, count / math.prod(shape), structure=structure, seed=seed, start="published"
    )
    assert dead <= dead_outputs(plain) + dead_inputs(plain)


@pytest.mark.parametrize("structure", [Block(4, 1), NByM(1, 2)])
def test_groups_and_gates(structure):
    for layout, shape in [
        (KernelLayout.convolution(groups=2), (3, 8, 16)),
        (KernelLayout.recurrent(4), (8, 32)),
    ]:
        kernel, mask = exact_orthogonal(shape, 0.5, seed=0, layout=layout, structure=structure)
        center = kernel[1] if len(shape) == 3 else kernel
        for matrix in np.split(center, layout.parts, axis=1):
            assert_orthogonal(matrix)
        assert mask.sum() % structure.unit(layout.canonical_shape(shape)) == 0


def test_refusals():
    with pytest.raises(LayoutError, match=r"outputs divisible by 16.*`exclude`.*x 10 outputs"):
        exact_orthogonal((64, 10), 0.5, structure=Block(1, 16))
    with pytest.raises(DensityError, match=r"largest density is 0.5"):
        exact_orthogonal((8, 8), 0.6, structure=NByM(2, 4))
    with pytest.raises(DensityError, match=r"least density is 0.25"):
        exact_orthogonal((64, 64), 0.1, structure=Block(16, 1))
    with pytest.raises(ValueError, match=r"must divide the other"):
        Block(4, 3)
    with pytest.raises(ValueError, match=r"positive integer"):
        NByM(0, 4)
    with pytest.raises(ValueError, match=r"`n` must divide `m`"):
        NByM(3, 4)
    with pytest.raises(ValueError, match=r"`m` be at most 65,536.*m=1000000000"):
        NByM(2, 10**9)
