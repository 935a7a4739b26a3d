"""`report`: figures, totals, and the three forms they come in."""

import csv
import json

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.analysis import SparsityReport
from keras_sparse_ortho.errors import NotPrunableError

L = keras.layers
pytestmark = pytest.mark.core

SIZES = {"conv/kernel": 216, "hidden/kernel": 512 * 16, "head/kernel": 64}
FLOPS = {"conv/kernel": 64 * 216, "hidden/kernel": 512 * 16, "head/kernel": 64}


def network():
    return keras.Sequential(
        [
            keras.Input((10, 10, 3)),
            L.Conv2D(8, 3, name="conv"),
            L.BatchNormalization(),
            L.Flatten(),
            L.Dense(16, name="hidden"),
            L.Dense(4, name="head"),
        ],
        name="net",
    )


def sparse():
    return kso.sparsify(network(), 0.2, seed=0)


def test_figures_and_totals():
    model = sparse()
    summary = kso.report(model)
    masks = {w.path: w.parametrization.mask_value() for w in kso.prunable_weights(model)}
    assert [row.path for row in summary.rows] == list(SIZES)
    for row in summary.rows:
        assert row.shape == masks[row.path].shape
        assert row.size == SIZES[row.path]
        assert row.live == masks[row.path].sum()
        assert row.density == row.live / row.size
        assert row.flops == FLOPS[row.path]
        assert row.sparse_flops == FLOPS[row.path] // SIZES[row.path] * row.live
        assert row.orthogonality_error < 1e-6
    assert summary.size == sum(SIZES.values())
    assert summary.live == round(0.2 * summary.size)
    assert summary.density == summary.live / summary.size
    assert summary.flops == sum(FLOPS.values())
    assert summary.sparse_flops == sum(row.sparse_flops for row in summary.rows)


def test_plain_models_count_nonzero_entries():
    model = network()
    kernel = np.zeros((3, 3, 3, 8), dtype="float32")
    kernel[1, 1, :, :3] = 2.0 * np.eye(3)
    model.layers[0].kernel.assign(kernel)
    rows = {row.path: row for row in kso.report(model, orthogonality="all").rows}
    assert rows["conv/kernel"].live == 3
    assert rows["conv/kernel"].sparse_flops == 3 * 64
    assert rows["conv/kernel"].orthogonality_error < 1e-6
    assert rows["hidden/kernel"].density == 1.0


def test_a_stripped_model_has_the_orthogonality_and_flops_of_the_wrapped_one():
    model = sparse()
    wrapped, plain = kso.report(model), kso.report(kso.strip(model), orthogonality="all")
    for ours, theirs in zip(wrapped.rows, plain.rows, strict=True):
        assert (ours.path, ours.shape, ours.flops) == (theirs.path, theirs.shape, theirs.flops)
        assert ours.orthogonality_error == theirs.orthogonality_error
        assert theirs.live <= ours.live  # trainable zeros are live only in the mask


def test_trained_kernels_and_random_ones_have_no_orthogonality_error(tmp_path):
    model = sparse()
    assert all(row.orthogonality_error < 1e-6 for row in kso.report(model).rows)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert all(row.orthogonality_error < 1e-6 for row in kso.report(loaded).rows)
    assert "|G - I|" in str(kso.report(loaded))
    kernel = model.get_layer("hidden").layer.kernel
    kernel.assign(keras.ops.multiply(kernel, 1.001))
    errors = {row.path: row.orthogonality_error for row in kso.report(model).rows}
    assert [path for path, error in errors.items() if error is None] == ["hidden/kernel"]
    random = kso.sparsify(network(), 0.2, initializer="random_sparse", seed=0)
    assert {row.orthogonality_error for row in kso.report(random).rows} == {None}
    assert "|G - I|" not in str(kso.report(random))


def test_the_orthogonality_errors_can_be_left_out():
    summary = kso.report(network(), orthogonality=False)
    assert {row.orthogonality_error for row in summary.rows} == {None}


def test_the_dict_is_json_and_has_every_figure():
    summary = kso.report(sparse())
    figures = json.loads(json.dumps(summary.to_dict()))
    first = summary.rows[0]
    assert {
        key: value for key, value in figures.items() if key not in ("weights", "unregistered")
    } == {
        "name": "net",
        "size": summary.size,
        "live": summary.live,
        "density": summary.density,
        "sparse_density": summary.density,
        "whole_density": summary.density,
        "flops": summary.flops,
        "sparse_flops": summary.sparse_flops,
    }
    assert figures["unregistered"] == []
    assert len(figures["weights"]) == 3
    assert figures["weights"][0] == {
        "path": "conv/kernel",
        "shape": [3, 3, 3, 8],
        "size": 216,
        "live": first.live,
        "density": first.density,
        "flops": FLOPS["conv/kernel"],
        "sparse_flops": first.sparse_flops,
        "orthogonality_error": first.orthogonality_error,
        "dead_outputs": 0,
        "gain": 1.0,
        "taps": "center",
        "state": "sparse",
        "block": None,
        "least_density": None,
        "not_on_blocks": None,
    }


def test_the_csv_reads_back_exactly(tmp_path):
    summary = kso.report(sparse())
    summary.to_csv(tmp_path / "report.csv")
    with (tmp_path / "report.csv").open(newline="", encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    assert len(lines) == len(summary.rows)
    for line, row in zip(lines, summary.rows, strict=True):
        assert line["path"] == row.path
        assert line["shape"] == "x".join(str(size) for size in row.shape)
        figures = [row.size, row.live, row.flops, row.sparse_flops]
        assert [int(line[key]) for key in ("size", "live", "flops", "sparse_flops")] == figures
        assert float(line["density"]) == row.density
        assert float(line["orthogonality_error"]) == row.orthogonality_error


def test_the_table_shows_every_kernel_and_the_totals():
    summary = kso.report(sparse())
    lines = str(summary).splitlines()
    assert lines[0].strip() == "Kernels of 'net'"
    for row in summary.rows:
        [line] = [line for line in lines if line.split()[:1] == [row.path]]
        for figure in (f"{row.live:,}", f"{row.density:.4f}", f"{row.sparse_flops:,}"):
            assert figure in line.split()
    totals = [f"{summary.size:,}", f"{summary.live:,}", f"{summary.density:.4f}"]
    assert lines[-1].split()[:5] == ["all", "kernels", *totals]


def test_a_model_without_kernels_has_an_empty_report():
    summary = kso.report(keras.Sequential([keras.Input((4,)), L.BatchNormalization()]))
    assert isinstance(summary, SparsityReport)
    assert (summary.rows, summary.size, summary.live, summary.flops) == ((), 0, 0, 0)


def test_an_unbuilt_model_is_refused():
    with pytest.raises(NotPrunableError, match="must be built"):
        kso.report(keras.Sequential([L.Dense(3)]))
