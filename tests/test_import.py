"""What importing the package loads, and what it leaves alone."""

import pytest

from tests.helpers import run_python

pytestmark = pytest.mark.numpy_only


@pytest.mark.parametrize(
    "backend",
    [
        "jax",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("tensorflow", "torch")
        ),
    ],
)
def test_only_the_backend_is_loaded_and_a_missing_extra_is_named(backend):
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
sys.modules["tf_keras"] = None
try:
    kso.tfmot
except ImportError as error:
    print(error)
"""
    loaded, missing = (
        run_python("-c", code, KERAS_BACKEND=backend).strip().splitlines()
    )
    # Nothing but what Keras loads itself.
    assert loaded.startswith("and by Keras:")
    assert backend in loaded.split()
    ours = {"tf_keras", "tensorflow_model_optimization", "ai_edge_litert"}
    assert not ours & set(loaded.split())
    # The extra of LiteRT: tests/export/test_refusals.py.
    assert "[tfmot]" in missing


def test_rooms_load_when_they_are_used_and_names_are_found_before():
    code = """
import sys
import keras_sparse_ortho as kso
rooms = ["analysis", "calibration", "callbacks", "pruning", "saliency", "export"]
print([room for room in rooms if f"keras_sparse_ortho.{room}" in sys.modules])
try:
    kso.UpdateMasks
except AttributeError as error:
    print(error)
kso.prune, kso.widths
print(set(kso.__all__) <= set(dir(kso)), "pruning" in dir(kso))
"""
    loaded, answer, listed = (
        run_python("-c", code, KERAS_BACKEND="jax").strip().splitlines()
    )
    assert loaded == "[]"
    assert "callbacks.UpdateMasks" in answer
    assert listed == "True True"


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
    message = run_python("-c", code, KERAS_BACKEND="", KERAS_HOME=str(tmp_path))
    message = " ".join(message.split())
    assert (
        "Set the environment variable KERAS_BACKEND before the first import"
        in message
    )
    assert (
        "Received: no module 'tensorflow'; installed: ['jax', 'torch']"
        in message
    )
