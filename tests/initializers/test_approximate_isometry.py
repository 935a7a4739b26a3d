"""`ApproximateIsometry`: what goes beyond the contract of all initializers."""

import json

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import DensityError
from keras_sparse_ortho.initializers import ApproximateIsometry


def test_a_given_mask_is_used_and_survives_json():
    mask = np.random.default_rng(0).random((8, 12)) < 0.5
    first = ApproximateIsometry(None, 1.5, seed=1, mask=mask)
    kernel, found = first.sample((8, 12))
    np.testing.assert_array_equal(found, mask)
    np.testing.assert_allclose(kernel @ kernel.T, 2.25 * np.eye(8), atol=1e-3)
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(first)))
    twin = keras.saving.deserialize_keras_object(config)
    assert twin.mask.dtype == bool
    np.testing.assert_array_equal(twin.sample((8, 12))[0], kernel)
    with pytest.raises(ValueError, match=r"kernels of shape \(8, 12\). Received: shape=\(12, 8\)"):
        first((12, 8))


def test_flattened_convolutions_inside_sparsify():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(16, 3, name="conv"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, name="head"),
        ]
    )
    sparse = kso.sparsify(model, 0.5, "uniform", ApproximateIsometry(1.0, gain=2.0), seed=0)
    conv, head = kso.prunable_weights(sparse)
    matrix = conv.value.reshape(27, 16)
    np.testing.assert_allclose(matrix.T @ matrix, 4 * np.eye(16), atol=1e-2)
    assert (conv.live, head.live) == (216, 2880)
    assert (conv.value != 0).sum() == 216


def test_refusals():
    mask = np.ones((4, 4), bool)
    with pytest.raises(DensityError, match=r"must be in .*Received: density=None"):
        ApproximateIsometry(None)
    with pytest.raises(DensityError, match=r"`density` must be None with a `mask`.*density=0.5"):
        ApproximateIsometry(0.5, mask=mask)
    with pytest.raises(ValueError, match=r"bool array .*float64 with 16 live"):
        ApproximateIsometry(None, mask=mask.astype(float))
    with pytest.raises(ValueError, match=r"Received: gain=-1"):
        ApproximateIsometry(0.5, gain=-1)
    with pytest.raises(ValueError, match=r"Received: max_iterations=1.5"):
        ApproximateIsometry(0.5, max_iterations=1.5)
