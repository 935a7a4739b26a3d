"""The draw of `make test`: half of the tests, and a quarter of their cases."""

import importlib.util
from types import SimpleNamespace

import pytest

from tools import check, mutants

pytestmark = pytest.mark.numpy_only


class Case:
    """A collected test, as far as the draw looks at it."""

    def __init__(self, nodeid, *markers):
        self.nodeid = nodeid
        self.markers = (*markers, "core")

    def get_closest_marker(self, name):
        return name if name in self.markers else None

    def iter_markers(self, name):
        del name
        return iter(())


CASES = [
    *(Case(f"test_it.py::test_of_forty_cases[{n}]") for n in range(40)),
    *(Case(f"test_it.py::test_of_one_case_{n}") for n in range(40)),
    *(Case(f"test_it.py::test_each[{n}]", "each_backend") for n in range(3)),
    Case("test_it.py::test_slow", "slow"),
]


@pytest.fixture(scope="module")
def drawn():
    """What runs on each backend, for a draw."""
    path = check.ROOT / "conftest.py"
    spec = importlib.util.spec_from_file_location("conftest_of_the_test", path)
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)
    config = SimpleNamespace(getoption={"--slow": False}.get)

    def of(draw):
        runs = []
        for conftest.BACKEND in mutants.BACKENDS:
            cases = conftest._spread(CASES, draw, config)
            runs.append([case.nodeid.partition("::")[2] for case in cases])
        return runs

    return of


@pytest.mark.parametrize("draw", ["first", "second"])
def test_half_of_the_tests_run_with_a_quarter_of_their_cases(drawn, draw):
    runs = drawn(draw)
    everywhere = [name for names in runs for name in names]
    of_forty = [name for name in everywhere if "forty" in name]
    assert len(of_forty) == len(set(of_forty)) == 10
    of_one = [name for name in everywhere if "of_one_case" in name]
    assert 10 < len(of_one) == len(set(of_one)) < 30
    assert "test_slow" not in everywhere
    for names in runs:
        assert len([name for name in names if "test_each" in name]) == 3
        assert any("forty" in name for name in names)


def test_another_draw_runs_other_cases(drawn):
    first, second = (set().union(*drawn(draw)) for draw in ("first", "second"))
    assert len(first.symmetric_difference(second)) > 10
    assert drawn("first") == drawn("first")


def test_a_quarter_of_the_short_pages_is_drawn():
    first, second = map(check.pages_left_out, ("first", "second"))
    assert first == check.pages_left_out("first") != second
    assert set(check.LONG_PAGES) <= set(first)
    pages = {
        page.relative_to(check.ROOT).as_posix()
        for page in (check.ROOT / "docs").rglob("*.md")
    }
    short = pages.difference(check.LONG_PAGES)
    assert len(short.intersection(first)) == 3 * len(short) // 4
