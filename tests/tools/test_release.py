"""What a release must have: one version, a wheel that holds the package alone, safe workflows."""

import re
import tomllib
import zipfile

import pytest

import keras_sparse_ortho as kso
from tools import release

pytestmark = pytest.mark.numpy_only


WORKFLOWS = {
    path.stem: path.read_text()
    for path in release.ROOT.glob(".github/workflows/*.yml")
}


def test_the_version_stands_in_one_place():
    assert release.version_of() == kso.__version__
    project = tomllib.loads((release.ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    for file in (
        release.ROOT / "pyproject.toml",
        release.ROOT / "CITATION.cff",
    ):
        assert kso.__version__ not in file.read_text(), file


def test_workflows_run_actions_of_one_commit_and_targets_that_exist():
    makefile = (release.ROOT / "Makefile").read_text()
    targets = set(
        " ".join(re.findall(r"^([\w -]+):", makefile, re.MULTILINE)).split()
    )
    assert "test-docs" in targets
    for name, text in WORKFLOWS.items():
        used = re.findall(r"uses: (\S+)(.*)", text)
        assert used, name
        for action, version in used:
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action), action
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", version), action
        run = re.findall(
            r"run: make ((?:[\w-]+ ?)+)(?:$| \w+=)", text, re.MULTILINE
        )
        # Of a matrix.
        run += re.findall(r"^ {10}- ([\w-]+)$", text, re.MULTILINE)
        assert {
            word for line in run for word in line.split() if "=" not in word
        } <= targets, name
    nightly = {
        "test-faults",
        "test-no-tensorflow",
        "test-keras-nightly",
        "bench-quick",
    }
    assert nightly <= set(
        re.findall(r"- ([\w-]+)$", WORKFLOWS["nightly"], re.MULTILINE)
    )


def test_nothing_is_published_before_a_person_switches_it_on():
    build, publish = WORKFLOWS["publish"].split("\n  publish:\n")
    assert "id-token" not in build
    for line in (
        "if: vars.PUBLISH == 'yes' && ",
        "environment: pypi",
        "id-token: write",
    ):
        assert line in publish
    for name, text in WORKFLOWS.items():
        assert "\npermissions:\n  contents: read\n" in text, name
        assert "secrets." not in text, name


def test_a_wheel_with_too_little_and_too_much_is_refused(tmp_path, monkeypatch):
    source = tmp_path / "source"
    package = source / release.PACKAGE
    package.mkdir(parents=True)
    for name in ("__init__.py", "left_out.py", "py.typed", "notes.txt"):
        (package / name).write_text("")
    wheel = tmp_path / "w.whl"
    with zipfile.ZipFile(wheel, "w") as file:
        for name in ("__init__.py", "py.typed", "stray.py"):
            file.writestr(f"{release.PACKAGE}/{name}", "")
        file.writestr("keras_sparse_ortho-0.dist-info/METADATA", "")
    # Installed and imported from elsewhere than the folder that it was put into.
    monkeypatch.setattr(
        release, "run", lambda *command, **_: "/elsewhere/__init__.py"
    )
    assert release.problems_of(wheel, source, tmp_path) == [
        "the wheel lacks keras_sparse_ortho/left_out.py",
        "the wheel holds keras_sparse_ortho/stray.py",
        "the installed wheel is not what is imported",
    ]
