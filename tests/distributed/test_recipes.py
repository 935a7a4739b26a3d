"""The recipes of `examples/scale/`: processes on this machine, each way equal to one process."""

import subprocess
import sys

import pytest

from tests.distributed.recipes import SCALE, environment

METHODS = ("fixed", "str", "gmp", "dnw", "rigl", "set", "compact", "blocks")


def run(name, *methods, seconds=600):
    """Runs a recipe; it fails by itself where a process hangs or a way differs from the first."""
    own = environment()
    own["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    done = subprocess.run(
        [sys.executable, SCALE / f"{name}.py", "--methods", *methods, "--seconds", str(seconds)],
        capture_output=True,
        text=True,
        check=False,
        timeout=4 * seconds,
        env=own,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    return [line.split(":")[0] for line in done.stdout.splitlines() if " equals " in line]


RECIPES = {
    "tensorflow_mirrored": pytest.mark.tensorflow_only,
    "tensorflow_workers": pytest.mark.tensorflow_only,
    "jax_data_parallel": pytest.mark.jax_only,
    "jax_model_parallel": pytest.mark.jax_only,
    "torch_ddp": pytest.mark.torch_only,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(k, marks=mark) for k, mark in RECIPES.items()])
def test_all_ways_of_a_recipe_agree(name):
    ways = 2 if name.startswith("jax") else 1  # beside the first
    assert run(name, *METHODS) == [*METHODS] * ways
