"""`examples/edge.py` and `examples/blocks.py`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

pytestmark = pytest.mark.tensorflow_only


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    import blocks
    import edge

    return blocks, edge


@pytest.mark.parametrize(("inputs", "outputs"), [(128, 64), (64, 128), (96, 96)])
def test_blocks_are_orthogonal_and_hold_in_training(modules, inputs, outputs):
    blocks, _ = modules
    layer = blocks.block_dense(outputs, 0.25, seed=1, gain=1.0, name="d")
    model = keras.Sequential([keras.Input((inputs,)), layer])
    kernel = keras.ops.convert_to_numpy(layer.layer.kernel)
    gram = kernel.T @ kernel if inputs >= outputs else kernel @ kernel.T
    np.testing.assert_allclose(gram, np.eye(len(gram)), atol=1e-5)
    mask = layer.parametrizations["kernel"].mask_value()
    tiles = mask.reshape(inputs // 16, 16, outputs)
    assert (tiles.all(axis=1) == tiles.any(axis=1)).all()
    assert mask.sum() == 16 * round(0.25 * inputs * outputs / 16)
    model.compile("sgd", "mse")
    model.fit(np.ones((4, inputs)), np.zeros((4, outputs)), verbose=0)
    trained = keras.ops.convert_to_numpy(layer.layer.kernel)
    assert (trained != kernel).any()
    assert not trained[~mask].any()
    with pytest.raises(ValueError, match="Received"):
        blocks.block_dense(32, 0.5, seed=0).build((None, 20))


def test_spectrograms_are_repeatable_and_balanced(modules):
    _, edge = modules
    x, y = edge.spectrograms(600, seed=4)
    again, _ = edge.spectrograms(600, seed=4)
    np.testing.assert_array_equal(x, again)
    assert x.shape == (600, edge.FRAMES, edge.BANDS)
    assert np.bincount(y).min() > 20
    assert len(np.bincount(y)) == edge.KEYWORDS


@pytest.mark.slow
def test_example_end_to_end(tmp_path):
    done = subprocess.run(
        [
            *(sys.executable, EXAMPLES / "edge.py"),
            *("--epochs", "1", "--only", "speech", "--output", tmp_path),
        ],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ, KERAS_BACKEND="tensorflow"),
    )
    assert done.returncode == 0, done.stderr
    line = json.loads((tmp_path / "edge.json").read_text())["speech"]
    assert line["test_accuracy"] > 0.6
    assert abs(line["file_accuracy"] - line["keras_accuracy"]) < 0.02
    assert "dynamic_int8+1x16" in line["latency_ms"]
