"""Scripts of examples/, run as a user would."""

import runpy
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def run_example(monkeypatch, tmp_path):
    """Runs a script, and gives its exit status and the folder that it writes to."""

    def run(name, *arguments):
        script = FOLDER / f"{name}.py"
        given = [script, *arguments, "--output", tmp_path / "out"]
        monkeypatch.setattr(sys, "argv", [str(argument) for argument in given])
        monkeypatch.syspath_prepend(FOLDER)
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script), run_name="__main__")
        return end.value.code, tmp_path / "out"

    return run
