"""Export where Keras runs on another backend, from a folder with the names of packages in it.

It starts workers of its own, as an export outside of these tests does. Importing the module loads
no TensorFlow there. (Exporting does: `Model.save` itself imports it.)
"""

import os
import subprocess
import sys

import numpy as np
import pytest

from tests.export.models import interpret

pytestmark = pytest.mark.tensorflow_only

HIDDEN = ("keras", "numpy", "json", "queue")  # what workers import first

EXPORT_ON_JAX = """
import os, sys
import keras, numpy as np
from keras_sparse_ortho.export import export_litert
assert "tensorflow" not in sys.modules and "ai_edge_litert" not in sys.modules
assert keras.backend.backend() == "jax"
from tests.export.models import recurrent
model = recurrent()
data = np.linspace(-1, 1, 24, dtype="float32").reshape(1, 6, 4)
assert sys.path[0] == "", "the current directory, as in an interactive session"
os.chdir(sys.argv[1])
report = export_litert(model, "m.tflite", sample=data)
assert "ai_edge_litert.interpreter" not in sys.modules, "the run belongs in the worker"
assert report.error <= 1e-5
np.save("want.npy", np.asarray(model({"x": data})))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where a process on JAX exported `m.tflite`, among modules that say when they are imported."""
    folder = tmp_path_factory.mktemp("jax")
    for name in HIDDEN:
        (folder / f"{name}.py").write_text("open(__file__ + '.imported', 'w'); raise ImportError")
    done = subprocess.run(
        [sys.executable, "-c", EXPORT_ON_JAX, folder],
        env=dict(os.environ, KERAS_BACKEND="jax", PYTHONPATH=os.pathsep.join(sys.path)),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def test_export_from_the_jax_backend(folder):
    data = np.linspace(-1, 1, 24, dtype="float32").reshape(1, 6, 4)
    (got,) = interpret(folder / "m.tflite", x=data).values()
    np.testing.assert_allclose(got, np.load(folder / "want.npy"), atol=1e-5)


def test_workers_import_nothing_that_lies_in_the_current_directory(folder):
    assert not list(folder.glob("*.imported"))
