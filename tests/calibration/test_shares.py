"""Densities by measured errors and by outliers: exact totals, more where more is lost."""

import dataclasses

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import calibration
from keras_sparse_ortho.errors import BudgetError
from tests.helpers import array, assert_same

L = keras.layers


def network():
    """A narrow layer that everything goes through, and a wide one with little in it."""
    keras.utils.set_random_seed(0)
    layers = [
        L.Dense(12, name="narrow"),
        L.Dense(96, name="wide"),
        L.Dense(6, name="head"),
    ]
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
        float(
            np.mean(
                (
                    array(kso.prune(dense, 0.2, data=x, **options)(x))
                    - array(dense(x))
                )
                ** 2
            )
        )
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
    dense = keras.Model(
        inputs,
        L.Dense(4, name="head")(L.Embedding(50, 8, name="words")(inputs)),
    )
    # Five of fifty words.
    tokens = np.random.default_rng(0).integers(0, 5, (64, 5))
    pruned = kso.prune(dense, 0.25, score="obs", data=tokens, budget="error")
    words, head = kso.prunable_weights(pruned)
    assert words.live + head.live == round(0.25 * (400 + 32))
    assert words.mask[:5].mean() > 0.9 > 0.2 > words.mask[5:].mean()


def test_refusals():
    dense = network()
    for options in ({}, {"score": "random"}):
        with pytest.raises(
            BudgetError, match=r"budget of prune, with `data`.*budget='error'"
        ):
            kso.prune(dense, 0.2, budget="error", **options)
    with pytest.raises(kso.errors.DensityError):
        kso.prune(dense, score="obs", data=rows(), budget="error")


def test_too_few_rows_to_hold_any_out_are_used_as_they_are():
    with pytest.warns(UserWarning, match="3 different among 3 rows"):
        pruned = kso.prune(
            network(), 0.5, score="obs", data=rows()[:3], budget="error"
        )
    assert sum(w.live for w in kso.prunable_weights(pruned)) == 912


@pytest.mark.core
def test_sensitivity_has_errors_of_layers_and_predicts_that_of_the_model():
    dense, x = network(), rows()
    before = dense.get_weights()
    table = kso.sensitivity(dense, x, densities=(0.5, 0.2))
    assert_same(before, dense.get_weights())
    assert (
        [*table.errors]
        == [*table.gains]
        == ["narrow/kernel", "wide/kernel", "head/kernel"]
    )
    # The first layer, on the rows that are held out.
    held, kernel = x[3::4], before[0]
    scale = np.abs(kernel).max(axis=0) / 7
    lost = held @ (np.rint(kernel / scale) * scale - kernel)
    error = table.errors["narrow/kernel"]
    assert error["int4"] == pytest.approx(
        np.sum(lost**2) / np.sum((held @ kernel) ** 2), rel=1e-3
    )
    assert error[0.2] > error[0.5] > error["int4"] > error["int8"] > 0
    # All layers are linear, without biases: this error goes through those behind.
    for name in ("wide", "head"):
        lost = lost @ array(dense.get_layer(name).kernel)
    whole = np.sum(array(dense(held)) ** 2)
    gain = np.sum(lost**2) / whole / error["int4"]
    assert table.gains["narrow/kernel"] == pytest.approx(gain, rel=1e-3)
    assert table.gains["head/kernel"] == pytest.approx(1.0, rel=1e-3)
    middle = (error[0.5] + error[0.2]) / 2
    assert table.predicted({"narrow/kernel": 0.35}) == pytest.approx(
        gain * middle, rel=1e-3
    )


def test_sensitivity_is_a_budget_with_gains_and_prints_and_draws():
    dense, x = network(), rows()
    density = 0.25
    measured = calibration.densities_around(density)
    table = kso.sensitivity(dense, x, densities=measured)
    found = [
        kso.prune(dense, density, score="obs", data=x, budget=b)
        for b in ("error", table)
    ]
    assert_same(*(model.get_weights() for model in found))
    scheduled = kso.parametrize(dense, kso.MagnitudeMask, density, table)
    assert [
        w.parametrization.schedule.density
        for w in kso.prunable_weights(scheduled)
    ] == [w.density for w in kso.prunable_weights(found[0])]
    assert all(word in str(table) for word in ("wide/kernel", "int4", "gain"))
    lines = table.plot().lines
    assert [line.get_label() for line in lines] == [*table.errors]
    assert sorted(measured) == [*lines[0].get_xdata()]
    marks = [mark.get_text() for mark in lines[0].axes.get_xticklabels()]
    assert marks == [f"{density:g}" for density in sorted(measured)]
    # Gains count: what a layer loses that nothing is left of costs nothing.
    free = dataclasses.replace(table, gains=table.gains | {"wide/kernel": 0.0})
    live = {
        w.path: w.live
        for w in kso.prunable_weights(kso.prune(dense, 0.6, budget=free))
    }
    assert live["wide/kernel"] == round(0.6 * 1824) - 96 - 576
    some = kso.sensitivity(dense, x, include="wide")
    with pytest.raises(
        BudgetError, match=r"'narrow/kernel' were not measured.*Received"
    ):
        kso.prune(dense, density, score="obs", data=x, budget=some)
    with pytest.raises(BudgetError, match=r"`budget` must be one of"):
        kso.sparsify(dense, density, budget=table)
