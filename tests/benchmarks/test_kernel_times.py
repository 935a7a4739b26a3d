"""Files are cut into pieces, one for each kernel."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho.export import export_litert, interpreter_of

L = keras.layers

pytestmark = pytest.mark.tensorflow_only


def test_pieces_in_a_row_compute_what_the_file_computes(
    kernel_times, tmp_path, monkeypatch
):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    x = L.ReLU()(L.Conv2D(32, 3, padding="same", name="stem")(inputs))
    y = L.DepthwiseConv2D(3, padding="same", name="deep")(x)
    x = L.Flatten()(L.MaxPooling2D(2)(L.Add(name="sum")([x, y])))
    model = keras.Model(inputs, L.Dense(4, name="head")(x))
    file = tmp_path / "whole.tflite"
    export_litert(model, file)
    pieces = kernel_times.pieces_of(file.read_bytes())
    paths = [[kernel.path for kernel in piece.kernels] for piece in pieces]
    assert paths == [["stem/kernel"], ["deep/kernel"], ["head/kernel"]]
    row = np.random.default_rng(0).normal(size=(1, 8, 8, 3)).astype("float32")
    tensors = {}
    for piece in pieces:
        interpreter = interpreter_of(model_content=piece.content)
        interpreter.allocate_tensors()
        for details in interpreter.get_input_details():
            value = tensors.get(details["name"], row)
            interpreter.set_tensor(details["index"], value)
        interpreter.invoke()
        for details in interpreter.get_output_details():
            tensor = interpreter.get_tensor(details["index"])
            tensors[details["name"]] = tensor
    whole = interpreter_of(model_content=file.read_bytes())
    whole.allocate_tensors()
    whole.set_tensor(whole.get_input_details()[0]["index"], row)
    whole.invoke()
    expected = whole.get_tensor(whole.get_output_details()[0]["index"])
    np.testing.assert_allclose(tensor, expected, rtol=1e-5, atol=1e-6)
    monkeypatch.setattr(
        kernel_times, "latencies", lambda files: [1.0, 2.0, 3.0][: len(files)]
    )
    times = kernel_times.kernel_times(file)
    assert times == {"stem/kernel": 1.0, "deep/kernel": 2.0, "head/kernel": 3.0}
