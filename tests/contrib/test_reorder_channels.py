"""`reorder_channels`: the same function, and more of it in blocks."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import DensityError, NotPrunableError

L = keras.layers
BLOCK = kso.Block(8, 8)


def random_weights(model, seed=0):
    """Weights that nothing leaves alike."""
    rng = np.random.default_rng(seed)
    values = [0.3 * rng.normal(size=w.shape) for w in model.get_weights()]
    pairs = zip(model.weights, values, strict=True)
    model.set_weights([np.abs(x) + 0.5 if "variance" in v.path else x for v, x in pairs])
    return model


def caught(model, *names):
    """The share of these kernels' energy that is in their best blocks."""
    structure = kso.Block(8, 8, regular=True)
    sparse = kso.prune(model, 0.25, structure=structure, include=[*names], budget="uniform")
    kept = sum(np.square(w.value).sum() for w in kso.prunable_weights(sparse) if w.live < w.size)
    whole = sum(np.square(np.asarray(model.get_layer(n).kernel)).sum() for n in names)
    return kept / whole


def same_function(model, other, shape, atol=1e-6):
    x = np.random.default_rng(1).normal(size=(6, *shape)).astype("float32")
    wanted = model.predict(x, verbose=0)
    found = other.predict(x, verbose=0)
    np.testing.assert_allclose(found, wanted, atol=atol * np.abs(wanted).max())


@pytest.mark.core
def test_blocks_catch_more_of_the_same_function():
    hidden = [L.Dense(64, "relu", name=name) for name in ("a", "b")]
    model = keras.Sequential([keras.Input((32,)), *hidden, L.Dense(32, name="c")])
    random_weights(model)
    before = model.get_weights()
    same = kso.contrib.reorder_channels(model, 0.25, BLOCK)
    same_function(model, same, (32,))
    assert caught(same, "a", "b", "c") > 1.15 * caught(model, "a", "b", "c")
    for kept, weight in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(kept, weight)
    # As the same channels in another order: a row of `b` is still a row.
    rows = {tuple(np.sort(row).tolist()) for row in before[2]}
    assert {tuple(np.sort(row).tolist()) for row in same.get_weights()[2]} == rows


def test_normalizations_residuals_and_depthwise_kernels_follow():
    inputs = keras.Input((8, 8, 16))
    x = L.BatchNormalization()(L.Conv2D(32, 3, padding="same", name="stem")(inputs))
    y = L.Conv2D(64, 3, padding="same", activation="relu", name="a")(x)
    y = L.DepthwiseConv2D(3, padding="same", activation="relu")(L.BatchNormalization()(y))
    y = L.BatchNormalization()(L.Conv2D(32, 3, padding="same", name="b")(y))
    y = L.ReLU()(L.Add()([x, y]))
    outputs = L.Dense(16, name="head")(L.GlobalAveragePooling2D()(y))
    sparse = kso.prune(random_weights(keras.Model(inputs, outputs)), 0.9)
    same, model = kso.contrib.reorder_channels(sparse, 0.25, BLOCK), kso.strip(sparse)
    assert not [x for x in same.layers if isinstance(x, kso.PrunableLayer)]
    same_function(sparse, same, (8, 8, 16), 1e-5)
    assert caught(same, "a", "b") > 1.02 * caught(model, "a", "b")
    pairs = zip(model.get_weights(), same.get_weights(), strict=True)
    moved = [not np.array_equal(*pair) for pair in pairs]
    assert sum(moved) == len(moved) - 1  # all but the bias of the head


def test_what_is_not_interchangeable_stays():
    inputs = keras.Input((4, 16))
    y = L.MultiHeadAttention(2, 8, name="attention")(inputs, inputs)
    y = L.LayerNormalization(name="norm")(L.Add()([inputs, y]))
    y = L.Dense(64, activation="softmax", name="mixed")(y)
    y = L.Dense(64, activation="gelu", name="wide")(y)
    model = random_weights(keras.Model(inputs, L.Dense(32, name="narrow")(y)))
    same = kso.contrib.reorder_channels(model, 0.25, BLOCK)
    same_function(model, same, (4, 16))
    kept = [m.get_layer(n).get_weights() for n in ("attention", "norm") for m in (model, same)]
    kept += [m.get_layer("mixed").get_weights()[1:] for m in (model, same)]
    for old, new in zip(kept[::2], kept[1::2], strict=True):
        for values in zip(old, new, strict=True):
            np.testing.assert_array_equal(*values)
    assert caught(same, "wide", "narrow") > 1.05 * caught(model, "wide", "narrow")


@pytest.mark.core
def test_what_cannot_be_reordered_is_refused():
    class Own(keras.Sequential):
        def call(self, inputs, **_):
            return 2 * super().call(inputs)

    own = Own([keras.Input((8,)), L.Dense(8)])
    with pytest.raises(NotPrunableError, match="Received"):
        kso.contrib.reorder_channels(own, 0.25)
    model = keras.Sequential([keras.Input((8,)), L.Dense(8)])
    with pytest.raises(DensityError):
        kso.contrib.reorder_channels(model, 0.0)


def test_kernels_that_read_channels_have_a_say():
    hidden = L.Dense(64, "relu", name="a")
    model = random_weights(keras.Sequential([keras.Input((32,)), hidden, L.Dense(32, name="b")]))
    bias, kernel = hidden.bias.numpy(), model.layers[1].kernel
    hidden.set_weights([np.where(np.arange(32)[:, None] % 2, 0.3, -0.3) + np.zeros((32, 64)), bias])
    kernel.assign(np.where(np.arange(64)[:, None] % 4, 0.1, 1.0) * np.asarray(kernel))
    same = kso.contrib.reorder_channels(model, 0.25, BLOCK)
    same_function(model, same, (32,))
    assert caught(same, "b") > 1.1 * caught(model, "b")
