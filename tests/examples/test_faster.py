"""`examples/faster.py`, with small layers."""

import json

import keras
import pytest

import keras_sparse_ortho as kso

SMALL = ("--width", 64, "--depth", 2, "--block", 8, "--density", 0.25, "--epochs", 2, "--batch", 32)


@pytest.mark.slow
def test_the_last_lines_say_what_was_measured(run_example, capsys):
    status, folder = run_example("faster", *SMALL)
    assert status == 0
    title, *lines, verdict = capsys.readouterr().out.strip().splitlines()[-7:]
    assert title.startswith("digits, 2 x 64, blocks of 8, batch 32, 2 epochs")
    assert title.endswith("density of the hidden kernels 0.2500")
    figures = json.loads((folder / "faster.json").read_text())
    dense, blocks = figures["dense"], figures["blocks"]
    assert min(dense["accuracy"], blocks["accuracy"]) > 0.5  # two epochs: it learns
    assert lines[0].endswith(f"{blocks['accuracy']:.2%} on blocks, {dense['accuracy']:.2%} dense")
    ratio = blocks["seconds"] / dense["seconds"]
    assert f"ratio {ratio:.2f}" in lines[1]
    assert verdict.startswith("An epoch on blocks is" if ratio < 1 else "Not faster here")

    for name in ("dense", "blocks"):
        model = keras.saving.load_model(folder / f"{name}.keras")
        held = [*model.weights, *model.optimizer.variables]
        size = sum(keras.ops.convert_to_numpy(variable).nbytes for variable in held)
        assert figures[name]["memory_mib"] == size / 2**20
        on_blocks = type(model.get_layer("hidden_1")) is kso.layers.BlockSparseDense
        assert on_blocks == (name == "blocks")
        assert type(model.get_layer("first")) is keras.layers.Dense
