"""`quantize_aware`: where activations are rounded, their ranges, files, strip, refusals."""

import zipfile

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError
from keras_sparse_ortho.parametrizations import LowRankSoftThreshold
from keras_sparse_ortho.quantization import (
    FakeQuantize,
    QuantizeWrapper,
    integers_of,
    quantize_aware,
    round_biases,
)
from tests.helpers import (
    array,
    assert_same,
    jit,
    reloaded,
    slow_where_traced,
)
from tests.models import returned

pytestmark = pytest.mark.core

L = keras.layers


def mlp():
    layers = [
        L.Dense(16, activation="relu", name="hidden"),
        L.Dense(8, activation="gelu", name="curved"),
        L.Dense(4, name="head", dtype="float32"),
    ]
    return keras.Sequential(
        [keras.Input((12,)), L.Flatten(name="flat"), *layers]
    )


def residual():
    """Convolutions with normalization, a depthwise one, and a sum."""
    inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(8, 3, padding="same", use_bias=False, name="first")(inputs)
    x = L.ReLU(name="first_relu")(L.BatchNormalization(name="first_norm")(x))
    y = L.DepthwiseConv2D(3, padding="same", name="depthwise")(x)
    y = L.ReLU(6.0, name="inner_relu")(
        L.BatchNormalization(name="inner_norm")(y)
    )
    y = L.BatchNormalization(name="last_norm")(
        L.Conv2D(8, 1, name="pointwise")(y)
    )
    x = L.MaxPooling2D(name="pool")(
        L.ReLU(name="sum_relu")(L.Add(name="sum")([x, y]))
    )
    x = L.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(inputs, L.Dense(4, activation="softmax", name="head")(x))


def rounded(model):
    """By name how many inputs are rounded, and whether the activation and the output are."""
    return {
        own.name: (
            len(own.of_inputs),
            own.of_activation is not None,
            own.of_output is not None,
        )
        for own in model.layers
        if isinstance(own, QuantizeWrapper)
    }


def squeeze_and_excite():
    """A gate as MobileNetV3 has it: a hard sigmoid from operations, times the channels."""
    inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(8, 3, activation="relu", name="first")(inputs)
    gate = L.GlobalAveragePooling2D(keepdims=True, name="squeeze")(x)
    gate = L.Conv2D(8, 1, name="excite")(gate)
    gate = L.ReLU(6.0, name="hard")(gate + 3.0) * (1.0 / 6.0)
    x = L.Multiply(name="gated")([x, gate])
    x = L.GlobalAveragePooling2D(name="mean")(x)
    return keras.Model(inputs, L.Dense(4, name="head")(x))


def fit(model, shape, epochs=1, initial_epoch=0):
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(64, *shape)).astype("float32"),
        rng.integers(0, 4, 64),
    )
    if not model.compiled:
        from_logits = len(shape) < 3  # the other network ends in a softmax
        loss = keras.losses.SparseCategoricalCrossentropy(
            from_logits=from_logits
        )
        model.compile(keras.optimizers.Adam(1e-3), loss, jit_compile=jit())
    model.fit(
        x,
        y,
        batch_size=16,
        shuffle=False,
        verbose=0,
        epochs=epochs,
        initial_epoch=initial_epoch,
    )
    return x


def test_roundings_are_where_litert_has_tensors():
    assert rounded(quantize_aware(mlp())) == {
        "hidden": (1, False, True),
        "curved": (0, True, True),
        "head": (0, False, True),
    }
    assert rounded(quantize_aware(residual())) == {
        "first": (1, False, False),
        "first_relu": (0, False, True),
        "inner_relu": (0, False, True),
        "last_norm": (0, False, True),
        "sum_relu": (0, False, True),
        "mean": (0, False, True),
        "head": (0, True, False),
    }
    gated = quantize_aware(squeeze_and_excite())
    assert rounded(gated) == {
        "first": (1, False, True),
        "squeeze": (0, False, True),
        "excite": (0, False, True),
        "hard": (0, False, True),
        "gated": (1, False, True),
        "mean": (0, False, True),
        "head": (0, False, True),
    }
    # The channels have a range, the gate comes from an operation.
    assert gated.get_layer("gated").rounded_numbers == (1,)


@slow_where_traced
@pytest.mark.parametrize(
    "storage", [pytest.param("masked", marks=pytest.mark.slow), "compact"]
)
def test_attentions_with_roundings_inside_are_saved_and_stripped(
    storage, tmp_path
):
    inputs = keras.Input((4, 8))
    x = L.MultiHeadAttention(2, 4, name="attention")(inputs, inputs)
    dense = keras.Model(
        inputs, L.Dense(4, name="head")(L.GlobalAveragePooling1D()(x))
    )
    model = quantize_aware(
        kso.sparsify(dense, 0.5, seed=0, storage=storage), "int4"
    )
    assert all(
        w.storage.quantizer is not None for w in kso.prunable_weights(model)
    )
    assert rounded(model)["attention"] == (2, False, True)
    x = fit(model, (4, 8))
    for one in (model, kso.strip(model)):
        again = reloaded(one, tmp_path)
        assert [weight.path for weight in again.weights] == [
            weight.path for weight in one.weights
        ]
        np.testing.assert_array_equal(array(again(x)), array(one(x)))
        third = reloaded(again, tmp_path)
        np.testing.assert_array_equal(array(third(x)), array(one(x)))


def recurrent():
    """An LSTM that LiteRT's operator computes, and recurrent layers that stay loops."""
    x = inputs = keras.Input((6, 5))
    x = L.LSTM(8, name="lstm", return_sequences=True)(x)
    x = L.LSTM(4, name="relu", activation="relu", return_sequences=True)(x)
    x = L.RNN(L.LSTMCell(4), name="cell", return_sequences=True)(x)
    both_ways = L.Bidirectional(L.LSTM(3, return_sequences=True), name="both")
    x = L.GRU(8, name="gru")(both_ways(x))
    return keras.Model(inputs, L.Dense(4, name="head")(x))


def test_lstms_of_one_operator_have_a_scale_for_each_gate():
    """Other recurrent layers stay in floats, between roundings of their activations."""
    model = quantize_aware(recurrent(), "int4")
    quantized = {}
    for weight in kso.prunable_weights(model):
        if weight.storage is not None:
            layer = weight.path.partition("/")[0]
            quantized[layer] = quantized.get(layer, 0) + 1
            scales = weight.storage.quantizer.per
            assert scales == ("output" if layer == "head" else "gate")
            gates = np.split(weight.value, 4, axis=-1)
            if layer != "head":
                assert all(len(np.unique(gate)) <= 15 for gate in gates)
    assert quantized == {"lstm": 2, "both": 4, "head": 1}
    x = fit(model, (6, 5))
    ends = {
        name: array(model.get_layer(name).of_output.high)
        for name in ("lstm", "both")
    }
    for name, high in ends.items():  # a symmetric range, as LiteRT asks for
        low = array(model.get_layer(name).of_output.low)
        np.testing.assert_allclose(low, -128 / 127 * high, rtol=1e-6)
    gru = model.get_layer("gru").of_output
    assert abs(array(gru.low) / array(gru.high) + 128 / 127) > 1e-3
    plain = kso.strip(model)
    np.testing.assert_allclose(array(plain(x)), array(model(x)), atol=1e-5)
    [kernel, _] = [
        weight
        for weight in kso.prunable_weights(plain)
        if weight.path.startswith("lstm/")
    ]
    for gate in np.split(kernel.value, 4, axis=-1):
        steps = 7 * gate / np.abs(gate).max()
        np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)


def test_lstms_with_a_scale_for_each_gate_are_saved(tmp_path):
    model = quantize_aware(kso.sparsify(recurrent(), 0.5, seed=0))
    x = fit(model, (6, 5))
    again = reloaded(model, tmp_path)
    assert again.get_layer("lstm").of_output.symmetric
    assert not again.get_layer("gru").of_output.symmetric
    np.testing.assert_array_equal(array(again(x)), array(model(x)))


def test_lstms_on_live_blocks_stay_in_floats():
    dense = keras.Sequential(
        [keras.Input((6, 16)), L.LSTM(16, name="lstm"), L.Dense(4, name="head")]
    )
    blocks = kso.sparsify(
        dense,
        0.5,
        structure=kso.Block(4, 4),
        storage="blocks",
        exclude="head",
        seed=0,
    )
    quantized = [
        weight.path
        for weight in kso.prunable_weights(quantize_aware(blocks))
        if weight.storage is not None and weight.storage.quantizer is not None
    ]
    assert quantized == ["head/kernel"]


def test_layers_behind_an_excluded_one_round_their_inputs():
    model = quantize_aware(mlp(), exclude="curved")
    assert rounded(model) == {
        "hidden": (1, False, True),
        "head": (1, False, True),
    }
    quantized = {
        w.path: w.storage is not None for w in kso.prunable_weights(model)
    }
    assert quantized == {
        "hidden/kernel": True,
        "curved/kernel": False,
        "head/kernel": True,
    }
    assert "mean" not in rounded(quantize_aware(residual(), exclude="mean"))


def test_the_given_model_is_left_as_it_was_and_paths_stay():
    model = kso.sparsify(residual(), 0.3, exclude="depthwise", seed=0)
    before = model.get_weights()
    x = np.random.default_rng(1).normal(size=(4, 8, 8, 3)).astype("float32")
    y = array(model(x))
    new = quantize_aware(model, "int4")
    paths = [weight.path for weight in kso.prunable_weights(model)]
    assert [weight.path for weight in kso.prunable_weights(new)] == paths
    live = [[w.live for w in kso.prunable_weights(one)] for one in (model, new)]
    assert live[0] == live[1]
    fit(new, (8, 8, 3))
    np.testing.assert_array_equal(array(model(x)), y)
    assert_same(before, model.get_weights())


@slow_where_traced
@pytest.mark.parametrize("make", [mlp, residual])
def test_resumed_training_equals_training_in_one_go(make, tmp_path):
    def start():
        keras.utils.set_random_seed(0)
        model = kso.sparsify(
            make(), 0.3, exclude=lambda w: "depthwise" in w.path, seed=0
        )
        return quantize_aware(model)

    half, whole = start(), start()
    shape = half.input_shape[1:]
    x = fit(half, shape)
    resumed = reloaded(half, tmp_path)
    assert rounded(resumed) == rounded(half)
    np.testing.assert_array_equal(array(resumed(x)), array(half(x)))
    fit(whole, shape, epochs=2)
    fit(resumed, shape, epochs=2, initial_epoch=1)
    for one, other in zip(
        whole.get_weights(), resumed.get_weights(), strict=True
    ):
        np.testing.assert_allclose(one, other, atol=1e-5)
    plain = kso.strip(resumed)
    assert all(weight.storage is None for weight in kso.prunable_weights(plain))
    np.testing.assert_allclose(array(plain(x)), array(resumed(x)), atol=1e-5)


def test_mixed_precision_keeps_ranges_in_float32():
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = quantize_aware(mlp())
    x = fit(model, (12,))
    hidden = model.get_layer("hidden")
    assert hidden.of_output.high.dtype == "float32"
    assert float(array(hidden.of_output.high)) > 0
    assert array(hidden.of_inputs[0].low) >= x.min()


def test_a_range_follows_its_input_and_has_a_least_width():
    layer = FakeQuantize(momentum=0.75)
    x = np.array([[-1.0, 0.5, 3.0]], "float32")
    np.testing.assert_array_equal(array(layer(x)), x)  # not seen yet
    layer(x, training=True)
    assert (float(array(layer.low)), float(array(layer.high))) == (-1.0, 3.0)
    layer(4 * x, training=True)
    assert (float(array(layer.low)), float(array(layer.high))) == (-1.75, 5.25)
    layer(np.abs(x), training=True)
    assert float(array(layer.low)) == pytest.approx(-1.3125)
    y = array(layer(np.linspace(-9, 9, 1000, dtype="float32")))
    assert len(np.unique(y)) == 256
    assert np.min(np.abs(y)) == 0
    layer = FakeQuantize()
    assert not array(layer(np.zeros((2, 3)), training=True)).any()
    assert layer.step() == pytest.approx(1e-6 / 255)  # biases are divided by it


def test_a_symmetric_range_follows_the_largest_magnitude():
    layer = FakeQuantize(momentum=0.75, symmetric=True)
    x = np.array([[-2.54, 0.5, 1.0]], "float32")
    layer(x, training=True)
    assert float(array(layer.high)) == pytest.approx(2.54)
    assert float(array(layer.low)) == pytest.approx(-2.56)
    assert layer.step() == pytest.approx(0.02)
    layer(2 * x, training=True)
    assert float(array(layer.high)) == pytest.approx(1.25 * 2.54)
    again = FakeQuantize.from_config(layer.get_config())
    assert again.symmetric


def test_refusals():
    product = kso.parametrize(
        mlp(), LowRankSoftThreshold(rank=2), include="curved"
    )
    for model, options, error, message in (
        (quantize_aware(mlp()), {}, NotPrunableError, "quantized already"),
        (mlp(), {"activations": "int4"}, ValueError, "`activations` must be"),
        (
            mlp(),
            {"weights": None, "activations": None},
            ValueError,
            "`activations` must be",
        ),
        (mlp(), {"weights": 8}, ValueError, "`weights` must be"),
        (mlp(), {"exclude": "other"}, UnknownWeightError, "other"),
        (
            keras.Sequential([keras.Input((4,)), L.ReLU()]),
            {},
            NotPrunableError,
            "no kernel that",
        ),
        (product, {}, NotPrunableError, "product of two factors"),
    ):
        with pytest.raises(error, match=message):
            quantize_aware(model, **options)
    with pytest.raises(ValueError, match="`momentum` must be in"):
        FakeQuantize(momentum=1.0)


@pytest.mark.parametrize(
    "change",
    [
        {"layer": None},
        {"layer": "../x"},
        {"inputs": 10**9},
        {"inputs": -1},
        {"inputs": True},
        {"inputs": 2, "rounded": [2]},
        {"inputs": 2, "rounded": [1, 0]},
        {"inputs": 2, "rounded": [1, 1]},
        {"inputs": 2, "rounded": [True]},
        {"inputs": 2, "rounded": "1"},
        {"inputs": 2, "rounded": 1},
    ],
)
def test_configurations_that_are_none_are_refused(change):
    config = QuantizeWrapper(keras.layers.Dense(2)).get_config()
    with pytest.raises(ValueError, match=r"Received: "):
        QuantizeWrapper.from_config(config | change)
    del config["layer"]
    with pytest.raises(ValueError, match=r"holds `layer`.*Received: "):
        QuantizeWrapper.from_config(config)


@pytest.mark.parametrize(("storage", "kind"), returned.REFUSED)
def test_models_that_no_list_of_returned_ones_has_are_refused(storage, kind):
    with pytest.raises(NotPrunableError, match=r"activations=None|convert"):
        returned.STORAGES[storage](returned.KINDS[kind]())


# --- `round_biases`: whole steps of the file, by a change of half a step at most ------------------


def seen(model, shape):
    """A quantized model that has seen data, and biases of all sizes."""
    rng = np.random.default_rng(0)
    quantized = quantize_aware(model, "int4")
    quantized(rng.normal(size=(32, *shape)).astype("float32"), training=True)
    for weight in quantized.weights:
        if weight.name in ("bias", "beta"):
            weight.assign(rng.normal(size=weight.shape))
    return quantized


def scales_of(model):
    """Scales of the quantized weights by path. Embeddings stay as they are."""
    parts = {
        weight.path: integers_of(weight)
        for weight in kso.prunable_weights(model)
    }
    return {
        path: part[1].reshape(-1)
        for path, part in parts.items()
        if part is not None
    }


def assert_whole(value, step):
    count = value / step
    np.testing.assert_allclose(count, np.rint(count), atol=1e-3)


def test_biases_are_whole_steps_of_input_and_kernel():
    layers = [
        L.Dense(6, activation="softmax", name="first"),
        L.Dense(3, name="head"),
    ]
    model = seen(keras.Sequential([keras.Input((8,)), *layers]), (8,))
    before = [array(layer.bias) for layer in model.layers]
    assert round_biases(model) is model
    scales = scales_of(model)
    for layer, was in zip(model.layers, before, strict=True):
        step = layer.of_inputs[0].step() * scales[f"{layer.name}/kernel"]
        bias = array(layer.bias)
        assert_whole(bias, step)
        assert np.all(np.abs(bias - was) <= 0.501 * step)
        assert not np.array_equal(bias, was)


def test_what_a_folded_normalization_adds_is_whole_steps():
    inputs = keras.Input((5, 5, 2))
    norm = L.BatchNormalization(name="norm")
    x = L.ReLU()(norm(L.Conv2D(4, 3, name="first")(inputs)))
    dense = keras.Model(inputs, L.Dense(2, name="head")(L.Flatten()(x)))
    model = round_biases(seen(dense, (5, 5, 2)))
    norm, first = model.get_layer("norm"), model.get_layer("first")
    gain = array(norm.gamma) / np.sqrt(
        array(norm.moving_variance) + norm.epsilon
    )
    whole = gain * (array(first.bias) - array(norm.moving_mean)) + array(
        norm.beta
    )
    assert_whole(
        whole,
        first.of_inputs[0].step()
        * scales_of(model)["first/kernel"]
        * np.abs(gain),
    )


def test_a_negative_gain_of_the_normalization_is_rounded_as_well():
    inputs = keras.Input((5, 5, 2))
    norm = L.BatchNormalization(name="norm")
    x = norm(L.Conv2D(4, 3, use_bias=False, name="first")(inputs))
    model = seen(
        keras.Model(inputs, L.Dense(2, name="head")(L.Flatten()(x))), (5, 5, 2)
    )
    norm, first = model.get_layer("norm"), model.get_layer("first")
    norm.gamma.assign([-1.5, 1.0, -0.25, 2.0])
    before = array(norm.beta)
    round_biases(model)
    gain = array(norm.gamma) / np.sqrt(
        array(norm.moving_variance) + norm.epsilon
    )
    step = (
        first.of_inputs[0].step()
        * scales_of(model)["first/kernel"]
        * np.abs(gain)
    )
    assert_whole(array(norm.beta) - gain * array(norm.moving_mean), step)
    assert np.all(array(norm.beta) != before)


@pytest.mark.parametrize(
    ("activation", "step"),
    [("tanh", 1 / 128), ("sigmoid", 1 / 256), ("softmax", 1 / 256)],
)
def test_biases_behind_a_fixed_range_are_steps_of_it(activation, step):
    """LiteRT gives these outputs a range that no training sets."""
    layers = [L.Dense(6, activation=activation), L.Dense(3, name="head")]
    dense = keras.Sequential([keras.Input((8,)), *layers])
    model = quantize_aware(dense, "int4", activations=None)
    bias, steps = (
        model.get_layer("head").bias,
        step * scales_of(model)["head/kernel"],
    )
    bias.assign([10.3, 7.4, -5.3] * steps)  # in half a step 10.5, 7.5 and -5.5
    round_biases(model)
    np.testing.assert_allclose(
        array(bias) / steps, [10.0, 7.0, -5.0], atol=1e-3
    )


def test_products_inside_of_an_attention_have_ranges_and_whole_biases():
    inputs = keras.Input((4, 8))
    attention = L.MultiHeadAttention(2, 4, name="attention")
    model = seen(keras.Model(inputs, attention(inputs, inputs)), (4, 8))
    round_biases(model)
    outer, scales = model.get_layer("attention"), scales_of(model)
    inner = outer.layer
    assert [
        len(one.of_inputs) for one in (inner.query_dense, inner.output_dense)
    ] == [0, 1]
    assert inner.query_dense.of_output is not None
    assert inner.output_dense.of_output is None
    assert outer.of_inputs[0].step() == outer.of_inputs[1].step()
    assert_whole(
        array(inner.query_dense.bias).reshape(-1),
        outer.of_inputs[0].step() * scales["attention/query/kernel"],
    )
    assert_whole(
        array(inner.output_dense.bias),
        inner.output_dense.of_inputs[0].step()
        * scales["attention/attention_output/kernel"],
    )


def test_biases_of_an_attention_to_another_sequence_are_steps_of_its_own_input():
    query, value = keras.Input((4, 8)), keras.Input((5, 8))
    outputs = L.MultiHeadAttention(2, 4, name="attention")(query, value)
    model = quantize_aware(keras.Model([query, value], outputs), "int4")
    rng = np.random.default_rng(0)
    rows = [
        k * rng.normal(size=(32, n, 8)).astype("float32")
        for k, n in ((1, 4), (3, 5))
    ]
    model(rows, training=True)
    outer = model.get_layer("attention")
    of_query, of_value = (one.step() for one in outer.of_inputs)
    assert of_value > 2 * of_query
    inner, scales = outer.layer, scales_of(model)
    steps = {"query": of_query, "key": of_value, "value": of_value}
    layers = {name: getattr(inner, f"{name}_dense") for name in steps}
    for layer in layers.values():
        layer.bias.assign(rng.normal(size=layer.bias.shape))
    round_biases(model)
    for name, layer in layers.items():
        step = steps[name] * scales[f"attention/{name}/kernel"]
        assert_whole(array(layer.bias).reshape(-1), step)


def test_round_biases_refuses():
    dense = keras.Sequential([keras.Input((4,)), L.Dense(2)])
    with pytest.raises(ValueError, match="set in training"):
        round_biases(quantize_aware(dense))
    with pytest.raises(NotPrunableError, match="functional and Sequential"):
        round_biases(type("Written", (keras.Model,), {})())


def test_a_file_whose_configuration_lacks_ranges_is_refused(tmp_path):
    dense = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    file, other = tmp_path / "m.keras", tmp_path / "other.keras"
    model = kso.quantize_aware(dense)
    model.save(file)
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name == "config.json":
                assert b'"output": true' in content
                content = content.replace(b'"output": true', b'"output": null')
            new.writestr(name, content)
    with pytest.raises(
        ValueError, match=r"ranges of 2 tensors for layer 'dense'.*Received: 1"
    ):
        keras.saving.load_model(other)
    assert keras.saving.load_model(file).count_params() == model.count_params()


# --- graphs of operations that are no layers ------------------------------------------------------


def of_operations():
    """Operations between layers: a sum, a slice, a ReLU and a mask of zeros."""
    words = keras.Input((10,), dtype="int32")
    x = L.Embedding(30, 8, mask_zero=True, name="embedding")(words)
    x = L.Dense(8, name="first")(x)
    x = L.Dense(8, name="second")(L.GlobalAveragePooling1D(name="mean")(x))
    y = L.Dense(8, name="third")(keras.ops.relu(x) * 0.5)
    outputs = L.Dense(3, name="head")((x + y)[:, 2:])
    return keras.Model(words, outputs)


def test_operations_and_masks_of_a_graph_are_no_layers():
    model = quantize_aware(of_operations(), "int4")
    assert rounded(model) == {
        "embedding": (0, False, True),
        "first": (0, False, True),
        "mean": (0, False, True),
        "second": (0, False, True),
        "third": (1, False, True),
        "head": (1, False, True),
    }
    rows = np.random.default_rng(0).integers(0, 30, (32, 10))
    model(rows, training=True)
    rng = np.random.default_rng(1)
    for name in ("second", "third", "head"):
        bias = model.get_layer(name).bias
        bias.assign(rng.normal(size=bias.shape))
    round_biases(model)
    scales = scales_of(model)
    steps = {
        "second": model.get_layer("mean").of_output.step(),
        "third": model.get_layer("third").of_inputs[0].step(),
        "head": model.get_layer("head").of_inputs[0].step(),
    }
    for name, step in steps.items():
        assert_whole(
            array(model.get_layer(name).bias), step * scales[f"{name}/kernel"]
        )


def test_indices_beside_a_tensor_hide_no_step():
    inputs = keras.Input((6, 4))
    places = keras.Input((3,), dtype="int32")
    x = L.Dense(8, activation="relu", name="first")(inputs)
    x = keras.ops.take(x, places[0], axis=1)
    dense = keras.Model([inputs, places], L.Dense(3, name="head")(x))
    model = quantize_aware(dense, "int8")
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(8, 6, 4)).astype("float32")
    model([rows, np.tile([0, 2, 5], (8, 1))], training=True)
    bias = model.get_layer("head").bias
    bias.assign(rng.normal(size=bias.shape))
    round_biases(model)
    step = model.get_layer("first").of_output.step()
    assert_whole(array(bias), step * scales_of(model)["head/kernel"])


def test_a_relu_that_is_an_operation_is_fused_where_a_layer_reads_it():
    inputs = keras.Input((6, 6, 2))
    x = L.BatchNormalization(name="norm")(
        L.Conv2D(4, 3, name="read_by_a_layer")(inputs)
    )
    x = L.Conv2D(4, 1, name="read_by_an_operation")(keras.ops.relu(x))
    x = keras.ops.relu(x) + 1.0
    model = quantize_aware(
        keras.Model(inputs, L.Dense(2, name="head")(L.Flatten()(x)))
    )
    assert rounded(model) == {
        "read_by_a_layer": (1, False, False),
        "read_by_an_operation": (1, False, True),
        "head": (1, False, True),
    }


def test_the_halves_of_a_separable_convolution_hand_over_rounded_values(
    tmp_path,
):
    inputs = keras.Input((6, 6, 2))
    layer = L.SeparableConv2D(
        4, 3, depth_multiplier=2, activation="gelu", name="separable"
    )
    dense = keras.Model(
        inputs, L.Dense(2, name="head")(L.Flatten()(layer(inputs)))
    )
    x = np.random.default_rng(0).normal(size=(16, 6, 6, 2)).astype("float32")
    # Without rounding, the halves are the layer.
    floats = quantize_aware(dense, "int8")
    np.testing.assert_allclose(array(floats(x)), array(dense(x)), atol=0.05)
    model = seen(dense, (6, 6, 2))
    outer = model.get_layer("separable")
    round_biases(model)
    assert_whole(
        array(outer.bias),
        outer.of_between.step()
        * scales_of(model)["separable/pointwise_kernel"],
    )
    again = reloaded(model, tmp_path)
    np.testing.assert_array_equal(array(again(x)), array(model(x)))
    np.testing.assert_allclose(
        array(kso.strip(model)(x)), array(model(x)), atol=1e-5
    )
