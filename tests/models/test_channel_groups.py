"""`channel_groups`: zeroed rows of a group, and the model without its channels, are equal."""

import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.models import CHANNEL_RULES
from tests.helpers import slow_on_jax
from tests.models.zoo import (
    NETWORKS,
    assert_groups_go,
    outputs,
    samples,
    settle,
    transformer,
    unsettle,
    zero_rows,
)

L = keras.layers


def networks(quick_on_jax):
    """The networks with the marks of the backends that they run on."""
    params = []
    for name in NETWORKS:
        # It compiles for long.
        marks = [] if name == quick_on_jax else [pytest.mark.slow_on("jax")]
        # TensorFlow has no such convolutions on processors.
        if name == "channels_first":
            marks.append(pytest.mark.not_tensorflow)
        if name != "positions":  # Keras normalizes the last axis alone on torch
            marks.append(pytest.mark.core)
        params.append(pytest.param(name, marks=marks))
    return params


@pytest.mark.parametrize("name", networks("perceptron"))
def test_zeroed_rows_equal_removed_channels(name):
    model = unsettle(NETWORKS[name]())
    groups = kso.channel_groups(model)
    assert len(groups)
    assert_groups_go(model, groups)


@pytest.mark.slow
@pytest.mark.parametrize("name", networks("words"))
def test_each_group_goes_by_itself(name):
    model = unsettle(NETWORKS[name]())
    for group in kso.channel_groups(model):
        assert_groups_go(model, [group])


@pytest.mark.parametrize("name", networks("perceptron"))
def test_dead_columns_go_with_their_constants(name):
    model = unsettle(NETWORKS[name]())
    rng = np.random.default_rng(5)
    for layer in model.layers:
        if isinstance(layer, L.Dense | L.Conv2D) and layer.name != "head":
            kernel, bias = layer.get_weights()
            dead = rng.permutation(kernel.shape[-1])[: kernel.shape[-1] // 3]
            kernel[..., dead] = 0
            bias[dead[::2]] = 0
            layer.set_weights([kernel, bias])
    rows = samples(model)
    with warnings.catch_warnings():
        # Some normalization needs the channels.
        warnings.simplefilter("ignore", UserWarning)
        small = kso.remove_channels(model)
    shrinks = name != "grouped"
    assert (small.count_params() < model.count_params()) == shrinks
    np.testing.assert_allclose(
        outputs(small, rows), outputs(model, rows), atol=1e-5, rtol=1e-5
    )


@pytest.mark.core
def test_tensors_in_two_sums_are_one_group():
    rows = keras.Input((3,))
    a, b, c = (L.Dense(4, name=name)(rows) for name in "abc")
    model = keras.Model(
        rows, L.Dense(2, name="head")(L.Concatenate()([a + b, c + b]))
    )
    [group] = kso.channel_groups(model)
    assert sorted(group.makers) == ["a", "b", "c"]
    assert group.rows["head/kernel"].tolist() == [
        [0, 4],
        [1, 5],
        [2, 6],
        [3, 7],
    ]


@pytest.mark.tensorflow_only
def test_streams_go_where_statistics_may_change():
    model = unsettle(transformer())
    exact = [group.name for group in kso.channel_groups(model)]
    attention = ("attention_{}/heads", "attention_{}/values", "wide_{}")
    assert exact == [name.format(k) for k in (0, 1) for name in attention]
    groups = kso.channel_groups(model, exact=False)
    stream = groups["stream+attention_0+narrow_0+attention_1+narrow_1"]
    assert stream.makers == (
        "stream",
        "attention_0",
        "narrow_0",
        "attention_1",
        "narrow_1",
    )
    assert "attention_0/query/kernel" in stream.rows
    with (
        zero_rows(model, [(stream, [1, 4, 6])]),
        pytest.warns(UserWarning, match="train further"),
    ):
        small = kso.remove_channels(model, exact=False)
    assert all(
        small.get_layer(name).output.shape[-1] == 5 for name in stream.makers
    )
    assert np.isfinite(outputs(small, samples(model))).all()


def test_what_stays_is_named_with_the_reason():
    rows = keras.Input((4, 6))
    x = L.Dense(8, name="first")(rows)
    x = L.Softmax(name="softmax")(x)
    y = L.Dense(5, name="second")(x)
    y = L.LayerNormalization(name="norm")(y)
    model = keras.Model(rows, L.Dense(3, name="head")(y))
    groups = kso.channel_groups(model)
    assert len(groups) == 0
    assert groups.stays["softmax (Softmax)"].count == 8
    assert groups.stays["norm (LayerNormalization)"].count == 5
    assert "exact=False" in groups.stays["norm (LayerNormalization)"].reason
    assert groups.stays["head (Dense)"].count == 3
    assert "8 stay in softmax (Softmax): its class has no rule" in str(groups)
    assert all(len(line) <= 80 for line in str(groups).splitlines())


class Halved(L.Layer):
    """A layer of a user, for which a rule is registered."""

    def call(self, x):
        return x * 0.5


def test_users_register_rules_for_their_layers():
    rows = keras.Input((6,))
    layers = [
        L.Dense(8, name="first"),
        Halved(name="halved"),
        L.Dense(3, name="head"),
    ]
    model = unsettle(keras.Sequential([rows, *layers]))
    assert not list(kso.channel_groups(model))
    kso.models.register_channel_rule(Halved, "elementwise")
    try:
        groups = kso.channel_groups(model)
        assert [group.name for group in groups] == ["first"]
        assert_groups_go(model, groups)
    finally:
        del CHANNEL_RULES[Halved]
    with pytest.raises(TypeError, match=r"class of layers\. Received: kind=5"):
        kso.models.register_channel_rule(5, "elementwise")
    with pytest.raises(
        TypeError, match=r"`rule` must be one of.*Received: rule='dense'"
    ):
        kso.models.register_channel_rule(Halved, "dense")


@pytest.mark.core
@slow_on_jax
def test_a_unit_stays_while_a_live_unit_reads_its_state():
    recurrent = L.SimpleRNN(5, name="recurrent")
    model = keras.Sequential(
        [keras.Input((6, 3)), recurrent, L.Dense(2, name="head")]
    )
    unsettle(model)
    kernel, bias = model.get_layer("head").get_weights()
    kernel[:2] = 0
    model.get_layer("head").set_weights([kernel, bias])
    kernel, states, bias = recurrent.get_weights()
    states[1] = (
        0  # nothing reads this unit, though all read the state of the one before
    )
    recurrent.set_weights([kernel, states, bias])
    small = kso.remove_channels(model)
    assert small.get_layer("recurrent").units == 4
    rows = samples(model)
    np.testing.assert_allclose(
        outputs(small, rows), outputs(model, rows), atol=1e-6
    )


@pytest.mark.core
@slow_on_jax
def test_heads_become_narrower():
    rows = keras.Input((4, 6))
    attention = L.MultiHeadAttention(
        2, 4, flash_attention=False, name="attention"
    )
    model = unsettle(keras.Model(rows, attention(rows, rows)))
    projections = (
        attention.query_dense,
        attention.key_dense,
        attention.value_dense,
    )
    for projection, dead in zip(
        projections, ((1, 2), (1, 0), (3, 0)), strict=True
    ):
        kernel, bias = projection.get_weights()
        for head in (0, 1):
            kernel[:, head, dead[head]] = 0
            bias[head, dead[head]] = 0
        projection.set_weights([kernel, bias])
    small = kso.remove_channels(model)
    narrower = small.get_layer("attention")
    # The second head has dead columns 2 and 0, the first one only column 1.
    assert (narrower.key_dim, narrower.value_dim) == (3, 3)
    batch = samples(model)
    np.testing.assert_allclose(
        outputs(small, batch), outputs(model, batch), atol=1e-6
    )


@pytest.mark.numpy_only
def test_rows_that_are_zero_but_for_rounding_go():
    model = unsettle(NETWORKS["perceptron"]())
    kernel, bias = model.get_layer("b").get_weights()
    kernel[:5] *= 1e-37
    kernel[:, 2] *= 1e-20
    model.get_layer("b").set_weights([kernel, bias])
    rows = samples(model)
    small = kso.remove_channels(model)
    assert small.get_layer("b").get_weights()[0].shape == (7, 9)
    np.testing.assert_allclose(
        outputs(small, rows), outputs(model, rows), atol=1e-6
    )


def _application(name):
    make = getattr(keras.applications, name)
    model = make(
        weights=None,
        input_shape=(32, 32, 3),
        classes=5,
        classifier_activation=None,
    )
    return settle(unsettle(model))


@pytest.mark.tensorflow_only
def test_first_blocks_of_a_network_of_keras():
    whole = keras.applications.MobileNetV2(
        (32, 32, 3), 0.35, include_top=False, weights=None
    )
    x = L.GlobalAveragePooling2D()(whole.get_layer("block_2_add").output)
    model = settle(
        unsettle(keras.Model(whole.input, L.Dense(3, name="head")(x)))
    )
    groups = kso.channel_groups(model)
    stream = "block_1_project+block_2_project"
    expected = [
        "Conv1",
        "expanded_conv_project",
        "block_1_expand",
        stream,
        "block_2_expand",
    ]
    assert sorted(group.name for group in groups) == sorted(expected)
    assert_groups_go(model, groups)


APPLICATIONS = {
    "MobileNetV2": 25,
    "MobileNetV3Small": 27,
    "ResNet50": 37,
    "EfficientNetB0": 40,
    "DenseNet121": 120,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", APPLICATIONS)
def test_networks_of_keras(name):
    model = _application(name)
    groups = kso.channel_groups(model)
    assert len(groups) == APPLICATIONS[name]
    assert {staying.reason for staying in groups.stays.values()} == {
        "the model returns them"
    }
    assert_groups_go(model, groups)
