"""`DensityLogger`: the live fraction in the logs, for the callbacks that read them."""

import csv

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import DensityLogger
from tests.helpers import jit

L = keras.layers
pytestmark = pytest.mark.core

X, Y = np.ones((8, 12), "float32"), np.zeros((8, 4), "float32")


def network():
    layers = [L.Dense(20, name="hidden"), L.BatchNormalization(), L.Dense(4, name="head")]
    return keras.Sequential([keras.Input((12,)), *layers])


def fit(model, *callbacks, epochs=2):
    model.compile("sgd", "mse", jit_compile=jit())
    return model.fit(X, Y, epochs=epochs, verbose=0, callbacks=list(callbacks)).history


def test_the_global_density_counts_kernels_only():
    history = fit(kso.sparsify(network(), 0.25, seed=0), DensityLogger())
    assert history["density"] == [0.25, 0.25]  # 80 of 320
    assert set(history) == {"loss", "density"}


def test_every_kernel_by_its_path_and_with_a_prefix():
    model = kso.sparsify(network(), 0.25, seed=0)
    table = {w.path: w.density for w in kso.prunable_weights(model, flops=False)}
    history = fit(model, DensityLogger(per_layer=True, prefix="live_"))
    assert set(history) == {"loss", "live_density"} | {f"live_density/{path}" for path in table}
    for path, density in table.items():
        assert history[f"live_density/{path}"] == [density] * 2


def test_a_plain_model_is_dense():
    assert fit(network(), DensityLogger(), epochs=1)["density"] == [1.0]


def test_a_mask_that_changes_between_epochs_is_seen():
    model = kso.sparsify(network(), 0.25, seed=0)

    class Grow(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            for weight in kso.prunable_weights(self.model, flops=False):
                if epoch == 1:
                    weight.parametrization.assign_mask(np.ones(weight.shape, dtype=bool))

    assert fit(model, Grow(), DensityLogger())["density"] == [0.25, 1.0]


def test_callbacks_after_it_read_the_density(tmp_path):
    path = tmp_path / "log.csv"
    fit(
        kso.sparsify(network(), 0.25, seed=0), DensityLogger(), keras.callbacks.CSVLogger(str(path))
    )
    with path.open(newline="") as stream:
        assert [float(row["density"]) for row in csv.DictReader(stream)] == [0.25, 0.25]
