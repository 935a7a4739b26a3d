"""Names of tensors in LiteRT files: short, distinct, and without the name of the model."""

import types

import keras
import numpy as np

from keras_sparse_ortho import export_litert
from keras_sparse_ortho.export import (
    name_of,
    read_model,
    shorten_names,
)

L = keras.layers


def images_network():
    """Two convolutions with normalization, of which the converter fuses operations."""
    keras.utils.set_random_seed(0)
    x = inputs = keras.Input((8, 8, 3), name="image")
    for name in ("first", "second"):
        x = L.Conv2D(4, 3, name=f"{name}_conv")(x)
        x = L.BatchNormalization(name=f"{name}_norm")(x)
        x = L.PReLU(shared_axes=(1, 2), name=f"{name}_prelu")(x)
    x = L.Flatten()(x)
    outputs = L.Dense(5, "softmax", name="classes")(x)
    return keras.Model(inputs, outputs, name="a_network_of_images")


def graphs_of(path):
    return read_model(path.read_bytes()).subgraphs


def test_names_are_short_and_distinct(tmp_path):
    path = tmp_path / "model.tflite"
    export_litert(images_network(), path)
    (graph,) = graphs_of(path)
    names = [name_of(tensor) for tensor in graph.tensors]
    assert len(set(names)) == len(names)
    assert not any(";" in name for name in names)
    assert not any(name.startswith("a_network_of_images") for name in names)
    assert "first_conv/kernel" in names
    assert any(name.startswith("second_prelu") for name in names)


def test_names_of_inputs_and_outputs_stay():
    names = [
        "serving_x",
        "net/relu;net/add",
        "net/relu;net/mul",
        "net/out;net/add",
        "constant",
    ]
    graph = types.SimpleNamespace(
        tensors=[types.SimpleNamespace(name=name.encode()) for name in names],
        inputs=np.array([0]),
        outputs=np.array([3]),
    )
    shorten_names(types.SimpleNamespace(subgraphs=[graph]))
    short = [name_of(tensor) for tensor in graph.tensors]
    expected = ["serving_x", "relu", "relu_2", "net/out;net/add", "constant"]
    assert short == expected
