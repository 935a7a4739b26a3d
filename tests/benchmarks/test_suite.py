"""The list of benchmarks cannot rot, results say what made them, and how they are counted."""

import argparse
import ast
import importlib.util
import json
import pathlib
import re
import subprocess
import sys
from typing import ClassVar

import pytest

pytestmark = pytest.mark.numpy_only
# What scripts share, and what measures nothing.
MODULES = {
    "kernel_times",
    "methods_summary",
    "methods_table",
    "networks",
    "owners",
    "package_rows",
    "packages",
    "record",
    "runner",
    "splice_sites",
    "training",
}
HERE = pathlib.Path(__file__).parents[2] / "benchmarks"
# In examples/, or fetched by a benchmark.
ELSEWHERE = {
    "data",
    "mtcnn",
    "slice_transformer",
}


def test_every_script_is_a_part_with_a_small_setting(runner):
    parts = runner.parts().values()
    scripts = {part["script"] for part in parts}
    assert scripts == {
        path.name for path in HERE.glob("*.py") if path.stem not in MODULES
    }
    for name in scripts:
        text = (HERE / name).read_text()
        found = re.search(r"^    main\(([\w, ]+)\)$", text, re.MULTILINE)
        measured = (
            [runner.snake(measurement) for measurement in found[1].split(", ")]
            if found
            else []
        )
        assert (set(measured) if len(measured) > 1 else set()) == {
            part["measures"]
            for part in parts
            if part["script"] == name and "measures" in part
        }
    quick = argparse.Namespace(quick=True, tables=False)
    for part in parts:
        for backend, arguments in runner.commands(part, quick):
            assert backend in ("tensorflow", "jax", "torch")
            assert arguments == [
                *filter(None, [part.get("measures")]),
                "--quick",
            ]
    tables = argparse.Namespace(quick=False, tables=True)
    found = [
        arguments
        for part in parts
        for _, arguments in runner.commands(part, tables)
    ]
    assert ["on_text", "--summary"] in found


def test_what_scripts_import_from_each_other_exists(runner):
    trees = {
        path.stem: ast.parse(path.read_text()) for path in HERE.glob("*.py")
    }
    for script, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (
                there := trees.get(node.module)
            ):
                bound = {
                    one.id
                    for one in ast.walk(there)
                    if isinstance(one, ast.Name)
                }
                bound |= {
                    one.name for one in ast.walk(there) if hasattr(one, "name")
                }
                lacking = {alias.name for alias in node.names} - bound
                assert not lacking, (
                    f"{script} imports {lacking} from {node.module}"
                )
            elif isinstance(node, ast.ImportFrom) and "." not in node.module:
                assert node.module in ELSEWHERE or importlib.util.find_spec(
                    node.module
                ), script


def test_the_readme_says_which_measurement_makes_which_page(runner):
    rows = [
        (
            re.findall(r"\(results/(\w+)\.md\)", row),
            re.findall(r"`(\w+\.py)(?: (\w+))?", row),
        )
        for row in (HERE / "README.md").read_text().splitlines()
        if row.startswith("| [")
    ]
    pages = [name for names, _ in rows for name in names]
    assert sorted(pages) == sorted(
        path.stem for path in (HERE / "results").glob("*.md")
    )
    known = {
        (part["script"], part.get("measures", ""))
        for part in runner.parts().values()
    }
    assert {
        command for _, commands in rows for command in commands
    } == known - {("pictures.py", "")}


def test_small_settings_do_not_stand_beside_the_real_ones(runner):
    class Wide(runner.Measurement):
        settings: ClassVar = {
            "width": runner.Setting(4096, quick=8),
            "deep": runner.Setting(False),
        }

    for arguments, width in (
        ([], 4096),
        (["--quick"], 8),
        (["--quick", "--width", "16"], 16),
    ):
        given = Wide.parser(arguments).parse_args(arguments)
        assert (given.width, given.quick, given.deep) == (
            width,
            "--quick" in arguments,
            False,
        )


def test_runs_that_stand_in_the_file_are_not_repeated(
    runner, record, tmp_path, monkeypatch
):
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    made = []

    class Squares(runner.Measurement):
        page = lines = "squares"
        settings = {"numbers": runner.Setting([1, 2])}  # noqa: RUF012

        def runs(self):
            return runner.grid(number=self.given.numbers)

        def run(self, which):
            made.append(which["number"])
            return {"square": which["number"] ** 2, "seed": 7}

        def report(self, lines):
            return "# Squares\n" + ", ".join(
                str(line["square"]) for line in lines
            )

    Squares.command([])
    Squares.command(["--numbers", "2", "3"])
    Squares.command(["--summary", "--numbers", "4"])
    assert made == [1, 2, 3]
    page = (tmp_path / "squares.md").read_text()
    assert page.startswith("# Squares\n1, 4, 9\n")
    assert "seeds 7, load" in page
    Squares.resumes = False
    Squares.command([])
    assert made == [1, 2, 3, 1, 2]


def test_a_result_says_where_it_was_made(record, tmp_path, capsys):
    table = record.markdown(["n", "time [ms]"], [["1", "2.5"], ["2", ""]])
    record.write_page(
        tmp_path / "page.md", f"# Title\n\n## Part\n\n{table}", seeds=[1, 0, 1]
    )
    text = (tmp_path / "page.md").read_text()
    assert "seeds 0, 1" in text
    assert capsys.readouterr().out == text + "\n"
    for part in (
        "Made by `python benchmarks/",
        "commit ",
        ", load ",
        "keras 3.",
    ):
        assert part in text
    record.append(tmp_path / "new" / "runs.jsonl", {"seed": 3})
    row = json.loads((tmp_path / "new" / "runs.jsonl").read_text())
    assert row["seed"] == 3
    assert {"commit", "date", "machine", "keras"} <= set(row["made"])


def test_what_is_left_is_told_and_passed_on(
    runner, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(
        runner.time, "monotonic", iter([0, 120, 120, 240, 300, 360]).__next__
    )
    assert list(runner.announced("part", "abc")) == ["a", "b", "c"]
    assert capsys.readouterr().out.splitlines() == [
        "left at least: part, 3 runs",
        "left at least: part, 2 runs, about 4 min",
        "left at least: part, 1 runs, about 2 min",
    ]
    monkeypatch.undo()
    script = tmp_path / "long.py"
    line = f"{runner.LEFT} part, 2 runs"
    script.write_text(
        f"import time\nprint({line!r}, flush=True)\ntime.sleep(30)\n"
    )
    monkeypatch.setattr(runner, "EVERY", 0.5)
    with open(tmp_path / "log", "w") as stream:
        process = subprocess.Popen([sys.executable, str(script)], stdout=stream)
        with pytest.raises(subprocess.TimeoutExpired):
            runner.followed(process, tmp_path / "log", 3.0)
        process.kill()
    assert process.wait() < 0
    assert capsys.readouterr().out.splitlines() == [f"      {line}"]


def test_the_page_on_planning_has_the_tables_of_the_script(memory):
    page = (HERE.parent / "docs" / "planning.md").read_text(encoding="utf-8")
    for part in (
        memory.constants,
        memory.planned_memory,
        memory.traffic,
        memory.cost_of_updates,
    ):
        assert part() in page, part.__name__


def test_times_follow_from_bytes_and_links(memory, monkeypatch):
    monkeypatch.setattr(
        memory, "exchanged", lambda: {"dense": 4.0, "blocks": 0.4}
    )
    monkeypatch.setattr(memory, "LINKS", {8: 7e9, 256: 255e9})
    lines = memory.traffic().splitlines()
    # 2 (n - 1) / n * 4e9 bytes, over the link.
    assert lines[2] == "| 1 | dense | 4.00 | 0 | 1000.0 | 31.2 |"
    assert lines[3] == "| 1 | blocks | 0.40 | 0 | 100.0 | 3.1 |"


def test_windows_are_taken_out_of_a_running_mean(training):
    progress = training.Progress(window=2)
    for _ in range(2):  # epochs
        progress.on_epoch_begin(0)
        right, seen = 0.0, 0
        for step, accuracy in enumerate([1.0, 0.5, 0.0, 0.5, 1.0]):
            right, seen = right + accuracy, seen + 1
            progress.on_train_batch_end(step, {"accuracy": right / seen})
    assert progress.points == [
        (step, pytest.approx(value))
        for _ in range(2)
        for step, value in ((2, 0.75), (4, 0.25))
    ]


def test_of_several_processes_the_median_counts(record):
    def line(kind, ratio, date=None, commit="a"):
        made = {"made": {"date": date, "commit": commit}} if date else {}
        return {"kind": kind, "ratio": ratio} | made

    lines = [
        line("x", 9.0, "1"),
        line("x", 1.0, "2", "b"),
        line("x", 3.0, "2"),
        line("y", 5.0),
    ]
    lines += [line("x", 1.0, "2", "a+"), line("y", 4.0), line("x", 2.0, "2")]
    found = record.middle_of_processes(
        lines, lambda line: line["kind"], "ratio"
    )
    assert {
        kind: (line["ratio"], line["processes"]) for kind, line in found.items()
    } == {
        "x": (2.0, 3),  # those of the last day and commit
        "y": (4.0, 1),  # not known when: the last
    }
    found = record.middle_of_processes(
        lines[:3] + lines[4:5], lambda line: line["kind"], "ratio"
    )
    assert found["x"]["ratio"] == 3.0  # of two the larger one


def test_epochs_and_seconds_on_live_blocks(methods_summary):
    run = {"curve": [0.85, 0.881, 0.87, 0.89]}
    assert methods_summary.epochs_to_goal(run) == 2
    # The last tenth is not trained on, and the last part of a batch is dropped.
    assert (
        methods_summary.steps_of({"samples": 20000, "batch_size": 128}) == 140
    )
    assert methods_summary.epochs_to_goal({"curve": [0.8]}) is None
