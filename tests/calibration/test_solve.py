"""Refits are least squares on each support; masks have their exact counts; OBS beats magnitudes."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho import NByM
from keras_sparse_ortho._backend import float64_operations
from keras_sparse_ortho.calibration import _solve
from keras_sparse_ortho.calibration._patterns import Entries
from tests.helpers import array

pytestmark = pytest.mark.core


def problem(seed, inputs=24, outputs=5, matrices=2, rows=60):
    """Correlated inputs, as those of trained layers; kernel, mask and Gram matrices."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(matrices, rows, inputs)) * (np.arange(inputs) + 1.0) ** -0.7
    x = x @ rng.normal(size=(inputs, inputs))
    kernel = rng.normal(size=(matrices, inputs, outputs))
    mask = rng.random(kernel.shape) < 0.4
    mask[0, :, 0] = False  # an output without live entries
    return kernel, mask, np.swapaxes(x, 1, 2) @ x


def loss(found, kernel, gram):
    left = found - kernel
    return float(np.sum(left * (_solve.damped(gram) @ left)))


@pytest.mark.parametrize("rows", [10, 500], ids=["few rows", "many rows"])
@pytest.mark.parametrize("seed", range(3))
def test_a_refit_solves_the_normal_equations_of_each_output(seed, rows):
    kernel, mask, gram = problem(seed, rows=rows)
    found = _solve.refit(kernel, mask, gram)
    assert not found[~mask].any()
    for m, o in np.ndindex(len(kernel), kernel.shape[-1]):
        h = gram[m] + 0.01 * np.diag(gram[m]).mean() * np.eye(len(gram[m]))
        live = mask[m, :, o]
        expected = np.linalg.solve(h[np.ix_(live, live)], (h @ kernel[m])[live, o])
        np.testing.assert_allclose(found[m, live, o], expected, atol=1e-6)
    assert loss(found, kernel, gram) <= loss(kernel * mask, kernel, gram)


def test_a_refit_of_all_entries_or_of_unused_inputs_changes_nothing():
    kernel, mask, gram = problem(0)
    np.testing.assert_allclose(_solve.refit(kernel, np.ones_like(mask), gram), kernel, atol=1e-12)
    zero = np.zeros_like(gram)
    np.testing.assert_allclose(_solve.refit(kernel, mask, zero), kernel * mask, atol=1e-12)


@pytest.mark.parametrize("count", [1, 23, 97, 239])
def test_obs_has_the_exact_count_and_the_values_of_a_refit(count):
    kernel, _, gram = problem(1)
    found, mask = _solve.obs(kernel, count, gram, Entries())
    assert mask.sum() == count
    assert not found[~mask].any()
    np.testing.assert_allclose(found, _solve.refit(kernel, mask, gram), atol=1e-6)


def test_obs_loses_less_than_wanda_and_that_less_than_magnitudes_with_refits():
    errors = {"obs": 0.0, "wanda": 0.0, "magnitude": 0.0, "masked": 0.0}
    for seed in range(5):
        kernel, _, gram = problem(seed)
        count = kernel.size // 5
        masks = {
            "wanda": Entries().largest(_solve.wanda(kernel, gram), count),
            "magnitude": Entries().largest(np.abs(kernel), count),
        }
        errors["obs"] += loss(_solve.obs(kernel, count, gram, Entries())[0], kernel, gram)
        for name, mask in masks.items():
            errors[name] += loss(_solve.refit(kernel, mask, gram), kernel, gram)
        errors["masked"] += loss(kernel * masks["magnitude"], kernel, gram)
    assert errors["obs"] < errors["wanda"] < errors["magnitude"] < errors["masked"]


@pytest.mark.parametrize("density", [0.5, 0.3])
def test_n_by_m(density):
    kernel, _, gram = problem(2)
    count = round(density * kernel.size)
    found, mask = _solve.obs(kernel, count, gram, Entries(NByM(2, 4)))
    wanda = Entries(NByM(2, 4)).largest(_solve.wanda(kernel, gram), count)
    for own in (mask, wanda):
        assert own.sum() == count
        assert own.reshape(2, 6, 4, 5).sum(axis=2).max() <= 2
    assert loss(found, kernel, gram) < loss(_solve.refit(kernel, wanda, gram), kernel, gram)


def test_wanda_scores():
    kernel = np.array([[[1.0, -2.0], [3.0, 0.5]]])
    scores = _solve.wanda(kernel, np.array([[[4.0, 1.0], [1.0, 9.0]]]))
    np.testing.assert_allclose(scores, [[[2.0, 4.0], [9.0, 1.5]]])


def test_tensors_of_an_accelerator_give_what_numpy_gives():
    kernel, mask, gram = problem(3)
    with float64_operations():
        tensor = keras.ops.convert_to_tensor(gram, dtype="float64")
    for one, two in ((gram, tensor),):
        np.testing.assert_allclose(
            _solve.refit(kernel, mask, one), _solve.refit(kernel, mask, two), atol=1e-9
        )
        obs, on_tensor = (_solve.obs(kernel, 40, g, Entries()) for g in (one, two))
        np.testing.assert_array_equal(obs[1], on_tensor[1])
        np.testing.assert_allclose(obs[0], on_tensor[0], atol=1e-9)
        np.testing.assert_allclose(_solve.wanda(kernel, one), _solve.wanda(kernel, two))
        errors = [_solve.relative_error(kernel * mask, kernel, g) for g in (one, two)]
        assert errors[0] == pytest.approx(errors[1], rel=1e-9)
    assert array(tensor).dtype == np.float64


@pytest.mark.parametrize("structure", [None, NByM(2, 4)])
def test_exchanges_lower_the_error_at_the_same_count(structure, monkeypatch):
    pattern, ratios = Entries(structure), []
    for seed in range(4):
        kernel, _, gram = problem(seed)
        count = kernel.size // (2 if structure else 4)
        found, mask = _solve.obs(kernel, count, gram, pattern)
        assert mask.sum() == count
        if structure is not None:
            assert (mask.reshape(*mask.shape[:1], -1, 4, mask.shape[-1]).sum(axis=2) == 2).all()
        np.testing.assert_allclose(found, _solve.refit(kernel, mask, gram), atol=1e-6)
        monkeypatch.setattr(_solve, "EXCHANGES", 0)
        without, _ = _solve.obs(kernel, count, gram, pattern)
        monkeypatch.undo()
        ratios.append(loss(found, kernel, gram) / loss(without, kernel, gram))
    assert max(ratios) <= 1 + 1e-9  # never above
    assert np.mean(ratios) < 0.97
