"""The lint of code: figures of small sources, limits of the house, and limits that only go down."""

import pytest

from tools import names, reading

pytestmark = pytest.mark.numpy_only

SOURCE = '''"""A docstring, which does not count."""

from typing import Any


def total(numbers: Any) -> int:
    """Adds numbers.

    In a loop.
    """
    # a comment
    found = 0
    for number in numbers:
        found += number if number > 0 else 0

    return found
'''


def test_figures_of_a_source():
    figures = reading.figures(SOURCE)
    assert figures.code == 6
    assert (figures.names, figures.vague) == (3, 2)
    assert (figures.any, figures.if_expressions) == (1, 1)
    assert (figures.long, figures.to_document, figures.documented) == (0, 1, 1)
    without_docstrings = SOURCE.replace(
        '"""Adds numbers.\n\n    In a loop.\n    """', ""
    )
    assert reading.figures(without_docstrings).nodes == figures.nodes
    both = figures + figures
    assert (both.code, both.nodes_a_line) == (12, figures.nodes_a_line)


def test_names_are_nouns():
    assert all(
        map(reading.is_vague, ["found", "_found", "own", "OTHERS", "held_"])
    )
    assert not any(
        map(reading.is_vague, ["mask", "found_masks", "number", "key"])
    )


def test_limits_of_the_house_and_of_a_file(tmp_path):
    path = tmp_path / "total.py"
    path.write_text(SOURCE)
    figures = reading.figures(SOURCE)
    assert names.exceeded(figures, {}) == {"vague names": (2, 1)}
    assert names.exceeded(figures, {"vague names": 2}) == {}
    report = names.report(path, {})
    assert report == [
        f"{path}: vague names: 2, limit 1",
        f"{path}:12: found",
        f"{path}:14: found",
    ]
    assert names.report(path, {"vague names": 2}) == []
    long = "def f():\n" + "    x = 1\n" * 60
    assert names.exceeded(reading.figures(long), {}) == {
        "long functions": (1, 0)
    }
    dense = "x = " + " + ".join(["a[0]"] * 9) + "\n"
    assert "nodes a line" in names.exceeded(reading.figures(dense), {})


def test_limits_only_go_down(tmp_path, monkeypatch):
    figures = reading.figures(SOURCE)
    assert names.lowered(figures, {"vague names": 5, "Any": 4}) == {
        "vague names": 2
    }
    assert names.lowered(figures, {}) == {}
    package = tmp_path / "package"
    package.mkdir()
    path = package / "total.py"
    path.write_text(SOURCE)
    monkeypatch.setattr(reading, "PACKAGE", package)
    monkeypatch.setattr(names, "LIMITS", tmp_path / "limits.toml")
    assert names.main([]) == 1
    names.main(["--accept", str(path)])
    assert names.read_limits() == {"total.py": {"vague names": 2}}
    assert names.main([]) == 0
    path.write_text(SOURCE + "own = 1\n")
    names.main(["--lower"])
    assert names.main([]) == 1
    path.write_text(SOURCE.replace("found", "total"))
    names.main(["--lower"])
    assert names.read_limits() == {}


def test_every_limit_is_of_a_file_that_exists():
    assert all(
        (reading.PACKAGE / name).exists() for name in names.read_limits()
    )
