"""Masks of a kind: their costs are those of dropping groups, and blocks stay regular."""

import numpy as np
import pytest

from keras_sparse_ortho import Block, NByM
from keras_sparse_ortho.calibration import _solve
from keras_sparse_ortho.calibration._patterns import Entries, RegularPattern, WholeInputs

pytestmark = pytest.mark.core

# Blocks, and canonical shapes: square, two taps, a padded side, two matrices.
SHAPES = {
    "square": (Block(2, 3, regular=True), (1, 1, 12, 12)),
    "taps": (Block(4, 2, regular=True), (1, 1, 2, 8, 8)),
    "padded": (Block(3, 2, regular=True), (1, 1, 35, 24)),
    "matrices": (Block(2, 2, regular=True), (2, 1, 8, 8)),
}


def problem(shape, seed=0):
    rng = np.random.default_rng(seed)
    batch, parts, *taps, inputs, outputs = shape
    k = int(np.prod(taps)) * inputs
    x = rng.normal(size=(batch * parts, 200, k)) @ rng.normal(size=(k, k))
    return rng.normal(size=(batch * parts, k, outputs)), np.swapaxes(x, 1, 2) @ x


def loss(found, kernel, gram):
    left = found - kernel
    return float(np.sum(left * (_solve.damped(gram) @ left)))


@pytest.mark.parametrize("name", SHAPES)
def test_costs_of_a_block_are_what_dropping_it_costs_when_all_others_make_up(name):
    block, shape = SHAPES[name]
    pattern, (kernel, gram) = RegularPattern(block, shape), problem(shape)
    precision = pattern.precision(np.linalg.inv(_solve.damped(gram)))
    costs = pattern.costs(kernel, precision)
    dead = np.zeros(shape, bool)
    dead[-1, -1, ..., : block.rows, : block.cols] = True  # at all taps
    dead = dead.reshape(kernel.shape)
    expected = loss(_solve.refit(kernel, ~dead, gram), kernel, gram)
    np.testing.assert_allclose(costs[dead].sum(), expected, rtol=1e-6)


def test_costs_of_an_entry_are_those_of_a_block_of_one():
    shape = (1, 1, 6, 4)
    kernel, gram = problem(shape)
    inverse = np.linalg.inv(_solve.damped(gram))
    found = [
        pattern.costs(kernel, pattern.precision(inverse))
        for pattern in (Entries(), RegularPattern(Block(1, 1, regular=True), shape))
    ]
    np.testing.assert_allclose(*found, rtol=1e-9)


@pytest.mark.parametrize("name", SHAPES)
def test_obs_on_regular_blocks(name):
    block, shape = SHAPES[name]
    pattern, (kernel, gram) = RegularPattern(block, shape), problem(shape)
    count = block.unit(shape)
    found, mask = _solve.obs(kernel, count, gram, pattern)
    assert mask.sum() == count
    canonical = mask.reshape(shape)
    assert (canonical == canonical.max(axis=tuple(range(2, len(shape) - 2)), keepdims=True)).all()
    for lines in (mask.any(axis=1), mask.any(axis=2)):
        assert lines.all()  # no input and no output is dead
    np.testing.assert_allclose(found, _solve.refit(kernel, mask, gram), atol=1e-6)
    assert pattern.largest(np.abs(kernel), count).sum() == count


def test_obs_on_blocks_loses_less_than_magnitudes_with_a_refit():
    block, shape = Block(2, 2, regular=True), (1, 1, 16, 16)
    pattern, lost = RegularPattern(block, shape), np.zeros(2)
    for seed in range(4):
        kernel, gram = problem(shape, seed)
        mask = pattern.largest(np.abs(kernel), 96)
        lost[0] += loss(_solve.obs(kernel, 96, gram, pattern)[0], kernel, gram)
        lost[1] += loss(_solve.refit(kernel, mask, gram), kernel, gram)
    assert lost[0] < 0.9 * lost[1]


def test_rounds_drop_blocks_and_never_wake_them():
    block, shape = Block(2, 2, regular=True), (1, 1, 12, 12)
    pattern, (kernel, gram) = RegularPattern(block, shape), problem(shape)
    before = np.ones(kernel.shape, bool)
    for _, mask in _solve.obs_rounds(kernel, [130, 100, 72, 40, 24], gram, pattern):
        assert not (mask & ~before).any()
        before = mask
    assert before.sum() == 24


def test_early_rounds_of_n_by_m_take_the_largest_of_each_group_and_the_last_no_more_than_n():
    pattern, (kernel, gram) = Entries(NByM(2, 8)), problem((1, 1, 16, 5))
    scores = np.abs(kernel)
    ranks = np.argsort(np.argsort(-scores.reshape(1, 2, 8, 5), axis=2), axis=2).reshape(1, 16, 5)
    # 60 of 80 entries do not fit two of eight: six of eight do.
    np.testing.assert_array_equal(pattern.largest(scores, 60, last=False), ranks < 6)
    np.testing.assert_array_equal(pattern.largest(scores, 20), ranks < 2)
    # 55 do not fit five of eight: the largest that six of eight leave.
    least = np.sort(scores[ranks < 6])[-55]
    some = pattern.largest(scores, 55, last=False)
    np.testing.assert_array_equal(some, (ranks < 6) & (scores >= least))
    # 15 fit two of eight.
    few = pattern.largest(scores, 15, last=False)
    assert few.sum() == 15
    assert not (few & (ranks >= 2)).any()
    found, mask = _solve.obs(kernel, 20, gram, pattern)
    assert (mask.reshape(1, 2, 8, 5).sum(axis=2) == 2).all()
    # Entries go in eight rounds; all at once costs more.
    costs = Entries().costs(kernel, Entries().precision(np.linalg.inv(_solve.damped(gram))))
    at_once = _solve.refit(kernel, pattern.largest(costs, 20), gram)
    assert loss(found, kernel, gram) < loss(at_once, kernel, gram)


@pytest.mark.parametrize("shape", [(1, 1, 12, 5), (1, 1, 3, 8, 6), (2, 1, 8, 4)])
@pytest.mark.parametrize("group", [1, 4])
def test_whole_inputs_go_that_cost_least_when_all_others_make_up(shape, group):
    pattern = WholeInputs(Block(group, shape[-1], regular=True), shape)
    kernel, gram = problem(shape)
    unit = group * shape[-1] * int(np.prod(shape[2:-2]))
    inverse = np.linalg.inv(_solve.damped(gram))
    costs = pattern.costs(kernel, pattern.precision(inverse))
    kept = pattern.largest(costs, kernel.size - unit)
    # All that can be dropped, one after the other.
    lost = []
    for matrix in range(shape[0]):
        for start in range(0, shape[-2], group):
            dead = np.zeros(shape, bool)
            dead[matrix, ..., start : start + group, :] = True
            dead = dead.reshape(kernel.shape)
            lost.append((loss(_solve.refit(kernel, ~dead, gram), kernel, gram), dead))
    least, dead = min(lost, key=lambda one: one[0])
    np.testing.assert_array_equal(kept, ~dead)
    np.testing.assert_allclose(costs[dead].sum(), least, rtol=1e-6)
    found, mask = _solve.obs(kernel, 2 * unit, gram, pattern)
    assert mask.sum() == 2 * unit
    groups = mask.reshape(*shape[:-2], -1, group, shape[-1])
    assert (groups == groups.max(axis=(*range(2, len(shape) - 2), -2, -1), keepdims=True)).all()
    np.testing.assert_allclose(found, _solve.refit(kernel, mask, gram), atol=1e-6)
