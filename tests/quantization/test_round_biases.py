"""`round_biases`: biases are whole steps of the file, by a change of half a step at most."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.quantization import integers_of, quantize_aware, round_biases
from tests.helpers import array

pytestmark = pytest.mark.core

L = keras.layers


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
    return {one.path: integers_of(one)[1].reshape(-1) for one in kso.prunable_weights(model)}


def assert_whole(value, step):
    count = value / step
    np.testing.assert_allclose(count, np.rint(count), atol=1e-3)


def test_biases_are_whole_steps_of_input_and_kernel():
    layers = [L.Dense(6, activation="softmax", name="first"), L.Dense(3, name="head")]
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
    gain = array(norm.gamma) / np.sqrt(array(norm.moving_variance) + norm.epsilon)
    whole = gain * (array(first.bias) - array(norm.moving_mean)) + array(norm.beta)
    assert_whole(whole, first.of_inputs[0].step() * scales_of(model)["first/kernel"] * np.abs(gain))


def test_products_inside_of_an_attention_have_ranges_and_whole_biases():
    inputs = keras.Input((4, 8))
    attention = L.MultiHeadAttention(2, 4, name="attention")
    model = seen(keras.Model(inputs, attention(inputs, inputs)), (4, 8))
    round_biases(model)
    outer, scales = model.get_layer("attention"), scales_of(model)
    inner = outer.layer
    assert [len(one.of_inputs) for one in (inner.query_dense, inner.output_dense)] == [0, 1]
    assert inner.query_dense.of_output is not None
    assert inner.output_dense.of_output is None
    assert outer.of_inputs[0].step() == outer.of_inputs[1].step()
    assert_whole(
        array(inner.query_dense.bias).reshape(-1),
        outer.of_inputs[0].step() * scales["attention/query/kernel"],
    )
    assert_whole(
        array(inner.output_dense.bias),
        inner.output_dense.of_inputs[0].step() * scales["attention/attention_output/kernel"],
    )


def test_biases_of_an_attention_to_another_sequence_are_steps_of_its_own_input():
    query, value = keras.Input((4, 8)), keras.Input((5, 8))
    outputs = L.MultiHeadAttention(2, 4, name="attention")(query, value)
    model = quantize_aware(keras.Model([query, value], outputs), "int4")
    rng = np.random.default_rng(0)
    rows = [k * rng.normal(size=(32, n, 8)).astype("float32") for k, n in ((1, 4), (3, 5))]
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


def test_refusals():
    dense = keras.Sequential([keras.Input((4,)), L.Dense(2)])
    with pytest.raises(ValueError, match="set in training"):
        round_biases(quantize_aware(dense))
    with pytest.raises(NotPrunableError, match="functional and Sequential"):
        round_biases(type("Written", (keras.Model,), {})())
