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

Dense it has 11.1 ± 2.2<!--=accuracy/dense-->
percent, ours 3<!--=time-->.

<!--table: all-->

| density | accuracy | seconds |
|---|---|---|
| a tenth | 1.0 ± 1.0 | 7 |
"""
LISTED = {
    "accuracy": "r#net a, epochs: 1 | method={} | accuracy | .1f",
    "time": {"of": "r#net a, | method=ours | time", "as": ".1f"},
}
TABLE = {
    "cell": "r#net a, | density={row} | {column}",
    "rows": ["0.1"],
    "columns": ["accuracy | .1f", "time | g"],
}


@pytest.fixture
def results(tmp_path):
    (tmp_path / "r.md").write_text(RESULTS)
    return tmp_path


def test_figures_of_every_kind(results):
    def figure(spec):
        return figures.figure(spec, results)

    assert (
        figure("r#net a, epochs: 1 | method=dense | accuracy | .1f")
        == "90.0 ± 0.3"
    )
    assert (
        figure("r#net a, epochs: 1, d | method=dense | accuracy | .1f")
        == "70.0"
    )
    assert figure("r#net a, | method=ours | time 2 | .0f") == "2000"
    ratio = {
        "of": "r | method=dense | time",
        "over": "r | method=ours; time | time",
        "as": ".1f",
    }
    assert figure(ratio) == "4.0"
    assert (
        figure({"of": "r#net a, | | time", "pick": "min", "as": ".2f"})
        == "0.50"
    )
    assert figure({"of": "r | | theirs", "pick": "max", "as": ".0f"}) == "6"
    less = {
        "of": "r | method=dense | time",
        "less": "r | density=0.1; time | time",
        "as": "g",
    }
    assert figure(less) == "1.5"
    assert (
        figure({"of": "r | method=dense | time", "times": 100, "as": ".0f"})
        == "200"
    )
    assert (
        figure(
            {"of": "r#net a, | method=ours | time", "inverse": True, "as": "g"}
        )
        == "2"
    )


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("r | method=theirs | accuracy | g", "No cell"),
        ("r | method=ours | accuracy | g", "One cell must be meant, not 2"),
        (
            "r#net a, | method=dense | accuracy | g",
            "One cell must be meant, not 2",
        ),
        ("r#net a, | method=ours | method | g", "must hold a number"),
    ],
)
def test_what_is_not_there_is_named(results, spec, message):
    with pytest.raises(figures.FigureError, match=message):
        figures.figure(spec, results)


def test_numbers_are_found_by_the_name_behind_them(results):
    page = figures.fill_numbers(PAGE, LISTED, results)
    expected = PAGE.replace("11.1 ± 2.2", "90.0 ± 0.3").replace(
        "ours 3<", "ours 0.5<"
    )
    assert page == expected
    moved = "\n- 5-4<!--=time--> of all, and 0.5<!--=time--> again\n"  # other words, another place
    assert figures.fill_numbers(moved, LISTED, results) == moved.replace(
        "5-4", "5-0.5"
    )
    for lost, message in (
        ("9<!--=space-->", "no such figure"),
        ("9<!--=accuracy-->", "takes more than that"),
        ("nine<!--=time-->", "No number stands before"),
    ):
        with pytest.raises(figures.FigureError, match=message):
            figures.fill_numbers(lost, LISTED, results)


def test_tables_are_found_by_the_name_above_them(results):
    def filled(page=PAGE, **changes):
        return figures.fill_tables(page, {"all": TABLE | changes}, results)

    assert "| a tenth | 87.0 ± 0.1 | 0.5 |" in filled()
    mark = "r#net a, | density={row} | verdict"
    assert "| a tenth | 87.0 ± 0.1 ↑ | 0.5 ↑ |" in filled(mark=mark)
    with pytest.raises(figures.FigureError, match="2 rows instead of 1"):
        filled(PAGE + "| b | 1 | 2 |\n")
    with pytest.raises(figures.FigureError, match="No table of the list"):
        filled(PAGE.replace("all", "some"))
    gaps = {
        "columns": ["accuracy | .1f", "lost | g"],
        "gaps": [["0.1", "lost | g"]],
    }
    # Until it is measured.
    assert "| a tenth | 87.0 ± 0.1 | - |" in filled(**gaps)
    with pytest.raises(figures.FigureError, match="no longer a gap"):
        filled(gaps=[["0.1", "accuracy | .1f"]])


def test_every_name_of_the_list_stands_on_a_page():
    listed = {"figures": LISTED, "table": {"all": TABLE}}
    assert figures.unused([PAGE], listed) == []
    lost = figures.unused(
        [PAGE.replace("=time", "=accuracy/dense"), PAGE.split("<!--=")[2]],
        listed,
    )
    assert lost[0] == "No page has the figure 'time'"
    assert "Received: 2 times" in lost[1]


def test_a_wrong_figure_is_noticed():
    """Every number with a name, on every page, is filled in again after it is changed."""
    listed = tomllib.loads(figures.LIST.read_text())["figures"]
    for file in [
        figures.ROOT / "README.md",
        *(figures.ROOT / "docs").rglob("*.md"),
    ]:
        page = file.read_text()
        wrong = figures.ANCHOR.sub(
            lambda found: f"{0.12345}<!--={found['name']}-->", page
        )
        assert figures.fill_numbers(wrong, listed).split() == page.split(), file
