"""Runs that are killed, within epochs and between them, and resumed equal those that are not."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

METHODS = ["FixedMask", "STR", "GMP", "DNW", "DNW constant", "SET", "RigL"]


@pytest.mark.core
@pytest.mark.slow
@pytest.mark.parametrize("more", ["plain", "more"])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_is_lost(method, more, tmp_path):
    """`plain` by Keras' BackupAndRestore; `more`, by ours, with Dropout, noise and augmentation."""
    script = pathlib.Path(__file__).with_name("killed_runs.py")
    done = subprocess.run(
        [sys.executable, str(script), method, more, str(tmp_path / "runs")],
        capture_output=True,
        text=True,
        env={
            **os.environ,
            "PYTHONPATH": str(script.parents[2]),
            # Every run is a process of its own: JAX compiles what they share once.
            "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["kills"] == {"plain": 4, "more": 6}[more]
    assert told["variables"] > 20
    assert told["differing"] == []
