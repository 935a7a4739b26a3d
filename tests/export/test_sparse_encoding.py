"""`+sp`: TensorFlow's sparse encoding of kernels of every structure."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import export_litert

pytestmark = pytest.mark.tensorflow_only
L = keras.layers


def masked(layer, shape, block):
    """A model whose kernel holds blocks of inputs and outputs, a tenth of them live."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [keras.Input(shape), layer, L.Flatten(), L.Dense(4)]
    )
    *_, inputs, outputs = layer.kernel.shape
    rows, columns = block
    rng = np.random.default_rng(0)
    live = (
        rng.random(
            (*layer.kernel.shape[:-2], inputs // rows, outputs // columns)
        )
        < 0.1
    )
    mask = np.kron(live, np.ones(block, bool))
    return kso.strip(kso.apply_masks(model, {layer.name: mask}))


@pytest.mark.parametrize(
    "block",
    [
        (16, 1),
        (8, 8),
        *(
            pytest.param(own, marks=pytest.mark.slow)
            for own in [(1, 1), (4, 1)]
        ),
    ],
)
def test_half_precision_of_blocks_is_right_and_smaller_than_single_precision(
    block, tmp_path
):
    model = masked(L.Dense(64, activation="relu", name="hidden"), (128,), block)
    reports = {
        mode: export_litert(model, tmp_path / f"{mode}.tflite", mode=mode)
        for mode in ("float32+sp", "float16+sp")
    }
    assert reports["float16+sp"].error < 0.001
    assert reports["float16+sp"].bytes < reports["float32+sp"].bytes
    assert any(
        weight.sparse and weight.dtype == "float16"
        for weight in reports["float16+sp"].weights
    )


@pytest.mark.slow
@pytest.mark.parametrize("block", [(1, 1), (16, 1), (8, 8)])
def test_half_precision_of_convolutions(block, tmp_path):
    model = masked(L.Conv2D(64, 3, name="hidden"), (5, 5, 64), block)
    assert (
        export_litert(model, tmp_path / "m.tflite", mode="float16+sp").error
        < 0.001
    )
