"""Whole inputs are pruned by least squares, and what fed them is taken out."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.calibration import Channels
from keras_sparse_ortho.errors import LayoutError
from tests.helpers import array

L = keras.layers


def transformer():
    """A block with attention of four heads, and a feed-forward of 12 channels."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    y = L.LayerNormalization()(inputs)
    attention = L.MultiHeadAttention(
        4, 3, flash_attention=False, name="attention"
    )
    x = L.Add()([inputs, attention(y, y, use_causal_mask=True)])
    y = L.Dense(12, activation="gelu", name="wide")(L.LayerNormalization()(x))
    model = keras.Model(inputs, L.Add()([x, L.Dense(8, name="narrow")(y)]))
    rng = np.random.default_rng(1)
    model.set_weights(
        [w + 0.3 * rng.normal(size=w.shape) for w in model.get_weights()]
    )
    return model


def rows(count=64):
    return np.random.default_rng(0).normal(size=(count, 6, 8)).astype("float32")


@pytest.mark.core
def test_feed_forward_channels_and_heads_go_and_the_outputs_stay():
    dense, x = transformer(), rows()
    half = {"score": "obs", "data": x}
    pruned = kso.prune(
        dense, 0.5, structure=Channels(), include="narrow", **half
    )
    output = "attention/attention_output/kernel"
    pruned = kso.prune(
        kso.strip(pruned), 0.75, structure=Channels(3), include=output, **half
    )
    small = kso.remove_channels(pruned)
    assert small.get_layer("wide").units == 6
    heads = small.get_layer("attention")
    assert heads.num_heads == 3
    assert (
        heads.count_params()
        == round(dense.get_layer("attention").count_params() * 0.75) + 2
    )
    assert small.output_shape == dense.output_shape
    np.testing.assert_allclose(array(small(x)), array(pruned(x)), atol=1e-5)


def test_heads_go_whose_values_are_zero_and_stay_where_they_are_constant():
    dense, x = transformer(), rows()
    attention = dense.get_layer("attention")
    weights = attention.get_weights()
    weights[4][:, [0, 2]], weights[5][[0, 2]] = 0, 0
    weights[4][:, 1] = 0  # its bias is not 0
    attention.set_weights(weights)
    with pytest.warns(
        UserWarning, match=r"of 'attention/value/kernel' in 'attention'"
    ):
        small = kso.remove_channels(dense)
    assert small.get_layer("attention").num_heads == 2
    np.testing.assert_allclose(array(small(x)), array(dense(x)), atol=1e-5)


def test_least_squares_lose_less_than_dropping_by_magnitude():
    dense, x = transformer(), rows(128)
    lost = []
    for options in ({"score": "obs", "data": x}, {"data": x}, {}):
        pruned = kso.prune(
            dense, 0.5, structure=Channels(), include="narrow", **options
        )
        lost.append(np.mean((array(pruned(x)) - array(dense(x))) ** 2))
    assert lost[0] <= lost[1] < 0.9 * lost[2]


def test_what_is_missed_is_told_and_what_does_not_fit_is_refused():
    dense, x = transformer(), rows()
    with pytest.warns(
        UserWarning, match=r"Channels\(group=4\) allows whole groups.*narrow"
    ):
        pruned = kso.prune(dense, 0.5, structure=Channels(4), include="narrow")
    assert kso.prunable_weights(pruned)[-1].live == 2 * 4 * 8
    with pytest.raises(
        LayoutError, match=r"'narrow/kernel' does not fit.*Received: 12 inputs"
    ):
        kso.prune(
            dense,
            0.5,
            structure=Channels(5),
            include="narrow",
            score="obs",
            data=x,
        )
    with pytest.raises(ValueError, match=r"`group` must be.*Received"):
        Channels(0)
    with pytest.raises(
        ValueError, match=r"size of blocks.*Received: structure=Channels"
    ):
        kso.prune(dense, 0.5, structure=Channels(), storage="blocks")


def image_rows():
    return np.random.default_rng(0).normal(size=(64, 6, 6, 3)).astype("float32")


@pytest.mark.core
def test_channels_behind_flatten_and_prelu_go_with_all_their_positions():
    keras.utils.set_random_seed(0)
    between = [
        L.PReLU("normal", shared_axes=[1, 2]),
        L.Flatten(),
        L.Dropout(0.1),
    ]
    layers = [L.Conv2D(8, 3, name="conv"), *between, L.Dense(5, name="head")]
    dense, x = keras.Sequential([keras.Input((6, 6, 3)), *layers]), image_rows()
    pruned = kso.prune(
        dense, 0.5, score="obs", data=x, structure=Channels(), include="head"
    )
    small = kso.remove_channels(pruned)
    assert small.get_layer("conv").filters == 4
    assert small.get_layer("head").kernel.shape == (4 * 16, 5)
    np.testing.assert_allclose(array(small(x)), array(pruned(x)), atol=1e-5)
    with pytest.raises(LayoutError, match="Received: 8 inputs"):
        kso.prune(dense, 0.5, structure=Channels(3), include="head")


@pytest.mark.parametrize("slopes", [0.25, "uniform"])
def test_constants_behind_prelu_are_those_of_all_positions(slopes):
    """A bias of -1 becomes -.25 everywhere, or another number at each position."""
    value = keras.initializers.Constant(slopes) if slopes == 0.25 else slopes
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((6, 6, 3)),
            L.Conv2D(4, 3, name="conv"),
            L.PReLU(value),
            L.Conv2D(2, 2),
        ]
    )
    kernel, _ = model.get_layer("conv").get_weights()
    kernel[..., :2] = 0
    model.get_layer("conv").set_weights([kernel, np.array([-1, 1, 0, 0])])
    small = kso.remove_channels(model)
    assert small.get_layer("conv").filters == (2 if slopes == 0.25 else 3)
    x = image_rows()
    np.testing.assert_allclose(array(small(x)), array(model(x)), atol=1e-5)


def test_channels_that_a_normalization_needs_are_told():
    keras.utils.set_random_seed(0)
    layers = [
        L.Dense(8, name="wide"),
        L.LayerNormalization(name="norm"),
        L.Dense(2, name="head"),
    ]
    dense = keras.Sequential([keras.Input((4,)), *layers])
    pruned = kso.prune(dense, 0.5, structure=Channels(), include="head")
    with pytest.warns(
        UserWarning,
        match=r"4 of 'norm' of class LayerNormalization, which nothing",
    ):
        assert kso.remove_channels(pruned).get_layer("wide").units == 8
