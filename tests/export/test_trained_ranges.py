"""Trained ranges of activations in files that are made without TensorFlow."""

import sys

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import export_litert
from keras_sparse_ortho.export._process import converter_backend
from keras_sparse_ortho.quantization import FakeQuantize
from tests.export.quantized import (
    block_mlp,
    check_integers,
    check_ranges,
    cnn,
    encoder,
    mlp,
    pooled,
    tensors_of,
    trained,
)
from tests.helpers import slow_case_on_jax

# With TensorFlow its converter makes the file: test_trained_integers.py.
pytestmark = [pytest.mark.core, pytest.mark.not_tensorflow]

L = keras.layers


@pytest.fixture(autouse=True)
def _no_tensorflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)
    assert converter_backend() == "jax"


def operations(path):
    """Names of the operations of a file, and what they give, in order."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    run = Interpreter(model_path=str(path), experimental_op_resolver_type=plain)
    run.allocate_tensors()
    types = {about["index"]: about["dtype"] for about in run.get_tensor_details()}
    return [(one["op_name"], types[one["outputs"][0]]) for one in run._get_ops_details()]


CASES = [slow_case_on_jax(cnn, "int4"), slow_case_on_jax(encoder, "int8"), (mlp, "int4")]
CASES += [slow_case_on_jax(pooled, "int8")]
SLOW = [
    (mlp, "int8"),
    (mlp, "ternary"),
    (cnn, "int8"),
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in [*SLOW, (encoder, "int4")]]


@pytest.mark.parametrize(("make", "weights"), CASES)
def test_integers_and_ranges_of_the_file_are_those_of_training(make, weights, tmp_path):
    model, x = trained(make, weights)
    report = export_litert(model, tmp_path / "m.tflite", quantization="int8", sample=x[:64])
    assert "tensorflow" not in report.versions
    assert report.error < 0.003
    check_integers(model, report.path)
    check_ranges(model, report.path)
    kernels = kso.prunable_weights(model)
    sizes = {weight.value.size for weight in kernels}
    held = [one for one in report.weights if one.size in sizes]
    assert {one.dtype for one in held} == {"int8"}
    assert len(held) == len(kernels)
    if make is not encoder:
        assert {kind for _, kind in operations(report.path)[:-1]} == {np.int8}


@pytest.mark.parametrize("mode", [slow_case_on_jax("int8+blocks")])
def test_files_of_blocks_have_the_trained_ranges(mode, tmp_path):
    options = {"storage": "blocks", "structure": kso.Block(8, 8), "exclude": ["head"]}
    model, x = trained(lambda: (block_mlp(), {**options, "density": 0.25}), "int8")
    report = export_litert(model, tmp_path / "m.tflite", mode=mode, sample=x[:64])
    assert report.error < 0.003
    check_ranges(model, report.path)


@pytest.mark.slow
def test_other_files_round_as_keras_does(tmp_path):
    model, x = trained(pooled, "int8")
    report = export_litert(model, tmp_path / "m.tflite", mode="float32", sample=x[:64])
    assert report.error < 1e-5


def ranged(low, high, name):
    layer = FakeQuantize(name=name)
    layer.build()
    for variable, value in ((layer.low, low), (layer.high, high), (layer.seen, 1.0)):
        variable.assign(value)
    return layer


def test_ranges_that_differ_and_layers_in_floats_between_them(tmp_path):
    inputs = keras.Input((8, 8))
    x = ranged(-1.0, 2.0, "wide")(inputs)
    x = ranged(-0.5, 0.6, "narrow")(x)  # again, in steps of its own
    x = L.LayerNormalization()(x)  # in floats
    x = ranged(-1.5, 1.5, "between")(L.Softmax()(x[:, ::2]))
    model = keras.Model(inputs, ranged(0.0, 0.5, "end")(keras.ops.cumsum(x, axis=1)))
    sample = np.random.default_rng(0).normal(size=(16, 8, 8)).astype("float32")
    with pytest.warns(UserWarning, match="Rounding activations changes Keras' own outputs"):
        report = export_litert(model, tmp_path / "m.tflite", quantization="int8", sample=sample)
    assert report.error < 0.001
    _, scales = tensors_of(report.path)
    for step in (3.0 / 255, 1.1 / 255, 3.0 / 255, 0.5 / 255):
        assert np.min(np.abs(np.array(scales, float) - step)) < 1e-5 * step
