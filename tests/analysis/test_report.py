"""The report: counts, FLOPs by hand, orthogonality errors."""

import csv
import json

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.analysis import orthogonality_error
from keras_sparse_ortho.initializers import KernelLayout
from keras_sparse_ortho.models import kernel_positions

L = keras.layers
pytestmark = pytest.mark.core

# layer, input shape, multiply-adds of its kernels in order, by hand
FLOPS = {
    "dense": (lambda: L.Dense(7), (5,), [35]),
    "dense_on_sequences": (lambda: L.Dense(7), (4, 5), [4 * 35]),
    "conv": (lambda: L.Conv2D(4, 3), (8, 8, 3), [6 * 6 * 108]),
    "strided": (lambda: L.Conv2D(4, 3, 2, padding="same"), (9, 9, 3), [5 * 5 * 108]),
    "groups": (lambda: L.Conv2D(4, 3, groups=2), (8, 8, 6), [6 * 6 * 27 * 4]),
    "conv1d": (lambda: L.Conv1D(4, 3), (8, 3), [6 * 36]),
    "conv3d": (lambda: L.Conv3D(4, 2), (4, 4, 4, 3), [27 * 96]),
    "transposed": (lambda: L.Conv2DTranspose(4, 3, 2), (5, 5, 3), [25 * 108]),
    "depthwise": (lambda: L.DepthwiseConv2D(3, depth_multiplier=2), (8, 8, 3), [36 * 54]),
    "separable": (lambda: L.SeparableConv2D(4, 3), (8, 8, 3), [36 * 27, 36 * 12]),
    "embedding": (None, (6,), [0]),
    "einsum": (lambda: L.EinsumDense("...bc,cd->...bd", (None, 7)), (2, 6, 5), [12 * 35]),
    "lstm": (lambda: L.LSTM(4), (6, 5), [6 * 80, 6 * 64]),
    "gru": (lambda: L.GRU(4), (6, 5), [6 * 60, 6 * 48]),
    "stacked": (
        lambda: L.RNN([L.SimpleRNNCell(4), L.SimpleRNNCell(3)]),
        (6, 5),
        [6 * 20, 6 * 16, 6 * 12, 6 * 9],
    ),
    "bidirectional": (lambda: L.Bidirectional(L.SimpleRNN(4)), (6, 5), [120, 96, 120, 96]),
    "time_distributed": (lambda: L.TimeDistributed(L.Dense(7)), (6, 5), [6 * 35]),
}


@pytest.mark.parametrize("name", FLOPS)
def test_multiply_adds_by_hand(name):
    make, shape, expected = FLOPS[name]
    inputs = keras.Input(shape, dtype="int32" if name == "embedding" else None)
    layer = L.Embedding(9, 4) if make is None else make()
    model = keras.Model(inputs, layer(inputs))
    assert [weight.flops for weight in kso.prunable_weights(model)] == expected


def test_attention_and_shared_layers():
    x = keras.Input((5, 12))
    model = keras.Model(x, L.MultiHeadAttention(3, 4)(x, x))
    assert [weight.flops for weight in kso.prunable_weights(model)] == [5 * 144] * 4
    shared = L.Dense(12)
    model = keras.Model(x, shared(shared(x)))
    assert [weight.flops for weight in kso.prunable_weights(model)] == [2 * 5 * 144]


def test_what_is_not_known():
    class Own(keras.layers.Layer):
        def build(self, input_shape):
            self.kernel = self.add_weight(shape=(input_shape[-1], 4), name="kernel")

        def call(self, inputs):
            return inputs @ self.kernel

    x = keras.Input((5,))
    model = keras.Model(x, Own()(x))
    assert kso.prunable_weights(model)[0].flops is None
    assert kso.report(model).flops is None
    assert "not known" in str(kso.report(model))
    kernel_positions.register(Own, lambda layer, inputs, outputs: 1)
    assert kso.prunable_weights(model)[0].flops == 20
    x = keras.Input((None, 5))
    dynamic = keras.Model(x, L.Dense(4)(x))
    assert kso.prunable_weights(dynamic)[0].flops is None


def test_totals_dict_and_csv(tmp_path):
    dense = keras.Sequential(
        [keras.Input((8, 8, 3)), L.Conv2D(8, 3, name="c"), L.Flatten(), L.Dense(5, name="d")]
    )
    model = kso.sparsify(dense, 0.25, seed=0)
    summary = kso.report(model)
    assert summary.size == 216 + 1440
    assert summary.live == round(0.25 * 1656)
    assert summary.density == summary.live / summary.size
    assert summary.flops == 36 * 216 + 1440
    assert summary.sparse_flops == 36 * summary.rows[0].live + summary.rows[1].live
    assert max(row.orthogonality_error for row in summary.rows) < 1e-6
    figures = json.loads(json.dumps(summary.to_dict()))
    assert [row["path"] for row in figures["weights"]] == ["c/kernel", "d/kernel"]
    assert figures["live"] == summary.live
    summary.to_csv(tmp_path / "report.csv")
    with (tmp_path / "report.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [int(row["live"]) for row in rows] == [row.live for row in summary.rows]
    for text in ("c/kernel", "d/kernel", f"{summary.flops:,}"):
        assert text in str(summary)
    bare = kso.report(model, orthogonality=False)
    assert {row.orthogonality_error for row in bare.rows} == {None}


def test_orthogonality_error_against_the_gram_matrix():
    rng = np.random.default_rng(0)
    for shape in ((20, 12), (12, 20)):
        kernel = rng.normal(size=shape)
        tall = kernel if shape[0] >= shape[1] else kernel.T
        gram = tall.T @ tall
        expected = np.abs(gram - 4.0 * np.eye(12)).max() / 4.0
        assert orthogonality_error(kernel, gain=2.0) == pytest.approx(expected)
        square = np.trace(gram) / 12
        expected = np.abs(gram / square - np.eye(12)).max()
        assert orthogonality_error(kernel) == pytest.approx(expected)
    assert orthogonality_error(np.zeros((3, 3))) == np.inf
    q, _ = np.linalg.qr(rng.normal(size=(16, 16)))
    gates = np.concatenate([q, q, 0.5 * q], axis=1)
    assert orthogonality_error(gates, KernelLayout.recurrent(3)) < 1e-12
    assert orthogonality_error(gates, KernelLayout.recurrent(3), gain=1.0) == pytest.approx(0.75)


def test_orthogonality_error_of_a_convolution_is_that_of_its_operator():
    """Two taps that are orthogonal each, but overlap: seen at the shift between them."""
    kernel = np.zeros((3, 4, 4))
    kernel[0] = kernel[1] = np.eye(4) / np.sqrt(2)
    assert orthogonality_error(kernel, gain=1.0) == pytest.approx(0.5)
    kernel[1] = 0
    kernel[0] *= np.sqrt(2)
    assert orthogonality_error(kernel, gain=1.0) < 1e-12


def test_the_density_logger():
    model = kso.sparsify(
        keras.Sequential([keras.Input((8,)), L.Dense(16, name="a"), L.Dense(4, name="b")]),
        0.5,
        seed=0,
    )
    model.compile("sgd", "mse")
    logger = kso.callbacks.DensityLogger(per_layer=True, prefix="live_")
    history = model.fit(
        np.ones((4, 8)), np.ones((4, 4)), epochs=2, verbose=0, callbacks=[logger]
    ).history
    assert history["live_density"] == [0.5, 0.5]
    table = {w.path: w.density for w in kso.prunable_weights(model)}
    assert history["live_density/a/kernel"] == [table["a/kernel"]] * 2
