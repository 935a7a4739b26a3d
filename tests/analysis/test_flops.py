"""Multiply-adds of a sample, counted by hand for every kind of layer."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.models import kernel_positions
from tests.helpers import Chain

L = keras.layers
# Shapes alone are looked at.
pytestmark = pytest.mark.numpy_only


def flops(model):
    return {
        weight.path: weight.flops
        for weight in kso.prunable_weights(model, flops=True)
    }


def model_of(layer, shape):
    entry = keras.Input(shape)
    return keras.Model(entry, layer(entry))


TRANSPOSED = L.Conv2DTranspose
# The expected sums: positions x (inputs x outputs x taps), kernel after kernel.
CASES = {
    "dense": (lambda: L.Dense(3), (5,), [5 * 3]),
    "dense_on_a_sequence": (lambda: L.Dense(3), (7, 5), [7 * 5 * 3]),
    "embedding": (lambda: L.Embedding(11, 4), (6,), [0]),
    "einsum": (
        lambda: L.EinsumDense("abc,cd->abd", (5, 8)),
        (5, 6),
        [5 * 6 * 8],
    ),
    "ellipsis": (
        lambda: L.EinsumDense("...x,xy->...y", 7),
        (6, 5, 4),
        [6 * 5 * 4 * 7],
    ),
    # One matrix for each b, each used once.
    "batched": (
        lambda: L.EinsumDense("abc,bcd->abd", (5, 8)),
        (5, 6),
        [5 * 6 * 8],
    ),
    "conv1d": (lambda: L.Conv1D(4, 3, strides=2), (9, 5), [4 * (3 * 5 * 4)]),
    "valid": (lambda: L.Conv2D(4, 3), (8, 7, 2), [6 * 5 * (9 * 2 * 4)]),
    "same": (
        lambda: L.Conv2D(4, 3, 2, "same"),
        (9, 7, 2),
        [5 * 4 * (9 * 2 * 4)],
    ),
    "groups": (
        lambda: L.Conv2D(6, 3, groups=2),
        (8, 8, 4),
        [6 * 6 * (9 * 2 * 6)],
    ),
    "first": (
        lambda: L.Conv2D(4, 3, 1, "valid", "channels_first"),
        (2, 8, 7),
        [6 * 5 * 9 * 2 * 4],
    ),
    "conv3d": (lambda: L.Conv3D(4, 2), (4, 5, 6, 3), [3 * 4 * 5 * (8 * 3 * 4)]),
    # A transposed convolution spreads every input pixel over all taps.
    "transpose": (
        lambda: TRANSPOSED(4, 3, strides=2),
        (5, 6, 2),
        [5 * 6 * (9 * 2 * 4)],
    ),
    "depthwise": (
        lambda: L.DepthwiseConv2D(3, 1, "valid", 2),
        (8, 8, 5),
        [36 * (9 * 5 * 2)],
    ),
    "separable": (
        lambda: L.SeparableConv2D(8, 3, 2),
        (9, 9, 5),
        [16 * (9 * 5), 16 * (5 * 8)],
    ),
    "lstm": (lambda: L.LSTM(4), (6, 3), [6 * 3 * 16, 6 * 4 * 16]),
    "gru": (lambda: L.GRU(4), (6, 3), [6 * 3 * 12, 6 * 4 * 12]),
    "simple_rnn": (lambda: L.SimpleRNN(4), (6, 3), [6 * 3 * 4, 6 * 4 * 4]),
    "unrolled": (
        lambda: L.GRU(4, unroll=True),
        (6, 3),
        [6 * 3 * 12, 6 * 4 * 12],
    ),
    "stacked": (
        lambda: L.RNN([L.LSTMCell(4), L.GRUCell(5)]),
        (6, 3),
        [6 * 3 * 16, 6 * 4 * 16, 6 * 4 * 15, 6 * 5 * 15],
    ),
    "both_ways": (lambda: L.Bidirectional(L.LSTM(4)), (6, 3), [288, 384] * 2),
    "over_time": (
        lambda: L.TimeDistributed(L.Conv2D(4, 3)),
        (5, 8, 7, 2),
        [5 * 30 * (9 * 8)],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_one_layer(case):
    make, shape, expected = CASES[case]
    assert list(flops(model_of(make(), shape)).values()) == expected


def test_attention_between_sequences_of_different_lengths():
    query, value = keras.Input((5, 32)), keras.Input((7, 16))
    model = keras.Model(
        [query, value], L.MultiHeadAttention(4, 8)(query, value)
    )
    assert [
        (path.split("/")[-2], count) for path, count in flops(model).items()
    ] == [
        ("query", 5 * 32 * 4 * 8),
        ("key", 7 * 16 * 4 * 8),
        ("value", 7 * 16 * 4 * 8),
        ("attention_output", 5 * 4 * 8 * 32),
    ]


def test_shared_and_nested_layers_count_for_every_call():
    shared = L.Dense(4, name="shared")
    inner_in = keras.Input((4,))
    inner = keras.Model(inner_in, shared(shared(inner_in)), name="inner")
    inputs = keras.Input((3, 4))
    x = L.Dense(4, name="first")(L.Flatten()(inputs))
    model = keras.Model(inputs, shared(inner(inner(x))))
    table = {path.split("/")[-2]: count for path, count in flops(model).items()}
    assert table == {"first": 12 * 4, "shared": 5 * 16}


def test_a_model_written_as_a_class():
    hidden = L.Dense(4, name="hidden")
    model = Chain(hidden, hidden, L.Dense(2, name="head"))
    model(keras.ops.zeros((2, 7, 4)))
    assert flops(model) == {"hidden/kernel": 2 * 7 * 16, "head/kernel": 7 * 8}


def test_dimensions_that_are_not_fixed_have_no_count():
    model = model_of(L.Dense(3), (None, 5))
    assert list(flops(model).values()) == [None]
    assert kso.report(model).flops is None
    assert "not known" in str(kso.report(model))
    # A sample of data, as `fit` takes it, fixes them.
    x = np.zeros((4, 7, 5), "float32")
    for sample in (x, (x, np.zeros(4)), [(x, np.zeros(4))]):
        assert kso.report(model, sample=sample).flops == 7 * 5 * 3
    assert (
        kso.prunable_weights(model, flops=True, sample=x)[0].flops == 7 * 5 * 3
    )


@pytest.mark.parametrize("sequences", [False, True])
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_convolutional_recurrent_layers(sequences, data_format):
    options = {"return_sequences": sequences, "data_format": data_format}
    if (
        keras.backend.backend() == "tensorflow"
        and data_format == "channels_first"
    ):
        options["padding"] = "same"
    shape = (5, 8, 7, 2) if data_format == "channels_last" else (5, 2, 8, 7)
    places = 8 * 7 if "padding" in options else 6 * 5
    model = model_of(L.ConvLSTM2D(4, 3, **options), shape)
    # The kernel on 2 channels and the recurrent one on 4, each for 4 gates of 4, in 5 steps.
    assert list(flops(model).values()) == [
        5 * places * 9 * 2 * 16,
        5 * places * 9 * 4 * 16,
    ]


def test_a_layer_without_a_rule_has_no_count_until_one_is_registered():
    class Mixing(L.Layer):
        def build(self, input_shape):
            self.kernel = self.add_weight(
                shape=(input_shape[-1], 4), name="kernel"
            )

        def call(self, inputs):
            return keras.ops.matmul(inputs, self.kernel)

    entry = keras.Input((6, 5))
    model = keras.Model(
        entry, L.Dense(3, name="head")(Mixing(name="mixing")(entry))
    )
    assert flops(model) == {"mixing/kernel": None, "head/kernel": 6 * 4 * 3}
    assert kso.report(model).flops is None
    kernel_positions.register(
        Mixing, lambda layer, inputs, outputs: inputs.shape[1]
    )
    assert flops(model) == {
        "mixing/kernel": 6 * 5 * 4,
        "head/kernel": 6 * 4 * 3,
    }


def test_a_model_that_cannot_be_called_is_named():
    class Broken(L.Layer):
        fails = False

        def call(self, x):
            if self.fails:
                raise AttributeError("no such thing")
            return x

    model = keras.Sequential(
        [keras.Input((4,)), L.Dense(3), Broken()], name="made"
    )
    model.layers[-1].fails = True
    with pytest.raises(
        ValueError, match=r"'made' cannot be called.*Received: AttributeError"
    ):
        flops(model)
