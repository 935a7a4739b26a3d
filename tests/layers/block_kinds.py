"""Every layer of live blocks in one network, and the same network with masked layers."""

import keras

from keras_sparse_ortho import FixedMask, PrunableLayer
from keras_sparse_ortho.layers import (
    BlockSparseConv1D,
    BlockSparseConv2D,
    BlockSparseConv3D,
    BlockSparseDense,
    BlockSparseEinsumDense,
)

L = keras.layers
SHAPE = (4, 4, 16)
BIAS = {"bias_initializer": keras.initializers.RandomNormal(stddev=0.3, seed=1)}
HALF = {"density": 0.5, "kernel_initializer": "he_normal", **BIAS}

# By name: where the layer stands among the branches, and how it is made.
MAKE = {
    "image": lambda: BlockSparseConv2D(
        32, 3, 2, "same", activation="relu", block=(4, 8), name="image", seed=1, **HALF
    ),
    "sequence": lambda: BlockSparseConv1D(
        16, 3, padding="causal", dilation_rate=2, block=8, name="sequence", seed=2, **HALF
    ),
    "volume": lambda: BlockSparseConv3D(
        8, 2, activation="tanh", block=4, name="volume", seed=3, **HALF
    ),
    "up": lambda: BlockSparseEinsumDense(
        "abc,cde->abde",
        (16, 2, 16),
        bias_axes="de",
        activation="gelu",
        block=8,
        name="up",
        seed=4,
        **HALF,
    ),
    "down": lambda: BlockSparseEinsumDense(
        "abde,dec->abc", (16, 16), bias_axes="c", block=(8, 4), name="down", seed=5, **HALF
    ),
    "each": lambda: BlockSparseDense(8, "softmax", block=4, name="each", seed=6, **HALF),
    "wide": lambda: BlockSparseDense(
        64,
        "gelu",
        density=0.25,
        block=16,
        bias_regularizer="l2",
        activity_regularizer="l2",
        name="wide",
        seed=7,
        **BIAS,
    ),
    "last": lambda: BlockSparseDense(
        32,
        density=0.25,
        block=(16, 8),
        kernel_regularizer=keras.regularizers.L1L2(1e-3),
        name="last",
        seed=8,
        **BIAS,
    ),
}


def network(layers):
    """A classifier of branches, with a layer for each name in `MAKE`."""
    inputs = keras.Input(SHAPE)
    sequence = L.Reshape((16, 16))(inputs)
    branches = [
        layers["image"](inputs),
        layers["sequence"](sequence),
        layers["volume"](L.Reshape((4, 2, 2, 16))(inputs)),
        layers["down"](layers["up"](sequence)),
        L.TimeDistributed(layers["each"])(sequence),
        layers["last"](layers["wide"](L.Flatten()(inputs))),
    ]
    heads = [L.Dense(3, name=f"head_{k}")(L.Flatten()(x)) for k, x in enumerate(branches)]
    return keras.Model(inputs, L.Add()(heads))


def block_network():
    return network({name: make() for name, make in MAKE.items()})


def block_layers(model):
    """The layers of live blocks in a network, by name."""
    found = {}
    for layer in model.layers:
        inner = layer.layer if isinstance(layer, L.TimeDistributed) else layer
        if hasattr(inner, "storages"):
            found[inner.name] = inner
    return found


def masked_twin(model, build):
    """`build(layers)`, with masked layers of the blocks and weights of `model`."""
    blocks = block_layers(model)
    masked = {
        name: PrunableLayer(layer.to_dense_layer(), FixedMask(mask=layer.mask_value()))
        for name, layer in blocks.items()
    }
    twin = build(masked)
    for ours, theirs in zip(model.layers, twin.layers, strict=True):
        if type(ours) is type(theirs) and not isinstance(ours, L.TimeDistributed):
            theirs.set_weights(ours.get_weights())
    return twin, masked
