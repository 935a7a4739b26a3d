"""`examples/quickstart.py`, run as a user runs it."""

import re

import pytest


@pytest.mark.slow  # about a minute: two networks, five files
@pytest.mark.core
def test_all_the_way(tmp_path, run_process):
    options = ("--epochs", 2, "--minutes", 0.1, "--seed", 3, "--output", tmp_path / "out")
    done = run_process("quickstart", *options)
    assert done.returncode == 0, done.stderr
    assert "1347 training and 450 test images" in done.stdout
    found = re.findall(r"^(\D.+?) +([\d.]+)% +([\d,]+) +([\d.]+)$", done.stdout, re.MULTILINE)
    names = [name for name, *_ in found]
    assert names == ["dense float32", "dense int8", "dense int4", "kso.shrink", names[-1]]
    assert names[-1].startswith("live blocks")
    size = {name: int(bytes_.replace(",", "")) for name, _, bytes_, _ in found}
    assert size[names[-1]] < size["dense int4"] < size["dense int8"] < size["dense float32"]
    assert min(float(accuracy) for _, accuracy, *_ in found) > 60  # two epochs: it learns
    assert len([*(tmp_path / "out").glob("*.tflite")]) == 5
