"""Recurrent layers in files: few operations a step, in loops and without them."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho.export import export_litert, kind_of, read_model
from tests.export.models import layers
from tests.helpers import array

pytestmark = pytest.mark.core
in_loops = pytest.mark.tensorflow_only

STEPS, FEATURES, UNITS = 7, 5, 6
MOST_OPERATIONS = {  # of a step, its counters included; in Keras' loops 21, 19 and 8
    "GRU": 18,
    "LSTM": 16,
    "SimpleRNN": 7,
}
OF_ALL_OUTPUTS = 4  # 7 in Keras' loops
KINDS = [getattr(layers, name) for name in MOST_OPERATIONS]


def exported(made, path, shape=(STEPS, FEATURES), mode=None):
    """The report of a network of layers, and the kinds of operations of each loop's body."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input(shape, name="x"), *made])
    rng = np.random.default_rng(0)
    sample = rng.normal(size=(4, *shape)).astype("float32")
    sample[:, 2] = 0.0  # a step that Masking leaves out
    assert np.abs(array(model(sample))).max() > 0.05
    before = [sorted(vars(layer)) for layer in model.layers]
    report = export_litert(model, path, mode=mode, sample=sample)
    assert before == [sorted(vars(layer)) for layer in model.layers]
    file = read_model(path.read_bytes())
    bodies = [
        [kind_of(file, operator) for operator in graph.operators]
        for graph in file.subgraphs
        if b"body" in graph.name
    ]
    return report, bodies


OPTIONS = [
    {},
    {"return_sequences": True},
    pytest.param(
        {"return_sequences": True, "go_backwards": True}, marks=pytest.mark.slow
    ),
    pytest.param({"use_bias": False}, marks=pytest.mark.slow),
    pytest.param({"activation": "relu"}, marks=pytest.mark.slow),
]


@in_loops
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_has_few_operations(tmp_path, kind, options):
    report, [body] = exported([kind(UNITS, **options)], tmp_path / "m.tflite")
    assert report.max_abs_diff < 1e-6
    assert body.count("FULLY_CONNECTED") == 2
    most = MOST_OPERATIONS[kind.__name__]
    if options.get("return_sequences"):
        most += OF_ALL_OUTPUTS
    assert len(body) <= most
    assert report.folded == ()


@in_loops
@pytest.mark.parametrize("kind", KINDS)
def test_inside_other_layers(tmp_path, kind):
    made = [
        layers.Bidirectional(kind(UNITS, return_sequences=True)),
        layers.RNN(kind(UNITS).cell),
    ]
    report, bodies = exported(made, tmp_path / "m.tflite")
    assert report.max_abs_diff < 1e-6
    assert [body.count("FULLY_CONNECTED") for body in bodies] == [2, 2, 2]


@in_loops
@pytest.mark.parametrize("kind", KINDS)
def test_dropout_leaves_no_operation(tmp_path, kind):
    """Keras draws the masks in inference, too."""
    dropout = {"dropout": 0.3, "recurrent_dropout": 0.2}
    path = tmp_path / "m.tflite"
    sizes = [
        exported([layer], path)[0].bytes
        for layer in (
            kind(UNITS),
            kind(UNITS, **dropout),
            layers.RNN([kind(UNITS, **dropout).cell]),
        )
    ]
    plain, dropped, stacked = sizes
    assert dropped - plain < 300  # another name, not 20 operations
    file = read_model(path.read_bytes())
    operations = [
        kind_of(file, operator)
        for graph in file.subgraphs
        for operator in graph.operators
    ]
    assert not any("RANDOM" in name for name in operations)
    assert stacked - plain < 4000


class OwnLoop(layers.GRU):
    """Doubles the states of every step."""

    def inner_loop(self, sequences, initial_state, mask, training=False):
        last, outputs, states = super().inner_loop(
            sequences, initial_state, mask, training
        )
        return 2 * last, 2 * outputs, states


KERAS_LOOPS = {
    "mask": lambda: [layers.Masking(), layers.GRU(UNITS)],
    "reset_before": lambda: [layers.GRU(UNITS, reset_after=False)],
    "two_cells": lambda: [
        layers.RNN([layers.GRUCell(UNITS), layers.LSTMCell(4)])
    ],
    "subclass": lambda: [OwnLoop(UNITS)],
}


@in_loops
@pytest.mark.parametrize("name", KERAS_LOOPS)
def test_other_layers_keep_the_loop_of_keras(tmp_path, name):
    report, bodies = exported(KERAS_LOOPS[name](), tmp_path / "m.tflite")
    assert len(bodies) == 1
    assert report.max_abs_diff < 1e-6


@in_loops
def test_steps_of_images_keep_the_loop_of_keras(tmp_path):
    made = [layers.ConvLSTM1D(3, 2, dropout=0.2)]
    report, [body] = exported(made, tmp_path / "m.tflite", shape=(4, 6, 2))
    assert report.max_abs_diff < 1e-6
    assert body.count("CONV_2D") >= 2


def test_a_state_that_is_given_and_one_that_is_returned(tmp_path):
    keras.utils.set_random_seed(0)
    x = keras.Input((STEPS, FEATURES), name="x")
    first = keras.Input((UNITS,), name="first")
    outputs = layers.GRU(UNITS, return_sequences=True, return_state=True)(
        x, initial_state=first
    )
    model = keras.Model([x, first], outputs)
    rng = np.random.default_rng(0)
    sample = [
        rng.normal(size=(4, *shape)).astype("float32")
        for shape in ((STEPS, FEATURES), (UNITS,))
    ]
    report = export_litert(model, tmp_path / "m.tflite", sample=sample)
    assert report.max_abs_diff < 1e-6


MOST_WITHOUT_A_LOOP = {"GRU": 14, "LSTM": 12, "SimpleRNN": 4}


@pytest.mark.parametrize("options", [{}, {"return_sequences": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_steps_without_a_loop(tmp_path, kind, options):
    """With `unroll=True`, and on JAX always; float32 has the fused LSTM there."""
    path = tmp_path / "m.tflite"
    counts = []
    for steps in (4, 5):
        layer = kind(UNITS, unroll=True, go_backwards=True, **options)
        shape = (steps, FEATURES)
        report, bodies = exported([layer], path, shape, "dynamic_int8")
        assert bodies == []
        assert report.error < 0.02
        file = read_model(path.read_bytes())
        [graph] = file.subgraphs
        counts.append(len(graph.operators))
    few, more = counts
    assert more - few <= MOST_WITHOUT_A_LOOP[kind.__name__]
