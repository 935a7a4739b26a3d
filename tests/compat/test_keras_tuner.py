"""A search over densities with keras-tuner: it builds, trains, saves and loads sparse models."""

import keras
import keras_tuner
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array, jit_if_quicker

pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),  # keras-tuner's, of `threading`
    # Keras', of the optimizer in a checkpoint that a new model has not built yet.
    pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer:UserWarning"),
]


def build(hp):
    model = keras.Sequential(
        [
            keras.Input((12,)),
            keras.layers.Dense(hp.Int("units", 8, 16, step=8), activation="relu"),
            keras.layers.Dense(1),
        ]
    )
    sparse = kso.sparsify(model, hp.Choice("density", [0.25, 0.5]), seed=0)
    sparse.compile("adam", "mse", jit_compile=jit_if_quicker())
    return sparse


def test_a_search(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(32, 12)).astype("float32"), rng.normal(size=(32, 1)).astype("float32")
    tuner = keras_tuner.RandomSearch(
        build, "val_loss", max_trials=3, seed=0, directory=tmp_path, project_name="search"
    )
    tuner.search(x, y, epochs=2, validation_data=(x, y), verbose=0)
    (best,), (parameters,) = tuner.get_best_models(1), tuner.get_best_hyperparameters(1)
    weights = kso.prunable_weights(best)
    size = sum(weight.size for weight in weights)
    assert sum(weight.live for weight in weights) == round(parameters["density"] * size)
    for weight in weights:
        assert not weight.raw_value()[~weight.parametrization.mask_value()].any()
    loss = best.evaluate(x, y, verbose=0)
    assert loss == pytest.approx(tuner.oracle.get_best_trials(1)[0].score, rel=1e-6)
    best.save(tmp_path / "best.keras")
    again = keras.saving.load_model(tmp_path / "best.keras")
    np.testing.assert_array_equal(array(again(x)), array(best(x)))
    plain = kso.strip(best)
    np.testing.assert_array_equal(array(plain(x)), array(best(x)))
