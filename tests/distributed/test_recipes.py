"""The recipes of `examples/scale/`: processes on this machine, each way equal to one process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCALE = Path(__file__).resolve().parents[2] / "examples" / "scale"
METHODS = ("fixed", "str", "gmp", "dnw", "rigl", "set", "compact", "blocks")


def run(name, *methods, seconds=600):
    """Runs a recipe; it fails by itself where a process hangs or a way differs from the first."""
    quick = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"
    flags = " ".join(f for f in quick.split() if "device_count" not in f)
    done = subprocess.run(
        [sys.executable, SCALE / f"{name}.py", "--methods", *methods, "--seconds", str(seconds)],
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * seconds,
        env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(SCALE.parents[1])},
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return [line.split(":")[0] for line in done.stdout.splitlines() if " equals " in line]


@pytest.mark.slow
@pytest.mark.tensorflow_only
@pytest.mark.parametrize("name", ["tensorflow_mirrored", "tensorflow_workers"])
def test_tensorflow(name):
    assert run(name, *METHODS) == list(METHODS)


@pytest.mark.slow
@pytest.mark.jax_only
@pytest.mark.parametrize("name", ["jax_data_parallel", "jax_model_parallel"])
def test_jax(name):
    assert run(name, *METHODS) == [*METHODS, *METHODS]


@pytest.mark.slow
@pytest.mark.torch_only
def test_torch():
    assert run("torch_ddp", *METHODS) == list(METHODS)
