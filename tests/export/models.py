"""Models and helpers that the tests of this folder share."""

import keras
import numpy as np

layers = keras.layers


def thin_out(model, density=0.1, seed=0):
    """Zero all but round(density * size) entries of each kernel; give the rest some spread."""
    rng = np.random.default_rng(seed)
    for variable in model.trainable_weights:
        value = np.array(keras.ops.convert_to_numpy(variable.value))
        if "kernel" in variable.name or "embeddings" in variable.name:
            dead = rng.permutation(value.size)[round(density * value.size) :]
            value = value / np.sqrt(density)
            value.flat[dead] = 0.0
        else:
            value = value + 0.1 * rng.standard_normal(value.shape)
        variable.assign(value)
    return model


def kernel_zeros(model):
    kernels = [v for v in model.weights if "kernel" in v.name or "embeddings" in v.name]
    return sum(int(np.sum(keras.ops.convert_to_numpy(v.value) == 0)) for v in kernels)


def mlp(width=64):
    return thin_out(
        keras.Sequential(
            [
                keras.Input((32,), name="x"),
                layers.Dense(width, activation="relu"),
                layers.Dense(width, activation="relu"),
                layers.Dense(10),
            ]
        )
    )


def cnn():
    model = keras.Sequential(
        [
            keras.Input((12, 12, 1), name="image"),
            layers.Conv2D(16, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Conv2D(32, 3, strides=2),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.Flatten(),
            layers.Dense(10),
        ]
    )
    rng = np.random.default_rng(1)
    for variable in model.non_trainable_weights:  # as training would leave them
        low, high = (0.5, 1.5) if "variance" in variable.name else (-0.1, 0.1)
        variable.assign(rng.uniform(low, high, variable.shape))
    return thin_out(model)


def tiny():
    return keras.Sequential([keras.Input((4,), name="x"), layers.Dense(3)])


def recurrent():
    x = keras.Input((6, 4), name="x")
    return keras.Model({"x": x}, layers.Dense(3)(layers.LSTM(5)(x)), name="recurrent")


def interpret(path, **inputs):
    """The outputs of a LiteRT file, by name, as a user without this package would get them."""
    from ai_edge_litert.interpreter import Interpreter

    return Interpreter(model_path=str(path)).get_signature_runner()(**inputs)
