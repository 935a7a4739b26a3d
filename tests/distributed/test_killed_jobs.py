"""The recipes of `examples/scale/`: each way equal to one process, also where one is killed."""

import json

import pytest

from tests.distributed.recipes import ROOT, SCALE, environment
from tests.helpers import run_python

STILL = "fixed"  # its masks never move
METHODS = (
    STILL,
    "str",
    "str alone",
    "gmp",
    "dnw",
    "set",
    "rigl",
    "compact",
    "blocks",
)


@pytest.mark.slow
@pytest.mark.core
def test_a_job_that_lost_a_process_ends_as_one_that_was_left_alone(tmp_path):
    """Bit by bit, variables of the model and of the optimizer, in each of the two processes."""
    cases = [f"{method}:keras:training" for method in METHODS] + [
        "rigl:ours:saving"
    ]
    for found in run(tmp_path, cases):
        assert found["again"] == [0, 0], found
        victim, epochs = found["victim"], found["epochs"]
        # Who had its backup may have begun the next epoch.
        others = ["01223", "012323"] if "saving" in found["case"] else ["01223"]
        assert epochs[victim] == "01223", found
        assert epochs[1 - victim] in others, found
        assert (int(found["moved"][victim]) > 0) == (
            STILL not in found["case"]
        ), found
        assert found["variables"] > 40, found
        assert found["differing"] == [], found


@pytest.mark.slow
@pytest.mark.core
def test_a_backup_by_keras_of_which_a_half_was_written_is_refused(tmp_path):
    (found,) = run(tmp_path, ["rigl:keras:saving"])
    assert None not in found["again"], found
    assert 0 not in found["again"], found


def run(folder, cases):
    """What `killed_jobs.py` tells of each case."""
    # Every process is new: JAX compiles what they share once.
    once = {
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    script = ROOT / "tests" / "distributed" / "killed_jobs.py"
    done = run_python(script, folder, *cases, **environment(**once))
    print(done)
    logs = "\n".join(
        log.read_text()[-2000:] for log in sorted(folder.glob("*/*/*.log"))
    )
    told = [
        json.loads(line) for line in done.splitlines() if line.startswith("{")
    ]
    assert [found["case"] for found in told] == list(cases)
    for found in told:
        victim = found["victim"]
        assert found["whole"] == [0, 0], (found, logs[-20000:])
        assert found["killed"][victim] == -9, (found, logs[-20000:])
        # No hang.
        assert found["killed"][1 - victim] not in (None, 0), (
            found,
            logs[-20000:],
        )
    return told


EQUAL = ("fixed", "str", "gmp", "dnw", "rigl", "set", "compact", "blocks")


def run_recipe(name, *methods, seconds=600):
    """Runs a recipe; it fails by itself where a process hangs or a way differs from the first."""
    own = environment()
    own["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    done = run_python(
        SCALE / f"{name}.py", "--methods", *methods, "--seconds", seconds, **own
    )
    return [
        line.split(":")[0] for line in done.splitlines() if " equals " in line
    ]


RECIPES = {
    "tensorflow_mirrored": pytest.mark.tensorflow_only,
    "tensorflow_workers": pytest.mark.tensorflow_only,
    "jax_data_parallel": pytest.mark.jax_only,
    "jax_model_parallel": pytest.mark.jax_only,
    "torch_ddp": pytest.mark.torch_only,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(k, marks=mark) for k, mark in RECIPES.items()]
)
def test_all_ways_of_a_recipe_agree(name):
    ways = 2 if name.startswith("jax") else 1  # beside the first
    assert run_recipe(name, *EQUAL) == [*EQUAL] * ways
