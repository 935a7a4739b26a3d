"""The list of benchmarks cannot rot: every script is in it, and says what its results are."""

import argparse
import json
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.numpy_only
# What scripts share, and what measures nothing.
MODULES = {
    "cells",
    "methods_rivals",
    "methods_runs",
    "methods_summary",
    "methods_table",
    "networks",
    "planning",
}
MODULES |= {"record", "reordered", "scanned", "small_language_model", "suite", "training"}


def test_every_script_is_a_part_with_a_small_setting(suite):
    parts = suite.parts().values()
    scripts = {part["script"] for part in parts}
    assert scripts == {path.name for path in suite.HERE.glob("*.py") if path.stem not in MODULES}
    for name in scripts:
        text = (suite.HERE / name).read_text()
        assert "parsed(" in text or "command_line(" in text, f"{name} has no --quick"
        found = re.search(r"^    chosen\(([\w, ]+)\)$", text, re.MULTILINE)
        measured = found[1].split(", ") if found else []
        assert set(measured) == {
            part["measures"] for part in parts if part["script"] == name and "measures" in part
        }
    quick = argparse.Namespace(quick=True, tables=False)
    for part in parts:
        for backend, arguments in suite.commands(part, quick):
            assert backend in ("tensorflow", "jax", "torch")
            assert arguments == [*filter(None, [part.get("measures")]), "--quick"]
    tables = argparse.Namespace(quick=False, tables=True)
    found = [arguments for part in parts for _, arguments in suite.commands(part, tables)]
    assert ["on_text", "--summary"] in found


def test_the_readme_says_which_measurement_makes_which_page(suite):
    rows = [
        (re.findall(r"\(results/(\w+)\.md\)", row), re.findall(r"`(\w+\.py)(?: (\w+))?", row))
        for row in (suite.HERE / "README.md").read_text().splitlines()
        if row.startswith("| [")
    ]
    pages = [name for names, _ in rows for name in names]
    assert sorted(pages) == sorted(path.stem for path in (suite.HERE / "results").glob("*.md"))
    known = {(part["script"], part.get("measures", "")) for part in suite.parts().values()}
    assert {command for _, commands in rows for command in commands} == known - {
        ("pictures.py", "")
    }


def test_small_settings_do_not_stand_beside_the_real_ones(record):
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4096)
    assert record.parsed(parser, {"width": 8}, []).width == 4096
    for arguments, width in ((["--quick"], 8), (["--quick", "--width", "16"], 16)):
        parser = argparse.ArgumentParser()
        parser.add_argument("--width", type=int, default=4096)
        assert record.parsed(parser, {"width": 8}, arguments).width == width


def test_a_result_says_where_it_was_made(record, tmp_path, capsys):
    table = record.markdown(["n", "time [ms]"], [["1", "2.5"], ["2", ""]])
    record.write_page(tmp_path / "page.md", f"# Title\n\n## Part\n\n{table}", seeds=[1, 0, 1])
    text = (tmp_path / "page.md").read_text()
    assert "seeds 0, 1" in text
    assert capsys.readouterr().out == text + "\n"
    for part in ("Made by `python benchmarks/", "commit ", ", load ", "keras 3."):
        assert part in text
    record.append(tmp_path / "new" / "runs.jsonl", {"seed": 3})
    row = json.loads((tmp_path / "new" / "runs.jsonl").read_text())
    assert row["seed"] == 3
    assert {"commit", "date", "machine", "keras"} <= set(row["made"])


def test_what_is_left_is_told_and_passed_on(record, suite, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(record.time, "monotonic", iter([0, 120, 120, 240, 300, 360]).__next__)
    assert list(record.announced("part", "abc")) == ["a", "b", "c"]
    assert capsys.readouterr().out.splitlines() == [
        "left at least: part, 3 runs",
        "left at least: part, 2 runs, about 4 min",
        "left at least: part, 1 runs, about 2 min",
    ]
    monkeypatch.undo()
    script = tmp_path / "long.py"
    line = f"{record.LEFT} part, 2 runs"
    script.write_text(f"import time\nprint({line!r}, flush=True)\ntime.sleep(30)\n")
    monkeypatch.setattr(suite, "EVERY", 0.5)
    with open(tmp_path / "log", "w") as stream:
        process = subprocess.Popen([sys.executable, str(script)], stdout=stream)
        with pytest.raises(subprocess.TimeoutExpired):
            suite.followed(process, tmp_path / "log", 3.0)
        process.kill()
    assert process.wait() < 0
    assert capsys.readouterr().out.splitlines() == [f"      {line}"]
