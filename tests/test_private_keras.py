"""The private names of Keras that the package uses: that they are there, and all in the table."""

import ast
import importlib
import pathlib

import keras
import pytest

from keras_sparse_ortho._keras_internals import PRIVATE_NAMES

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "keras_sparse_ortho"
ROOM = PACKAGE / "_keras_internals"
# Attributes with a leading underscore that are not Keras'.
OTHERS = {"_make", "_getframe", "_modules", "_fields", "_track_trackable", "_delete_tracking"}


def samples():
    """An object of each class that the table names."""
    inputs = keras.Input((4,))
    dense = keras.layers.Dense(3)
    model = keras.Model(inputs, dense(inputs))
    model.compile("sgd", "mse")
    masked = keras.layers.Masking()(keras.Input((4, 2)))
    return {
        "Layer": dense,
        "Variable": dense.kernel,
        "Function": model,
        "Sequential": keras.Sequential([keras.Input((4,))]),
        "KerasTensor": masked,
        "Trainer": model,
    }


@pytest.mark.core
@pytest.mark.parametrize("name", sorted(PRIVATE_NAMES))
def test_keras_has_it(name):
    if name.startswith("keras.src."):
        module, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(module), attribute), PRIVATE_NAMES[name]
        return
    kind, _, attribute = name.partition(".")
    sample = samples()[kind]
    if attribute in ("_torch_params", "_track_variables"):
        if keras.backend.backend() == "torch":
            sample.torch_params  # noqa: B018 - made when it is read
            assert hasattr(sample, attribute), PRIVATE_NAMES[name]
    elif attribute.endswith("..."):
        assert any(held.startswith(attribute[:-3]) for held in vars(sample)), PRIVATE_NAMES[name]
    else:
        assert hasattr(sample, attribute), PRIVATE_NAMES[name]


def used(path):
    """What a file uses of `keras.src`, and attributes with a leading underscore not its own."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            own |= {node.attr} if getattr(node.value, "id", "") == "self" else set()
    imported, attributes = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("keras.src"):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            attributes.add(node.attr)
    private = {name for name in attributes if name.startswith("_") and name[1:2] != "_"}
    return imported, private - own - OTHERS


@pytest.mark.numpy_only
def test_the_room_uses_what_the_table_names():
    imported, attributes = set(), set()
    for path in ROOM.glob("*.py"):
        if path.name != "__init__.py":
            more = used(path)
            imported, attributes = imported | more[0], attributes | more[1]
    in_table = {name for name in PRIVATE_NAMES if name.startswith("keras.src.")}
    assert imported == in_table
    assert attributes <= {name.rpartition(".")[2] for name in PRIVATE_NAMES} | {"_overrides"}


@pytest.mark.numpy_only
def test_no_other_room_imports_private_keras():
    for path in PACKAGE.rglob("*.py"):
        if ROOM not in path.parents:
            assert not used(path)[0], path
