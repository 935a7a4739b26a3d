"""Training on live blocks: step by step as with masks, resumed, and in mixed precision."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.layers import (
    BlockSparseConv2D,
    BlockSparseDense,
    _wrapped_layer,
)
from tests.helpers import (
    array,
    classifier_loss,
    data,
    jit,
    jit_if_quicker,
    on_two_devices,
    slow_on_tensorflow,
)
from tests.pruning.checks import assert_equal_kernels

L = keras.layers
STEPS = 50

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-3, use_ema=True),
    "adamw": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.05),
    "sgd": lambda: keras.optimizers.SGD(
        0.02, momentum=0.9, clipnorm=0.05, gradient_accumulation_steps=2
    ),
}


def small_network(dtype=None, **kwargs):
    """A convolution and a dense layer on live blocks."""
    conv = {
        "density": 0.5,
        "block": 4,
        "activation": "relu",
        "seed": 1,
        "dtype": dtype,
    }
    dense = {
        "density": 0.25,
        "block": (12, 8),
        "seed": 2,
        "dtype": dtype,
        **kwargs,
    }
    inputs = keras.Input((6, 6, 8))
    x = BlockSparseConv2D(16, 3, 2, "same", name="c", **conv)(inputs)
    x = BlockSparseDense(32, "gelu", name="d", **dense)(
        L.Flatten()(L.BatchNormalization()(x))
    )
    return keras.Model(inputs, L.Dense(3, name="head")(x))


# One of the three in every run: with momentum, clipping and accumulation.
CASES = [
    pytest.param(name, marks=pytest.mark.slow)
    for name in OPTIMIZERS
    if name != "sgd"
]


@pytest.mark.core
@pytest.mark.parametrize("optimizer", ["sgd", *CASES])
@slow_on_tensorflow
def test_fifty_steps_equal_those_of_masked_layers(optimizer):
    model = small_network(kernel_regularizer="l2")
    twin = kso.convert(model, "masked")
    x, y = data(model, 3)
    losses = []
    for net in (model, twin):
        net.compile(
            OPTIMIZERS[optimizer](), classifier_loss(), jit_compile=jit()
        )
        history = net.fit(
            x, y, batch_size=len(x), epochs=STEPS, shuffle=False, verbose=0
        )
        losses.append(history.history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
    assert_equal_kernels(model, twin, atol=1e-4)


def wide_matrices():
    """Two dense layers, with so many columns that a processor would get several chunks."""
    layers = [
        BlockSparseDense(256, "relu", density=0.25, block=32, name="a"),
        BlockSparseDense(256, density=0.25, block=32, name="b"),
    ]
    return keras.Sequential([keras.Input((256,)), *layers]), (8192, 256)


def convolutions():
    layers = [
        BlockSparseConv2D(
            64,
            3,
            2,
            "same",
            activation="relu",
            density=0.25,
            block=16,
            name="a",
            seed=0,
        ),
        BlockSparseConv2D(64, 3, density=0.25, block=16, name="b", seed=1),
    ]
    return keras.Sequential([keras.Input((8, 8, 64)), *layers]), (32, 8, 8, 64)


def lowered(model, shape):
    """The compiled train step of a model, as text for each platform."""
    import jax

    optimizer = keras.optimizers.Adam()
    optimizer.build(model.trainable_variables)
    x = jax.ShapeDtypeStruct(shape, "float32")

    def step(trainable, fixed, slots, x):
        def loss(trainable):
            outputs, _ = model.stateless_call(
                trainable, fixed, x, training=True
            )
            return (outputs**2).mean()

        found = jax.grad(loss)(trainable)
        return optimizer.stateless_apply(slots, found, trainable)

    state = [
        [v.value for v in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]
    traced = jax.jit(step).trace(*state, x)
    return {
        p: traced.lower(lowering_platforms=(p,)).as_text()
        for p in ("tpu", "cuda", "cpu")
    }


@pytest.mark.jax_only
@pytest.mark.parametrize("make", [wide_matrices, convolutions])
def test_a_compiled_step_for_accelerators_has_neither_scatters_nor_calls_to_the_host(
    make,
):
    model, shape = make()
    text = lowered(model, shape)
    for platform in ("tpu", "cuda"):
        assert "stablehlo.gather" in text[platform]
        for word in ("scatter", "callback", "stablehlo.while", "dynamic"):
            assert word not in text[platform].replace("dynamic_slice", ""), word
        assert "?x" not in text[platform]  # no size is left open
    if make is wide_matrices:
        assert "while" in text["cpu"]  # in several chunks


def transformer(storage):
    """Attention, a convolution and padded blocks, or the same kernels in another storage."""
    keras.utils.set_random_seed(1)
    inputs = keras.Input((5, 64))
    x = inputs + L.MultiHeadAttention(4, 16, name="mix")(inputs, inputs)
    x = L.Conv1D(64, 3, activation="tanh", name="conv")(
        L.LayerNormalization(name="norm")(x)
    )
    y = L.Dense(128, "gelu", name="wide")(x)
    x = L.GlobalAveragePooling1D()(x + L.Dense(64, name="narrow")(y))
    x = L.Dense(61, "tanh", name="padded")(x)
    dense = keras.Model(inputs, L.Dense(3, name="head")(x))
    blocks = kso.sparsify(
        dense, 0.5, "uniform", storage="blocks", exclude="head", seed=0
    )
    rows = kso.report(blocks, orthogonality=False).rows[:-1]
    assert all(row.block for row in rows)
    assert 61 % rows[-1].block[1]
    return blocks if storage == "blocks" else kso.convert(blocks, storage)


def trained(storage):
    """Dense kernels by path, and the other trained weights, after two epochs."""
    model = transformer(storage)
    x, y = data(model, 3, count=48)
    optimizer = keras.optimizers.SGD(0.1, momentum=0.9)
    model.compile(optimizer, classifier_loss(), jit_compile=jit_if_quicker())
    model.fit(x, y, batch_size=16, epochs=2, shuffle=False, verbose=0)
    weights = kso.prunable_weights(model)
    own = {id(weight.variable) for weight in weights}
    others = {
        v.path: array(v) for v in model.trainable_variables if id(v) not in own
    }
    return {weight.path: weight.value for weight in weights} | others


@pytest.mark.parametrize(
    "storage",
    [
        "blocks",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("masked", "compact")
        ),
    ],
)
def test_two_devices_agree_with_one(storage):
    one, begun = trained("blocks"), kso.prunable_weights(transformer("blocks"))
    assert len(begun) == 9
    keras.utils.clear_session()
    with on_two_devices():
        two = trained(storage)
    assert one.keys() == two.keys()
    for name, value in one.items():
        atol = 1e-6 if storage == "blocks" else 1e-5
        np.testing.assert_allclose(two[name], value, atol=atol, err_msg=name)
    for weight in begun:
        assert (one[weight.path] != weight.value).any()
        if weight.storage is not None:
            assert not two[weight.path][~weight.mask].any()


# --- compact layers under data parallel: called for each device's samples by itself ---------------


def all_compact():
    """An embedding, convolutions and dense layers, all in compact storage."""
    keras.utils.set_random_seed(0)
    tokens = keras.Input((6,), dtype="int32")
    x = L.Embedding(11, 8, name="words")(tokens)
    x = L.Conv1D(8, 3, padding="same", activation="relu", name="near")(x)
    x = L.SeparableConv1D(8, 3, padding="same", name="apart")(x)
    x = L.Dense(12, "tanh", kernel_regularizer="l2", name="each")(x)
    x = L.LayerNormalization()(x)
    model = keras.Model(tokens, L.Dense(3, name="head")(L.Flatten()(x)))
    model = kso.sparsify(model, 0.4, seed=0, storage="compact")
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def trained_by(distribution):
    keras.distribution.set_distribution(distribution)
    try:
        model = all_compact()
        rng = np.random.default_rng(0)
        x, y = (
            rng.integers(0, 11, (16, 6)),
            rng.normal(size=(16, 3)).astype("float32"),
        )
        model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0)
        outputs = model.predict(x[:6], batch_size=6, verbose=0)
        return [*(array(v) for v in model.weights), outputs]
    finally:
        keras.distribution.set_distribution(None)


@pytest.mark.jax_only
@pytest.mark.slow
def test_training_is_that_of_one_device(monkeypatch):
    split = []
    can = _wrapped_layer._can_be_split
    monkeypatch.setattr(
        _wrapped_layer,
        "_can_be_split",
        lambda layer, *args: (
            split.append((layer.name, can(layer, *args))) or split[-1][1]
        ),
    )
    alone = trained_by(None)
    assert not split
    together = trained_by(keras.distribution.DataParallel())
    assert {name for name, was in split if was} == {
        "words",
        "near",
        "apart",
        "each",
        "head",
    }
    for a, b in zip(alone, together, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
