"""`ScannedStack`: one traced layer is all of them, masked, on blocks, saved, stripped, reported."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.contrib import ScannedStack, _scanned_stack
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.layers import BlockSparseDense, CircularPadding, PrunableLayer
from tests.helpers import (
    array,
    gradients,
    jit,
    jit_if_quicker,
    slow_on_tensorflow,
)

L = keras.layers
pytestmark = pytest.mark.core

DEPTH = 5


def samples(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def dense(**options):
    return L.Dense(8, activation="tanh", bias_initializer="random_normal", **options)


def block():
    """Several layers with regularizers, moving averages and a random generator."""
    return keras.Sequential(
        [
            CircularPadding(1),
            L.Conv1D(4, 3, kernel_regularizer=keras.regularizers.L2(0.1), name="conv"),
            L.BatchNormalization(momentum=0.5),
            L.Dropout(0.5, seed=1),
        ],
        name="block",
    )


KINDS = {
    "dense": (dense, (8,)),
    "blocks": (lambda: BlockSparseDense(8, density=0.5, block=2, seed=3, activation="relu"), (8,)),
    "several": (block, (6, 4)),
}


def model_of(kind, depth=DEPTH):
    make, shape = KINDS[kind]
    return keras.Sequential([keras.Input(shape), ScannedStack(make(), depth, name="stack")])


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_its_layers_in_a_row(kind):
    model = model_of(kind)
    plain = model.layers[0].unrolled()
    assert len(plain.layers) == DEPTH
    assert model.count_params() >= plain.count_params()
    x = samples(3, *KINDS[kind][1])
    np.testing.assert_allclose(array(model(x)), array(plain(x)), atol=2e-6)

    def loss(y, outputs):
        return keras.ops.mean(keras.ops.square(outputs - keras.ops.convert_to_tensor(y)))

    if kind == "several":
        return  # dropout: which activations are kept is drawn by each layer
    found = gradients(model, x, x, loss)
    rows = dict(zip([v.name for v in model.trainable_variables], found, strict=True))
    others = gradients(plain, x, x, loss)
    for name, found in rows.items():
        expected = [
            g for v, g in zip(plain.trainable_variables, others, strict=True) if v.name == name
        ]
        np.testing.assert_allclose(found, np.stack(expected), atol=1e-6)


def test_every_layer_has_its_own_draw():
    stack = ScannedStack(dense(kernel_initializer=keras.initializers.Orthogonal(seed=0)), 3)
    stack.build((None, 8))
    kernels = array(stack.kernel)
    np.testing.assert_allclose(
        kernels @ kernels.transpose(0, 2, 1), np.stack([np.eye(8)] * 3), atol=1e-6
    )
    assert np.abs(kernels[0] - kernels[1]).max() > 0.1


def test_states_move_and_losses_are_counted():
    model = model_of("several")
    stack = model.layers[0]
    x = samples(4, 6, 4)
    averages, seeds = (
        next(v for v in stack.non_trainable_variables if name in v.name)
        for name in ("moving_mean", "seed")
    )
    before, drawn = array(averages), array(seeds)
    plain = stack.unrolled()
    model(x, training=True)
    plain(x, training=True)
    expected = [v for v in plain.non_trainable_variables if v.name == "moving_mean"]
    np.testing.assert_allclose(array(averages), np.stack([array(v) for v in expected]), atol=1e-6)
    assert np.abs(array(averages) - before).max() > 0
    assert (array(seeds) != drawn).any(axis=1).all()
    conv = next(v for v in stack.trainable_variables if v.name == "conv_kernel")
    np.testing.assert_allclose(
        array(sum(model.losses)), 0.1 * np.sum(np.square(array(conv))), rtol=1e-5
    )


@pytest.mark.parametrize("xla", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_masked_it_trains_is_saved_reported_and_stripped(tmp_path, xla):
    dense_model = keras.Sequential(
        [keras.Input((8,)), ScannedStack(dense(), DEPTH, name="stack"), L.Dense(2, name="head")]
    )
    model = kso.sparsify(dense_model, 0.5, exclude="head", seed=0)
    weight = next(w for w in kso.prunable_weights(model) if w.path == "stack/kernel")
    assert weight.live == DEPTH * 64 // 2
    for kernel in weight.value:
        gram = kernel.T @ kernel
        np.testing.assert_allclose(gram, gram[0, 0] * np.eye(8), atol=1e-5)
    mask = weight.parametrization.mask_value()
    model.compile("adam", "mse", jit_compile=jit(always=True) if xla else jit_if_quicker())
    x, y = samples(64, 8), samples(64, 2)
    before = weight.value
    model.fit(x, y, epochs=2, batch_size=32, verbose=0)
    assert np.abs(weight.value - before).max() > 0
    assert not weight.value[~mask].any()
    assert weight.live == DEPTH * 64 // 2
    (row,) = [row for row in kso.report(model).rows if row.path == "stack/kernel"]
    assert row.flops == DEPTH * 64
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(x, verbose=0), expected, atol=1e-6)
    loaded.fit(x, y, epochs=1, verbose=0)
    plain = kso.strip(model)
    kinds = [type(layer) for layer in plain.get_layer("stack").layers]
    assert kinds == [L.Dense] * DEPTH
    np.testing.assert_allclose(plain.predict(x, verbose=0), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("layer", "depth", "error", "message"),
    [
        (lambda: L.Dense(8), 0, ValueError, "depth=0"),
        (lambda: L.Dense(8), True, ValueError, "depth=True"),
        (lambda: "dense", 2, ValueError, "type str"),
        (
            lambda: PrunableLayer(L.Dense(8), kso.FixedMask(0.5)),
            2,
            NotPrunableError,
            "PrunableLayer",
        ),
    ],
)
def test_what_cannot_be_repeated_is_refused(layer, depth, error, message):
    with pytest.raises(error, match=f"Received: .*{message}"):
        ScannedStack(layer(), depth)


def test_layers_that_are_built_or_change_shapes_are_refused():
    built = L.Dense(8)
    built.build((None, 8))
    with pytest.raises(ValueError, match="must not be built yet"):
        ScannedStack(built, 2)
    with pytest.raises(ValueError, match=r"must return the shape that they take.*\(None, 9\)"):
        ScannedStack(L.Dense(8), 2).build((None, 9))


def test_several_layers_in_a_stack_are_sparsified_saved_and_stripped(tmp_path):
    model = kso.sparsify(model_of("several"), 0.25, seed=0)
    x = samples(4, 6, 4)
    expected = array(model(x))
    kernels = kso.prunable_weights(model)
    assert [weight.live for weight in kernels] == [DEPTH * 4 * 3 * 4 // 4]
    model.save(tmp_path / "stack.keras")
    np.testing.assert_array_equal(
        array(keras.models.load_model(tmp_path / "stack.keras")(x)), expected
    )
    np.testing.assert_allclose(array(kso.strip(model)(x)), expected, atol=1e-6)


@keras.saving.register_keras_serializable(package="tests")
class Residual(L.Layer):
    """Layers without names, two of them made when it is built."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.norm = L.LayerNormalization()

    def build(self, input_shape):
        self.up, self.down = L.Dense(16, activation="relu"), L.Dense(8)
        self.norm.build(input_shape)
        self.up.build(input_shape)
        self.down.build((*input_shape[:-1], 16))
        super().build(input_shape)

    def call(self, inputs):
        return inputs + self.down(self.up(self.norm(inputs)))

    def compute_output_shape(self, input_shape):
        return input_shape


def test_layers_without_names_have_the_same_names_in_every_instance(tmp_path):
    L.Dense(1), L.Dense(1)  # Keras' numbers are others in every process
    stack = ScannedStack(Residual(), 3, name="stack")
    model = keras.Sequential([keras.Input((8,)), stack, L.Dense(2, name="head")])
    names = {variable.name for variable in stack.variables}
    assert names == {f"dense{k}_{w}" for k in ("", "_1") for w in ("kernel", "bias")} | {
        "layer_normalization_gamma",
        "layer_normalization_beta",
    }
    sparse = kso.sparsify(model, 0.25, exclude="head", seed=0)
    paths = [weight.path for weight in kso.prunable_weights(sparse)]
    assert paths == ["stack/dense_kernel", "stack/dense_1_kernel", "head/kernel"]
    x = samples(4, 8)
    expected = array(sparse(x))
    sparse.save(tmp_path / "stack.keras")
    loaded = keras.models.load_model(tmp_path / "stack.keras")
    np.testing.assert_array_equal(array(loaded(x)), expected)
    np.testing.assert_allclose(array(kso.strip(sparse)(x)), expected, atol=1e-6)
    np.testing.assert_allclose(array(kso.convert(sparse, "compact")(x)), expected, atol=1e-6)


def test_a_deep_stack_is_unrolled_in_parts(monkeypatch):
    monkeypatch.setattr(_scanned_stack, "_LONGEST", 2)
    stack = ScannedStack(dense(), 5, name="stack")
    model = kso.prune(keras.Sequential([keras.Input((8,)), stack]), 0.5)
    plain = kso.strip(model)
    parts = plain.get_layer("stack").layers
    assert [len(part.layers) for part in parts] == [2, 2, 1]
    assert all(type(layer) is L.Dense for part in parts for layer in part.layers)
    x = samples(4, 8)
    np.testing.assert_allclose(array(plain(x)), array(model(x)), atol=1e-6)


@pytest.mark.torch_only
def test_on_torch_no_layer_has_a_gradient_as_large_as_the_stack():
    names, nodes = set(), [model_of("dense")(samples(4, 8)).sum().grad_fn]
    while nodes:
        node = nodes.pop()
        names.add(node.name())
        nodes += [follower for follower, _ in node.next_functions if follower is not None]
    assert "UnbindBackward0" in names
    assert "SelectBackward0" not in names


def wide_stack(layer):
    stack = ScannedStack(layer, 3, name="stack")
    return keras.Sequential([keras.Input((4, 64)), stack, L.Flatten(), L.Dense(3, name="head")])


WIDE = {
    "dense": lambda: L.Dense(64, "tanh", bias_initializer="random_normal"),
    "conv": lambda: L.Conv1D(64, 3, padding="same", activation="tanh", use_bias=False),
}


@slow_on_tensorflow
@pytest.mark.parametrize("kind", ["dense", pytest.param("conv", marks=pytest.mark.slow)])
@pytest.mark.parametrize("verb", [kso.sparsify, pytest.param(kso.prune, marks=pytest.mark.slow)])
def test_one_word_puts_the_layers_of_a_stack_on_blocks(verb, kind, tmp_path):
    keras.utils.set_random_seed(1)
    dense = wide_stack(WIDE[kind]())
    before = array(dense.layers[0].kernel)
    blocks = verb(dense, 0.25, budget="uniform", storage="blocks", exclude="head", seed=0)
    (weight, _), stack = kso.prunable_weights(blocks), blocks.layers[0]
    assert type(stack) is ScannedStack
    assert type(stack.layer).__name__.startswith("BlockSparse")
    assert kso.report(blocks).rows[0].block == (16, 16)
    assert kso.report(blocks).rows[0].least_density == 0.25
    kernel, mask = weight.storage.value(), weight.storage.mask_value()
    assert [float(one.mean()) for one in mask] == [0.25] * 3
    if verb is kso.prune:
        np.testing.assert_array_equal(kernel, np.where(mask, before, 0))
    else:
        for one in kernel:
            matrix = one if kind == "dense" else one[1]
            np.testing.assert_allclose(matrix.T @ matrix, np.eye(64), atol=1e-6)
    masked, x = kso.convert(blocks, "masked"), samples(16, 4, 64)
    assert type(masked.layers[0]) is PrunableLayer
    np.testing.assert_allclose(fit_stack(blocks), fit_stack(masked), atol=1e-5)
    expected = masked.predict(x, verbose=0)
    blocks.save(tmp_path / "blocks.keras")
    loaded = keras.saving.load_model(tmp_path / "blocks.keras")
    for model in (blocks, loaded, kso.strip(blocks)):
        np.testing.assert_allclose(model.predict(x, verbose=0), expected, atol=1e-5)


def fit_stack(model, epochs=2, callbacks=()):
    if not model.compiled:
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss, jit_compile=jit_if_quicker())
    options = {"batch_size": 8, "epochs": epochs, "shuffle": False, "verbose": 0}
    return model.fit(*stack_data(), callbacks=[*callbacks], **options).history["loss"]


def stack_data():
    return samples(16, 4, 64), np.arange(16) % 3


def stack_on_blocks(density=0.5, seed=0):
    keras.utils.set_random_seed(1)
    dense = wide_stack(WIDE["dense"]())
    options = {"budget": "uniform", "storage": "blocks", "exclude": "head", "seed": seed}
    return dense, kso.sparsify(dense, density, **options)


def test_storages_of_a_stack_are_converted_with_the_optimizer(tmp_path):
    dense, blocks = stack_on_blocks()
    fit_stack(blocks)
    masked = kso.convert(blocks, "masked")
    again = kso.convert(masked, "blocks", block=16)
    assert type(again.layers[0]) is ScannedStack
    np.testing.assert_allclose(*map(fit_stack, (again, masked)), atol=1e-5)
    values = [kso.prunable_weights(model)[0].value for model in (again, masked)]
    np.testing.assert_allclose(*values, atol=1e-5)
    for one, other in zip(
        kso.convert(again, "masked").optimizer.variables, masked.optimizer.variables, strict=True
    ):
        np.testing.assert_allclose(array(one), array(other), atol=1e-5)
    dense.save_weights(tmp_path / "dense.weights.h5")
    kso.contrib.load_dense_weights(again, tmp_path / "dense.weights.h5")
    weight = kso.prunable_weights(again)[0]
    expected = np.where(weight.mask, array(dense.layers[0].kernel), 0)
    np.testing.assert_array_equal(weight.value, expected)
    with pytest.raises(NotPrunableError, match=r"stack.*whole blocks of 8 x 32"):
        kso.convert(kso.prune(dense, 0.5, exclude="head"), "blocks", block=(8, 32))


@pytest.mark.slow
def test_rigl_moves_the_blocks_of_a_stack_as_in_its_masked_twin():
    _, blocks = stack_on_blocks()
    models, (x, y), losses = (blocks, kso.convert(blocks, "masked")), stack_data(), []
    before = kso.prunable_weights(blocks)[0].mask
    for model in models:
        moving = kso.callbacks.RigL((x, y), 8, frequency=1, end_step=40, fraction=0.6)
        losses.append(fit_stack(model, callbacks=[moving]))
    weight, twin = (kso.prunable_weights(model)[0] for model in models)
    assert (weight.mask != before).any(axis=(1, 2)).sum() >= 2  # layers that have moved some
    np.testing.assert_allclose(*losses, atol=1e-5)
    np.testing.assert_array_equal(weight.mask, twin.mask)
    np.testing.assert_allclose(weight.value, twin.value, atol=1e-5)


def test_set_moves_the_blocks_of_a_stack_within_each_layer():
    _, blocks = stack_on_blocks()
    (weight, _), before = kso.prunable_weights(blocks), kso.prunable_weights(blocks)[0].mask
    fit_stack(blocks, 1, [kso.callbacks.SET(frequency=1, end_step=40, fraction=0.9)])
    assert (weight.mask != before).any()
    live = weight.mask.reshape(3, 4, 16, 4, 16)
    assert (live.all(axis=(2, 4)) == live.any(axis=(2, 4))).all()
    for axis in (1, 2):
        assert (live.any(axis=(2, 4)).sum(axis=axis) == 2).all()
    assert not weight.value[~weight.mask].any()


def test_blocks_deeper_in_a_stack_have_no_masked_form():
    inner = keras.Sequential([BlockSparseDense(8, density=0.5, block=2), L.LayerNormalization()])
    model = keras.Sequential([keras.Input((8,)), ScannedStack(inner, 2, name="stack")])
    with pytest.raises(NotPrunableError, match=r"ScannedStack 'stack'.*keras_sparse_ortho\.strip"):
        kso.convert(model, "masked")
    assert len(kso.strip(model).layers[0].layers) == 2


@keras.saving.register_keras_serializable(package="test_scanned_stack")
class Holder(keras.Model):
    """A subclassed model, whose constructor makes a stack of plain layers."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.stack = ScannedStack(L.Dense(64, "tanh"), 3, name="stack")

    def build(self, input_shape):
        self.stack.build(input_shape)
        self.built = True

    def call(self, inputs):
        return self.stack(inputs)


def test_a_subclassed_model_is_loaded_with_its_stack_on_blocks(tmp_path):
    model, x = Holder(), samples(4, 64)
    model(x)
    model = kso.sparsify(model, 0.25, storage="blocks", seed=0)
    assert type(model.stack.layer) is BlockSparseDense
    expected = model.predict(x, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert type(loaded.stack.layer) is BlockSparseDense
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), expected)
