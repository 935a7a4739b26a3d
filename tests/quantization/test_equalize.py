"""`equalize`: the same outputs, ranges of channels that are more even, and what keeps its range."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.quantization import equalize
from tests.helpers import array

pytestmark = pytest.mark.core

L = keras.layers
RNG = np.random.default_rng(0)
IMAGES = RNG.normal(size=(32, 8, 8, 3)).astype("float32")


def uneven(model, spread=30.0):
    """Gives the channels that layers make ranges of several magnitudes."""
    rng = np.random.default_rng(1)
    for layer in model.layers:
        weights = layer.get_weights()
        if isinstance(layer, L.BatchNormalization):
            count = len(weights[-1])
            weights[-1] = rng.uniform(0.5, 2.0, count)
            weights[-2] = rng.normal(size=count)
        kernels = [w.shape for w in weights if w.ndim > 1]
        factors = (
            spread ** rng.uniform(-1, 0, weights[0].shape[-1:] or 1)
            if weights
            else 1
        )
        if kernels or isinstance(layer, L.BatchNormalization):
            weights[0] = weights[0] * factors
            layer.set_weights(weights)
    return model


def branches(body, shape=(8, 8, 3)):
    """A graph of a body between a first convolution and a head."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input(shape)
    x = L.Conv2D(6, 3, padding="same", name="first")(inputs)
    x = L.Flatten()(body(L.ReLU(name="relu")(x)))
    return uneven(keras.Model(inputs, L.Dense(3, name="head")(x)))


def normalized(**settings):
    def body(x):
        x = L.Conv2D(6, 3, use_bias=False, name="conv")(x)
        return L.ReLU()(L.BatchNormalization(**settings, name="norm")(x))

    return body


def sum_of_two(x):
    y = L.Conv2D(6, 1, name="beside", activation="relu")(x)
    return L.Add(name="sum")([x, L.MaxPooling2D(2, 1, padding="same")(y)])


def before_norm(x):
    """A normalization behind a sum, which no convolution takes in."""
    return L.ReLU()(L.BatchNormalization(name="norm")(sum_of_two(x)))


BODIES = {
    "depthwise": lambda x: L.DepthwiseConv2D(3, depth_multiplier=2)(x),
    "separable": lambda x: L.SeparableConv2D(5, 3, depth_multiplier=2)(x),
    "grouped": lambda x: L.Conv2D(4, 3, groups=2, name="grouped")(x),
    "transposed": lambda x: L.Conv2DTranspose(4, 3, name="up")(x),
    "normalized": normalized(),
    "without gamma": normalized(scale=False),
    "without beta": normalized(center=False),
    "before norm": before_norm,
    "sum": sum_of_two,
    "a + b": lambda x: x + L.Conv2D(6, 1)(x),
    "concatenation": lambda x: L.Concatenate()([x, L.Conv2D(2, 1)(x)]),
    "PReLU": lambda x: L.PReLU(shared_axes=[1, 2])(L.Conv2D(4, 1)(x)),
    "LeakyReLU": lambda x: L.LeakyReLU()(L.Conv2D(4, 1)(x)),
    "ReLU6": lambda x: L.ReLU(6.0)(L.Conv2D(4, 1)(x)),
    "padding": lambda x: L.AveragePooling2D(2)(L.ZeroPadding2D()(x)),
    "mean": lambda x: L.GlobalAveragePooling2D()(x),
    # These keep the ranges of what they read.
    "gelu": lambda x: L.Conv2D(4, 1, activation="gelu")(x),
    "product": lambda x: L.Multiply()([x, L.Conv2D(6, 1)(x)]),
    "constant": lambda x: x + 1.0,
    "layer norm": lambda x: L.LayerNormalization()(x),
}
HELD = ("product", "constant", "layer norm")


def peaks_behind(model, name):
    """The largest magnitude of each channel behind a layer."""
    probe = keras.Model(model.inputs[0], model.get_layer(name).output)
    values = np.abs(array(probe(IMAGES)))
    return values.reshape(-1, values.shape[-1]).max(0)


@pytest.mark.parametrize("body", BODIES)
def test_outputs_stay_and_ranges_become_more_even(body):
    model = branches(BODIES[body])
    equal = equalize(model, IMAGES)
    before, after = array(model(IMAGES)), array(equal(IMAGES))
    assert np.abs(after - before).max() <= 1e-5 * np.abs(before).max()
    old, new = peaks_behind(model, "relu"), peaks_behind(equal, "relu")
    if body in HELD:
        np.testing.assert_array_equal(new, old)
    else:
        # Sums share the factors of their tensors, of which the largest share counts.
        assert new.max() / new.min() < 0.9 * old.max() / old.min()


@pytest.mark.parametrize("settings", [{}, {"strides": 2, "use_bias": False}])
def test_channels_between_the_kernels_of_a_separable_convolution(settings):
    """Behind a product, which holds its ranges, so that only those inside can change."""

    def body(x):
        x = L.Multiply()([x, L.Conv2D(6, 1)(x)])
        return L.SeparableConv2D(
            5, 3, depth_multiplier=2, name="separable", **settings
        )(x)

    model = branches(body)
    separable = model.get_layer("separable")
    depthwise, *weights = separable.get_weights()
    spread = 30.0 ** np.linspace(-1, 0, 12).reshape(6, 2)
    separable.set_weights([depthwise * spread, *weights])
    equal = equalize(model, IMAGES)
    before, after = array(model(IMAGES)), array(equal(IMAGES))
    assert np.abs(after - before).max() <= 1e-5 * np.abs(before).max()
    peaks = []
    for network in (model, equal):
        kernel = network.get_layer("separable").get_weights()[0]
        peaks.append(np.abs(kernel).max(axis=(0, 1)).ravel())
    old, new = peaks
    assert new.max() / new.min() < 0.5 * old.max() / old.min()


def test_power_one_gives_all_channels_one_range():
    model = branches(BODIES["depthwise"])
    peaks = peaks_behind(equalize(model, IMAGES, power=1.0), "relu")
    np.testing.assert_allclose(peaks, peaks.max(), rtol=1e-4)


def test_relu6_bounds_the_factors():
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            L.Conv2D(4, 1, name="conv"),
            L.ReLU(6.0, name="relu"),
            L.DepthwiseConv2D(3),
        ]
    )
    kernel, bias = model.layers[0].get_weights()
    scales = np.array([40.0, 1.0, 0.01, 1e-4], "float32")
    model.layers[0].set_weights([kernel * scales, bias])
    equal = equalize(model, IMAGES, power=1.0)
    peaks = peaks_behind(equal, "relu")
    assert peaks.max() <= 6.0 + 1e-5
    assert peaks_behind(model, "relu")[1] < 5.0
    np.testing.assert_allclose(peaks[:2], 6.0, rtol=1e-4)
    np.testing.assert_array_equal(
        array(equal.layers[0].kernel)[..., 0], kernel[..., 0] * 40
    )
    np.testing.assert_allclose(
        array(equal(IMAGES)), array(model(IMAGES)), atol=1e-5
    )


def test_training_continues_where_it_was():
    """Batch statistics of scaled inputs give the outputs that they gave before."""
    model = branches(before_norm)
    model.get_layer("norm").epsilon = 1e-9
    equal = equalize(model, IMAGES)
    norm, moved = model.get_layer("norm"), equal.get_layer("norm")
    assert not np.allclose(array(norm.gamma), array(moved.gamma))
    before, after = (
        array(one(IMAGES, training=True)) for one in (model, equal)
    )
    assert np.abs(after - before).max() <= 1e-4 * np.abs(before).max()


def test_the_given_model_stays_and_zeros_stay():
    model = branches(BODIES["depthwise"])
    pruned = kso.prune(model, 0.5)
    before = [array(weight) for weight in pruned.weights]
    equal = equalize(pruned, IMAGES)
    for weight, value in zip(pruned.weights, before, strict=True):
        np.testing.assert_array_equal(array(weight), value)
    live = {
        w.path: np.count_nonzero(w.value) for w in kso.prunable_weights(pruned)
    }
    assert live == {
        w.path: np.count_nonzero(w.value) for w in kso.prunable_weights(equal)
    }


def test_channels_of_zeros_keep_their_weights():
    model = branches(BODIES["depthwise"])
    first = model.get_layer("first")
    kernel, bias = first.get_weights()
    kernel[..., 0], kernel[..., 1] = 0.0, 1e-30
    first.set_weights([kernel, bias])
    equal = equalize(model, IMAGES).get_layer("first")
    np.testing.assert_array_equal(array(equal.kernel)[..., :2], kernel[..., :2])
    assert np.isfinite(array(equal.kernel)).all()


class Squares(L.Layer):
    def call(self, x):
        return x * x


def test_refusals():
    model = branches(BODIES["depthwise"])
    with pytest.raises(ValueError, match="power=2"):
        equalize(model, IMAGES, power=2)
    with pytest.raises(NotPrunableError, match="quantize_aware"):
        equalize(kso.quantize_aware(model), IMAGES)
    # Nothing is known of a user's layer, but that it maps entries.
    kso.models.register_channel_rule(Squares, "elementwise")
    squares = branches(lambda x: Squares()(x))
    np.testing.assert_array_equal(
        peaks_behind(equalize(squares, IMAGES), "relu"),
        peaks_behind(squares, "relu"),
    )
