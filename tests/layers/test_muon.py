"""Muon, which mixes the entries of a matrix, so that dead raw entries move with the live ones."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import jit_if_quicker, slow_on_jax

L = keras.layers
pytestmark = pytest.mark.core
RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(32, 16)).astype("float32"), RNG.normal(size=(32, 4)).astype("float32")


def trained(model, *callbacks):
    optimizer = keras.optimizers.Muon(0.01, exclude_layers=["head"])
    model.compile(optimizer, "mse", jit_compile=jit_if_quicker())
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=list(callbacks))
    return model


def network():
    return keras.Sequential(
        [keras.Input((16,)), L.Dense(24, activation="relu", name="wide"), L.Dense(4, name="head")]
    )


def largest_dead(model, raw):
    """The largest magnitude of a dead entry."""
    [weight] = [w for w in kso.prunable_weights(model) if w.path == "wide/kernel"]
    value = weight.raw_value() if raw else weight.value
    return np.abs(value[~weight.parametrization.mask_value()]).max()


def test_effective_weights_stay_zero_and_so_do_files(tmp_path):
    model = trained(kso.sparsify(network(), 0.4, seed=0))
    assert largest_dead(model, raw=True) > 1e-3  # Muon's own doing, and of no consequence
    assert largest_dead(model, raw=False) == 0
    outputs = model.predict(X, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert largest_dead(loaded, raw=True) == 0
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), outputs)
    np.testing.assert_array_equal(kso.strip(model).predict(X, verbose=0), outputs)


def test_masks_that_move_start_new_entries_at_zero():
    model = trained(kso.sparsify(network(), 0.4, seed=0))
    [weight, _] = kso.prunable_weights(model)
    own = weight.parametrization
    other = np.zeros(weight.shape, bool)
    other.flat[: own.mask_value().sum()] = True
    grown = other & ~own.mask_value()
    kept = weight.raw_value()[other & ~grown]
    own.assign_mask(other)
    assert grown.any()
    assert not weight.raw_value()[~other | grown].any()
    np.testing.assert_array_equal(weight.raw_value()[other & ~grown], kept)


@slow_on_jax
def test_scheduled_masks_do_not_bring_dead_entries_back():
    schedule = kso.schedules.Constant(0.4, 0, frequency=4)
    model = kso.parametrize(network(), kso.MagnitudeMask(schedule), include="wide")
    trained(model, kso.callbacks.UpdateMasks())
    [weight, _] = kso.prunable_weights(model)
    first = weight.parametrization.mask_value()
    weight.parametrization.update(1000)
    np.testing.assert_array_equal(weight.parametrization.mask_value(), first)
