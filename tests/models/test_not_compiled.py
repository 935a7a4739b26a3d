"""What `sparsify` and `strip` return is not compiled, whatever the given model was."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso

pytestmark = pytest.mark.core


@pytest.mark.parametrize("functional", [False, True])
def test_the_new_model_is_not_compiled_and_the_given_one_stays_so(functional, tmp_path):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16), keras.layers.Dense(4)])
    if functional:
        inputs = keras.Input((8,))
        model = keras.Model(inputs, model(inputs))  # with a nested model
    model.compile("adam", "mse", jit_compile=False)
    sparse = kso.sparsify(model, 0.5, seed=0)
    assert model.compiled
    assert not sparse.compiled

    sparse.compile("adam", "mse", jit_compile=False)
    sparse.fit(np.ones((4, 8)), np.ones((4, 4)), verbose=0)
    plain = kso.strip(sparse)
    assert sparse.compiled
    assert not plain.compiled
    assert getattr(plain, "optimizer", None) is None  # so no slots in its file
    plain.save(tmp_path / "plain.keras")
    sparse.save(tmp_path / "sparse.keras")
    sizes = [(tmp_path / f"{name}.keras").stat().st_size for name in ("plain", "sparse")]
    assert sizes[0] < sizes[1]
