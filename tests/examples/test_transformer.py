"""`examples/transformer.py`, with a small network."""

import json

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso

SMALL = ("--width", 16, "--heads", 2, "--depth", 1, "--batch", 32, "--epochs", 4, "--density", 0.4)


@pytest.mark.slow
# Keras', of blocks without `build` that are loaded.
@pytest.mark.filterwarnings("ignore:.build... was called on layer:UserWarning")
def test_the_last_lines_say_what_came_out(run_example, capsys):
    status, folder = run_example("transformer", *SMALL)
    assert status == 0
    title, accuracy, weights, _, packed = capsys.readouterr().out.strip().splitlines()[-5:]
    assert title == f"digits, 1 blocks of width 16, 4 epochs, {keras.backend.backend()}"
    figures = json.loads((folder / "transformer.json").read_text())
    dense, sparse = figures["dense"], figures["sparse"]
    assert min(dense["accuracy"], sparse["accuracy"]) > 0.5  # four epochs: it learns
    assert accuracy.endswith(f"{sparse['accuracy']:.2%} sparse, {dense['accuracy']:.2%} dense")
    assert f"{sparse['live']:,} of {sparse['weights']:,} live" in weights
    assert sparse["gzip_bytes"] < 0.7 * dense["gzip_bytes"]
    assert packed.endswith(f"{sparse['gzip_bytes'] / dense['gzip_bytes']:.2f} of it")

    plain = keras.saving.load_model(folder / "sparse.keras")
    plain(np.zeros((1, 8, 8, 1), "float32"))
    held = {w.path: np.count_nonzero(w.value) for w in kso.prunable_weights(plain)}
    assert sum(held.values()) == sparse["live"]
    ends = {"patch/kernel": 4 * 16, "head/kernel": 16 * 10}
    assert ends.items() <= held.items()
    inner = sparse["weights"] - sum(ends.values())
    assert sparse["live"] - sum(ends.values()) <= round(0.4 * inner)
