"""Training on live blocks: step by step as with masks, resumed, and in mixed precision."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.layers import BlockSparseConv2D, BlockSparseDense
from tests.helpers import (
    array,
    classifier_loss,
    data,
    jit,
    jit_if_quicker,
    on_two_devices,
    slow_on_tensorflow,
)
from tests.layers.block_kinds import masked_twin

L = keras.layers
STEPS = 50

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(1e-3, use_ema=True),
    "adamw": lambda: keras.optimizers.AdamW(1e-3, weight_decay=0.05),
    "sgd": lambda: keras.optimizers.SGD(
        0.02, momentum=0.9, clipnorm=0.05, gradient_accumulation_steps=2
    ),
}


def small(layers):
    inputs = keras.Input((6, 6, 8))
    x = L.Flatten()(L.BatchNormalization()(layers["c"](inputs)))
    return keras.Model(inputs, L.Dense(3, name="head")(layers["d"](x)))


def small_network(**kwargs):
    return small(
        {
            "c": BlockSparseConv2D(
                16, 3, 2, "same", density=0.5, block=4, activation="relu", name="c", seed=1
            ),
            "d": BlockSparseDense(
                32, "gelu", density=0.25, block=(12, 8), name="d", seed=2, **kwargs
            ),
        }
    )


# One of the three in every run: with momentum, clipping and accumulation.
CASES = [pytest.param(name, marks=pytest.mark.slow) for name in OPTIMIZERS if name != "sgd"]


@pytest.mark.core
@pytest.mark.parametrize("optimizer", ["sgd", *CASES])
@slow_on_tensorflow
def test_fifty_steps_equal_those_of_masked_layers(optimizer):
    model = small_network(kernel_regularizer="l2")
    twin, masked = masked_twin(model, small)
    x, y = data(model, 3)
    losses = []
    for net in (model, twin):
        net.compile(OPTIMIZERS[optimizer](), classifier_loss(), jit_compile=jit())
        history = net.fit(x, y, batch_size=len(x), epochs=STEPS, shuffle=False, verbose=0)
        losses.append(history.history["loss"])
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert losses[0][-1] < losses[0][0]
    for name in ("c", "d"):
        expected = masked[name].prunable_weights[0].value
        np.testing.assert_allclose(model.get_layer(name).kernel_value(), expected, atol=1e-4)


@pytest.mark.core
@slow_on_tensorflow
def test_resumed_training_equals_training_in_one_go(tmp_path):
    def trained(model, **epochs):
        x, y = data(model, 3)
        model.fit(x, y, batch_size=8, shuffle=False, verbose=0, **epochs)
        return model

    def fresh():
        keras.utils.clear_session()
        keras.utils.set_random_seed(5)
        model = small_network()
        model.compile(keras.optimizers.AdamW(1e-2), classifier_loss(), jit_compile=jit())
        return model

    whole = trained(fresh(), epochs=4)
    half = trained(fresh(), epochs=2)
    half.save(tmp_path / "half.keras")
    resumed = keras.models.load_model(tmp_path / "half.keras")
    trained(resumed, initial_epoch=2, epochs=4)
    pairs = [(whole.weights, resumed.weights)]
    pairs.append((whole.optimizer.variables, resumed.optimizer.variables))
    for ours, theirs in pairs:
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(array(a), array(b))


@pytest.mark.parametrize(
    "policy", [pytest.param("mixed_bfloat16", marks=pytest.mark.slow), "mixed_float16"]
)
def test_mixed_precision(policy):
    keras.config.set_dtype_policy(policy)
    model = small_network()
    x, y = data(model, 3)
    model.compile(keras.optimizers.Adam(1e-2), classifier_loss(), jit_compile=jit())
    pattern = array(model.get_layer("d").inputs_of)
    losses = model.fit(x, y, epochs=8, verbose=0).history["loss"]
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]
    for name in ("c", "d"):
        layer = model.get_layer(name)
        assert layer.blocks.dtype == "float32"
        assert layer.inputs_of.dtype == layer.slots_of.dtype == "int32"
        outputs = keras.KerasTensor((None, 6, 6, 8) if name == "c" else (None, 144))
        assert layer.compute_output_spec(outputs).dtype == policy[6:]
    np.testing.assert_array_equal(array(model.get_layer("d").inputs_of), pattern)


@pytest.mark.core
def test_blocks_of_short_floats():
    layer = BlockSparseDense(32, density=0.5, block=8, dtype="bfloat16", seed=0)
    model = keras.Sequential([keras.Input((32,)), layer])
    assert layer.blocks.dtype == "bfloat16"
    gram = layer.kernel_value().T @ layer.kernel_value()
    assert np.abs(gram - np.eye(32)).max() < 2e-2
    assert kso.strip(model).layers[0].kernel.dtype == "bfloat16"


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
            64, 3, 2, "same", activation="relu", density=0.25, block=16, name="a", seed=0
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
            outputs, _ = model.stateless_call(trainable, fixed, x, training=True)
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
    return {p: traced.lower(lowering_platforms=(p,)).as_text() for p in ("tpu", "cuda", "cpu")}


@pytest.mark.jax_only
@pytest.mark.parametrize("make", [wide_matrices, convolutions])
def test_a_compiled_step_for_accelerators_has_neither_scatters_nor_calls_to_the_host(make):
    from keras_sparse_ortho.layers import _block_products

    model, shape = make()
    text = lowered(model, shape)
    for platform in ("tpu", "cuda"):
        assert "stablehlo.gather" in text[platform]
        for word in ("scatter", "callback", "stablehlo.while", "dynamic"):
            assert word not in text[platform].replace("dynamic_slice", ""), word
        assert "?x" not in text[platform]  # no size is left open
    if make is wide_matrices:
        one = np.zeros((8, 32, 8192), "float32")
        assert _block_products._chunks(one, model.layers[0].inputs_of) > 1
        assert "while" in text["cpu"]


def one_layer():
    layer = BlockSparseDense(32, "tanh", density=0.5, block=4, seed=0)
    return keras.Sequential([keras.Input((16,)), layer, L.Dense(3, name="head")])


def by_one_word():
    """Padded blocks, and convolutions."""
    layers = [
        L.Conv1D(64, 3, activation="tanh", name="conv"),
        L.Flatten(),
        L.Dense(101, "relu", name="hidden"),
    ]
    model = keras.Sequential([keras.Input((4, 64)), *layers, L.Dense(3, name="head")])
    sparse = kso.sparsify(model, 0.5, "uniform", storage="blocks", exclude="head", seed=0)
    first, second, _ = kso.report(sparse, orthogonality=False).rows
    assert first.block == (16, 16)
    assert second.block == (32, 26)  # one block of 26 outputs, three of 25
    return sparse


def trained_on_devices(make):
    keras.utils.set_random_seed(3)
    model = make()
    x, y = data(model, 3)
    model.compile(
        keras.optimizers.SGD(0.1, momentum=0.9), classifier_loss(), jit_compile=jit_if_quicker()
    )
    model.fit(x, y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return [array(v) for v in model.weights]


@pytest.mark.parametrize("make", [pytest.param(one_layer, marks=pytest.mark.slow), by_one_word])
def test_two_devices_agree_with_one(make):
    one = trained_on_devices(make)
    keras.utils.clear_session()
    with on_two_devices():
        two = trained_on_devices(make)
    for a, b in zip(one, two, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
