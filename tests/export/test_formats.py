"""The rows of docs/exports.md that need no package beside the backends."""

import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.export.models import X, resized, stored
from tests.helpers import array, slow_case_on_jax

SPEC = [keras.InputSpec(shape=X.shape, dtype="float32")]
every_storage = pytest.mark.parametrize(
    "storage", ["masked", "compact", "blocks", "stripped"]
)
# On JAX each is traced for TensorFlow, which takes seconds.
where_traced = pytest.mark.parametrize(
    "storage",
    [
        "blocks",
        *(slow_case_on_jax(name) for name in ("masked", "compact", "stripped")),
    ],
)


@pytest.mark.filterwarnings(
    "ignore:The `native_serialization` parameter is deprecated"
)  # Keras'
@where_traced
def test_a_saved_model_answers_as_the_model(storage, tmp_path):
    import tensorflow as tf

    model = stored(storage)
    model.export(
        str(tmp_path / "saved"), format="tf_saved_model", verbose=False
    )
    artifact = tf.saved_model.load(str(tmp_path / "saved"))
    np.testing.assert_allclose(
        artifact.serve(X).numpy(), array(model(X)), atol=1e-5
    )


@pytest.mark.torch_only
@every_storage
def test_torch_export_answers_as_the_model(storage, tmp_path):
    import torch

    model = stored(storage)
    path = str(tmp_path / "model.pt2")
    model.export(path, format="torch", input_signature=SPEC, verbose=False)
    program = torch.export.load(path).module()
    with torch.no_grad():
        np.testing.assert_allclose(
            program(torch.from_numpy(X)), array(model(X)), atol=1e-5
        )


@pytest.mark.tensorflow_only
@every_storage
def test_keras_own_litert_file_answers_as_the_model(storage, tmp_path):
    model = stored(storage)
    model.export(str(tmp_path / "model.tflite"), format="litert", verbose=False)
    answer = resized(tmp_path / "model.tflite", X)
    np.testing.assert_allclose(answer, array(model(X)), atol=1e-5)


@where_traced
def test_export_litert_takes_every_storage(storage, tmp_path):
    model, path = stored(storage), tmp_path / "model.tflite"
    rows = (
        np.random.default_rng(1)
        .normal(size=(64, *X.shape[1:]))
        .astype("float32")
    )
    kso.export_litert(
        model, path, sample=X, mode="int8", representative_data=rows
    )
    expected, file = array(model(X)), kso.load_litert(path)
    answer = file.predict(X)
    assert file.route == "int8"
    np.testing.assert_allclose(
        answer, expected, atol=0.1 * np.abs(expected).max()
    )


@pytest.mark.core
def test_lora_of_a_stripped_layer_works_and_is_dense():
    layer = stored("stripped").get_layer("hidden")
    layer.enable_lora(2)
    layer.lora_kernel_b.assign(np.ones(layer.lora_kernel_b.shape))
    assert (array(layer.kernel) != 0).mean() > 0.99


@pytest.mark.core
def test_quantizing_a_stripped_model_keeps_every_zero():
    plain = stored("stripped")
    before, expected = (
        {layer.name: zeros(layer) for layer in plain.layers},
        array(plain(X)),
    )
    with warnings.catch_warnings(action="ignore"):  # Keras', of its own Input
        plain.quantize("int8")
    quantized = [
        layer
        for layer in plain.layers
        if getattr(layer, "quantization_mode", None)
    ]
    # Keras leaves convolutions.
    assert [layer.name for layer in quantized] == [
        "hidden",
        "head",
    ]
    for layer in quantized:
        assert zeros(layer) >= before[layer.name] > 0
    np.testing.assert_allclose(
        array(plain(X)), expected, atol=0.02 * np.abs(expected).max()
    )


def zeros(layer):
    """The entries of a layer's kernel that are exactly zero, whatever its dtype."""
    kernels = [
        array(weight)
        for weight in layer.weights
        if weight.path.endswith("/kernel")
    ]
    return sum(int((kernel == 0).sum()) for kernel in kernels)
