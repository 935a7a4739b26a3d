"""Families of layers: each question is answered, or a message names the layer; users' own too."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.grouped_dense import GroupedDense, Guessed, Unregistered
from tests.helpers import array, on_two_devices

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(256, 12)).astype("float32")


def network(kind=GroupedDense, **options):
    """A network with a Dense in groups between others."""
    layers = [
        L.Dense(16, "relu", name="up"),
        kind(24, 4, name="grouped", **options),
        L.ReLU(name="relu"),
        L.Dense(3, name="down"),
    ]
    return keras.Sequential([keras.Input((12,)), *layers])


def kernel_of(model, path="grouped/matrices"):
    kernels = kso.prunable_weights(model, flops=True)
    return next(kernel for kernel in kernels if kernel.path == path)


@pytest.mark.core
@pytest.mark.each_backend
def test_a_users_layer_has_masks_and_flops():
    sparse = kso.sparsify(network(), 0.5, seed=0, budget="uniform")
    kernel = kernel_of(sparse)
    assert kernel.flops == kernel.size == 4 * 4 * 6
    assert kernel.live == kernel.sparse_flops == 48
    # Each of the four matrices is orthogonal.
    for matrix in kernel.value:
        product = matrix @ matrix.T
        assert np.abs(product - product[0, 0] * np.eye(4)).max() < 1e-5


@pytest.mark.core
@pytest.mark.each_backend
def test_a_users_layer_is_pruned_and_refitted_on_data():
    model = keras.Sequential(
        [keras.Input((16,)), GroupedDense(24, 4, name="grouped")]
    )
    # Two directions in the four inputs of a group: half of them can do the work of all.
    directions = RNG.normal(size=(4, 2, 4))
    parts = RNG.normal(size=(256, 4, 2))
    inputs = np.einsum("bgd,gdi->bgi", parts, directions).reshape(256, 16)
    inputs = inputs.astype("float32")
    by_data = kso.prune(model, 0.5, score="obs", data=inputs)
    by_size = kso.prune(model, 0.5, score="magnitude")
    assert kernel_of(by_data).live == kernel_of(by_size).live == 48

    def error(pruned):
        return np.square(array(pruned(inputs)) - array(model(inputs))).mean()

    assert error(by_data) < 0.5 * error(by_size)


@pytest.mark.core
@pytest.mark.each_backend
@pytest.mark.parametrize("use_bias", [False, True])
def test_channels_of_a_users_layer_go_group_by_group(use_bias):
    model = network(use_bias=use_bias)
    groups = kso.channel_groups(model)
    assert [(group.makers, group.steps) for group in groups] == [
        (("up", "grouped"), 4)
    ]
    kernel = array(model.layers[-1].kernel).copy()
    kernel[6:12] = 0  # nothing reads the second group
    bias = array(model.layers[-1].bias)
    model.layers[-1].set_weights([kernel, bias])
    small = kso.remove_channels(model)
    shapes = [
        tuple(layer.kernel.shape)
        for layer in small.layers
        if hasattr(layer, "kernel")
    ]
    assert shapes == [(12, 12), (3, 4, 6), (18, 3)]
    assert (small.get_layer("grouped").units, small.layers[1].groups) == (18, 3)
    np.testing.assert_allclose(array(small(X)), array(model(X)), atol=1e-5)


@pytest.mark.core
def test_a_network_with_a_users_layer_gets_narrower():
    small = kso.narrow(network(), 0.6, data=X, multiple_of=1)
    assert small.get_layer("grouped").groups in (1, 2, 3)
    assert small(X).shape == (256, 3)


@pytest.mark.core
@pytest.mark.each_backend
def test_a_users_layer_is_trained_with_the_rounding_of_its_file():
    model = kso.quantize_aware(network())
    kernel = kernel_of(model)
    steps = kernel.value / (np.abs(kernel.value).max() / 127)
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-3)
    wrapper = model.get_layer("grouped")
    assert wrapper.of_output is not None


@pytest.mark.core
def test_a_users_layer_has_an_integer_file(tmp_path):
    model = kso.quantize_aware(network(use_bias=False))
    model(X, training=True)
    report = kso.export_litert(
        model,
        tmp_path / "model.tflite",
        mode="int8",
        representative_data=X[:64],
    )
    assert "in floats" not in str(report)
    np.testing.assert_allclose(
        kso.load_litert(tmp_path / "model.tflite").predict(X[:8]),
        array(model(X[:8])),
        atol=0.05,
    )


@pytest.mark.core
def test_a_users_layer_that_moves_entries_keeps_their_range():
    class Flipped(L.Layer):
        def call(self, inputs):
            return keras.ops.flip(inputs, axis=-1)

    def names_of_rounded():
        layers = [L.Dense(4, name="up"), Flipped(name="flipped"), L.Dense(3)]
        model = keras.Sequential([keras.Input((12,)), *layers])
        rounded = kso.quantize_aware(model)
        return [layer.name for layer in rounded.layers if layer.weights]

    assert "flipped" in names_of_rounded()
    kso.register_layer(Flipped, {}, keeps_range=True)
    assert "flipped" not in names_of_rounded()


@pytest.mark.jax_only
def test_a_users_layer_by_sample_is_called_on_each_device_by_itself():
    import jax

    def is_split(kind):
        with on_two_devices():
            sparse = kso.sparsify(
                network(kind),
                0.5,
                seed=0,
                include=[f"grouped/{kind.kernel_name}"],
                storage="compact",
            )
            return "shard_map" in str(jax.make_jaxpr(sparse)(X))

    assert is_split(GroupedDense)
    assert not is_split(Guessed)


# --- an answer, or a message that names the layer ------------------------------------------------


@pytest.mark.core
def test_qat_warns_of_layers_that_it_does_not_know():
    with pytest.warns(
        UserWarning, match=r"'grouped/matrices' of Unregistered, in floats"
    ):
        kso.quantize_aware(network(Unregistered))
    with pytest.warns(
        UserWarning, match=r"'grouped/kernel' of Guessed, rounded by output"
    ):
        kso.quantize_aware(network(Guessed))
    # Without a warning, which would be an error here.
    for name in ("grouped", "grouped/matrices"):
        kso.quantize_aware(network(Unregistered), exclude=[name])
    kso.quantize_aware(network(Unregistered), weights=None)


@pytest.mark.core
def test_each_question_names_a_layer_that_is_not_known():
    model = network(Guessed)
    assert kernel_of(model, "grouped/kernel").flops is None
    with pytest.warns(UserWarning, match="Received: 'grouped/kernel'"):
        kso.prune(model, 0.5, score="obs", data=X)
    stays = kso.channel_groups(model).stays
    assert stays["grouped (Guessed)"].reason == "its class has no rule"
    with pytest.warns(UserWarning, match=r"'grouped/kernel' is not on live"):
        kso.sparsify(model, 0.5, storage="blocks", seed=0)


@pytest.mark.core
def test_registering_refuses_wrong_answers_and_then_registers_nothing():
    class Own(L.Layer):
        """A layer of a user."""

    refused = {
        "kind must be a class": {"kind": 5},
        "layouts must be a dict": {"layouts": "dense"},
        "positions must be 'last axis'": {"positions": "first axis"},
        "rows must be 'last axis'": {"rows": 3},
        "rule must be one of": {"channels": "dense"},
        "rounding must be one of": {"rounding": "int8"},
    }
    for message, wrong in refused.items():
        answers = {"kind": Own, "layouts": {}, **wrong}
        with pytest.raises(TypeError) as error:
            kso.register_layer(**answers)
        assert message in str(error.value).replace("`", "")
        assert "Received: " in str(error.value)
    assert Own not in kso.initializers.kernel_layouts.registry


# Layers of Keras with kernels, and inputs for them.
IMAGE = (6, 6, 4)
STEPS = (5, 4)
FAMILIES = {
    **dict.fromkeys(("Dense",), (STEPS, (3,))),
    "EinsumDense": (STEPS, ("bsi,io->bso", (5, 3))),
    "Embedding": ((5,), (7, 3)),
    **dict.fromkeys(("Conv1D", "Conv1DTranspose"), (STEPS, (3, 2))),
    **dict.fromkeys(("Conv2D", "Conv2DTranspose"), (IMAGE, (3, 2))),
    **dict.fromkeys(("Conv3D", "Conv3DTranspose"), ((4, *IMAGE), (3, 2))),
    "DepthwiseConv1D": (STEPS, (2,)),
    "DepthwiseConv2D": (IMAGE, (2,)),
    "SeparableConv1D": (STEPS, (3, 2)),
    "SeparableConv2D": (IMAGE, (3, 2)),
    **dict.fromkeys(("SimpleRNN", "GRU", "LSTM"), (STEPS, (3,))),
    "ConvLSTM1D": ((5, 6, 4), (3, 2)),
    "ConvLSTM2D": ((5, *IMAGE), (3, 2)),
    "MultiHeadAttention": (STEPS, (2, 3)),
    "GroupQueryAttention": (STEPS, (3, 2, 1)),
}
# Questions that no family answers; the layers are then named where they are met.
OPEN = {
    ("EinsumDense", "channels"),
    ("GroupQueryAttention", "channels"),
    ("ConvLSTM1D", "rows"),
    ("ConvLSTM1D", "channels"),
    ("ConvLSTM2D", "rows"),
    ("ConvLSTM2D", "channels"),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_each_family_answers_each_question(name):
    shape, arguments = FAMILIES[name]
    is_attention = "Attention" in name
    reads_tokens = name == "Embedding"
    entry = keras.Input(shape, dtype="int32" if reads_tokens else None)
    # A layer without a rule holds the channels that it reads.
    read = entry if reads_tokens else L.Dense(4, name="first")(entry)
    layer = getattr(L, name)(*arguments, name="layer")
    called = layer(read, read) if is_attention else layer(read)
    if len(called.shape) > 2:
        called = L.Flatten()(called)
    model = keras.Model(entry, L.Dense(2, name="head")(called))
    kernels = [
        kernel
        for kernel in kso.prunable_weights(model, flops=True)
        if kernel.path.startswith("layer/")
    ]
    assert kernels
    missing = set()
    for kernel in kernels:
        answers = {
            "layouts": kernel.layout,
            "positions": kernel.flops,
            "rows": kso.calibration.kernel_rows(kernel.owner, kernel),
            "rounding": kso.quantization.kernel_rounding(kernel.owner),
        }
        missing |= {
            (name, question)
            for question, answer in answers.items()
            if answer is None
        }
    stays = kso.channel_groups(model).stays
    if any(stay.reason == "its class has no rule" for stay in stays.values()):
        assert f"layer ({type(layer).__name__})" in stays
        missing.add((name, "channels"))
    assert missing == {pair for pair in OPEN if pair[0] == name}


@pytest.mark.numpy_only
def test_all_layers_of_keras_with_kernels_are_in_the_table():
    cells = {"SimpleRNNCell": "SimpleRNN", "GRUCell": "GRU", "LSTMCell": "LSTM"}
    names = {
        cells.get(kind.__name__, kind.__name__)
        for kind in kso.initializers.kernel_layouts.registry
        if kind.__module__.startswith("keras.")
    }
    assert names - {"ConvLSTMCell"} <= FAMILIES.keys()


@keras.saving.register_keras_serializable(package="tests")
class Scores(L.Dense):
    """A Dense that ends in probabilities."""

    def call(self, inputs):
        return keras.ops.softmax(super().call(inputs))


@keras.saving.register_keras_serializable(package="tests")
class BlockSparseScores(kso.layers.BlockSparseDense):
    """Its form on live blocks."""

    namesake = Scores

    def call(self, inputs):
        return keras.ops.softmax(super().call(inputs))


@pytest.mark.core
def test_a_users_layer_has_a_form_on_live_blocks(tmp_path):
    model = keras.Sequential([keras.Input((32,)), Scores(16, name="scores")])
    options = {"structure": kso.Block(8, 8), "storage": "blocks"}
    with pytest.warns(UserWarning, match="scores/kernel.*register_layer"):
        kso.prune(model, 0.5, **options)
    layouts = kso.initializers.kernel_layouts.dispatch(L.Dense)
    kso.register_layer(Scores, layouts, blocks=BlockSparseScores)
    pruned = kso.prune(model, 0.5, **options)
    assert type(pruned.get_layer("scores")) is BlockSparseScores
    inputs = RNG.normal(size=(8, 32)).astype("float32")
    outputs = pruned.predict(inputs, verbose=0)
    np.testing.assert_allclose(outputs.sum(-1), 1, atol=1e-5)
    plain = kso.strip(pruned)
    assert type(plain.get_layer("scores")) is Scores
    pruned.save(tmp_path / "scores.keras")
    loaded = keras.saving.load_model(tmp_path / "scores.keras")
    for same in (kso.convert(pruned, "masked"), plain, loaded):
        np.testing.assert_allclose(
            same.predict(inputs, verbose=0), outputs, atol=1e-6
        )


@pytest.mark.parametrize("blocks", [L.Dense, "blocks", BlockSparseScores])
def test_a_form_on_live_blocks_must_be_one(blocks):
    with pytest.raises(TypeError, match="blocks"):
        kso.register_layer(L.Activation, {}, blocks=blocks)
