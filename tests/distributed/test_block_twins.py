"""Models on live blocks, trained on several devices or processes, equal their masked twins."""

import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from examples.scale.recipe import free_ports
from tests.distributed.block_twins import (
    STORAGES,
    fitted,
    model_in,
    state,
    trained_by_torch,
)
from tests.helpers import two_device_strategy

ROOT = Path(__file__).resolve().parents[2]


def check_equal(*states):
    """All of them are the same, and not what the model began with."""
    first, *others = states
    assert len(first) == 18
    for other in others:
        assert other.keys() == first.keys()
        for name, value in first.items():
            np.testing.assert_allclose(other[name], value, atol=1e-5, err_msg=name)
    begun = state(model_in("blocks"))
    kernels = [name for name in first if name.endswith("kernel")]
    assert len(kernels) == 8
    assert all((first[name] != begun[name]).any() for name in kernels)


@pytest.mark.tensorflow_only
def test_mirrored_strategy():
    one = fitted("blocks")
    with two_device_strategy().scope():
        check_equal(one, *map(fitted, STORAGES))


@pytest.mark.jax_only
def test_data_parallel_on_jax():
    one, previous = fitted("blocks"), keras.distribution.distribution()
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    try:
        two = [*map(fitted, STORAGES)]
    finally:
        keras.distribution.set_distribution(previous)
    check_equal(one, *two)


@pytest.mark.slow
@pytest.mark.torch_only
def test_two_processes_of_torch_with_rigl(tmp_path):
    port, running = str(free_ports(1)[0]), []
    script = ROOT / "tests" / "distributed" / "block_twins.py"
    environment = {**os.environ, "KERAS_BACKEND": "torch", "PYTHONPATH": str(ROOT)}
    for rank in range(2):
        command = [sys.executable, script, str(rank), port, tmp_path]
        own = {**environment, "PYTHONHASHSEED": str(rank + 1)}  # sets have another order
        running.append(subprocess.Popen(command, env=own))
    one = trained_by_torch("blocks")
    try:
        assert [process.wait(timeout=300) for process in running] == [0, 0]
    finally:
        for process in running:
            process.kill()
    states = []
    for storage in STORAGES:
        for rank in range(2):
            with np.load(tmp_path / f"{storage}_{rank}.npz") as file:
                states.append({name.replace("|", "/"): file[name] for name in file.files})
    check_equal(one, *states)
    (weight, *_), _ = kso.prunable_weights(model_in("blocks")), None
    assert ((one[weight.path] != 0) != weight.mask).any()  # blocks have moved
