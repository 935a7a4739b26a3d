"""`report`: figures, totals, and the three forms they come in."""

import csv
import dataclasses
import io
import json

import keras
import numpy as np
import pytest
import rich.console

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from tests.helpers import reloaded

L = keras.layers
pytestmark = pytest.mark.core

SIZES = {"conv/kernel": 216, "hidden/kernel": 512 * 16, "head/kernel": 64}
FLOPS = {"conv/kernel": 64 * 216, "hidden/kernel": 512 * 16, "head/kernel": 64}


def network():
    layers = [L.Conv2D(8, 3, name="conv"), L.BatchNormalization(), L.Flatten()]
    layers += [L.Dense(16, name="hidden"), L.Dense(4, name="head")]
    return keras.Sequential([keras.Input((10, 10, 3)), *layers], name="net")


def sparse():
    return kso.sparsify(network(), 0.2, seed=0)


def test_figures_and_totals():
    model = sparse()
    summary = kso.report(model)
    masks = {
        w.path: w.parametrization.mask_value()
        for w in kso.prunable_weights(model)
    }
    assert [row.path for row in summary.rows] == list(SIZES)
    for row in summary.rows:
        size, flops, mask = SIZES[row.path], FLOPS[row.path], masks[row.path]
        assert (row.shape, row.size, row.live, row.flops) == (
            mask.shape,
            size,
            mask.sum(),
            flops,
        )
        assert row.density == row.live / row.size
        assert row.sparse_flops == flops // size * row.live
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
    rows = {
        row.path: row for row in kso.report(model, orthogonality="all").rows
    }
    assert rows["conv/kernel"].live == 3
    assert rows["conv/kernel"].sparse_flops == 3 * 64
    assert rows["conv/kernel"].orthogonality_error < 1e-6
    assert rows["hidden/kernel"].density == 1.0


def test_a_stripped_model_has_the_orthogonality_and_flops_of_the_wrapped_one():
    model = sparse()
    wrapped, plain = (
        kso.report(model),
        kso.report(kso.strip(model), orthogonality="all"),
    )
    for ours, theirs in zip(wrapped.rows, plain.rows, strict=True):
        assert (ours.path, ours.shape, ours.flops) == (
            theirs.path,
            theirs.shape,
            theirs.flops,
        )
        assert ours.orthogonality_error == theirs.orthogonality_error
        # Trainable zeros are live only in the mask.
        assert theirs.live <= ours.live


def test_trained_kernels_and_random_ones_have_no_orthogonality_error(tmp_path):
    model = sparse()
    assert all(row.orthogonality_error < 1e-6 for row in kso.report(model).rows)
    loaded = reloaded(model, tmp_path)
    assert all(
        row.orthogonality_error < 1e-6 for row in kso.report(loaded).rows
    )
    assert "|G - I|" in str(kso.report(loaded))
    kernel = model.get_layer("hidden").layer.kernel
    kernel.assign(keras.ops.multiply(kernel, 1.001))
    errors = {
        row.path: row.orthogonality_error for row in kso.report(model).rows
    }
    assert [path for path, error in errors.items() if error is None] == [
        "hidden/kernel"
    ]
    random = kso.sparsify(network(), 0.2, initializer="random_sparse", seed=0)
    for without in (
        kso.report(random),
        kso.report(sparse(), orthogonality=False),
    ):
        assert {row.orthogonality_error for row in without.rows} == {None}
    assert "|G - I|" not in str(kso.report(random))


def test_dict_csv_and_table_have_every_figure(tmp_path):
    summary = kso.report(sparse())
    figures = json.loads(json.dumps(summary.to_dict()))
    totals = (
        "size",
        "live",
        "density",
        "sparse_density",
        "whole_density",
        "flops",
        "sparse_flops",
    )
    assert {name: figures.pop(name) for name in totals} == {
        k: getattr(summary, k) for k in totals
    }
    first, *others = figures.pop("weights")
    assert len(others) == 2
    assert figures == {"name": "net", "unregistered": []}
    row = summary.rows[0]
    assert first == dataclasses.asdict(row) | {
        "shape": [3, 3, 3, 8],
        "density": row.density,
    }
    assert 0 < row.gain < 1  # before normalization
    assert (row.state, row.dead_outputs) == ("sparse", 0)

    summary.to_csv(tmp_path / "report.csv")
    with (tmp_path / "report.csv").open(newline="", encoding="utf-8") as stream:
        lines = list(csv.DictReader(stream))
    for line, row in zip(lines, summary.rows, strict=True):
        assert (line["path"], line["shape"]) == (
            row.path,
            "x".join(map(str, row.shape)),
        )
        for name in (
            "size",
            "live",
            "flops",
            "sparse_flops",
            "density",
            "orthogonality_error",
        ):
            assert line[name] == str(getattr(row, name))

    lines = [line.split() for line in str(summary).splitlines()]
    assert lines[0] == ["Kernels", "of", "'net'"]
    for row in summary.rows:
        [line] = [line for line in lines if line[:1] == [row.path]]
        assert {
            f"{row.live:,}",
            f"{row.density:.4f}",
            f"{row.sparse_flops:,}",
        } <= {*line}
    totals = [
        f"{summary.size:,}",
        f"{summary.live:,}",
        f"{summary.density:.4f}",
    ]
    assert lines[-1][:5] == ["all", "kernels", *totals]


def test_plain_kernels_with_zeros_are_sparse_and_scaled_ones_are_not_as_drawn():
    model = kso.strip(sparse())
    assert [row.state for row in kso.report(model).rows] == ["sparse"] * 3

    drawn = keras.Sequential([keras.Input((8,))])
    for name in ("kept", "scaled"):
        kernel = kso.initializers.ExactOrthogonal(0.5, seed=1)
        drawn.add(L.Dense(8, kernel_initializer=kernel, name=name))
    scaled = drawn.get_layer("scaled").kernel
    scaled.assign(scaled * 2)
    kept, scaled = kso.report(kso.apply_masks(drawn)).rows
    assert kept.orthogonality_error < 1e-6
    assert scaled.orthogonality_error is None


def test_bytes_are_those_of_the_storage():
    masked = sparse()
    size, live = sum(SIZES.values()), round(0.2 * sum(SIZES.values()))
    summary = kso.report(masked)
    # Float32, bool.
    assert (summary.bytes, summary.live_bytes) == (
        4 * size + size,
        4 * live,
    )
    assert (summary.params, summary.mask_params) == (
        masked.count_params(),
        size,
    )
    compact = kso.report(kso.convert(masked, "compact"))
    # Float32, int32.
    assert (compact.bytes, compact.live_bytes) == (
        8 * live,
        4 * live,
    )
    assert compact.params == masked.count_params() - 2 * (size - live)
    assert compact.mask_params == live
    head = " ".join(str(summary).split("weight")[0].split())
    assert (
        f"{masked.count_params():,} parameters in summary(), 8,472 of them masks or"
        in head
    )
    assert "kernels take 42.4kB, their live values 6.78kB" in head
    plain = kso.report(kso.strip(masked))
    assert (plain.bytes, plain.mask_params) == (4 * size, 0)
    assert "parameters" not in str(plain)
    assert plain.params == masked.count_params() - size
    blocks = kso.Block(4, 4, regular=True)
    wide = keras.Sequential([keras.Input((64,)), L.Dense(64, dtype="bfloat16")])
    wide = kso.convert(
        kso.sparsify(wide, 0.25, structure=blocks, seed=0), "blocks"
    )
    summary = kso.report(wide)
    stored = wide.layers[0].blocks.dtype
    assert summary.live_bytes == 1024 * (2 if stored == "bfloat16" else 4)
    assert summary.bytes == summary.live_bytes + 4 * summary.mask_params
    assert 0 < summary.mask_params == wide.count_params() - 1024 - 64


def test_masks_that_wait_for_their_first_update_are_told():
    model = kso.parametrize(network(), kso.MagnitudeMask(0.1))
    summary = kso.report(model)
    assert summary.dense == dict.fromkeys(SIZES, "not updated")
    assert str(summary).count("not updated") == 3
    assert not kso.report(kso.finish(model)).dense


def test_an_initializer_alone_is_told_with_the_next_step():
    drawn = kso.initializers.ExactOrthogonal(0.1, seed=0)
    hidden = L.Dense(32, kernel_initializer=drawn, name="hidden")
    model = keras.Sequential(
        [keras.Input((16,)), hidden, L.Dense(4, name="head")]
    )
    summary = kso.report(model)
    assert summary.unadopted == ("hidden/kernel",)
    assert "Before training, call apply_masks(model). hidden/k" in " ".join(
        str(summary).split()
    )
    # It is sparse until it is trained.
    assert summary.dense == {"head/kernel": "no mask"}
    for made in (kso.apply_masks(model), kso.strip(kso.apply_masks(model))):
        assert not kso.report(made).unadopted
        assert "apply_masks" not in str(kso.report(made))
    hidden.kernel.assign(np.ones((16, 32)))
    assert kso.report(model).dense["hidden/kernel"] == "not adopted"
    assert "not adopted" in str(kso.report(model))


def test_notebooks_get_the_table_escaped():
    empty = kso.report(
        keras.Sequential([keras.Input((4,)), L.BatchNormalization()])
    )
    assert (empty.rows, empty.size, empty.live, empty.flops) == ((), 0, 0, 0)
    summary = dataclasses.replace(kso.report(sparse()), name="<script>")
    assert repr(summary) == str(summary)
    html = summary._repr_html_()
    assert html.startswith("<pre>Kernels of &#x27;&lt;script&gt;&#x27;")
    assert html.count("<") == 2
    assert len(html) < 2000


def test_a_matrix_on_all_taps_is_reported_as_one():
    model = keras.Sequential(
        [keras.Input((8, 8, 4)), keras.layers.Conv2D(16, 3, name="c")]
    )
    pattern = kso.initializers.ExactOrthogonal(taps="all")
    sparse = kso.sparsify(model, 0.3, initializer=pattern, seed=0)
    (row,) = kso.report(sparse).rows
    assert row.orthogonality_error < 1e-6
    assert row.live == round(0.3 * row.size)
    kernel = np.asarray(kso.prunable_weights(sparse)[0].value)
    assert kso.analysis.orthogonality_error(kernel) > 0.1  # no isometry
    assert kso.analysis.orthogonality_error(kernel, taps="all") < 1e-6


def drawn(summary, width):
    stream = io.StringIO()
    rich.console.Console(file=stream, width=width).print(summary)
    return stream.getvalue()


def test_names_are_text_and_not_commands():
    names = [
        "conv[bn]",
        "[red]",
        ":smile:",
        "b\x1b]0;title\x07",
        "line\nbreak",
        "\ud800",
    ]
    # TensorFlow could not call a model with such names.
    row = kso.report(sparse()).rows[0]
    rows = [dataclasses.replace(row, path=f"{name}/kernel") for name in names]
    summary = kso.analysis.SparsityReport(tuple(rows), "[bold]m\x1b[31m")
    for text in (
        str(summary),
        repr(summary),
        drawn(summary, 80),
        summary._repr_html_(),
    ):
        assert "\x1b" not in text
        text.encode()  # half a surrogate pair would raise
    text = str(summary)
    for name in (
        "conv[bn]",
        "[red]",
        ":smile:",
        r"b\x1b]0;title\x07",
        r"line\nbreak",
        r"\ud800",
    ):
        assert f"{name}/kernel" in text
    assert r"Kernels of '[bold]m\x1b[31m'" in text
    weight = kso.prunable_weights(sparse())[0]
    assert repr(dataclasses.replace(weight, path=names[3])).startswith(
        r"<b\x1b]0;title\x07 shape"
    )


@pytest.mark.parametrize("width", [40, 60, 80, 100, 110, 120, 200])
def test_no_column_is_cut_off(width):
    rows = [
        dataclasses.replace(
            row,
            block=(32, 32),
            least_density=0.03125,
            gain=1.4142,
            dead_outputs=7,
        )
        for row in kso.report(sparse()).rows
    ]
    many = [
        dataclasses.replace(row, size=10**9, live=10**8, flops=10**12)
        for row in rows
    ]
    text = drawn(kso.analysis.SparsityReport(tuple(many), "net"), width)
    assert max(len(line) for line in text.splitlines()) <= width
    words = text.split()
    for title in ("weight", "shape", "density", "|G", "gain", "blocks"):
        assert title in words
    assert "3x3x3x8" in words
    for cell in ("0.1000", "0.0312", "32x32", "1.414", "7"):
        assert words.count(cell) >= 2, cell
    assert "…" not in text


def quantized(mode):
    x = keras.Input((9,), dtype="int32")
    y = L.Embedding(20, 15, name="table")(x)
    y = L.EinsumDense("abc,cde->abde", (None, 3, 5), name="heads")(y)
    model = keras.Model(x, L.Dense(7, name="odd")(L.Reshape((9, 15))(y)))
    plain = kso.strip(kso.prune(model, 0.5, budget="uniform"))
    before = kso.report(plain)
    for layer in (plain.get_layer(name) for name in ("table", "heads", "odd")):
        layer.quantize(mode)
    return plain, before


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_kernels_that_keras_quantized_have_their_own_figures(mode):
    """Two integers of 4 bits are in one byte, and an odd last axis is padded."""
    plain, before = quantized(mode)
    after = kso.report(plain)
    assert [(row.path, row.shape) for row in after.rows] == [
        (row.path, row.shape) for row in before.rows
    ]
    for row, other in zip(after.rows, before.rows, strict=True):
        # Values near 0 are rounded to it.
        assert 0.8 * other.live <= row.live <= other.live
    zeros = {
        weight.path: weight.value == 0 for weight in kso.prunable_weights(plain)
    }
    assert all(
        zeros[path].shape == row.shape
        for path, row in zip(zeros, after.rows, strict=True)
    )


def test_kernels_that_cannot_be_read_are_refused_by_name(monkeypatch):
    """GPTQ and AWQ need trained layers and minutes; the check is the same for all modes."""
    monkeypatch.setattr(
        "keras_sparse_ortho.analysis._report._UNREADABLE", ("int8",)
    )
    model = network()
    model.get_layer("hidden").quantize("int8")
    with pytest.raises(
        NotPrunableError, match=r"'hidden/kernel' is packed.*Dense of 'int8'"
    ):
        kso.report(model)


@pytest.mark.tensorflow_only
def test_a_saved_model_in_a_layer_is_listed(tmp_path):
    model = network()
    model.export(tmp_path / "saved", verbose=False)
    layer = L.TFSMLayer(tmp_path / "saved", call_endpoint="serve")
    x = keras.Input((10, 10, 3))
    summary = kso.report(keras.Model(x, layer(x)))
    assert sorted(row.size for row in summary.unregistered) == sorted(
        SIZES.values()
    )
    assert {row.state for row in summary.unregistered} == {"not registered"}
    assert summary.rows == ()
