"""A sample of the crafted files of `make test-faults`, so that neither it nor the package rots."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.torch_only  # whose processes can be forked
@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
def test_crafted_files_load_or_are_refused_by_name():
    command = [sys.executable, "-W", "ignore", "-m", "tests.faults", "--parts", "hostile"]
    command += ["--share", "0.046", "--seed", "7"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    rows = re.findall(r"^\| hostile: [^|]+\| (\d+) \|", done.stdout, re.MULTILINE)
    assert len(rows) == 5
    assert sum(map(int, rows)) >= 100
