"""One start in both Kerases: networks with normalization draw the same kernels at equal seeds."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso

pytestmark = pytest.mark.tensorflow_only


def network(which, add):
    """A residual block in a nested model, and layers without normalization behind them."""
    L = which.layers
    inputs = which.Input((8, 8, 4))
    x = L.Conv2D(4, 3, padding="same", name="conv")(inputs)
    x = L.ReLU()(L.BatchNormalization(name="norm")(x))
    block = which.Model(inputs, add(inputs, x), name="block")
    inputs = which.Input((8, 8, 4))
    x = L.Conv2D(
        4,
        3,
        padding="same",
        kernel_initializer=which.initializers.HeNormal(),
        name="stem",
    )(inputs)
    x = block(L.BatchNormalization()(x))
    x = L.GlobalAveragePooling2D()(x)
    neck = [which.Input((4,)), L.Dense(8, name="a"), L.LayerNormalization()]
    x = which.Sequential(neck, name="neck")(x)
    x = L.Dense(8, activation="relu", name="hidden")(x)
    return which.Model(inputs, L.Dense(3, name="head")(x))


def by_layer(which):
    return lambda x, y: which.layers.Add()([x, y])


def by_operator(_):
    return lambda x, y: x + y


def kernels(weights):
    return {w.path: w.value for w in weights}


@pytest.mark.parametrize("add", [by_layer, by_operator])
@pytest.mark.parametrize(
    "pattern",
    [
        "exact_orthogonal",
        "random_sparse",
        kso.initializers.ExactOrthogonal(gain="auto"),
    ],
)
def test_networks_with_normalization_draw_the_same_kernels(
    tf_keras, add, pattern
):
    move = network(keras, add(keras))
    stay = network(tf_keras, add(tf_keras))
    arguments = (0.3, "uniform", pattern)
    expected = kernels(
        kso.prunable_weights(kso.sparsify(move, *arguments, seed=0))
    )
    drawn = kernels(
        kso.tfmot.prunable_weights(
            kso.tfmot.prune_exact_orthogonal(stay, *arguments, seed=0)
        )
    )
    assert drawn.keys() == expected.keys()
    for path, kernel in expected.items():
        np.testing.assert_array_equal(drawn[path], kernel)


def unit(which, relu):
    class Unit(which.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = which.layers.Dense(16, name="dense")
            self.norm = which.layers.BatchNormalization(name="norm")

        def build(self, shape):
            self.dense.build(shape)
            self.norm.build(shape)
            self.built = True

        def call(self, x):
            return x + relu(self.norm(self.dense(x)))

    inputs = which.Input((16,))
    x = Unit(name="unit")(inputs)
    return which.Model(inputs, which.layers.Dense(4, name="head")(x))


def test_calls_inside_a_layer_written_as_a_class_are_watched(tf_keras):
    import tensorflow as tf

    stay, move = unit(tf_keras, tf.nn.relu), unit(keras, keras.ops.relu)
    inner = stay.get_layer("unit").dense
    count = len(inner._inbound_nodes), len(inner._outbound_nodes)
    calls = kso.pruning.watch_calls(stay)
    assert len(calls.of_layer[id(inner)]) == 1
    assert (len(inner._inbound_nodes), len(inner._outbound_nodes)) == count
    weights = kso.tfmot.prunable_weights(stay)
    drawn = kso.pruning.draw_kernels(
        stay, weights, 0.3, "uniform", "exact_orthogonal", seed=0
    )
    sparse = kso.sparsify(move, 0.3, "uniform", seed=0)
    for weight in kso.prunable_weights(sparse):
        kernel = drawn[weight.path].kernel
        np.testing.assert_array_equal(kernel, weight.value)
