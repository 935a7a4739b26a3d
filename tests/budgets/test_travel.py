"""Budgets that move between methods: STR's published ones, and those lifted for EOI."""

import csv
import importlib.resources

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import budgets
from keras_sparse_ortho.errors import BudgetError
from keras_sparse_ortho.orthogonal import covering_count, least_count

pytestmark = pytest.mark.numpy_only

L = keras.layers


@pytest.fixture(scope="module")
def resnet50():
    keras.backend.clear_session()
    return kso.prunable_weights(
        keras.applications.ResNet50(weights=None), flops=True
    )


def table():
    path = importlib.resources.files(budgets).joinpath(
        "data", "str_resnet50.csv"
    )
    with path.open(newline="") as stream:
        return list(csv.DictReader(stream))


def test_layers_are_those_of_keras_in_name_shape_and_flops(resnet50):
    """Sizes agree in every layer; FLOPs too, but where v1 and v1.5 have their stride elsewhere."""
    budget = budgets.str_resnet50(0.0977)
    assert set(budget) == {weight.path for weight in resnet50}
    fitted = budget.for_weights(resnet50)
    assert fitted.size == 25502912
    published = {
        name: int(row["flops"])
        for name, row in zip(budget, table()[1:], strict=True)
    }
    elsewhere = {f"conv{stage}_block1_1_conv/kernel" for stage in (3, 4, 5)}
    for weight in resnet50:
        if weight.path in elsewhere:
            assert 4 * weight.flops == published[weight.path]
        else:
            assert weight.flops == published[weight.path], weight.path
    # The total of the table counts the average pooling before the head as well.
    assert sum(published.values()) + 100352 == int(table()[0]["flops"])


@pytest.mark.parametrize("column", range(1, 17))
def test_parameter_totals_are_the_printed_ones(resnet50, column):
    printed = table()[0][f"sparsity_{column}"]
    budget = budgets.str_resnet50(
        round(1 - float(printed) / 100, 6)
    ).for_weights(resnet50)
    if printed == "95.03":  # whose printed layers add up to 95.024
        assert 100 * (1 - budget.density) == pytest.approx(95.03, abs=0.01)
    else:
        assert f"{100 * (1 - budget.density):.2f}" == f"{float(printed):.2f}"
    assert budget.live == sum(
        round(d * budget.sizes[path]) for path, d in budget.items()
    )


def test_unpublished_densities_are_refused():
    for wanted in (0.1, "sparsity_4"):
        with pytest.raises(
            BudgetError,
            match=r"are \[0.2045, .*0.009\].*'vd'.*Received: density=",
        ):
            budgets.str_resnet50(wanted)


# Of the paper's table of budgets at 90%.
RIVALS = {
    "uniform": 90.0,
    "erk": 90.07,
    "snfs": 90.06,
    "vd": 90.27,
    "gs": 89.54,
}


@pytest.mark.parametrize("name", RIVALS)
def test_budgets_of_rivals_have_the_printed_totals(resnet50, name):
    budget = budgets.str_resnet50(name).for_weights(resnet50)
    assert 100 * (1 - budget.density) == pytest.approx(RIVALS[name], abs=0.005)


def published(kind):
    """A table of RAIVNLab/STR as it is published, but for torch's names."""
    if kind == "rivals":
        head = ["Layer,STR,Uniform,ERK,SNFS,VD,GS"]
        keys, form, name = ("sparsity_4", *RIVALS), "{:.2f}%", "{}"
    else:
        keys, form, name = (
            [f"sparsity_{k}" for k in range(1, 17)],
            "{:g}",
            "Layer {} - conv",
        )
        totals = ",".join(table()[0][key] for key in keys)
        head = [
            "Metric,Params,FLOPs,Sparsity (%)" + 15 * ",",
            f"Overall,25502912,4089284608,{totals}",
        ]
        head += ["Backbone,23454912,4087136256" + 16 * ",82.07"]
    lines = [
        ",".join(
            [
                name.format(number),
                *([row["size"], row["flops"]] if kind == "learnt" else []),
                *(form.format(float(row[key])) for key in keys),
            ]
        )
        for number, row in enumerate(table()[1:], 1)
    ]
    tail = (
        ["AP - average pool before fc,0,100352" + 16 * ",100"]
        if kind == "learnt"
        else []
    )
    return "\n".join([*head, *lines, *tail]) + "\n"


def test_published_tables_load_as_they_are(tmp_path):
    path = tmp_path / "table.csv"
    path.write_text(published("learnt"))
    for column, density in ((90.23, 0.0977), ("99.1", 0.009), ("87.7", 0.123)):
        found = kso.Budget.load(path, column=column)
        assert found == budgets.str_resnet50(density)
        assert found.size == 25502912
    with pytest.raises(
        BudgetError, match=r"one of \['79.55', .*Received: column=None"
    ):
        kso.Budget.load(path)
    with pytest.raises(BudgetError, match=r"Received: column='4089284608'"):
        kso.Budget.load(path, column="4089284608")
    path.write_text(published("rivals"))
    for name in RIVALS:
        column = name.capitalize() if name == "uniform" else name.upper()
        assert kso.Budget.load(path, column=column) == budgets.str_resnet50(
            name
        )
    assert kso.Budget.load(path, "STR") == budgets.str_resnet50()
    for old, new, message in (
        (
            "\n7,",
            "\nX,",
            "the 54 layers of ResNet-50 are needed, in order. Received: 53",
        ),
        (
            "\n54,",
            "\nX,",
            "the 54 layers of ResNet-50 are needed, in order. Received: 53",
        ),
        ("\n54,", "\n55,", "in order. Received: 54 layers"),
        ("35.11%", "?", r"line 2: .*Give a number, not text.*density='\?'"),
        ("35.11%", "100.00%", r"line 2: .*must be in \(0, 1\]"),
    ):
        path.write_text(published("rivals").replace(old, new))
        with pytest.raises(BudgetError, match=message):
            kso.Budget.load(path, column="GS")


def test_lifting_for_orthogonal_kernels_keeps_the_global_count(resnet50):
    sparse = budgets.str_resnet50(0.009).for_weights(resnet50)
    lifted = budgets.lift(resnet50, sparse)
    assert lifted.live == sparse.live
    assert lifted.lifted
    for weight in resnet50:
        count, enough = (
            lifted.counts[weight.path],
            covering_count(weight.shape, weight.layout),
        )
        assert count >= max(enough, least_count(weight.shape, weight.layout))
        assert (sparse.counts[weight.path] < enough) == (
            weight.path in lifted.lifted
        )
        assert lifted.lifted_from.get(weight.path, count) in (
            count,
            sparse.counts[weight.path],
        )
    covering = {
        weight.path: covering_count(weight.shape, weight.layout)
        for weight in resnet50
    }
    rest = [path for path in sparse if lifted.counts[path] > covering[path]]
    ratios = [lifted.counts[path] / sparse.counts[path] for path in rest]
    assert max(ratios) <= 1
    np.testing.assert_allclose(ratios, np.mean(ratios), rtol=0.02)


def test_a_learnt_budget_becomes_exactly_orthogonal_kernels(tmp_path):
    model = keras.Sequential(
        [keras.Input((32,)), L.Dense(64, name="a"), L.Dense(8, name="b")]
    )
    learnt = kso.parametrize(model, kso.parametrizations.SoftThreshold())
    first, second = (w.parametrization for w in kso.prunable_weights(learnt))
    for parametrization, share in ((first, 0.999), (second, 0.7)):
        value = np.abs(parametrization.weight.raw_value())
        threshold = np.quantile(value, share)
        parametrization.s.assign(np.log(threshold / (1 - threshold)))
    budget = kso.Budget.from_model(learnt)
    budget.save(tmp_path / "learnt.json")
    assert kso.Budget.from_model(kso.strip(learnt)) == budget
    loaded = kso.Budget.load(tmp_path / "learnt.json")
    assert loaded == budget
    with pytest.raises(
        BudgetError, match=r"budgets\.lift.*is 32. Received: 3 for 'a/kernel'"
    ):
        kso.sparsify(model, budget=loaded, seed=0)
    lifted = budgets.lift(model, loaded)
    assert lifted.lifted == ("a/kernel",)
    sparse = kso.sparsify(model, budget=lifted, seed=0)
    weights = kso.prunable_weights(sparse, flops=True)
    assert sum(w.live for w in weights) == budget.live
    assert all(
        kso.analysis.orthogonality_error(w.value) < 1e-6 for w in weights
    )
