"""The list of faults that `make test-mutants` tries cannot rot, and its verdicts are right."""

import pytest

from tools.mutants import (
    PACKAGE,
    ROOT,
    BrokenMutantError,
    Mutant,
    judge,
    read_list,
    run_pytest,
)

pytestmark = pytest.mark.numpy_only
MUTANTS = read_list()


def test_every_fault_can_be_put_in(tmp_path):
    problems = {}
    for mutant in MUTANTS:
        try:
            file = mutant.located(ROOT).file
            copy = tmp_path / mutant.name / PACKAGE / file
            copy.parent.mkdir(parents=True)
            copy.write_text((ROOT / PACKAGE / file).read_text())
            mutant.apply(tmp_path / mutant.name)
        except BrokenMutantError as error:
            problems[mutant.name] = str(error)
    assert not problems


def test_every_fault_has_a_text_and_tests_that_exist():
    files = {
        test.partition("::")[0] for mutant in MUTANTS for test in mutant.tests
    }
    assert not {file for file in files if not (ROOT / file).exists()}
    assert all(mutant.fault and mutant.tests for mutant in MUTANTS)


def test_every_room_has_its_faults():
    rooms = {
        path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")
    }
    assert rooms <= {mutant.located(ROOT).room for mutant in MUTANTS}


CODE = 'def twice(x):\n    """2 * x"""\n    return 2 * x\n\n\ndef thrice(x):\n    return 3 * x\n'
TESTS = "from keras_sparse_ortho import twice\n\n\ndef test_twice():\n    assert twice(2) == 4\n"


@pytest.mark.parametrize(
    ("changes", "word", "note"),
    [
        ({}, "killed", "test_twice"),
        ({"find": "3 * x"}, "SURVIVED", "test_it.py"),
        ({"k": "thrice"}, "broken", "no test ran"),
        ({"tests": ("test_other.py",)}, "broken", "usage"),
        ({"replace": "2 *"}, "broken", "does not compile"),
        ({"replace": "2  *  x"}, "broken", "changes nothing"),
        ({"find": "* x"}, "broken", "__init__.py, __init__.py"),
        ({"find": "4 * x"}, "broken", "nowhere"),
        (
            {"find": "def twice", "replace": "def double"},
            "broken",
            "not collected",
        ),
        (
            {"find": "2*x", "within": "__init__.double"},
            "killed",
            "test_twice",
        ),  # it is renamed
        ({"find": "3 * x", "within": "__init__.twice"}, "broken", "nowhere"),
    ],
)
def test_verdicts(tmp_path, changes, word, note):
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").write_text(CODE)
    (tmp_path / "test_it.py").write_text(TESTS)
    row = {
        "find": "2 * x",
        "replace": "4 + x",
        "tests": ("test_it.py",),
        **changes,
    }
    verdict = judge(tmp_path, Mutant("name", "fault", **row))
    assert (verdict.word, note in verdict.note) == (word, True), verdict
    assert (tmp_path / PACKAGE / "__init__.py").read_text() == CODE


def test_a_copy_is_what_its_tests_import(tmp_path):
    """Also in processes that tests start, and though this package is installed."""
    (tmp_path / PACKAGE).mkdir()
    (tmp_path / PACKAGE / "__init__.py").write_text(CODE)
    (tmp_path / "test_it.py").write_text(
        "import subprocess, sys\n\n\ndef test_it():\n"
        "    code = 'import keras_sparse_ortho as p; print(p.twice(3))'\n"
        "    assert subprocess.check_output([sys.executable, '-c', code]).split() == [b'6']\n"
    )
    status, output = run_pytest(tmp_path, "tensorflow", ["test_it.py"])
    assert status == 0, output
