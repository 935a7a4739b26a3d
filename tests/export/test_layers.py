"""Every kind of layer, at 10% density, in one model with an output for each."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho.export import export_litert
from keras_sparse_ortho.layers import CircularPadding
from tests.export.models import interpret, kernel_zeros, layers, thin_out
from tests.helpers import array

pytestmark = pytest.mark.tensorflow_only

BATCH = 2


def zoo():
    image = keras.Input((9, 9, 4), name="image")
    tokens = keras.Input((6,), dtype="int32", name="tokens")
    steps = keras.Input((6, 8), name="steps")
    volume = keras.Input((4, 4, 4, 2), name="volume")
    vector = keras.Input((8,), name="vector")
    words = layers.Embedding(20, 8, mask_zero=True)(tokens)
    shared = layers.Dense(8)
    outputs = {
        "attention": layers.MultiHeadAttention(2, 4)(steps, steps),
        "bidirectional": layers.Bidirectional(layers.SimpleRNN(3))(steps),
        "circular": layers.Conv2D(4, 3, strides=2)(
            CircularPadding([(1, 1), (0, 2)])(image)
        ),
        "conv1d": layers.Conv1D(4, 3)(steps),
        "conv3d": layers.Conv3D(3, 2)(volume),
        "conv_batchnorm": layers.ReLU()(
            layers.BatchNormalization()(layers.Conv2D(8, 3)(image))
        ),
        "depthwise": layers.DepthwiseConv2D(3, depth_multiplier=2)(image),
        "einsum": layers.EinsumDense("abc,cd->abd", output_shape=(None, 3))(
            steps
        ),
        "group": layers.Conv2D(6, 3, groups=2)(image),
        "gru": layers.GRU(6, return_sequences=True)(steps),
        "gru_unrolled": layers.GRU(5, unroll=True)(steps),
        "lstm_masked": layers.LSTM(6)(words),
        "separable": layers.SeparableConv2D(5, 3)(image),
        "shared": shared(shared(vector)),
        "time_distributed": layers.TimeDistributed(layers.Dense(7))(steps),
        "transposed": layers.Conv2DTranspose(4, 3, strides=2)(image),
    }
    inputs = {t.name: t for t in (image, tokens, steps, volume, vector)}
    return thin_out(keras.Model(inputs, outputs))


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The model, the report, and the outputs of Keras and of the file on the first batch."""
    model = zoo()
    rng = np.random.default_rng(0)
    sample = {
        "image": rng.normal(size=(5, 9, 9, 4)),
        "tokens": rng.integers(0, 20, (5, 6)),
        "steps": rng.normal(size=(5, 6, 8)),
        "volume": rng.normal(size=(5, 4, 4, 4, 2)),
        "vector": rng.normal(size=(5, 8)),
    }
    path = tmp_path_factory.mktemp("zoo") / "zoo.tflite"
    report = export_litert(model, path, batch_size=BATCH, sample=sample)
    types = {tensor.name: tensor.dtype for tensor in model.inputs}
    batch = {
        name: rows[:BATCH].astype(types[name]) for name, rows in sample.items()
    }
    want = {
        name: array(output)
        for name, output in model(batch, training=False).items()
    }
    return model, report, want, interpret(path, **batch)


def test_every_layer_agrees_with_keras(exported):
    _, report, want, got = exported
    assert got.keys() == want.keys()  # names of dict outputs are kept
    for name, values in want.items():
        # Or the comparison would say nothing.
        assert np.abs(values).max() > 0.01, name
        np.testing.assert_allclose(got[name], values, atol=1e-5, err_msg=name)
    assert report.sample_rows == 5  # in batches of two
    assert 0 < report.max_abs_diff < 1e-5
    assert report.argmax_agreement == 1.0


def test_no_zero_is_lost(exported):
    model, report, _, _ = exported
    assert report.total_zeros >= kernel_zeros(model) > 0
    # The converter slices the kernels of unrolled loops; every other one is there as a whole.
    assert all("gru" in path for path in report.folded)
    # Initial states of loops are constants as well.
    assert 0.09 < report.density < 0.13


class Positions(layers.Layer):
    """A table that is added at every place, after a layer with a bias."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.table = layers.Embedding(6, 8, name="table")

    def call(self, x):
        return x + self.table(keras.ops.arange(6))


def test_a_table_that_is_added_to_a_bias_is_named(tmp_path):
    """The converter adds them: no tensor of the file has the zeros of the table."""
    steps = keras.Input((6, 8), name="steps")
    model = keras.Model(
        steps, Positions(name="where")(layers.Dense(8, name="dense")(steps))
    )
    report = export_litert(thin_out(model, 0.5), tmp_path / "m.tflite")
    assert report.folded == ("where/table/embeddings",)
    assert "where/table" in str(report)
    assert (
        kernel_zeros(model)
        > report.total_zeros
        >= np.sum(model.get_layer("dense").kernel == 0)
    )
