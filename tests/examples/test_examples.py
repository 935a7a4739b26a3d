"""The scripts of examples/, run as a user runs them, in small settings."""

import json
import re
import runpy
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import run_python

FOLDER = Path(__file__).resolve().parents[2] / "examples"
BACKEND = keras.backend.backend()
SMALL = {
    "quickstart": (),
    "transformer": (
        "--width",
        16,
        "--heads",
        2,
        "--depth",
        1,
        "--batch",
        32,
        "--epochs",
        4,
    ),
    "faster": (
        "--width",
        64,
        "--depth",
        2,
        "--block",
        8,
        "--batch",
        32,
        "--epochs",
        2,
    ),
}


@pytest.fixture
def run_example(monkeypatch, tmp_path):
    """Runs a script, and gives its exit status and the folder that it writes to."""

    def run(name, *arguments):
        script = FOLDER / f"{name}.py"
        given = [
            script,
            *SMALL.get(name, ()),
            *arguments,
            "--output",
            tmp_path / "out",
        ]
        monkeypatch.setattr(sys, "argv", [str(argument) for argument in given])
        monkeypatch.syspath_prepend(FOLDER)
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(script), run_name="__main__")
        return end.value.code, tmp_path / "out"

    return run


@pytest.mark.tensorflow_only
@pytest.mark.parametrize(
    ("name", "arguments", "rule"),
    [
        (
            "quickstart",
            ["--epochs", 1],
            "--epochs must be 2 or more. Received: 1",
        ),
        (
            "transformer",
            ["--epochs", 0],
            "--epochs must be 1 or more. Received: 0",
        ),
        (
            "transformer",
            ["--heads", 3],
            "--width must be divisible by --heads. Received: 16, 3",
        ),
        ("transformer", ["--density", 0.01], "The least global density"),
        ("faster", ["--epochs", 1], "--epochs must be 2 or more. Received: 1"),
        ("faster", ["--block", 48], "Received"),
        (
            "faster",
            ["--density", 1.5],
            "must be in (0, 1]. Received: density=1.5",
        ),
    ],
)
def test_refusals_are_one_line(run_example, capsys, name, arguments, rule):
    status, folder = run_example(name, *arguments)
    assert status == 2
    errors = capsys.readouterr().err
    assert rule in errors
    assert "Traceback" not in errors
    assert not folder.exists() or not list(folder.glob("*.json"))


@pytest.mark.slow  # about a minute: two networks, a dozen files
@pytest.mark.core
def test_quickstart(tmp_path):
    options = (
        "--epochs",
        2,
        "--minutes",
        0.1,
        "--seed",
        3,
        "--output",
        tmp_path / "out",
    )
    said = run_python(FOLDER / "quickstart.py", *options)
    assert f"1347 training and 450 test images; backend {BACKEND}" in said
    found = re.findall(
        r"^(\D.+?) +([\d.]+)% +([\d,]+) +[\d,]+ +([\d.]+)$", said, re.MULTILINE
    )
    names = [name for name, *_ in found]
    assert names == [
        "dense float32",
        "dense int8",
        "dense int4",
        "kso.shrink",
        names[-1],
    ]
    assert names[-1].startswith("live blocks")
    size = {name: int(size.replace(",", "")) for name, _, size, _ in found}
    assert (
        size[names[-1]]
        < size["dense int4"]
        < size["dense int8"]
        < size["dense float32"]
    )
    # Two epochs: it learns.
    assert min(float(accuracy) for _, accuracy, *_ in found) > 60
    assert len([*(tmp_path / "out").glob("*.tflite")]) == 5


@pytest.mark.slow
def test_the_last_lines_of_faster_say_what_was_measured(run_example, capsys):
    status, folder = run_example("faster", "--density", 0.25)
    assert status == 0
    title, *lines, verdict = capsys.readouterr().out.strip().splitlines()[-7:]
    assert title.startswith("digits, 2 x 64, blocks of 8, batch 32, 2 epochs")
    assert title.endswith("density of the hidden kernels 0.2500")
    figures = json.loads((folder / "faster.json").read_text())
    dense, blocks = figures["dense"], figures["blocks"]
    # Two epochs: it learns.
    assert min(dense["accuracy"], blocks["accuracy"]) > 0.5
    assert lines[0].endswith(
        f"{blocks['accuracy']:.2%} on blocks, {dense['accuracy']:.2%} dense"
    )
    ratio = blocks["seconds"] / dense["seconds"]
    assert f"ratio {ratio:.2f}" in lines[1]
    assert verdict.startswith(
        "An epoch on blocks is" if ratio < 1 else "It is no faster here"
    )

    for name in ("dense", "blocks"):
        model = keras.saving.load_model(folder / f"{name}.keras")
        held = [*model.weights, *model.optimizer.variables]
        size = sum(
            keras.ops.convert_to_numpy(variable).nbytes for variable in held
        )
        assert figures[name]["memory_mib"] == size / 2**20
        on_blocks = (
            type(model.get_layer("hidden_1")) is kso.layers.BlockSparseDense
        )
        assert on_blocks == (name == "blocks")
        assert type(model.get_layer("first")) is keras.layers.Dense


@pytest.mark.slow
# Keras', of blocks without `build` that are loaded.
@pytest.mark.filterwarnings("ignore:.build... was called on layer:UserWarning")
def test_the_last_lines_of_transformer_say_what_came_out(run_example, capsys):
    status, folder = run_example("transformer", "--density", 0.4)
    assert status == 0
    title, accuracy, weights, _, packed = (
        capsys.readouterr().out.strip().splitlines()[-5:]
    )
    assert title == f"digits, 1 blocks of width 16, 4 epochs, {BACKEND}"
    figures = json.loads((folder / "transformer.json").read_text())
    dense, sparse = figures["dense"], figures["sparse"]
    # Four epochs: it learns.
    assert min(dense["accuracy"], sparse["accuracy"]) > 0.5
    assert accuracy.endswith(
        f"{sparse['accuracy']:.2%} sparse, {dense['accuracy']:.2%} dense"
    )
    assert f"{sparse['live']:,} of {sparse['weights']:,} live" in weights
    assert sparse["gzip_bytes"] < 0.7 * dense["gzip_bytes"]
    assert packed.endswith(
        f"{sparse['gzip_bytes'] / dense['gzip_bytes']:.2f} of it"
    )

    plain = keras.saving.load_model(folder / "sparse.keras")
    plain(np.zeros((1, 8, 8, 1), "float32"))
    held = {
        w.path: np.count_nonzero(w.value) for w in kso.prunable_weights(plain)
    }
    assert sum(held.values()) == sparse["live"]
    ends = {"patch/kernel": 4 * 16, "head/kernel": 16 * 10}
    assert ends.items() <= held.items()
    inner = sparse["weights"] - sum(ends.values())
    assert sparse["live"] - sum(ends.values()) <= round(0.4 * inner)


@pytest.mark.slow  # some 20 seconds: two processes that load a backend
def test_blocks_train_where_the_dense_twin_does_not_fit():
    small = ("--width", 8192, "--depth", 1, "--epochs", 1, "--limit", 1200)
    title, blocks, dense = (
        run_python(FOLDER / "wide.py", *small).strip().splitlines()
    )
    assert (
        "8192 x 8192: weights, gradients and Adam's moments are 1,024 MiB dense"
        in title
    )
    found = re.fullmatch(
        r"blocks: epochs 1, \d+ s, test accuracy ([\d.]+)%, peak resident memory ([\d,]+) MiB",
        blocks,
    )
    assert found, blocks
    assert float(found[1]) > 60  # it learns
    # TensorFlow may end by a signal instead, where its kernels do not check what they were given.
    reason = (
        r"SIG\w+|\w+: .*(memory|OOM)"
        if BACKEND == "tensorflow"
        else r"\w+: .*memory"
    )
    assert re.match(f"dense:  ended with ({reason})", dense), dense


@pytest.mark.tensorflow_only
def test_spectrograms_are_repeatable_and_balanced(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    import edge

    x, y = edge.spectrograms(600, seed=4)
    again, _ = edge.spectrograms(600, seed=4)
    np.testing.assert_array_equal(x, again)
    assert x.shape == (600, edge.FRAMES, edge.BANDS)
    assert np.bincount(y).min() > 20
    assert len(np.bincount(y)) == edge.KEYWORDS


@pytest.mark.tensorflow_only
@pytest.mark.slow
def test_edge(run_example):
    status, folder = run_example("edge", "--epochs", "1", "--only", "speech")
    assert status == 0
    lines = json.loads((folder / "edge.json").read_text())["speech"]
    assert (lines["dense"]["route"], lines["blocks"]["route"]) == (
        "int8",
        "int8+blocks",
    )
    for kind in ("dense", "blocks"):
        line = lines[kind]
        assert line["keras_accuracy"] > 0.6
        assert abs(line["file_accuracy"] - line["keras_accuracy"]) < 0.02
        assert (folder / f"speech_{kind}.tflite").stat().st_size == line[
            "bytes"
        ]
    assert lines["blocks"]["bytes"] < lines["dense"]["bytes"] / 3


@pytest.mark.tensorflow_only
@pytest.mark.slow  # some 20 seconds: every stage to an int8 file
def test_no_stage_of_the_pipeline_loses_a_zero(tmp_path):
    done = run_python(
        FOLDER / "tfmot_pipeline.py", "--epochs", 8, "--output", tmp_path
    )
    stages = json.loads((tmp_path / "stages.json").read_text())
    assert [name.split(",")[0] for name in stages] == [
        "pruned",
        "trained with XLA",
        "stripped",
        "clustered",
        "quantization-aware",
        "int8 file",
    ]
    for name, stage in stages.items():
        assert (stage["zeros"], stage["lost"]) == (13584 - 2717, 0), name
        assert stage["accuracy"] > (
            0.05 if name.startswith("pruned") else 0.85
        ), name
    assert f"zeros {13584 - 2717} of {13584 - 2717}" in done
    assert (
        abs(
            stages["trained with XLA"]["accuracy"]
            - stages["stripped"]["accuracy"]
        )
        < 1e-9
    )
    assert (tmp_path / "model.tflite").stat().st_size < 25_000


@pytest.mark.slow  # a CNN, three files
@pytest.mark.tensorflow_only
def test_the_folder_for_a_raspberry_pi_answers_as_keras(tmp_path):
    options = ("--epochs", 1, "--minutes", 0, "--output", tmp_path / "pi")
    said = run_python(FOLDER / "raspberry_pi.py", *options)
    same = int(
        re.search(
            r"(\d+) of 200 rows have the class that Keras gives them", said
        )[1]
    )
    assert same >= 195
    assert {one.name for one in (tmp_path / "pi").iterdir()} == {
        *("model.tflite.gz", "rows.npz", "run.py")
    }


@pytest.mark.tensorflow_only  # the array is the same from another backend
def test_the_program_for_micro_registers_the_operators_of_its_array(tmp_path):
    """The workflow of the night builds it, where the sources of LiteRT Micro can be had."""
    program = (FOLDER / "micro" / "main.cc").read_text(encoding="utf-8")
    registered = re.findall(r"resolver\.Add(\w+)\(\);", program)
    script = FOLDER / "micro" / "model.py"
    output = run_python(script, tmp_path, "--rows", "256")
    [operators] = re.findall(r"operators: (.*)", output)
    assert operators.split() == registered
    assert f"MicroMutableOpResolver<{len(registered)}>" in program
    header = (tmp_path / "model.h").read_text(encoding="utf-8")
    assert "alignas(16) static const unsigned char model_data[]" in header
    rows = (tmp_path / "rows.h").read_text(encoding="utf-8")
    assert "signed char rows[20][500]" in rows
    assert "signed char answers[20][10]" in rows
