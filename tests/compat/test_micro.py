"""Files of `+blocks` and `+lstm` in LiteRT Micro's interpreter; tflite-micro must be installed."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import c_array, export_litert, load_litert
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


# --- LSTMs as one operator -----------------------------------------------------------------------


def answers_of_micro(path, rows):
    """The outputs of LiteRT Micro on rows, one at a time, in one interpreter."""
    from tflite_micro.python.tflite_micro import runtime

    interpreter = runtime.Interpreter.from_file(str(path))
    answers = []
    for row in rows:
        interpreter.set_input(row[None], 0)
        interpreter.invoke()
        answers.append(np.array(interpreter.get_output(0)[0]))
    return np.stack(answers)


@pytest.mark.parametrize("steps", [20, 50, 100])
@pytest.mark.parametrize("route", ["float32+lstm", "int8+lstm"])
def test_lstms_answer_on_microcontrollers_as_keras(route, steps, tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((steps, 8), name="x"),
            keras.layers.LSTM(16, return_sequences=True),
            keras.layers.LSTM(12),
            keras.layers.Dense(4),
        ]
    )
    rows = np.random.default_rng(0).standard_normal((80, steps, 8))
    rows = rows.astype("float32")
    x = rows[:8]
    path = tmp_path / "lstm.tflite"
    data = {"representative_data": rows[8:]} if route == "int8+lstm" else {}
    export_litert(model, path, mode=route, sample=x, **data)
    operators = c_array(path, tmp_path / "lstm.h")
    assert "UnidirectionalSequenceLSTM" in operators
    found = answers_of_micro(path, x)
    expected = keras.ops.convert_to_numpy(model(x))
    if route == "float32+lstm":
        np.testing.assert_allclose(found, expected, atol=1e-5)
        return
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert error < 0.08
    # The kernels of LiteRT and of LiteRT Micro round a few steps apart.
    litert = load_litert(path).predict(x)
    assert np.abs(found - litert).max() < 0.05 * np.abs(expected).max()


def test_unrolled_grus_answer_on_microcontrollers_as_keras(tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((20, 8), name="x"),
            keras.layers.GRU(8, return_sequences=True, unroll=True),
            keras.layers.GRU(8, unroll=True),
        ]
    )
    rows = np.random.default_rng(0).standard_normal((80, 20, 8))
    rows = rows.astype("float32")
    path = tmp_path / "gru.tflite"
    export_litert(
        model,
        path,
        mode="int8",
        sample=rows[:8],
        representative_data=rows[8:],
    )
    assert "While" not in c_array(path, tmp_path / "gru.h")
    expected = keras.ops.convert_to_numpy(model(rows[:8]))
    found = answers_of_micro(path, rows[:8])
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert error < 0.08
