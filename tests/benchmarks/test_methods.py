"""A small version of benchmarks/methods.py: parts, and going on after a kill."""

import json

import pytest

pytestmark = pytest.mark.tensorflow_only


@pytest.mark.slow
def test_times_of_training_in_turns(methods, monkeypatch, tmp_path):
    some = {name: methods.METHODS[name] for name in ("dense", "gmp", "rigl")}
    monkeypatch.setattr(methods, "METHODS", some)
    turns = []
    on_epoch_end = methods.Turn.on_epoch_end
    monkeypatch.setattr(
        methods.Turn,
        "on_epoch_end",
        lambda turn, epoch, logs=None: turns.append(epoch) or on_epoch_end(turn, epoch, logs),
    )
    options = {"filters": [4, 4, 4], "batch_size": 128, "epochs": 4, "learning_rate": 1e-3}
    options |= {"seeds": [0], "frequency": 4, "jit": False, "budgets": tmp_path / "budgets.jsonl"}
    seconds = methods.turns("cnn", 0.1, methods.load("digits"), options, rounds=2)
    assert list(seconds) == [*some, "dense again"]
    assert min(seconds.values()) > 0
    assert turns == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4  # the rivals take turns


# Seven steps leave the smallest kernel at its floor.
@pytest.mark.filterwarnings("ignore:TargetDensity holds weights at their floor:UserWarning")
@pytest.mark.slow
def test_a_small_grid_in_parts_and_resumed(methods, tmp_path):
    some = ["dense", "str", "eoi_str", "gmp", "rigl"]  # one of each kind
    lines = tmp_path / "runs.jsonl"
    small = ["--dataset", "digits", "--samples", "1024", "--epochs", "1", "--densities", "0.1"]
    small += ["--seeds", "0", "--no-jit", "--no-tune", "--out", str(lines)]
    methods.methods([*small, "--methods", "dense", "str"])
    (kept,) = methods.finished(tmp_path / "budgets.jsonl")
    assert (kept["net"], kept["density"], kept["seed"]) == ("cnn", 0.1, 0)
    with lines.open("a") as file:
        file.write('{"net": "cnn", "meth')  # as a kill in the middle of writing leaves it
        file.write("\n")
    methods.methods([*small, "--methods", *some])
    runs = methods.finished(lines)
    assert [run["method"] for run in runs] == some  # none twice
    size = runs[0]["size"]
    for run in runs[1:]:
        assert run["live"] == pytest.approx(0.1 * size, abs=2)
        assert 0 < run["flops"] < runs[0]["flops"]
    before = lines.read_text()
    methods.methods([*small, "--methods", *some])
    assert lines.read_text() == before
    table = lines.with_suffix(".md").read_text()
    assert all(f"| {name} |" in table for name in some)
    assert json.loads(before.splitlines()[0])["density"] == 0.1
    methods.methods([*small, "--epochs", "2", "--methods", "dense"])  # another run than that of 1
    assert [run["epochs"] for run in methods.finished(lines)] == [1] * len(some) + [2]
    other = ", dataset: digits, samples: 1024\n"  # than in the settings: the table says so
    first, second = lines.with_suffix(".md").read_text().split("## cnn, epochs: ")[1:]
    assert first.startswith(f"1{other}")
    assert all(f"| {name} |" in first for name in some)
    assert second.startswith(f"2{other}")
    assert "| dense |" in second
    assert "| gmp |" not in second
