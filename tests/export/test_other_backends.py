"""Export where Keras runs on another backend.

Importing the module loads no TensorFlow there. (Exporting does: `Model.save` itself imports it.)
"""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.export.models import interpret

pytestmark = pytest.mark.tensorflow_only

EXPORT_ON_JAX = """
import sys
import keras, numpy as np
from keras_sparse_ortho.export import export_litert
assert "tensorflow" not in sys.modules and "ai_edge_litert" not in sys.modules
assert keras.backend.backend() == "jax"
x = keras.Input((6, 4), name="x")
y = keras.layers.LSTM(5)(x)
model = keras.Model({"x": x}, keras.layers.Dense(3)(y))
data = np.linspace(-1, 1, 24, dtype="float32").reshape(1, 6, 4)
report = export_litert(model, sys.argv[1])
assert "ai_edge_litert.interpreter" not in sys.modules, "the run belongs in the worker"
assert report.error <= 1e-5
np.save(sys.argv[2], np.asarray(model({"x": data})))
"""


def test_export_from_the_jax_backend(tmp_path):
    file, outputs = tmp_path / "m.tflite", tmp_path / "want.npy"
    done = subprocess.run(
        [sys.executable, "-c", EXPORT_ON_JAX, file, outputs],
        env=dict(os.environ, KERAS_BACKEND="jax", PYTHONPATH=os.pathsep.join(sys.path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    data = np.linspace(-1, 1, 24, dtype="float32").reshape(1, 6, 4)
    (got,) = interpret(file, x=data).values()
    np.testing.assert_allclose(got, np.load(outputs), atol=1e-5)
