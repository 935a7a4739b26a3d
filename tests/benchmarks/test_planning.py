"""The tables of docs/planning.md are those of the script."""

import pathlib

import pytest

pytestmark = pytest.mark.numpy_only

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "planning.md"


def test_the_page_has_the_tables_of_the_script(planning):
    page = PAGE.read_text(encoding="utf-8")
    for part in (planning.constants, planning.memory, planning.traffic, planning.cost_of_updates):
        assert part() in page, part.__name__


def test_times_follow_from_bytes_and_links(planning, monkeypatch):
    monkeypatch.setattr(planning, "exchanged", lambda: {"dense": 4.0, "blocks": 0.4})
    monkeypatch.setattr(planning, "LINKS", {8: 7e9, 256: 255e9})
    lines = planning.traffic().splitlines()
    # 2 (n - 1) / n * 4e9 bytes, over the link.
    assert lines[2] == "| 1 | dense | 4.00 | 0 | 1000.0 | 31.2 |"
    assert lines[3] == "| 1 | blocks | 0.40 | 0 | 100.0 | 3.1 |"
