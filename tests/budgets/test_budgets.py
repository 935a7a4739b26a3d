"""Budgets: exact totals, formulas, bounds, files."""

import json

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st

import keras_sparse_ortho as kso
from keras_sparse_ortho.budgets import Budget
from keras_sparse_ortho.errors import BudgetError

L = keras.layers
pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def model():
    layers = [L.Dense(16, name="hidden"), L.Dense(7, name="head")]
    return keras.Sequential([keras.Input((8,)), *layers])


@given(
    st.dictionaries(st.text(min_size=1), st.floats(1e-9, 1.0), min_size=1),
    st.booleans(),
)
def test_files_give_back_the_same_budget(tmp_path_factory, densities, sized):
    densities = {
        name: d for name, d in densities.items() if name.isprintable()
    } or {"x": 0.5}
    sizes = dict.fromkeys(densities, 1000) if sized else {}
    budget = Budget(densities, sizes, {next(iter(densities)): 7})
    path = tmp_path_factory.mktemp("budget") / "budget.json"
    budget.save(path)
    loaded = Budget.load(path)
    assert dict(loaded) == dict(budget)
    assert loaded.sizes == budget.sizes
    assert loaded.lifted_from == budget.lifted_from


@pytest.mark.numpy_only
def test_a_part_of_a_file_is_refused(tmp_path):
    names = [f"layer_{k}/kernel" for k in range(4)]
    budget = Budget(
        dict.fromkeys(names, 0.25), dict.fromkeys(names, 1000), {names[1]: 7}
    )
    path, part = tmp_path / "whole.json", tmp_path / "part.json"
    budget.save(path)
    content = path.read_bytes()
    for end in range(len(content.rstrip())):
        part.write_bytes(content[:end])
        with pytest.raises(BudgetError, match="Received"):
            Budget.load(part)


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    tmp_path, monkeypatch
):
    path = tmp_path / "budget.json"
    Budget({"a": 0.5}).save(path)
    path.chmod(0o640)
    old = path.read_bytes()

    def full(descriptor):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            Budget({"b": 0.25, "c": 0.5}).save(path)
    assert path.read_bytes() == old
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
    link = tmp_path / "link.json"
    link.symlink_to(path)
    # Through the link, with the rights of before.
    Budget({"b": 0.25}).save(link)
    assert link.is_symlink()
    assert list(Budget.load(path)) == ["b"]
    assert path.stat().st_mode & 0o777 == 0o640


MANGLED = [
    (b'{"budget": [\n{"weight": "a",}]}', "line 2: "),
    (b'{"weights": []}', "line 1: an object"),
    (b'{"budget": [{"weight": "a"}]}', "entry 1: 'density'"),
    (
        b'{"budget": [{"weight": "a", "density": 1.5}]}',
        r"entry 1: .*must be in \(0, 1\]",
    ),
    (b'{"budget": []}', "A budget needs weights"),
    (b'{"a": 0.5, "b": 2}', r"entry 2: .*must be in \(0, 1\]"),
    (b'{"a": 0.5, "a": 0.25}', "a name stands twice"),
    (b'{"a": 0.5, "b": "0.5"}', "line 1: an object"),
    (b'{"a": true}', "entry 1: "),
    (b'{"budget": ' + b"[" * 100_000, None),
    (b"null", None),
    (b'{"budget": {}}', None),
    (b'{"budget": ["ab"]}', None),
    (b'{"budget": [{"weight": "a", "density": 0.5, "size": Infinity}]}', None),
    (
        b'{"budget": [{"weight": "a", "density": 0.5, "size": '
        + b"9" * 5000
        + b"}]}",
        None,
    ),
    (b'{"budget": [{"weight": "\\ud800", "density": 0.5}]}', None),
    (b'{"budget": [{"weight": ["x"], "density": 0.5}]}', None),
    (b'{"budget": [{"weight": "a", "density": {"x": 1}}]}', None),
    (b"\xff\xfe{\x00}\x00", None),
]


@pytest.mark.parametrize(
    ("content", "message"), MANGLED, ids=range(len(MANGLED))
)
def test_whatever_a_file_holds_it_is_a_budget_or_refused(
    tmp_path, content, message
):
    path = tmp_path / "mangled.json"
    path.write_bytes(content)
    with pytest.raises(BudgetError, match=message) as caught:
        Budget.load(path)
    assert len(str(caught.value)) < 1000
    # A byte order mark is none of the content.
    path.write_bytes(
        b'\xef\xbb\xbf{"budget": [{"weight": "a", "density": 0.5}]}'
    )
    assert dict(Budget.load(path)) == {"a": 0.5}


BY_HAND = {
    "plain.json": '{"hidden/kernel": 0.25, "head": 1}',
    "plain.csv": "hidden/kernel,0.25\nhead,1\n",
    "titled.csv": '\ufeffPath, Density\r\n"hidden/kernel", 0.25\r\n\r\nhead ,1.0\r\n',
}


@pytest.mark.parametrize("name", BY_HAND)
def test_budgets_by_hand(model, tmp_path, name):
    (tmp_path / name).write_text(BY_HAND[name], encoding="utf-8")
    budget = Budget.load(tmp_path / name)
    assert dict(budget) == {"hidden/kernel": 0.25, "head": 1.0}
    assert budget.for_weights(kso.prunable_weights(model)).live == 32 + 112


@pytest.mark.numpy_only
@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "A budget needs weights"),
        ("path,density\n", "A budget needs weights"),
        ("a;0.5\n", "line 1: .*Give a number, not text.*Received: .*a;0.5"),
        ("path,sparsity\na,0.5\n", "line 1: .*density='sparsity'"),
        ("a,0.5\nb,10%\n", "line 2: .*not a percentage: density=0.1 keeps 10%"),
        ("a,0.5\nb,1.5\n", r"line 2: .*must be in \(0, 1\]"),
        ("a,0.5\nb,nan\n", r"line 2: .*must be in \(0, 1\]"),
        ("a,0.5\na,0.5\n", "line 2: .*'a' is empty, or named twice"),
        ("a,0.5,0.7\n", r"line 1: .*density='0.5,0.7'"),
        ('a,"0.5\n', "not readable as CSV"),
        (",0.5\n", "line 1: .*is empty, or named twice"),
    ],
)
def test_tables_that_are_no_budget_are_refused(tmp_path, content, message):
    path = tmp_path / "budget.csv"
    path.write_text(content)
    with pytest.raises(BudgetError, match=message):
        Budget.load(path)


def test_refusals(model, tmp_path):
    with pytest.raises(BudgetError, match=r"ends in .json or .csv. Received"):
        Budget.load(tmp_path / "budget.txt")
    Budget({"a": 0.5}).save(tmp_path / "one.json")
    with pytest.raises(
        BudgetError, match=r"`column` is for.*Received: column='GS' for"
    ):
        Budget.load(tmp_path / "one.json", column="GS")
    with pytest.raises(BudgetError, match=r"ends in .json. Received"):
        Budget({"a": 0.5}).save(tmp_path / "budget.txt")
    with pytest.raises(BudgetError, match=r"budget of 'a': .*density=0"):
        Budget({"a": 0})
    with pytest.raises(
        BudgetError, match=r"unknown weights. Received: \['b'\]"
    ):
        Budget({"a": 0.5}, {"b": 3})
    with pytest.raises(BudgetError, match="Counts need the sizes"):
        _ = Budget({"a": 0.5}).live
    weights = kso.prunable_weights(model)
    full = dict.fromkeys((w.path for w in weights), 0.5)
    small = {**full, "head/kernel": 1e-3}
    for budget, message in (
        (Budget({**full, "x": 0.5}), r"unknown \['x'\], missing \[\]"),
        (Budget({"hidden/kernel": 0.5}), r"missing \['head/kernel'\]"),
        (Budget(small), r"'head/kernel' of 112 entries would have no live one"),
        (
            Budget(full, {"head/kernel": 5}),
            r"made for a weight 'head/kernel' of 5 entries",
        ),
    ):
        with pytest.raises(BudgetError, match=message):
            budget.for_weights(weights)


@pytest.mark.parametrize(
    "count",
    [2**63, 10**400, pytest.param(10**5000, id="5001 digits"), 0.5, True, -1],
)
def test_sizes_and_counts_are_bounded(tmp_path, count):
    with pytest.raises(
        BudgetError, match=r"size of 'a' must be .* 1 to 2\^63 - 1. Received"
    ) as size:
        Budget({"a": 0.5}, {"a": count})
    with pytest.raises(
        BudgetError, match=r"`lifted_from` of 'a' must be .* 0 to 2\^63 - 1"
    ):
        Budget({"a": 0.5}, {"a": 8}, {"a": count})
    assert len(str(size.value)) < 1000
    if abs(count) > 10**4000:  # neither Python nor JSON writes these
        return
    for column, least in (("size", 1), ("lifted_from", 0)):
        row = {"weight": "a", "density": 0.5, "size": 8, "lifted_from": 2}
        row[column] = count
        file = tmp_path / "budget.json"
        file.write_text(json.dumps({"budget": [row]}))
        with pytest.raises(
            BudgetError,
            match=rf"entry 1: .*{column}.* from {least} to 2\^63 - 1",
        ):
            Budget.load(file)


def test_the_largest_size_is_shown():
    budget = Budget({"a": 0.5}, {"a": 2**63 - 1}, {"a": 0})
    assert repr(budget).endswith(
        "4611686018427387904 of 9223372036854775807  (lifted from 0)>"
    )


def test_names_of_layers_stand_for_their_kernels(tmp_path):
    model = keras.Sequential(
        [keras.Input((4, 8)), L.GRU(8, name="gru"), L.Dense(4, name="head")]
    )
    names = {"gru/gru_cell/kernel": 0.25, "gru": 0.5, "head": 0.75}
    Budget(names).save(tmp_path / "b.json")
    plan = Budget.load(tmp_path / "b.json").for_weights(
        kso.prunable_weights(model)
    )
    assert [*plan.items()] == [
        ("gru/gru_cell/kernel", 0.25),
        ("gru/gru_cell/recurrent_kernel", 0.5),
        ("head/kernel", 0.75),
    ]
    assert (
        kso.prune(model, budget=Budget(names)).count_params()
        > model.count_params()
    )
    for wrong in (
        Budget({**names, "tail": 0.5}),
        Budget({**names, "hea": 0.5}),
    ):
        with pytest.raises(
            BudgetError, match=r"unknown \['(tail|hea)'\], missing \[\]"
        ):
            wrong.for_weights(kso.prunable_weights(model))
    sized = Budget(names, {"head": 32})
    with pytest.raises(
        BudgetError, match=r"unknown \['head'\], missing \['head/kernel'\]"
    ):
        sized.for_weights(kso.prunable_weights(model))


def test_equality_is_that_of_the_densities():
    budget = Budget({"a": 0.5, "b": 0.25})
    assert budget == Budget({"b": 0.25, "a": 0.5}, {"a": 8}, {"b": 3})
    assert budget != Budget({"a": 0.5, "b": 0.2})
    assert budget != Budget({"a": 0.5})
    with pytest.raises(TypeError, match="unhashable"):
        hash(budget)
