"""`examples/wide.py`: what the limit lets through, and what it does not."""

import re

import keras
import pytest

ON_TENSORFLOW = keras.backend.backend() == "tensorflow"


@pytest.mark.slow  # some 20 seconds: two processes that load a backend
def test_blocks_train_where_the_dense_twin_does_not_fit(run_process):
    done = run_process("wide", "--width", 8192, "--depth", 1, "--epochs", 1, "--limit", 1200)
    assert done.returncode == 0, done.stdout + done.stderr
    title, blocks, dense = done.stdout.strip().splitlines()
    assert "8192 x 8192: weights, gradients and Adam's moments are 1,024 MiB dense" in title
    found = re.fullmatch(
        r"blocks: epochs 1, \d+ s, test accuracy ([\d.]+)%, peak resident memory ([\d,]+) MiB",
        blocks,
    )
    assert found, blocks
    assert float(found[1]) > 60  # it learns
    # TensorFlow may end by a signal instead, where its kernels do not check what they were given.
    reason = r"SIG\w+|\w+: .*(memory|OOM)" if ON_TENSORFLOW else r"\w+: .*memory"
    assert re.match(f"dense:  ended with ({reason})", dense), dense
