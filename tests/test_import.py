"""What importing the package loads, and what it leaves alone."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.numpy_only


def run(code, **environment):
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


@pytest.mark.parametrize("backend", ["tensorflow", "jax", "torch"])
def test_only_the_backend_is_loaded(backend):
    code = """
import sys
import keras
heavy = ["tensorflow", "jax", "torch", "tf_keras", "tensorflow_model_optimization"]
heavy += ["ai_edge_litert"]
by_keras = [name for name in heavy if name in sys.modules]
import keras_sparse_ortho as kso
kso.sparsify, kso.report, kso.callbacks, kso.budgets.erk
print(*[name for name in heavy if name in sys.modules and name not in by_keras])
print("and by Keras:", *by_keras)
"""
    loaded = run(code, KERAS_BACKEND=backend)
    assert loaded[:3] == ["and", "by", "Keras:"]  # nothing but what Keras loads itself
    assert backend in loaded
    assert not {"tf_keras", "tensorflow_model_optimization", "ai_edge_litert"} & set(loaded)


@pytest.mark.slow
def test_tf_keras_is_what_it_was():
    code = """
import os
import tensorflow as tf
before = tf.keras.__name__, tf.keras.__version__
import keras_sparse_ortho as kso
kso.export, kso.export_litert
assert (tf.keras.__name__, tf.keras.__version__) == before
assert "TF_USE_LEGACY_KERAS" not in os.environ
model = tf.keras.Sequential([tf.keras.Input((4,)), tf.keras.layers.Dense(3)])
import keras
assert isinstance(model, keras.Model)
kso.tfmot
assert tf.keras.__name__ == before[0]
assert kso.sparsify(model, 0.5, seed=0).count_params() > 0
print("good")
"""
    assert run(code, KERAS_BACKEND="tensorflow")[-1] == "good"


def test_a_missing_extra_is_named():
    code = """
import sys
import keras, keras_sparse_ortho as kso

def export():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    kso.export_litert(model, "never.tflite")

uses = [("ai_edge_litert", export, "[litert]"), ("tf_keras", lambda: kso.tfmot, "[tfmot]")]
for blocked, use, extra in uses:
    sys.modules[blocked] = None
    try:
        use()
    except ImportError as error:
        assert extra in str(error), error
        print("named")
"""
    assert run(code, KERAS_BACKEND="tensorflow") == ["named", "named"]


def test_a_missing_backend_is_named_with_the_way_out(tmp_path):
    code = """
import sys, types

class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "tensorflow":
            raise ModuleNotFoundError("No module named 'tensorflow'", name="tensorflow")

sys.meta_path.insert(0, Block())
try:
    import keras_sparse_ortho
except ImportError as error:
    print(error)
"""
    # No variable and no keras.json: as after `pip install '.[jax]'` alone.
    message = " ".join(run(code, KERAS_BACKEND="", KERAS_HOME=str(tmp_path)))
    assert "Set the environment variable KERAS_BACKEND before the first import" in message
    assert "Received: no module 'tensorflow'; installed: ['jax', 'torch']" in message
