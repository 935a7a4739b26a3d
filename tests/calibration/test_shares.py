"""Densities by measured errors and by outliers: exact totals, more where more is lost."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError
from tests.helpers import array
from tests.pruning.checks import assert_same

L = keras.layers


def network():
    """A narrow layer that everything goes through, and a wide one with little in it."""
    keras.utils.set_random_seed(0)
    layers = [L.Dense(12, name="narrow"), L.Dense(96, name="wide"), L.Dense(6, name="head")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    kernel, bias = model.get_layer("head").get_weights()
    kernel[:9] *= 20.0
    model.get_layer("head").set_weights([kernel, bias])
    return model


def rows():
    return np.random.default_rng(0).normal(size=(100, 8)).astype("float32")


@pytest.mark.core
@pytest.mark.parametrize("density", [0.35, 0.123])
def test_totals_are_exact_and_the_model_stays(density):
    dense, x = network(), rows()
    before = dense.get_weights()
    pruned = kso.prune(dense, density, score="obs", data=x, budget="error")
    live = {weight.path: weight.live for weight in kso.prunable_weights(pruned)}
    assert sum(live.values()) == round(density * (96 + 12 * 96 + 96 * 6))
    assert_same(before, dense.get_weights())


def test_shares_by_error_lose_less_than_one_density():
    dense, x = network(), rows()
    lost = [
        float(np.mean((array(kso.prune(dense, 0.2, data=x, **options)(x)) - array(dense(x))) ** 2))
        for options in (
            {"score": "obs", "budget": "error"},
            {"score": "obs"},
            {"budget": "error"},
            {"budget": "uniform"},
        )
    ]
    assert lost[0] < 0.8 * lost[1]
    assert lost[2] < 0.8 * lost[3]


def test_an_embedding_gets_what_its_tokens_are_worth():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,), dtype="int32")
    dense = keras.Model(inputs, L.Dense(4, name="head")(L.Embedding(50, 8, name="words")(inputs)))
    tokens = np.random.default_rng(0).integers(0, 5, (64, 5))  # five of fifty words
    pruned = kso.prune(dense, 0.25, score="obs", data=tokens, budget="error")
    words, head = kso.prunable_weights(pruned)
    assert words.live + head.live == round(0.25 * (400 + 32))
    assert words.mask[:5].mean() > 0.9 > 0.2 > words.mask[5:].mean()


def test_refusals():
    dense = network()
    for options in ({}, {"score": "random"}):
        with pytest.raises(BudgetError, match=r"budget of prune, with `data`.*budget='error'"):
            kso.prune(dense, 0.2, budget="error", **options)
    with pytest.raises(kso.errors.DensityError):
        kso.prune(dense, score="obs", data=rows(), budget="error")


def test_too_few_rows_to_hold_any_out_are_used_as_they_are():
    with pytest.warns(UserWarning, match="3 different among 3 rows"):
        pruned = kso.prune(network(), 0.5, score="obs", data=rows()[:3], budget="error")
    assert sum(w.live for w in kso.prunable_weights(pruned)) == 912
