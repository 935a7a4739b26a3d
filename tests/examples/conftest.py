"""Scripts of examples/, run as a user would."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import keras
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


@pytest.fixture
def run_process():
    """Runs a script in a process of its own."""

    def run(name, *arguments):
        return subprocess.run(
            [sys.executable, FOLDER / f"{name}.py", *map(str, arguments)],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "KERAS_BACKEND": keras.backend.backend()},
        )

    return run
