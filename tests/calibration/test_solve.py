"""Refits are least squares on each support, masks have their counts, damping is held-out rows'."""

import itertools

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import Block, NByM
from keras_sparse_ortho.calibration import Blocks, Entries, Moments, _solve
from keras_sparse_ortho.orthogonal import block_unit
from tests.helpers import array

L = keras.layers

# Blocks, and canonical shapes: square, two taps, padded sides, two matrices, any pattern.
SHAPES = {
    "square": (Block(2, 3, regular=True), (1, 1, 12, 12)),
    "taps": (Block(4, 2, regular=True), (1, 1, 2, 8, 8)),
    "padded": (Block(3, 2, regular=True), (1, 1, 35, 24)),
    "matrices": (Block(2, 2, regular=True), (2, 1, 8, 8)),
    "wide": (Block(4, 12, regular=True), (1, 1, 2, 12, 23)),
    "wide matrices": (Block(2, 8, regular=True), (2, 1, 8, 16)),
    "free": (Block(2, 4), (1, 1, 2, 8, 12)),
}


def problem(seed, shape=(2, 1, 24, 5), rows=60, noise=0.0, fresh=2000):
    """A kernel, moments of correlated inputs, as those of trained layers, and of fresh ones."""
    rng = np.random.default_rng(seed)
    batch, parts, *taps, inputs, outputs = shape
    k = int(np.prod(taps)) * inputs
    mixed = (
        rng.normal(size=(batch * parts, k, k))
        * (np.arange(k) + 1.0)[:, None] ** -0.7
    )

    def moments(count):
        x = rng.normal(size=(batch * parts, count, k)) @ mixed
        x += noise * rng.normal(size=x.shape)
        return Moments(np.swapaxes(x, 1, 2) @ x, rows=count)

    kernel = rng.normal(size=(batch * parts, k, outputs))
    return (
        kernel,
        (moments(rows - rows // 4), moments(rows // 4)),
        moments(fresh).gram,
    )


def by_magnitude(kernel, count, moments, pattern):
    return _solve.refit(
        kernel, pattern.largest(np.abs(kernel), count), *moments
    )


def least_squares(kernel, mask, moments, extra, lines=None):
    """Output by output, with `extra` of the damped diagonal, or of parts of lines, added to it."""
    found = np.zeros(kernel.shape)
    damped = _solve.damped((moments[0] + moments[1]).gram)
    together = np.eye(kernel.shape[1], dtype=bool)
    for line in lines or ():
        together[np.ix_(line, line)] = True
    for m, o in np.ndindex(len(kernel), kernel.shape[-1]):
        h = damped[m] * (1 + extra * together)
        live = mask[m, :, o]
        found[m, live, o] = np.linalg.solve(
            h[np.ix_(live, live)], (h @ kernel[m])[live, o]
        )
    return found


def loss(kernel, mask, moments):
    """The least damped error of a mask."""
    left = least_squares(kernel, mask, moments, 0.0) - kernel
    return float(
        np.sum(left * (_solve.damped((moments[0] + moments[1]).gram) @ left))
    )


@pytest.mark.parametrize("extra", [0.0, 0.3])
@pytest.mark.parametrize("rows", [10, 500], ids=["few rows", "many rows"])
def test_a_refit_solves_the_normal_equations_of_each_output(
    rows, extra, monkeypatch
):
    monkeypatch.setattr(_solve, "EXTRA", (extra,))
    for seed in range(3):
        kernel, moments, _ = problem(seed, rows=rows)
        mask = np.random.default_rng(seed).random(kernel.shape) < 0.4
        mask[0, :, 0] = False  # an output without live entries
        found = _solve.refit(kernel, mask, *moments)
        assert not found[~mask].any()
        expected = least_squares(kernel, mask, moments, extra)
        np.testing.assert_allclose(found, expected, atol=1e-5)
    # Refits of all entries, or on unused inputs, change nothing.
    whole = _solve.refit(kernel, np.ones_like(mask), *moments)
    np.testing.assert_allclose(whole, kernel, atol=1e-9)
    none = [Moments(0 * part.gram, rows=part.rows) for part in moments]
    np.testing.assert_allclose(
        _solve.refit(kernel, mask, *none), kernel * mask, atol=1e-12
    )


@pytest.mark.parametrize("structure", [None, NByM(2, 4)])
@pytest.mark.parametrize("count", [1, 23, 97, 120])
def test_obs_has_the_exact_count_and_the_values_of_a_refit(
    count, structure, monkeypatch
):
    monkeypatch.setattr(_solve, "EXTRA", (0.1,))
    kernel, moments, _ = problem(1)
    found, mask = _solve.obs(kernel, count, Entries(structure), *moments)
    assert mask.sum() == count
    assert not found[~mask].any()
    if structure is not None:
        assert mask.reshape(2, 6, 4, 5).sum(axis=2).max() <= 2
    np.testing.assert_allclose(
        found, least_squares(kernel, mask, moments, 0.1), atol=1e-4
    )


@pytest.mark.parametrize("outputs", [1, 24])
def test_matrices_with_the_same_inputs_are_pruned_as_one_of_all_their_outputs(
    outputs,
):
    """As the kernels of a recurrent cell: one Gram matrix for all of them."""
    kernel, moments, _ = problem(5, shape=(1, 1, 24, 3 * outputs))
    as_one = _solve.obs(kernel, 30 * outputs, Entries(), *moments)
    split = np.stack(np.split(kernel[0], 3, axis=-1))
    apart = _solve.obs(split, 30 * outputs, Entries(), *moments)
    joined = np.concatenate([*apart.values], axis=-1)
    gram = (moments[0] + moments[1]).gram
    errors = [
        _solve.relative_error(values, kernel, gram)
        for values in (as_one.values, joined[None])
    ]
    assert np.count_nonzero(joined) == 30 * outputs
    assert errors[1] < 1.1 * errors[0] < 1.0


@pytest.mark.parametrize("structure", [None, NByM(2, 4)])
def test_obs_loses_less_than_wanda_and_that_less_than_magnitudes_with_refits(
    structure,
):
    pattern, lost = Entries(structure), np.zeros(4)
    for seed in range(5):
        kernel, moments, fresh = problem(seed)
        count = kernel.size // (2 if structure else 5)
        scores = _solve.wanda(kernel, moments[0] + moments[1])
        found = [
            _solve.obs(kernel, count, pattern, *moments)[0],
            _solve.refit(kernel, pattern.largest(scores, count), *moments),
            by_magnitude(kernel, count, moments, pattern),
            kernel * pattern.largest(np.abs(kernel), count),
        ]
        lost += [_solve.relative_error(one, kernel, fresh) for one in found]
    assert lost[0] < 0.9 * min(lost[1:3])
    assert max(lost[1:3]) < lost[3]


def test_the_mask_is_nearly_the_best_of_all(monkeypatch):
    """All masks of a small kernel are tried."""
    monkeypatch.setattr(_solve, "EXTRA", (0.0,))
    ratios = []
    for seed in range(6):
        kernel, moments, _ = problem(seed, (1, 1, 12, 1), rows=200)
        masks = [
            np.isin(np.arange(12), live)
            for live in itertools.combinations(range(12), 5)
        ]
        least = min(
            loss(kernel, live[None, :, None], moments) for live in masks
        )
        _, mask = _solve.obs(kernel, 5, Entries(), *moments)
        ratios.append(loss(kernel, mask, moments) / least)
    assert sorted(ratios)[3] < 1.001
    assert max(ratios) < 1.5


def test_damping_is_chosen_on_held_out_rows(monkeypatch):
    """With fewer rows than inputs the least error on them is a worse kernel on others."""
    lost, chosen = np.zeros((2, 2)), np.zeros((2, 4))
    for seed in range(4):
        for k, rows in enumerate((40, 4000)):
            kernel, moments, fresh = problem(
                seed, (1, 1, 64, 16), rows, noise=0.5
            )
            mask = Entries().largest(np.abs(kernel), 400)
            chosen[k, seed] = _solve.chosen_damping(
                kernel, mask, *moments, Entries()
            )
            for which, extra in enumerate((_solve.EXTRA, (0.0,))):
                with monkeypatch.context() as patch:
                    patch.setattr(_solve, "EXTRA", extra)
                    found, _ = _solve.obs(kernel, 400, Entries(), *moments)
                lost[k, which] += _solve.relative_error(found, kernel, fresh)
    assert lost[0, 0] < 0.95 * lost[0, 1]
    assert lost[1, 0] < 1.02 * lost[1, 1]
    assert chosen[0].min() > 0.02 >= chosen[1].max()
    alone = Moments(moments[0].gram, rows=3), Moments()
    assert (
        _solve.chosen_damping(kernel, mask, *alone, Entries())
        == _solve.EXTRA[-1]
    )


@pytest.mark.parametrize("cols", [8, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "regular",
    [
        pytest.param(True, id="regular", marks=pytest.mark.slow),
        pytest.param(False, id="any pattern"),
    ],
)
def test_blocks_have_the_damping_that_held_out_rows_choose_for_them(
    regular, cols, monkeypatch
):
    """Their mask has none: it is the same whatever held-out rows choose."""
    pattern, damping = (
        Blocks(Block(4, cols, regular=regular), (1, 1, 32, 32)),
        set(),
    )
    for seed, rows in itertools.product(range(3), (16, 48, 4000)):
        kernel, moments, _ = problem(seed, pattern.shape, rows, noise=0.3)
        found, mask = _solve.obs(kernel, kernel.size // 4, pattern, *moments)
        lost = []
        for extra in _solve.EXTRA:
            tried = least_squares(
                kernel, mask, (moments[0], Moments()), extra, pattern.lines
            )
            lost.append(
                np.sum((tried - kernel) * (moments[1].gram @ (tried - kernel)))
            )
        best = _solve.EXTRA[int(np.argmin(lost))]
        expected = least_squares(kernel, mask, moments, best, pattern.lines)
        np.testing.assert_allclose(found, expected, atol=1e-4)
        with monkeypatch.context() as patch:
            patch.setattr(_solve, "EXTRA", (1.0,))
            np.testing.assert_array_equal(
                _solve.obs(kernel, kernel.size // 4, pattern, *moments)[1], mask
            )
        damping.add(best)
    assert len(damping) >= 3


def test_wanda_scores():
    kernel = np.array([[[1.0, -2.0], [3.0, 0.5]]])
    scores = _solve.wanda(kernel, Moments(np.array([[[4.0, 1.0], [1.0, 9.0]]])))
    np.testing.assert_allclose(scores, [[[2.0, 4.0], [9.0, 1.5]]])


@pytest.mark.parametrize("name", SHAPES)
def test_scores_of_a_part_of_a_line_are_what_dropping_it_alone_costs(name):
    block, shape = SHAPES[name]
    pattern, (kernel, moments, _) = Blocks(block, shape), problem(0, shape, 200)
    gram = _solve.damped((moments[0] + moments[1]).gram)
    own = _solve.RefitProblem(kernel, moments, pattern)
    np.testing.assert_allclose(own.back(own.full), kernel, atol=1e-9)
    assert sorted(np.concatenate(pattern.lines)) == [*range(kernel.shape[1])]
    for line in (pattern.lines[0], pattern.lines[-1]):
        dropped = np.zeros(kernel.shape)
        dropped[-1, line, : block.cols] = kernel[-1, line, : block.cols]
        cost = float(np.sum(dropped * (gram @ dropped)))
        score = np.sum(own.full[-1, line, : block.cols] ** 2)
        np.testing.assert_allclose(score, cost, rtol=1e-9)


@pytest.mark.parametrize("name", SHAPES)
def test_obs_on_blocks(name, monkeypatch):
    monkeypatch.setattr(_solve, "EXTRA", (0.0,))
    block, shape = SHAPES[name]
    pattern, (kernel, moments, _) = Blocks(block, shape), problem(0, shape, 200)
    count = block_unit(block, shape) * (1 if block.regular else 4)
    found, mask = _solve.obs(kernel, count, pattern, *moments)
    assert mask.sum() == count
    canonical = mask.reshape(shape)
    if block.regular:
        taps = tuple(range(2, len(shape) - 2))
        assert (canonical == canonical.max(axis=taps, keepdims=True)).all()
        for lines in (mask.any(axis=1), mask.any(axis=2)):
            assert lines.all()  # no input and no output is dead
    else:
        whole = canonical.reshape(2, 4, 2, 3, 4)
        assert (whole == whole.max(axis=(2, 4), keepdims=True)).all()
    np.testing.assert_allclose(
        found, least_squares(kernel, mask, moments, 0.0), atol=1e-4
    )
    assert pattern.largest(np.abs(kernel), count).sum() == count


@pytest.mark.parametrize(
    "block", [Block(2, 2, regular=True), Block(2, 2)], ids=["regular", "free"]
)
def test_obs_on_blocks_loses_less_than_magnitudes_with_a_refit(block):
    pattern, lost = Blocks(block, (1, 1, 16, 16)), np.zeros(2)
    for seed in range(4):
        kernel, moments, fresh = problem(seed, (1, 1, 16, 16), 200)
        for which, found in enumerate(
            (
                _solve.obs(kernel, 96, pattern, *moments)[0],
                by_magnitude(kernel, 96, moments, pattern),
            )
        ):
            lost[which] += _solve.relative_error(found, kernel, fresh)
    assert lost[0] < 0.9 * lost[1]


def test_n_by_m_keeps_the_largest_of_each_group_and_no_more_where_entries_are_equal():
    pattern, (kernel, _, _) = Entries(NByM(2, 8)), problem(0, (1, 1, 16, 5))
    scores = np.abs(kernel)
    ranks = np.argsort(
        np.argsort(-scores.reshape(1, 2, 8, 5), axis=2), axis=2
    ).reshape(1, 16, 5)
    np.testing.assert_array_equal(pattern.largest(scores, 20), ranks < 2)
    few = pattern.largest(scores, 15)
    assert few.sum() == 15
    assert not (few & (ranks >= 2)).any()
    equal = pattern.largest(np.ones((1, 16, 5)), 20)
    assert (equal.reshape(2, 8, 5).sum(axis=1) == 2).all()


@pytest.mark.parametrize(
    "shape", [(1, 1, 12, 5), (1, 1, 3, 8, 6), (2, 1, 8, 4)]
)
@pytest.mark.parametrize("group", [1, 4])
def test_whole_inputs_that_go_are_nearly_the_best_to_go(
    shape, group, monkeypatch
):
    monkeypatch.setattr(_solve, "EXTRA", (0.0,))
    pattern = Blocks(Block(group, shape[-1]), shape, few=False)
    kernel, moments, _ = problem(0, shape, 200)
    unit = group * shape[-1] * int(np.prod(shape[2:-2]))
    lost = []
    for matrix in range(shape[0]):
        for start in range(0, shape[-2], group):
            live = np.ones(shape, bool)
            live[matrix, ..., start : start + group, :] = False
            lost.append(loss(kernel, live.reshape(kernel.shape), moments))
    found, mask = _solve.obs(kernel, kernel.size - unit, pattern, *moments)
    assert loss(kernel, mask, moments) <= 1.2 * min(lost)
    found, mask = _solve.obs(kernel, 2 * unit, pattern, *moments)
    assert mask.sum() == 2 * unit
    groups = mask.reshape(*shape[:-2], -1, group, shape[-1])
    assert (
        groups
        == groups.max(axis=(*range(2, len(shape) - 2), -2, -1), keepdims=True)
    ).all()
    np.testing.assert_allclose(
        found, least_squares(kernel, mask, moments, 0.0), atol=1e-4
    )


def test_errors_are_those_on_rows_that_are_held_out():
    keras.utils.set_random_seed(0)
    dense = keras.Sequential(
        [keras.Input((48,)), L.Dense(16, use_bias=False, name="a")]
    )
    x, fresh = (
        np.random.default_rng(0).normal(size=(32, 48)),
        np.random.default_rng(1).normal(size=(2000, 48)),
    )
    kernel = array(dense.layers[0].kernel)
    found = kso.sensitivity(dense, x, densities=(0.3,)).errors["a/kernel"][0.3]
    # The network that OBS makes of these rows with so many entries, on others.
    pruned = kso.prune(dense, 0.3, score="obs", data=x, budget="uniform")
    lost = fresh @ (kso.prunable_weights(pruned)[0].value - kernel)
    assert found > 0.7 * np.sum(lost**2) / np.sum((fresh @ kernel) ** 2)
