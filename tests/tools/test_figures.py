"""Figures of the pages are those of the results, and the check notices where they are not."""

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


def test_a_wrong_figure_is_noticed():
    """Every page of the list fails the check if one of its numbers is changed."""
    entries = tomllib.loads(figures.LIST.read_text())
    for entry in entries["text"]:
        page = (figures.ROOT / entry["page"]).read_text()
        assert figures.fill_text(page, entry) == page, entry["text"]
        right = figures.figure(entry["cells"][0])
        wrong = page.replace(right, right.replace(right[-1], str((int(right[-1]) + 1) % 10)))
        assert figures.fill_text(wrong, entry) != wrong, entry["text"]
