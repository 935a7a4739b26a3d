"""A small version of benchmarks/methods.py: parts, and going on after a kill."""

import json
import pathlib
import sys

import pytest

FOLDER = pathlib.Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.tensorflow_only


@pytest.fixture
def methods(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(FOLDER), *sys.path])
    import methods

    return methods


def test_a_small_grid_in_parts_and_resumed(methods, tmp_path):
    some = ["dense", "str", "eoi_str", "gmp", "rigl"]  # one of each kind
    lines = tmp_path / "runs.jsonl"
    small = ["--dataset", "digits", "--samples", "1024", "--epochs", "1", "--densities", "0.1"]
    small += ["--seeds", "0", "--no-jit", "--out", str(lines)]
    methods.main([*small, "--methods", "dense", "str"])
    assert (tmp_path / "budgets" / "cnn_str_0.1_0.csv").exists()
    with lines.open("a") as file:
        file.write('{"net": "cnn", "meth')  # as a kill in the middle of writing leaves it
        file.write("\n")
    methods.main([*small, "--methods", *some])
    runs = methods.finished(lines)
    assert [run["method"] for run in runs] == some  # none twice
    size = runs[0]["size"]
    for run in runs[1:]:
        assert run["live"] == pytest.approx(0.1 * size, abs=2)
        assert 0 < run["flops"] < runs[0]["flops"]
    before = lines.read_text()
    methods.main([*small, "--methods", *some])
    assert lines.read_text() == before
    table = lines.with_suffix(".md").read_text()
    assert all(f"| {name} |" in table for name in some)
    assert json.loads(before.splitlines()[0])["density"] == 0.1
