"""`remove_channels`: smaller layers, equal outputs, on every backend."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array

L = keras.layers


def unsettle(model, dead=0.4, seed=0):
    """Random weights, with some dead columns and rows of kernels; statistics as after training."""
    rng = np.random.default_rng(seed)
    for layer in model.layers:
        values = []
        for variable in layer.weights:
            value = rng.normal(size=variable.shape)
            if "variance" in variable.name:
                value = rng.uniform(0.5, 1.5, variable.shape)
            elif len(variable.shape) > 1 and layer.name != "head":
                value *= 1.5 / np.sqrt(np.prod(value.shape[:-1]))
                outputs = -2 if "depthwise" in layer.name else -1
                gone = rng.random(value.shape[outputs]) < dead
                gone[0] = False
                value = np.moveaxis(value, outputs, -1)
                value[..., gone] = 0
                value = np.moveaxis(value, -1, outputs)
            elif variable.name == "gamma":
                value = rng.uniform(0.5, 1.5, value.shape) * (rng.random(value.shape) > 0.1)
            elif layer.name != "head":
                value *= 0.5
            values.append(value)
        layer.set_weights(values)
    return model


def samples(model, seed=1):
    rng = np.random.default_rng(seed)
    made = [rng.normal(size=(6, *t.shape[1:])).astype("float32") for t in model.inputs]
    return made[0] if len(made) == 1 else made


def outputs(model, x):
    # Compiled on JAX, where it is faster to compile one function than every operation.
    call = model if keras.backend.backend() != "jax" else lambda x: model.predict(x, verbose=0)
    return np.concatenate([array(y).reshape(6, -1) for y in keras.tree.flatten(call(x))], axis=1)


def assert_smaller_and_equal(model, atol=1e-5):
    x = samples(model)
    expected = outputs(model, x)
    assert np.median(expected.std(axis=0)) > 1e-3  # it says something
    small = kso.remove_channels(model)
    np.testing.assert_allclose(outputs(small, x), expected, atol=atol, rtol=1e-5)
    assert names(small) == names(model)
    assert small.count_params() < model.count_params()
    again = kso.remove_channels(small)
    assert again.count_params() == small.count_params()
    return small


def names(model):
    # Keras itself names the inputs of a clone anew.
    return [layer.name for layer in model.layers if not isinstance(layer, L.InputLayer)]


def sizes(model):
    return {layer.name: layer.output.shape[-1] for layer in model.layers}


def chain(padding="valid", after=False):
    """Convolutions with normalization before or after the activation, pooling, Flatten, Dense."""
    layers = [keras.Input((12, 12, 3))]
    for k, width in enumerate((8, 10)):
        norm, relu = L.BatchNormalization(), L.Activation("gelu")
        layers += [L.Conv2D(width, 3, padding=padding, name=f"conv_{k}")]
        layers += [relu, norm] if after else [norm, relu]
        layers += [L.MaxPooling2D(2), L.Dropout(0.5)]
    layers += [L.Flatten(), L.Dense(16, activation="relu", name="hidden"), L.Dense(4, name="head")]
    return keras.Sequential(layers)


def residual():
    inputs = keras.Input((8, 8, 3))
    x = L.ReLU()(L.BatchNormalization()(L.Conv2D(12, 3, padding="same", name="stem")(inputs)))
    for k, width in enumerate((12, 16)):
        y = L.Conv2D(width, 3, padding="same", use_bias=False, name=f"a_{k}")(x)
        y = L.ReLU()(L.BatchNormalization()(y))
        y = L.Conv2D(width, 1, use_bias=False, name=f"b_{k}")(y)
        y = L.BatchNormalization()(y)
        if width != x.shape[-1]:
            x = L.Conv2D(width, 1, name=f"project_{k}")(x)
        x = L.ReLU()(L.Add()([x, y]))
    x = L.GlobalAveragePooling2D(keepdims=True)(x)
    x = L.Reshape((-1,))(x)
    return keras.Model(inputs, L.Dense(4, name="head")(x))


def mobile():
    inputs = keras.Input((9, 9, 3))
    x = L.Conv2D(8, 3, strides=2, padding="same", use_bias=False, name="stem")(inputs)
    x = L.ReLU(6.0)(L.BatchNormalization()(x))
    for k, padding in enumerate(("valid", "same")):
        y = L.Conv2D(24, 1, use_bias=False, name=f"expand_{k}")(x)
        y = L.ReLU(6.0)(L.BatchNormalization()(y))
        y = L.DepthwiseConv2D(3, padding=padding, use_bias=False, name=f"depthwise_{k}")(y)
        y = L.ReLU(6.0)(L.BatchNormalization()(y))
        x = L.BatchNormalization()(L.Conv2D(12, 1, use_bias=False, name=f"project_{k}")(y))
    x = L.SeparableConv2D(10, 2, depth_multiplier=2, activation="relu", name="separable")(x)
    return keras.Model(inputs, L.Dense(4, name="head")(L.GlobalMaxPooling2D()(x)))


def branches():
    """Two inputs and outputs, 1-D and 3-D, concatenation, products, padding and upsampling."""
    first, second = keras.Input((10, 3)), keras.Input((6, 6, 6, 2))
    x = L.Conv1D(8, 3, padding="causal", activation="tanh", name="causal")(first)
    x = L.Concatenate()([x, L.Conv1D(6, 3, padding="same", activation="relu", name="same")(first)])
    x = L.AveragePooling1D(2, padding="same")(L.UpSampling1D(2)(x))
    x = L.Conv1D(9, 2, activation="sigmoid", name="joint")(L.Cropping1D(1)(x))
    y = L.Conv3D(5, 3, activation="elu", name="volume")(L.ZeroPadding3D(1)(second))
    y = L.Conv3D(9, 2, activation=None, name="second_volume")(L.LeakyReLU()(y))
    x, y = L.GlobalAveragePooling1D()(x), L.GlobalAveragePooling3D()(y)
    z = L.Multiply()([x, y])
    merged = [
        L.Maximum()([x, y]),
        L.Minimum()([x, z]),
        L.Average()([x, y, z]),
        L.Subtract()([x, z]),
    ]
    w = L.Dense(7, activation="softmax", name="mixing")(L.Concatenate()(merged))
    w = L.Dense(7, activation="selu", name="last")(w)
    return keras.Model([first, second], [L.Dense(4, name="head")(w), z])


def dense_chain():
    layers = [L.Dense(20, activation=a, name=f"d{a}") for a in ("relu", "silu", "softplus")]
    return keras.Sequential([keras.Input((6,)), *layers, L.Dense(4, name="head")])


NETWORKS = {
    "chain": chain,
    "chain_same": lambda: chain("same"),
    "chain_normalized_after": lambda: chain(after=True),
    "residual": residual,
    "mobile": mobile,
    "branches": branches,
    "dense": dense_chain,
}


@pytest.mark.core
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_equal(name):
    assert_smaller_and_equal(unsettle(NETWORKS[name]()))


@pytest.mark.tensorflow_only
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", NETWORKS)
def test_outputs_are_equal_for_other_patterns(name, seed):
    model = unsettle(NETWORKS[name](), dead=(0.2, 0.8)[seed % 2], seed=seed + 10)
    x = samples(model)
    small = kso.remove_channels(model)
    np.testing.assert_allclose(outputs(small, x), outputs(model, x), atol=1e-5, rtol=1e-5)
