"""`strip`: a plain Keras model with equal outputs, without anything of ours."""

import json
import pathlib

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import ExactOrthogonal
from tests.compat.fresh import in_a_fresh_process
from tests.helpers import array, slow_where_traced
from tests.models.networks import MODELS, SHAPE, sequential, wrappers
from tests.models.test_whole_way import IMAGES, whole_way

L = keras.layers


@pytest.mark.core
@pytest.mark.parametrize(
    "name",
    [
        "residual",
        pytest.param("recurrent_and_attention", marks=pytest.mark.slow),
    ],
)
@slow_where_traced
def test_the_files_load_without_the_package(tmp_path, name):
    sparse, plain = whole_way(MODELS[name](), IMAGES)
    sparse.save(tmp_path / "sparse.keras")
    plain.save(tmp_path / "plain.keras")
    for (found,), model in zip(
        in_a_fresh_process(tmp_path, IMAGES), (plain, sparse), strict=True
    ):
        np.testing.assert_allclose(
            found, array(model(IMAGES, training=False)), atol=1e-6
        )


@pytest.mark.core
def test_our_initializers_leave_the_configuration():
    inputs = keras.Input((12,))
    eoi = ExactOrthogonal(0.3, seed=0)
    x = L.Dense(12, kernel_initializer=eoi)(inputs)
    x = L.TimeDistributed(
        kso.PrunableLayer(L.Dense(12, kernel_initializer=eoi))
    )(L.Reshape((1, 12))(x))
    model = keras.Model(inputs, x)
    data = np.random.default_rng(0).normal(size=(4, 12)).astype("float32")
    plain = kso.strip(model)
    assert "keras_sparse_ortho" not in json.dumps(
        plain.get_config(), default=str
    )
    assert not wrappers(plain)
    np.testing.assert_allclose(
        array(plain(data)), array(model(data)), atol=1e-6
    )


@pytest.mark.core
def test_a_single_wrapped_layer_and_a_plain_model():
    layer = kso.PrunableLayer(
        L.Dense(4, kernel_initializer=ExactOrthogonal(0.5, seed=0))
    )
    x = np.ones((2, 8), dtype="float32")
    expected = array(layer(x))
    plain = kso.strip(layer)
    assert type(plain) is L.Dense
    np.testing.assert_allclose(array(plain(x)), expected, atol=1e-6)
    dense = sequential()
    x = np.ones((2, *SHAPE), dtype="float32")
    np.testing.assert_allclose(
        array(kso.strip(dense)(x)), array(dense(x)), atol=1e-6
    )


@pytest.mark.core
def test_what_is_no_built_model_is_refused():
    with pytest.raises(
        NotPrunableError, match=r"must be built.*layers \[.*'dense"
    ):
        kso.strip(keras.Sequential([L.Dense(4)]))
    with pytest.raises(
        NotPrunableError, match=r"must be a Keras 3 model or layer. Received"
    ):
        kso.strip(pathlib.Path("model.keras"))


def times(x):
    return 3.0 * x


@pytest.mark.core
@pytest.mark.parametrize(
    "function", [times, lambda x: 3.0 * x], ids=["named", "lambda"]
)
def test_functions_in_layers_are_those_of_the_given_model(function):
    inputs = keras.Input((8,))
    x = L.Lambda(function, output_shape=(8,), arguments={})(
        L.Dense(8, activation=function)(inputs)
    )
    model = keras.Model(
        inputs, L.Dense(3, name="out")(L.Activation(function)(x))
    )
    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    pruned = kso.apply_masks(model, {"out/kernel": np.ones((8, 3), bool)})
    np.testing.assert_array_equal(array(pruned(x)), array(model(x)))
    np.testing.assert_array_equal(array(kso.strip(pruned)(x)), array(model(x)))
    assert pruned.layers[2].function is function
