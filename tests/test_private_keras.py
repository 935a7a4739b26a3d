"""The private names of Keras that the package uses: that they are there, and all in the table."""

import ast
import importlib
import pathlib
import re

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho._keras_internals import (
    BEHAVIOURS,
    PRIVATE_NAMES,
    symbolic_calls,
)
from tests.helpers import array

PACKAGE = pathlib.Path(__file__).resolve().parents[1] / "keras_sparse_ortho"
ROOM = PACKAGE / "_keras_internals"
# Attributes with a leading underscore that are not Keras'.
PRIVATE = re.compile(r"keras\.src|tensorflow_model_optimization\.python")
OTHERS = {
    "_make",
    "_getframe",
    "_modules",
    "_fields",
    "_track_trackable",
    "_delete_tracking",
}


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
        assert hasattr(importlib.import_module(module), attribute), (
            PRIVATE_NAMES[name]
        )
        return
    kind, _, attribute = name.partition(".")
    sample = samples()[kind]
    if attribute in ("_torch_params", "_track_variables"):
        if keras.backend.backend() == "torch":
            sample.torch_params  # noqa: B018 - made when it is read
            assert hasattr(sample, attribute), PRIVATE_NAMES[name]
    elif attribute.endswith("..."):
        assert any(held.startswith(attribute[:-3]) for held in vars(sample)), (
            PRIVATE_NAMES[name]
        )
    else:
        assert hasattr(sample, attribute), PRIVATE_NAMES[name]


def used(*paths):
    """What files use of private modules, and attributes with a leading underscore not their own."""
    nodes = [
        node
        for p in paths
        for node in ast.walk(ast.parse(p.read_text(encoding="utf-8")))
    ]
    own, imported, attributes = set(), set(), set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(
            node.ctx, ast.Store
        ):
            own |= (
                {node.attr}
                if getattr(node.value, "id", "") == "self"
                else set()
            )
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and PRIVATE.match(
            node.module or ""
        ):
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Attribute):
            attributes.add(node.attr)
    private = {
        name for name in attributes if name.startswith("_") and name[1:2] != "_"
    }
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
    assert attributes <= {name.rpartition(".")[2] for name in PRIVATE_NAMES} | {
        "_overrides"
    }


@pytest.mark.numpy_only
def test_no_other_room_imports_private_keras():
    for path in PACKAGE.rglob("*.py"):
        if ROOM not in path.parents:
            assert path.name == "_tf_keras_internals.py" or not used(path)[0], (
                path
            )
    wing = (
        path
        for path in (PACKAGE / "tfmot").glob("*.py")
        if "_tf_keras" not in path.name
    )
    assert used(*wing) == (set(), set())


def behaviour(name):
    """A test of what Keras does without promising it: the name stands in the table."""
    assert name in BEHAVIOURS
    TESTED.add(name)
    return pytest.mark.core


TESTED = set()


def layer():
    keras.utils.set_random_seed(0)
    made = keras.layers.Dense(3, name="dense")
    made.build((None, 4))
    return made


X = np.ones((2, 4), "float32")


@behaviour("a layer is its class and its dictionary")
def test_class_and_dictionary():
    one, other = layer(), keras.layers.Activation("relu")
    expected = array(one(X))
    other.__class__ = type(one)
    vars(other).clear()
    vars(other).update(vars(one))
    np.testing.assert_array_equal(array(other(X)), expected)


@behaviour("graphs call the layer objects that they hold")
def test_graphs_call_objects():
    held = layer()
    model = keras.Sequential([keras.Input((4,)), held])

    class Doubled(keras.layers.Dense):
        def call(self, inputs):
            return 2 * super().call(inputs)

    before = array(model(X))
    held.__class__ = Doubled
    np.testing.assert_allclose(array(model(X)), 2 * before, rtol=1e-6)


@behaviour("Keras binds `build` to the object")
def test_build_is_in_the_dictionary():
    made = layer()
    assert "build" in vars(made)
    held = [
        cell.cell_contents for cell in vars(made)["build"].__closure__ or ()
    ]
    assert any(
        value is made or getattr(value, "__self__", None) is made
        for value in held
    )


class Overriding(keras.StatelessScope):
    def __init__(self, variable, value):
        super().__init__()
        self.pair = (variable, value)

    def get_current_value(self, variable):
        return (
            self.pair[1]
            if variable is self.pair[0]
            else super().get_current_value(variable)
        )


@behaviour("a variable asks the scope for its value")
def test_scopes_answer_for_values():
    made = layer()
    with Overriding(made.kernel, keras.ops.ones((4, 3))):
        inside = array(made(X))
    np.testing.assert_allclose(inside, np.full((2, 3), 4.0))
    assert not np.allclose(array(made(X)), 4.0)


@behaviour("a scope knows the one around it")
def test_scopes_are_nested():
    with keras.StatelessScope() as outer, keras.StatelessScope() as inner:
        assert inner.original_scope is outer


@behaviour("variables are created without values in a stateless scope")
def test_variables_without_values():
    pending = keras.src.backend.common.global_state.get_global_attribute
    before = len(pending("uninitialized_variables", [], set_to_default=True))
    with keras.StatelessScope():
        made = layer()
        assert made.kernel._value is None
    assert len(pending("uninitialized_variables")) in (before, before + 2)
    assert made.kernel.shape == (4, 3)


@behaviour("a layer saves its own variables by number")
def test_own_variables_are_numbered():
    class Pair(keras.layers.Layer):
        def build(self, shape):
            self.a = self.add_weight(shape=(2,), initializer="ones")
            self.b = self.add_weight(shape=(3,), initializer="zeros")

    made, store = Pair(), {}
    made.build(None)
    made.save_own_variables(store)
    assert {key: np.shape(value) for key, value in store.items()} == {
        "0": (2,),
        "1": (3,),
    }


@behaviour("set_weights assigns one variable after the other")
def test_set_weights_calls_assign():
    made, calls = layer(), []
    for variable in made.weights:
        assign = type(variable).assign

        def noted(value, variable=variable, assign=assign):
            calls.append(variable)
            assign(variable, value)

        vars(variable)["assign"] = noted
    made.set_weights([np.ones((4, 3)), np.zeros(3)])
    assert [v.name for v in calls] == ["kernel", "bias"]


@behaviour("a class is saved by its registered name")
def test_classes_are_found_by_registered_names():
    wrapper = kso.layers.PrunableLayer
    name = keras.saving.get_registered_name(wrapper)
    assert name == "keras_sparse_ortho>PrunableLayer"
    assert keras.saving.get_registered_object(name) is wrapper


@behaviour("optimizers build one slot after the other for each variable")
def test_slots_follow_variables():
    made, adam = layer(), keras.optimizers.Adam()
    adam.build(made.trainable_variables)
    shapes = [tuple(v.shape) for v in adam.variables[2:]]
    assert shapes == [(4, 3), (3,), (4, 3), (3,)] or shapes == [
        (4, 3),
        (4, 3),
        (3,),
        (3,),
    ]
    assert len(adam._trainable_variables) == 2


@behaviour("a symbolic call makes a Node by the name in its module")
def test_symbolic_calls_are_watched():
    class Doubling(keras.layers.Layer):
        def call(self, x):
            return keras.ops.add(held(x), x)

    symbol, outer = keras.KerasTensor((2, 3)), Doubling()
    held = keras.layers.Dense(3)
    held.build((None, 3))
    calls, outputs = symbolic_calls(outer, (symbol,), {})
    names = [type(call.operation).__name__ for call in calls]
    assert names == ["Dense", "Add"]
    assert calls[1].inputs == [calls[0].outputs[0], symbol]
    assert outputs == calls[1].outputs
    assert not held._inbound_nodes


@pytest.mark.numpy_only
def test_each_behaviour_has_a_test():
    assert set(BEHAVIOURS) == TESTED
