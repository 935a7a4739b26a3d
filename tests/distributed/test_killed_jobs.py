"""Jobs of two processes of which one is killed, and that are started again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STILL = "fixed"  # its masks never move
METHODS = (STILL, "str", "str alone", "gmp", "dnw", "set", "rigl", "compact", "blocks")


@pytest.mark.slow
@pytest.mark.core
def test_a_job_that_lost_a_process_ends_as_one_that_was_left_alone(tmp_path):
    """Bit by bit, variables of the model and of the optimizer, in each of the two processes."""
    backend = os.environ["KERAS_BACKEND"]
    name = {"tensorflow": "tensorflow_workers", "jax": "jax_data_parallel", "torch": "torch_ddp"}
    flags = os.environ.get("XLA_FLAGS", "").split()
    environment = {
        "XLA_FLAGS": " ".join(flag for flag in flags if "device_count" not in flag),
        "PYTHONPATH": str(ROOT),
        # Every process is new: JAX compiles what they share once.
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    script = ROOT / "tests" / "distributed" / "killed_jobs.py"
    done = subprocess.run(
        [sys.executable, script, name[backend], tmp_path, *METHODS],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    print(done.stdout)
    logs = "\n".join(log.read_text()[-2000:] for log in sorted(tmp_path.glob("*/*/*.log")))
    assert done.returncode == 0, done.stderr[-3000:] + logs[-20000:]
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [found["method"] for found in told] == list(METHODS)
    for found in told:
        victim = found["victim"]
        assert found["killed"][victim] == -9, (found, logs[-20000:])
        assert found["killed"][1 - victim] not in (None, 0), (found, logs[-20000:])  # no hang
        assert found["whole"] == found["again"] == [0, 0], (found, logs[-20000:])
        assert found["epochs"] == ["01223"] * 2, found
        assert (int(found["moved"][victim]) > 0) == (found["method"] != STILL), found
        assert found["variables"] > 40, found
        assert found["differing"] == [], found
