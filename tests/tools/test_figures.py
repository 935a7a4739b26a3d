"""Figures of the pages are those of the results, and the check notices where they are not."""

import os
import subprocess
import sys
import tomllib

import pytest

from tools import figures

pytestmark = pytest.mark.numpy_only

RESULTS = """# Title

## net a, epochs: 1

| density | method | accuracy | time | time | verdict |
| --- | --- | --- | --- | --- | --- |
| 1 | dense | 90.049 +- 0.263 | 2.0 | 8 | - |
| 0.1 | ours | 86.95 +- 0.14 | 0.5 | 2,000 | wins |

## net a, epochs: 1, depth: 3

| density | method | accuracy | theirs |
| --- | --- | --- | --- |
| 1 | dense | 70.0 | - |
| 0.5 | more | 60.0 | 6 |

## net ab, epochs: 1

| density | method | accuracy |
| --- | --- | --- |
| 0.1 | ours | 1.0 |
"""
PAGE = """# Page

Dense it has 11.1 ± 2.2
percent, ours 3.

| density | accuracy | seconds |
|---|---|---|
| a tenth | 1.0 ± 1.0 | 7 |
"""


@pytest.fixture
def results(tmp_path):
    (tmp_path / "r.md").write_text(RESULTS)
    return tmp_path


def test_figures_of_every_kind(results):
    def figure(spec):
        return figures.figure(spec, results)

    assert figure("r#net a, epochs: 1 | method=dense | accuracy | .1f") == "90.0 ± 0.3"
    assert figure("r#net a, epochs: 1, d | method=dense | accuracy | .1f") == "70.0"
    assert figure("r#net a, | method=ours | time 2 | .0f") == "2000"
    ratio = {"of": "r | method=dense | time", "over": "r | method=ours; time | time", "as": ".1f"}
    assert figure(ratio) == "4.0"
    assert figure({"of": "r#net a, | | time", "pick": "min", "as": ".2f"}) == "0.50"
    assert figure({"of": "r | | theirs", "pick": "max", "as": ".0f"}) == "6"
    less = {"of": "r | method=dense | time", "less": "r | density=0.1; time | time", "as": "g"}
    assert figure(less) == "1.5"
    assert figure({"of": "r | method=dense | time", "times": 100, "as": ".0f"}) == "200"
    assert figure({"of": "r#net a, | method=ours | time", "inverse": True, "as": "g"}) == "2"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("r | method=theirs | accuracy | g", "No cell"),
        ("r | method=ours | accuracy | g", "One cell must be meant, not 2"),
        ("r#net a, | method=dense | accuracy | g", "One cell must be meant, not 2"),
        ("r#net a, | method=ours | method | g", "must hold a number"),
    ],
)
def test_what_is_not_there_is_named(results, spec, message):
    with pytest.raises(figures.FigureError, match=message):
        figures.figure(spec, results)


def test_a_page_is_filled_in_where_it_says_so(results):
    text = {"page": "p", "text": "Dense it has {} percent, ours {}.", "cells": []}
    text["cells"] = [
        "r#net a, epochs: 1 | method=dense | accuracy | .1f",
        "r#net a, | method=ours | time | .1f",
    ]
    page = figures.fill_text(PAGE, text, results)
    assert page == PAGE.replace("11.1 ± 2.2", "90.0 ± 0.3").replace("ours 3.", "ours 0.5.")
    table = {"page": "p", "header": "density | accuracy | seconds", "rows": ["0.1"]}
    table |= {"columns": ["accuracy | .1f", "time | g"]}
    table |= {"cell": "r#net a, | density={row} | {column}"}
    assert "| a tenth | 87.0 ± 0.1 | 0.5 |" in figures.fill_table(PAGE, table, results)
    mark = {"mark": "r#net a, | density={row} | verdict"}
    assert "| a tenth | 87.0 ± 0.1 ↑ | 0.5 ↑ |" in figures.fill_table(PAGE, table | mark, results)
    with pytest.raises(figures.FigureError, match="stands there 0 times"):
        figures.fill_text(PAGE, text | {"text": "Dense has {} percent"}, results)
    with pytest.raises(figures.FigureError, match="more rows"):
        figures.fill_table(PAGE + "| b | 1 | 2 |\n", table, results)


def test_a_gap_is_a_dash_until_it_is_measured(results):
    table = {"page": "p", "header": "density | accuracy | seconds", "rows": ["0.1"]}
    table |= {"columns": ["accuracy | .1f", "lost | g"], "gaps": [["0.1", "lost | g"]]}
    table |= {"cell": "r#net a, | density={row} | {column}"}
    assert "| a tenth | 87.0 ± 0.1 | - |" in figures.fill_table(PAGE, table, results)
    with pytest.raises(figures.FigureError, match="Not a gap any more"):
        figures.fill_table(PAGE, table | {"gaps": [["0.1", "accuracy | .1f"]]}, results)


def test_sections_and_words_between(results):
    page = "# A\n\nends at 1.0\n\n## Net\n\nIt ends, as\nmeant, at 2.0 %\n\n# B\n\nends at 3.0\n"
    entry = {"page": "p", "text": "ends ... at {}", "cells": ["r | method=more | accuracy | .1f"]}
    for section, old in (("Net", "2.0"), ("B", "3.0")):
        filled = figures.fill_text(page, entry | {"section": section}, results)
        assert filled == page.replace(old, "60.0")
    with pytest.raises(figures.FigureError, match="stands there 3 times"):
        figures.fill_text(page, entry, results)
    with pytest.raises(figures.FigureError, match="no such section"):
        figures.fill_text(page, entry | {"section": "C"}, results)
    other = page.replace("as\nmeant", "as\n\nmeant")  # not across paragraphs
    with pytest.raises(figures.FigureError, match="stands there 0 times"):
        figures.fill_text(other, entry | {"section": "Net"}, results)


def test_a_wrong_figure_is_noticed():
    """Every page of the list fails the check if one of its numbers is changed."""
    for entry in figures.texts(tomllib.loads(figures.LIST.read_text())["text"]):
        page = (figures.ROOT / entry["page"]).read_text()
        assert figures.fill_text(page, entry) == page, entry["text"]
        found = figures.find_text(page, entry)
        for k in range(1, 1 + len(entry["cells"])):
            begin = found.start(k)
            wrong = page[:begin] + str((int(page[begin]) + 1) % 10) + page[begin + 1 :]
            assert figures.fill_text(wrong, entry).split() == page.split(), entry["text"]


def test_results_of_another_folder_are_not_asked(tmp_path):
    command = [sys.executable, "tools/figures.py", "--check"]
    environment = os.environ | {"KSO_RESULTS": str(tmp_path)}
    subprocess.run(command, cwd=figures.ROOT, env=environment, check=True)
