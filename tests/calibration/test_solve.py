"""Refits are least squares on each support, masks have their counts, rows are what layers see."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import Block, NByM
from keras_sparse_ortho.calibration import _layerwise, _shares, _solve
from keras_sparse_ortho.calibration._layerwise import GramStop, as_matrices, rows_of
from keras_sparse_ortho.calibration._solve import Entries, RegularPattern, WholeInputs
from tests.helpers import array

L = keras.layers

# Blocks, and canonical shapes: square, two taps, a padded side, two matrices.
SHAPES = {
    "square": (Block(2, 3, regular=True), (1, 1, 12, 12)),
    "taps": (Block(4, 2, regular=True), (1, 1, 2, 8, 8)),
    "padded": (Block(3, 2, regular=True), (1, 1, 35, 24)),
    "matrices": (Block(2, 2, regular=True), (2, 1, 8, 8)),
}


def problem(seed, shape=(2, 1, 24, 5), rows=60):
    """A kernel and the Gram matrices of correlated inputs, as those of trained layers."""
    rng = np.random.default_rng(seed)
    batch, parts, *taps, inputs, outputs = shape
    k = int(np.prod(taps)) * inputs
    x = rng.normal(size=(batch * parts, rows, k)) * (np.arange(k) + 1.0) ** -0.7
    x = x @ rng.normal(size=(k, k))
    return rng.normal(size=(batch * parts, k, outputs)), np.swapaxes(x, 1, 2) @ x


def loss(found, kernel, gram):
    left = found - kernel
    return float(np.sum(left * (_solve.damped(gram) @ left)))


def precision(pattern, gram):
    return pattern.precision(np.linalg.inv(_solve.damped(gram)))


@pytest.mark.parametrize("rows", [10, 500], ids=["few rows", "many rows"])
def test_a_refit_solves_the_normal_equations_of_each_output(rows):
    for seed in range(3):
        kernel, gram = problem(seed, rows=rows)
        mask = np.random.default_rng(seed).random(kernel.shape) < 0.4
        mask[0, :, 0] = False  # an output without live entries
        found = _solve.refit(kernel, mask, gram)
        assert not found[~mask].any()
        for m, o in np.ndindex(len(kernel), kernel.shape[-1]):
            h = gram[m] + 0.01 * np.diag(gram[m]).mean() * np.eye(len(gram[m]))
            live = mask[m, :, o]
            expected = np.linalg.solve(h[np.ix_(live, live)], (h @ kernel[m])[live, o])
            np.testing.assert_allclose(found[m, live, o], expected, atol=1e-6)
        assert loss(found, kernel, gram) <= loss(kernel * mask, kernel, gram)
    # Refits of all entries, or on unused inputs, change nothing.
    np.testing.assert_allclose(_solve.refit(kernel, np.ones_like(mask), gram), kernel, atol=1e-12)
    unused = _solve.refit(kernel, mask, np.zeros_like(gram))
    np.testing.assert_allclose(unused, kernel * mask, atol=1e-12)


@pytest.mark.parametrize("structure", [None, NByM(2, 4)])
@pytest.mark.parametrize("count", [1, 23, 97, 120])
def test_obs_has_the_exact_count_and_the_values_of_a_refit(count, structure):
    kernel, gram = problem(1)
    found, mask = _solve.obs(kernel, count, gram, Entries(structure))
    assert mask.sum() == count
    assert not found[~mask].any()
    if structure is not None:
        assert mask.reshape(2, 6, 4, 5).sum(axis=2).max() <= 2
    np.testing.assert_allclose(found, _solve.refit(kernel, mask, gram), atol=1e-6)


@pytest.mark.parametrize("structure", [None, NByM(2, 4)])
def test_obs_loses_less_than_wanda_and_that_less_than_magnitudes_with_refits(structure):
    pattern = Entries(structure)
    errors = dict.fromkeys(("obs", "wanda", "magnitude", "masked"), 0.0)
    for seed in range(5):
        kernel, gram = problem(seed)
        count = kernel.size // (2 if structure else 5)
        masks = {
            "wanda": pattern.largest(_solve.wanda(kernel, gram), count),
            "magnitude": pattern.largest(np.abs(kernel), count),
        }
        errors["obs"] += loss(_solve.obs(kernel, count, gram, pattern)[0], kernel, gram)
        for name, mask in masks.items():
            errors[name] += loss(_solve.refit(kernel, mask, gram), kernel, gram)
        errors["masked"] += loss(kernel * masks["magnitude"], kernel, gram)
    assert errors["obs"] < min(errors["wanda"], errors["magnitude"])
    assert max(errors["wanda"], errors["magnitude"]) < errors["masked"]
    assert structure is not None or errors["wanda"] < errors["magnitude"]


def test_wanda_scores():
    kernel = np.array([[[1.0, -2.0], [3.0, 0.5]]])
    scores = _solve.wanda(kernel, np.array([[[4.0, 1.0], [1.0, 9.0]]]))
    np.testing.assert_allclose(scores, [[[2.0, 4.0], [9.0, 1.5]]])


@pytest.mark.parametrize("structure", [None, NByM(2, 4)])
def test_exchanges_lower_the_error_at_the_same_count(structure, monkeypatch):
    lost = np.zeros((4, 2))
    for seed in range(4):
        kernel, gram = problem(seed)
        count = kernel.size // (2 if structure else 4)
        for k, most in enumerate((12, 0)):
            monkeypatch.setattr(_solve, "EXCHANGES", most)
            found, mask = _solve.obs(kernel, count, gram, Entries(structure))
            assert mask.sum() == count
            lost[seed, k] = loss(found, kernel, gram)
    ratios = lost[:, 0] / lost[:, 1]
    assert ratios.max() <= 1 + 1e-9  # never above
    assert ratios.mean() < 0.97


@pytest.mark.parametrize("name", SHAPES)
def test_costs_of_a_block_are_what_dropping_it_costs_when_all_others_make_up(name):
    block, shape = SHAPES[name]
    pattern, (kernel, gram) = RegularPattern(block, shape), problem(0, shape, 200)
    costs = pattern.costs(kernel, precision(pattern, gram))
    dead = np.zeros(shape, bool)
    dead[-1, -1, ..., : block.rows, : block.cols] = True  # at all taps
    dead = dead.reshape(kernel.shape)
    expected = loss(_solve.refit(kernel, ~dead, gram), kernel, gram)
    np.testing.assert_allclose(costs[dead].sum(), expected, rtol=1e-6)


@pytest.mark.parametrize("name", SHAPES)
def test_obs_on_regular_blocks(name):
    block, shape = SHAPES[name]
    pattern, (kernel, gram) = RegularPattern(block, shape), problem(0, shape, 200)
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
        kernel, gram = problem(seed, shape, 200)
        mask = pattern.largest(np.abs(kernel), 96)
        lost[0] += loss(_solve.obs(kernel, 96, gram, pattern)[0], kernel, gram)
        lost[1] += loss(_solve.refit(kernel, mask, gram), kernel, gram)
    assert lost[0] < 0.9 * lost[1]


def test_early_rounds_of_n_by_m_take_the_largest_of_each_group_and_the_last_no_more_than_n():
    pattern, (kernel, gram) = Entries(NByM(2, 8)), problem(0, (1, 1, 16, 5), 200)
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
    costs = Entries().costs(kernel, precision(Entries(), gram))
    at_once = _solve.refit(kernel, pattern.largest(costs, 20), gram)
    assert loss(found, kernel, gram) < loss(at_once, kernel, gram)


@pytest.mark.parametrize("shape", [(1, 1, 12, 5), (1, 1, 3, 8, 6), (2, 1, 8, 4)])
@pytest.mark.parametrize("group", [1, 4])
def test_whole_inputs_go_that_cost_least_when_all_others_make_up(shape, group):
    pattern = WholeInputs(Block(group, shape[-1], regular=True), shape)
    kernel, gram = problem(0, shape, 200)
    unit = group * shape[-1] * int(np.prod(shape[2:-2]))
    costs = pattern.costs(kernel, precision(pattern, gram))
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


# --- the rows of layers ---------------------------------------------------------------------------

LAYERS = {
    "dense": (L.Dense(7), (5, 6)),
    "even taps": (L.Conv2D(4, (4, 2), strides=(3, 1), padding="same"), (9, 8, 3)),
    "same dilation": (L.Conv2D(4, 3, dilation_rate=(2, 1), padding="same"), (9, 8, 3)),
    "causal": (L.Conv1D(4, 3, padding="causal", dilation_rate=2), (9, 3)),
    "groups": (L.Conv1D(4, 4, strides=3, padding="same", groups=2), (11, 6)),
    "three axes": (L.Conv3D(4, (2, 3, 1), strides=(1, 2, 1), padding="same"), (4, 5, 3, 2)),
    "depthwise": (L.DepthwiseConv2D(3, depth_multiplier=2, padding="same"), (6, 5, 3)),
    "depthwise strides": (L.DepthwiseConv1D(3, strides=2), (7, 3)),
    "heads": (L.EinsumDense("abc,cde->abde", (None, 2, 4)), (5, 6)),
    "from heads": (L.EinsumDense("abcd,cde->abe", (None, 6)), (5, 2, 4)),
    "ellipsis": (L.EinsumDense("...x,xy->...y", 5), (2, 6)),
    "many matrices": (L.EinsumDense("abc,bcd->abd", (5, 6)), (5, 4)),
    "summed": (L.EinsumDense("abc,cd->ad", (6,)), (5, 4)),
}


def last_kernel(layer, shape):
    model = keras.Sequential([keras.Input(shape), layer])
    return kso.prunable_weights(model)[-1]


def moments(weight, *inputs):
    found = []
    stop = GramStop(weight, rows_of(weight), lambda *sums: found.extend(sums))
    stop.add(*(keras.ops.convert_to_tensor(x) for x in inputs))
    stop.finish()
    return found[:2]


@pytest.mark.core
@pytest.mark.parametrize("name", LAYERS)
def test_rows_times_matrices_are_the_layers_call(name):
    layer, shape = LAYERS[name]
    weight = last_kernel(layer, shape)
    x = np.random.default_rng(0).normal(size=(3, *shape)).astype("float32")
    matrices, rows = (
        as_matrices(weight.raw_value(), weight.layout),
        rows_of(weight)(x.astype("float64")),
    )
    # Each matrix gives some of the outputs at every position.
    found = np.moveaxis(rows @ matrices, 0, 1)
    expected = array(layer(x))
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5)
    gram, _ = moments(weight, x)
    np.testing.assert_allclose(gram, np.swapaxes(rows, 1, 2) @ rows, atol=1e-9)


@pytest.mark.jax_only  # TensorFlow has no such convolution on the CPU
def test_channels_first():
    layer = L.Conv2D(4, 3, strides=2, padding="same", data_format="channels_first")
    weight = last_kernel(layer, (3, 9, 8))
    x = np.random.default_rng(0).normal(size=(2, 3, 9, 8)).astype("float32")
    found = rows_of(weight)(x) @ as_matrices(weight.raw_value(), weight.layout)
    expected = np.moveaxis(array(layer(x)), 1, -1)
    np.testing.assert_allclose(found.reshape(expected.shape), expected, atol=1e-5)


def test_large_inputs_are_summed_in_pieces(monkeypatch):
    monkeypatch.setattr(_layerwise, "_CHUNK", 1000)
    x = np.random.default_rng(0).normal(size=(6, 9, 8, 3)).astype("float32")
    given = x + np.random.default_rng(1).normal(size=x.shape).astype("float32")
    for weight in (last_kernel(L.Conv2D(4, 3), (9, 8, 3)), last_kernel(L.Dense(2), (9, 8, 3))):
        rows, wanted = (rows_of(weight)(inputs.astype("float64")) for inputs in (x, given))
        gram, across = moments(weight, x, given)
        turned = np.swapaxes(rows, 1, 2)
        np.testing.assert_allclose(gram, turned @ rows, rtol=1e-12)
        np.testing.assert_allclose(across, turned @ (wanted - rows), atol=1e-9)


class Doubled(L.Dense):
    def call(self, inputs):
        return super().call(2.0 * inputs)


class Named(L.Dense):
    pass


@pytest.mark.parametrize(
    ("layer", "shape"),
    [(Doubled(3), (4,)), (L.Conv1DTranspose(3, 2), (4, 2)), (L.SeparableConv1D(5, 3), (9, 3))],
    ids=["own call", "transposed", "separable"],
)
def test_kernels_whose_rows_are_not_known(layer, shape):
    assert rows_of(last_kernel(layer, shape)) is None


def test_kernels_that_are_summed_alone_have_no_rows():
    weight = last_kernel(L.EinsumDense("ab,bc->ac", (3,)), (4,))
    assert rows_of(weight) is not None
    weight.owner.equation = "ab,bcd->ac"  # Keras builds no such kernel
    assert rows_of(weight) is None
    assert rows_of(last_kernel(Named(3), (4,))) is not None


def test_budgets_by_error_are_judged_on_rows_that_are_held_out(monkeypatch):
    curves = {}
    by_error = _shares._by_error

    def noted(found, *rest):
        curves.update(found)
        return by_error(found, *rest)

    monkeypatch.setattr(_shares, "_by_error", noted)
    keras.utils.set_random_seed(0)
    dense = keras.Sequential([keras.Input((48,)), L.Dense(16, use_bias=False, name="a")])
    x, fresh = (
        np.random.default_rng(0).normal(size=(32, 48)),
        np.random.default_rng(1).normal(size=(2000, 48)),
    )
    kso.prune(dense, 0.3, score="obs", data=x, budget="error")
    counts, errors = curves["a/kernel"]
    kernel = array(dense.layers[0].kernel)
    at = int(np.argmin(np.abs(counts - 0.3 * kernel.size)))
    # The network that OBS makes of these rows with so many entries, on others.
    pruned = kso.prune(dense, counts[at] / kernel.size, score="obs", data=x, budget="uniform")
    lost = fresh @ (kso.prunable_weights(pruned)[0].value - kernel)
    error = np.sum(lost**2) / np.sum((fresh @ kernel) ** 2)
    assert errors[at] > 0.7 * error
    assert errors[-1] == 0
