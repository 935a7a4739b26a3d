"""Outputs that stay zero: budgets avoid them, `sparsify` warns of them, the report counts them."""

import csv

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.orthogonal import Block
from tests.helpers import data

L = keras.layers
pytestmark = pytest.mark.core


def widening():
    layers = [
        L.Dense(64, "relu", name="a"),
        L.Dense(128, "relu", name="b"),
        L.Dense(8, name="head"),
    ]
    return keras.Sequential([keras.Input((16,)), *layers])


def dead(model):
    return {row.path: row.dead_outputs for row in kso.report(model).rows}


@pytest.mark.parametrize("budget", ["erk", "er", "uniform"])
def test_nothing_is_dead_where_the_count_allows(budget):
    least = (64 + 128 + 8) / (1024 + 8192 + 1024)
    model = kso.sparsify(widening(), least, budget, seed=0)
    assert dead(model) == {"a/kernel": 0, "b/kernel": 0, "head/kernel": 0}
    assert [row.live for row in kso.report(model).rows] == [64, 128, 8]
    assert "dead" not in str(kso.report(model))


def test_what_stays_dead_is_named_counted_and_never_wakes(tmp_path):
    with pytest.warns(
        UserWarning, match=r"stay dead under ReLU.*Received: .*'b/kernel'"
    ) as told:
        model = kso.sparsify(widening(), 0.015, seed=0)
    [warning] = [w for w in told if w.category is UserWarning]  # not Keras' own
    assert warning.filename == __file__
    before = dead(model)
    assert sum(before.values()) == 64 + 128 + 8 - round(0.015 * 10240)
    for path, count in before.items():
        assert (f"{count} of '{path}'" in str(warning.message)) == (count > 0)
    assert "dead" in str(kso.report(model))
    kso.report(model).to_csv(tmp_path / "report.csv")
    with (tmp_path / "report.csv").open(newline="") as stream:
        assert [
            int(line["dead_outputs"]) for line in csv.DictReader(stream)
        ] == [*before.values()]
    model.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    model.fit(*data(model, 8, count=64), epochs=2, verbose=0)
    assert all(dead(model)[path] >= count for path, count in before.items())


def test_a_budget_of_ones_own_is_kept_and_the_dead_are_named():
    own = kso.Budget(
        {"a/kernel": 48 / 1024, "b/kernel": 0.1, "head/kernel": 0.2}
    )
    with pytest.warns(
        UserWarning, match=r"budgets\.lift.*Received: 16 of 'a/kernel'$"
    ):
        model = kso.sparsify(widening(), budget=own, seed=0)
    assert kso.report(model).rows[0].live == 48
    lifted = kso.budgets.lift(widening(), own)
    assert lifted.lifted_from == {"a/kernel": 48}
    assert set(
        dead(kso.sparsify(widening(), budget=lifted, seed=0)).values()
    ) == {0}


def test_the_published_start_is_not_lifted():
    pattern = ExactOrthogonal(start="published")
    with pytest.warns(
        UserWarning, match=r'start="published" leaves them empty'
    ):
        model = kso.sparsify(widening(), 0.02, "uniform", pattern, seed=0)
    assert [row.live for row in kso.report(model).rows] == [21, 164, 20]
    assert dead(model)["a/kernel"] >= 44


def test_structures_and_scored_budgets_cover_too():
    sparse = kso.sparsify(widening(), 0.05, structure=Block(1, 4), seed=0)
    assert set(dead(sparse).values()) == {0}
    scored = kso.saliency.magnitude(widening(), 0.025, on_collapse="ignore")
    budget = scored.orthogonal_budget
    assert budget.counts["a/kernel"] >= 64
    assert budget.counts["b/kernel"] >= 128
    assert set(
        dead(kso.sparsify(widening(), budget=budget, seed=0)).values()
    ) == {0}


def test_outputs_of_every_layout_are_counted():
    inputs = keras.Input((6, 8))
    x = L.MultiHeadAttention(2, 4, use_bias=False, name="mha")(inputs, inputs)
    x = L.DepthwiseConv1D(
        3, depth_multiplier=2, use_bias=False, name="depthwise"
    )(x)
    model = keras.Model(inputs, L.GRU(4, use_bias=False, name="gru")(x))
    assert set(dead(model).values()) == {0}
    zeros = {
        "mha/query/kernel": np.s_[:, 1, 2],
        "mha/attention_output/kernel": np.s_[..., :3],
        "depthwise/kernel": np.s_[:, 5, 1],
        "gru/gru_cell/kernel": np.s_[:, [0, 11]],
    }
    for weight in kso.prunable_weights(model):
        if weight.path in zeros:
            value = weight.raw_value()
            value[zeros[weight.path]] = 0
            weight.variable.assign(value)
    found = {path: count for path, count in dead(model).items() if count}
    assert found == dict(zip(zeros, (1, 3, 1, 2), strict=True))
