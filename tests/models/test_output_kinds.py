"""What outputs mean: from the end of the graph and from the compiled loss, never from values."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.models import OutputKind, output_kinds, output_names

L = keras.layers
BITS = keras.losses.BinaryCrossentropy


def ending(*ends):
    """A model with a hidden layer, and these layers or functions behind it."""
    inputs = keras.Input((8,))
    x = L.Dense(6, "relu", name="hidden")(inputs)
    for end in ends:
        x = end(x)
    return keras.Model(inputs, x)


@pytest.mark.parametrize(
    ("ends", "end"),
    [
        ([L.Dense(3, "softmax")], "softmax"),
        ([L.Dense(1, "sigmoid")], "sigmoid"),
        ([L.Dense(1)], "linear"),
        ([L.Dense(3, "relu")], None),
        ([L.Dense(3), L.Softmax()], "softmax"),
        ([L.Reshape((2, 3)), L.Softmax(axis=1)], None),
        ([L.Dense(3), L.Activation("sigmoid")], "sigmoid"),
        ([L.Dense(3), keras.ops.softmax], "softmax"),
        ([L.Dense(3), keras.activations.sigmoid], "sigmoid"),
        ([L.Dense(6, "softmax"), L.Dropout(0.5), L.Reshape((6, 1))], "softmax"),
        ([L.Dense(3, "sigmoid"), L.Rescaling(2.0)], None),
        (
            [L.Reshape((2, 3)), L.TimeDistributed(L.Dense(3, "softmax"))],
            "softmax",
        ),
        (
            [keras.Sequential([keras.Input((6,)), L.Dense(3, "softmax")])],
            "softmax",
        ),
        ([L.Reshape((2, 3)), L.LSTM(3, activation="sigmoid")], None),
    ],
)
def test_the_end_of_a_graph(ends, end):
    model = ending(*ends)
    assert [kind.end for kind in output_kinds(model, 1)] == [end]
    if model.layers[-1].name.startswith("dense"):
        pruned = kso.prune(model, 0.5, budget="uniform")  # in a wrapper
        assert output_kinds(pruned, 1)[0].end == end


@pytest.mark.core
@pytest.mark.parametrize(
    ("activation", "loss", "kind"),
    [
        ("softmax", None, OutputKind("softmax", "classes")),
        ("sigmoid", None, OutputKind("sigmoid", None)),
        ("sigmoid", "mse", OutputKind("sigmoid", "values")),
        ("sigmoid", keras.losses.Huber(), OutputKind("sigmoid", "values")),
        ("softmax", "kl_divergence", OutputKind("softmax", "values")),
        ("sigmoid", "bce", OutputKind("sigmoid", "bits")),
        ("sigmoid", keras.losses.Dice(), OutputKind("sigmoid", "bits")),
        (None, BITS(from_logits=True), OutputKind("linear", "bits")),
        (None, "hinge", OutputKind("linear", "bits")),
        (
            "softmax",
            "sparse_categorical_crossentropy",
            OutputKind("softmax", "classes"),
        ),
        (None, lambda y, p: keras.ops.mean(p), OutputKind("linear", None)),
    ],
)
def test_the_loss_says_what_an_output_is_trained_for(activation, loss, kind):
    model = ending(L.Dense(2, activation))
    if loss is not None:
        model.compile("sgd", loss)
    assert output_kinds(model, 1) == [kind]
    assert kind.probabilities == (
        None if kind.answers == "values" else activation
    )


def test_outputs_by_name_and_in_order():
    inputs = keras.Input((8,))
    value, bit = (
        L.Dense(1, "sigmoid", name="a")(inputs),
        L.Dense(1, "sigmoid", name="b")(inputs),
    )
    kinds = [OutputKind("sigmoid", "values"), OutputKind("sigmoid", "bits")]
    for outputs, loss in (
        ([value, bit], ["mse", "bce"]),
        ([value, bit], {"b": "bce", "a": "mse"}),
        ({"z": bit, "y": value}, {"z": "bce", "y": "mse"}),
    ):
        model = keras.Model(inputs, outputs)
        model.compile("sgd", loss)
        assert output_kinds(model, 2) == kinds


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.head = L.Dense(1, "sigmoid")

    def call(self, x):
        return self.head(x)


def test_a_subclassed_model_shows_its_loss_alone():
    model = Subclassed()
    assert output_kinds(model, 1) == [OutputKind(None, None)]
    model.compile("sgd", "bce")
    assert output_kinds(model, 1) == [OutputKind("sigmoid", "bits")]
    model.compile("sgd", BITS(from_logits=True))
    assert output_kinds(model, 1) == [OutputKind("linear", "bits")]


def test_names_of_outputs():
    inputs = keras.Input((4, 3))
    gru = keras.layers.GRU(2, return_state=True, name="gru")(inputs)
    box = keras.layers.Dense(2, name="box")(gru[0])
    outputs = np.zeros(1)
    model = keras.Model(inputs, [box, *gru])
    names = output_names(model, [outputs] * 3)
    assert names == ["box", "gru", "gru#2"]
    model = keras.Model(inputs, {"z": box, "a": gru[0]})
    assert output_names(model, {"z": outputs, "a": outputs}) == ["a", "z"]
    subclassed = type("Own", (keras.Model,), {})()
    assert output_names(subclassed, [outputs] * 2) == ["output_1", "output_2"]
