"""`+blocks` files in LiteRT Micro's own interpreter, for which tflite-micro must be installed."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import c_array, export_litert
from tests.export.models import X, dense

pytestmark = [pytest.mark.tensorflow_only, pytest.mark.filterwarnings("ignore")]


@pytest.mark.parametrize("route", ["float32+blocks", "int8+blocks"])
def test_blocks_run_on_microcontrollers(route, tmp_path):
    from tflite_micro.python.tflite_micro import runtime

    keras.utils.set_random_seed(0)
    blocks = kso.Block(8, 8, regular=True)
    model = kso.convert(
        kso.sparsify(dense(), 0.5, structure=blocks, seed=0), "blocks"
    )
    path = tmp_path / "blocks.tflite"
    data = {"representative_data": X} if route == "int8+blocks" else {}
    export_litert(model, path, mode=route, sample=X, **data)
    assert "Conv2D" in c_array(path, tmp_path / "blocks.h")
    interpreter = runtime.Interpreter.from_file(str(path))
    expected = keras.ops.convert_to_numpy(model(X))
    found = []
    for row in X:
        interpreter.set_input(row[None], 0)
        interpreter.invoke()
        found.append(interpreter.get_output(0)[0])
    error = np.abs(np.stack(found) - expected).max() / np.abs(expected).max()
    assert error < (0.1 if route == "int8+blocks" else 1e-5)
