"""A circular convolution as a LiteRT file."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho.export import export_litert
from keras_sparse_ortho.layers import CircularPadding

pytestmark = pytest.mark.tensorflow_only


def test_it_is_exported_and_agrees_with_keras(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((6, 6, 2)),
            CircularPadding([(1, 1), (0, 2)]),
            keras.layers.Conv2D(4, 3, strides=2, padding="valid"),
        ]
    )
    sample = np.random.default_rng(0).normal(size=(3, 6, 6, 2)).astype("float32")
    report = export_litert(model, tmp_path / "ring.tflite", sample=sample)
    assert np.abs(model.predict(sample, verbose=0)).max() > 0.01  # or nothing would be compared
    assert report.max_abs_diff < 1e-5
