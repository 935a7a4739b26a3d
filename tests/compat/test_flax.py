"""Matrices in Flax modules are named as dense. flax is in no environment but this suite's."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso

pytestmark = pytest.mark.jax_only
L = keras.layers


def test_matrices_of_flax_modules_stay_dense_and_are_named():
    from flax import linen

    inner = L.FlaxLayer(linen.Dense(12), name="module")
    model = keras.Sequential([keras.Input((12,)), inner, L.Dense(4, name="head")])
    with pytest.warns(UserWarning, match="Matrices with .* stay dense"):
        sparse = kso.sparsify(model, 0.5, seed=0)
    assert list(kso.report(sparse).dense.values()) == ["not registered"]
    np.testing.assert_array_equal(
        np.asarray(sparse.get_layer("module").params["params"]["kernel"]),
        np.asarray(inner.params["params"]["kernel"]),
    )
    assert kso.report(sparse).density == 0.5
