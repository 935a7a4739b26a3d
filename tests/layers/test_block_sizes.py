"""Sizes of blocks follow the kind of device, and slow ones are told of where they are trained."""

import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.layers import (
    BlockSizes,
    BlockSparseDense,
    block_sizes,
    why_slow,
)
from tests.helpers import jit_if_quicker


@pytest.mark.numpy_only
def test_only_sizes_that_were_measured_slow_are_called_slow():
    for rows in (1, 128, 1023):
        assert why_slow("gpu", (32, 32), rows) is None
    for block in ((32, 32), (16, 128)):
        reason = why_slow("gpu", block, 1024)
        assert "GPU" in reason
        assert "structure=Block(128, 128)" in reason
        assert f"blocks of {block[0]} x {block[1]} and 1024 rows" in reason
    assert why_slow("gpu", (64, 64), 1024) is None
    assert why_slow("gpu", (64, 64), 4096)
    assert why_slow("gpu", (128, 128), 10**6) is None
    for kind in ("cpu", "tpu"):
        assert why_slow(kind, (4, 4), 10**6) is None


def of_gpus(caught):
    messages = [str(warning.message) for warning in caught]
    return [message for message in messages if "On a GPU" in message]


def trained_warnings(block, batch):
    """What `predict`, and what `fit` of a layer on blocks say of a GPU."""
    layer = BlockSparseDense(128, density=0.5, block=block, seed=0)
    model = keras.Sequential([keras.Input((128,)), layer])
    model.compile("sgd", "mse", jit_compile=jit_if_quicker())
    x = np.zeros((batch, 128), "float32")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.predict(x, batch_size=batch, verbose=0)
        assert not of_gpus(caught)
        model.fit(x, x, batch_size=batch, verbose=0)
        return of_gpus(caught)


@pytest.mark.not_tensorflow  # there `fit` leaves the rows of a batch open
def test_training_on_a_gpu_tells_once_of_slow_blocks(monkeypatch):
    rows = 1031  # of no other test: a process tells once
    assert not trained_warnings(32, rows)
    monkeypatch.setattr(kso._backend, "device_kind", lambda: "gpu")
    (message,) = trained_warnings(32, rows)
    assert f"blocks of 32 x 32 and {rows} rows" in message
    assert not trained_warnings(32, rows)
    assert not trained_warnings(64, rows)


def test_storage_on_blocks_takes_the_sizes_of_the_device(monkeypatch):
    layers = [keras.layers.Dense(512, name=name) for name in "ab"]
    model = keras.Sequential([keras.Input((512,)), *layers])

    def blocks():
        sparse = kso.sparsify(model, 0.25, "uniform", storage="blocks", seed=0)
        rows = kso.report(sparse, orthogonality=False).rows[:-1]
        return {row.block for row in rows}

    assert blocks() == {(64, 64)}
    sizes = BlockSizes(sides=(32, 16), slow_from={})
    monkeypatch.setattr(kso.pruning._blocks, "block_sizes", lambda: sizes)
    assert blocks() == {(32, 32)}
    assert block_sizes("unknown") is block_sizes("cpu")
