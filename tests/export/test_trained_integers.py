"""Files of quantization-aware training: the integers, zeros and ranges are those of training."""

import warnings

import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import _export_warnings, export_litert, load_litert
from keras_sparse_ortho.export._trained_integers import IntegersError, with_trained_integers
from keras_sparse_ortho.quantization import quantize_aware, round_biases, trained_integers
from tests.export.quantized import (
    block_cnn,
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

pytestmark = pytest.mark.tensorflow_only

SLOW_TEST = pytest.mark.slow
# One kind of network for each kind of weights, and four bits under folded normalization: the
# other pairs take as long.
QUICK = [(mlp, "int8"), (mlp, "ternary"), (cnn, "int4")]
SLOW = [(mlp, "int4"), (cnn, "int8"), (pooled, "int8"), (cnn, "ternary")]
SLOW += [(encoder, "int8"), (encoder, "int4")]
CASES = QUICK + [pytest.param(*case, marks=SLOW_TEST) for case in SLOW]


@pytest.mark.parametrize(("make", "weights"), CASES)
def test_integers_and_ranges_of_the_file_are_those_of_training(make, weights, tmp_path):
    model, x = trained(make, weights)
    report = export_litert(model, tmp_path / "m.tflite", quantization="int8", sample=x[:256])
    assert report.error < 0.01
    sizes = {weight.value.size for weight in kso.prunable_weights(model)}
    kernels = [weight for weight in report.weights if weight.size in sizes]
    assert {weight.dtype for weight in kernels} == {"int8"}
    assert len(kernels) == len(kso.prunable_weights(model))
    check_integers(model, report.path)
    check_ranges(model, report.path)


@pytest.mark.slow
def test_files_of_floats_round_as_keras_does(tmp_path):
    model, x = trained(pooled, "int8")
    report = export_litert(model, tmp_path / "m.tflite", mode="float32", sample=x[:64])
    assert report.error < 1e-5


@pytest.mark.slow
def test_the_file_has_rounded_biases_whether_keras_has_them_or_not(tmp_path):
    model, x = trained(cnn, "int4", rounded=False)
    outputs = []
    for name in ("before", "after"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # before, that Keras differs
            export_litert(model, tmp_path / name, quantization="int8", sample=x[:64])
        outputs.append(load_litert(tmp_path / name).predict(x[:64]))
        round_biases(model)
    np.testing.assert_array_equal(*outputs)


@pytest.mark.parametrize(
    ("make", "weights"), [(block_mlp, "int4"), pytest.param(block_cnn, "int8", marks=SLOW_TEST)]
)
def test_files_of_blocks_hold_the_trained_integers(make, weights, tmp_path):
    options = {"storage": "blocks", "structure": kso.Block(8, 8), "exclude": ["head"]}
    options["density"] = 0.25
    model, x = trained(lambda: (make(), options), weights)
    report = export_litert(model, tmp_path / "m.tflite", mode="int8+blocks", sample=x[:64])
    assert report.error < 0.01
    (kernel,) = (one for one in trained_integers(model) if one.path == "hidden/kernel")
    integers = kernel.integers.reshape(-1, kernel.integers.shape[-1])
    mask = next(w.mask for w in kso.prunable_weights(model) if w.path == kernel.path)
    live = int(mask.reshape(integers.shape)[:, 0].sum())
    constants, _ = tensors_of(report.path)
    (held,) = (c for c, _ in constants if c.ndim == 4 and c.shape[0] == integers.shape[1])
    assert held.size == live * integers.shape[1]
    for channel in range(len(held)):  # the order of blocks is the file's
        values = np.sort(held[channel].ravel())
        dead = np.zeros(len(integers) - live, int)
        column = integers[:, channel]
        signed = (np.sort(column), np.sort(-column))
        assert any(np.array_equal(np.sort([*values, *dead]), one) for one in signed)


def test_a_file_with_other_integers_is_refused(tmp_path, monkeypatch):
    model, x = trained(mlp, "int4", rounded=False)
    monkeypatch.setattr(_export_warnings, "_AS_TRAINED", 1e-5)  # a CNN is above 1%
    with pytest.warns(UserWarning, match=r"differs from Keras by 0.\d+%.*round_biases\(model\)"):
        report = export_litert(model, tmp_path / "m.tflite", quantization="int8", sample=x[:64])
    kernels = trained_integers(model)
    content = (tmp_path / "m.tflite").read_bytes()
    assert report.tolerance == 0.25
    kernels[0].integers[kernels[0].integers == 0] = 1
    with pytest.raises(IntegersError, match="'hidden/kernel' with the integers that were trained"):
        with_trained_integers(content, kernels)


def test_int8_without_ranges_or_data_is_refused(tmp_path):
    dense, _ = mlp()
    untrained = quantize_aware(dense)
    with pytest.raises(ValueError, match="ranges of activations are set in training"):
        export_litert(untrained, tmp_path / "m.tflite", quantization="int8")
    with pytest.raises(ValueError, match="`representative_data` is needed"):
        export_litert(quantize_aware(dense, "int8", None), tmp_path / "m", quantization="int8")
