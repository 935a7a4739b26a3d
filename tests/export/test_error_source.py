"""What a refused or differing file is told about: where the error starts, and what to try."""

import re

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import (
    ExportFallbackWarning,
    ExportVerificationError,
    _candidates,
    export_litert,
)
from tests.export.models import layers, tiny

pytestmark = pytest.mark.tensorflow_only


def channels_of_unlike_variance():
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    x = (rng.normal(size=(64, 64, 16)) * np.logspace(-2.5, 0, 16)).astype("float32")
    dense = [
        layers.Conv1D(16, 1, name="first"),
        layers.LayerNormalization(axis=1, name="norm"),
        layers.Conv1D(32, 5, activation="gelu", name="conv"),
        layers.GlobalMaxPooling1D(),
        layers.Dense(8, name="head"),
    ]
    model = keras.Sequential([keras.Input((64, 16)), *dense])
    model.get_layer("first").kernel.assign(np.eye(16)[None])
    return model, x


def test_a_refused_file_names_the_layer_and_what_to_try(tmp_path):
    model, x = channels_of_unlike_variance()
    with pytest.raises(ExportVerificationError) as caught:
        export_litert(model, tmp_path / "m.tflite", mode="int8", representative_data=x)
    message = str(caught.value)
    assert re.search(r"starts at layer 'norm' \(LayerNormalization\): error 0\.\d+", message)
    for part in ('mode="dynamic_int8"', "quantize_aware(model)", "`exclude`", "statistics"):
        assert part in message
    assert re.search(r"Received: error=.*on 16 rows \(rows held out of", message)
    assert not list(tmp_path.iterdir())
    assert (
        export_litert(model, tmp_path / "m.tflite", mode="dynamic_int8", sample=x[:8]).error < 0.1
    )
    trained = kso.quantize_aware(model)
    trained(x, training=True)
    assert export_litert(trained, tmp_path / "m.tflite", quantization="int8", sample=x).error < 0.01


def test_a_mode_warns_of_a_route_whose_file_is_wrong(monkeypatch, tmp_path, tiny_file):
    """`tiny_file` has other weights than this model: as if the converter had made it of them."""
    plain = _candidates.convert

    def convert(task, routes):
        files = plain(task, [route for route in routes if route.encoding == "dense"])
        files["float16"].write_bytes(tiny_file.read_bytes())
        return files | {route.name: files["float32"] for route in routes if route.name not in files}

    monkeypatch.setattr(_candidates, "convert", convert)
    keras.utils.set_random_seed(2)
    with pytest.warns(ExportFallbackWarning, match="mode='float16'.*Received: float16: error="):
        report = export_litert(tiny(), tmp_path / "m.tflite", mode="small")
    assert report.route != "float16"
    keras.utils.set_random_seed(2)
    with pytest.raises(ExportVerificationError, match=r"to 0\.005.*Try quantization=None"):
        export_litert(tiny(), tmp_path / "m.tflite", mode="float16")
