"""One network in each way that its kernels can be stored."""

import keras
import numpy as np

import keras_sparse_ortho as kso

L = keras.layers
X = np.random.default_rng(0).normal(size=(4, 8, 8, 16)).astype("float32")


def dense():
    """A convolution and two Dense layers."""
    layers = [L.Conv2D(32, 3, activation="relu", name="conv"), L.GlobalAveragePooling2D()]
    layers += [L.Dense(64, activation="relu", name="hidden"), L.Dense(16, name="head")]
    return keras.Sequential([keras.Input((8, 8, 16), name="x"), *layers])


def stored(storage):
    """The network at density 1/2; "stripped" is the masked one, stripped."""
    if storage == "blocks, to_masked":
        return kso.convert(stored("blocks"), "masked")
    if storage == "blocks":
        structure = kso.Block(8, 8, regular=True)
        model = kso.convert(kso.sparsify(dense(), 0.5, structure=structure, seed=0), "blocks")
        assert sum(type(layer).__name__.startswith("BlockSparse") for layer in model.layers) == 3
        return model
    options = {"storage": "compact"} if storage == "compact" else {}
    model = kso.sparsify(dense(), 0.5, budget="uniform", seed=0, **options)
    return kso.strip(model) if storage == "stripped" else model
