"""`CircularPadding`: NumPy's wrap, both data formats, and convolutions that keep the norm."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.layers import CircularPadding
from tests.helpers import array

L = keras.layers
pytestmark = pytest.mark.core


def wrapped(x, pairs):
    return np.pad(x, pairs, mode="wrap")


@pytest.mark.parametrize(
    ("shape", "padding", "data_format", "pairs"),
    [
        ((2, 5, 3), 2, None, ((0, 0), (2, 2), (0, 0))),
        ((2, 5, 3), [(5, 0)], None, ((0, 0), (5, 0), (0, 0))),
        ((2, 5, 4, 3), (1, (0, 3)), None, ((0, 0), (1, 1), (0, 3), (0, 0))),
        (
            (2, 3, 5, 4),
            ((2, 1), 0),
            "channels_first",
            ((0, 0), (0, 0), (2, 1), (0, 0)),
        ),
        (
            (1, 2, 3, 4, 2),
            1,
            "channels_last",
            ((0, 0), (1, 1), (1, 1), (1, 1), (0, 0)),
        ),
    ],
)
def test_the_padding_is_numpys(shape, padding, data_format, pairs):
    x = np.random.default_rng(0).normal(size=shape).astype("float32")
    layer = CircularPadding(padding, data_format)
    expected = wrapped(x, pairs)
    np.testing.assert_array_equal(array(layer(x)), expected)
    assert layer.compute_output_shape(shape) == expected.shape
    again = CircularPadding.from_config(layer.get_config())
    np.testing.assert_array_equal(array(again(x)), expected)


def test_sizes_that_are_not_known_before_a_call():
    inputs = keras.Input((None, None, 2))
    model = keras.Model(inputs, CircularPadding(1)(inputs))
    assert model.output_shape == (None, None, None, 2)
    x = np.random.default_rng(0).normal(size=(2, 4, 3, 2)).astype("float32")
    pairs = ((0, 0), (1, 1), (1, 1), (0, 0))
    np.testing.assert_array_equal(
        model.predict(x, verbose=0), wrapped(x, pairs)
    )


def test_convolutions_behind_it_keep_the_norm():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 4)),
            CircularPadding([(1, 1), (0, 2)]),
            L.Conv2D(24, 3, padding="valid", use_bias=False, name="conv"),
        ]
    )
    sparse = kso.sparsify(model, 0.15, initializer=ExactOrthogonal(), seed=0)
    x = np.random.default_rng(1).normal(size=(3, 8, 8, 4)).astype("float32")
    y = sparse.predict(x, verbose=0)
    assert y.shape == (3, 8, 8, 24)
    norms = [np.linalg.norm(values.reshape(3, -1), axis=1) for values in (x, y)]
    np.testing.assert_allclose(*norms, rtol=1e-5)
    [row] = kso.report(sparse).rows
    assert row.orthogonality_error < 1e-6


def test_dead_channels_are_removed_through_it():
    layers = [
        L.Conv2D(6, 1, activation="relu", name="a"),
        CircularPadding(1),
        L.Conv2D(2, 3),
    ]
    model = keras.Sequential([keras.Input((4, 4, 3)), *layers])
    kernel, bias = model.get_layer("a").get_weights()
    kernel[..., [1, 4]] = 0
    bias[[1, 4]] = 0.5  # a constant, which goes into the next bias
    model.get_layer("a").set_weights([kernel, bias])
    thin = kso.remove_channels(model)
    assert thin.get_layer("a").filters == 4
    x = np.random.default_rng(0).normal(size=(2, 4, 4, 3)).astype("float32")
    np.testing.assert_allclose(
        thin.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-5
    )


@pytest.mark.parametrize(
    "padding", [-1, 1.5, "same", None, True, [1.0], [(1, -2)]]
)
def test_what_is_no_padding_is_refused(padding):
    with pytest.raises(
        ValueError, match=r"`padding` must be .*Received: padding="
    ):
        CircularPadding(padding)


def test_inputs_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError, match=r"'ring' is not one of the spatial axes.*\(1, 1\)"
    ):
        CircularPadding((1, 1), name="ring")(np.zeros((1, 4, 2), "float32"))
    with pytest.raises(
        ValueError, match=r"not one of the spatial axes.*shape \(1, 4\)"
    ):
        CircularPadding(1)(np.zeros((1, 4), "float32"))
    with pytest.raises(
        ValueError, match=r"by more than its size.*padding=5.*\(1, 4, 2\)"
    ):
        CircularPadding(5)(np.zeros((1, 4, 2), "float32"))
