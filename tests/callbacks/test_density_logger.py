"""`DensityLogger`: the live fraction in the logs, for the callbacks that read them."""

import csv

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import (
    SET,
    DensityLogger,
    TargetDensity,
    UpdateMasks,
)
from tests.helpers import jit

L = keras.layers
pytestmark = pytest.mark.core

X, Y = np.ones((8, 12), "float32"), np.zeros((8, 4), "float32")


def network():
    layers = [
        L.Dense(20, name="hidden"),
        L.BatchNormalization(),
        L.Dense(4, name="head"),
    ]
    return keras.Sequential([keras.Input((12,)), *layers])


def fit(model, *callbacks, epochs=2, **options):
    model.compile("sgd", "mse", jit_compile=jit())
    options = {"verbose": 0} | options
    return model.fit(
        X, Y, epochs=epochs, callbacks=list(callbacks), **options
    ).history


def test_the_global_density_counts_kernels_only():
    history = fit(kso.sparsify(network(), 0.25, seed=0), DensityLogger())
    assert history["density"] == [0.25, 0.25]  # 80 of 320
    assert set(history) == {"loss", "density"}
    # A plain model.
    assert fit(network(), DensityLogger(), epochs=1)["density"] == [1.0]


def test_callbacks_behind_find_them_in_the_logs():
    """In one run: thresholds, masks on a schedule and the logger, before one that evaluates."""
    lists = []

    class Evaluate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            # A single number, as ever.
            lists.append(self.model.evaluate(X, Y, verbose=0))

    made = (kso.SoftThreshold(), kso.MagnitudeMask(kso.schedules.Linear(0.25)))
    layers = [
        kso.PrunableLayer(L.Dense(n), own)
        for n, own in zip((20, 4), made, strict=True)
    ]
    mixed = keras.Sequential([keras.Input((12,)), *layers])
    own = [TargetDensity(0.5), UpdateMasks(), DensityLogger(), Evaluate()]
    history = fit(
        mixed,
        *own,
        validation_data=(X, Y),
        validation_freq=2,
        batch_size=2,
        epochs=4,
    )
    assert history["density"] == sorted(history["density"], reverse=True)
    assert history["density"][-1] == (120 + 20) / 320
    assert all(isinstance(value, float) for value in lists)
    # Afterwards.
    assert set(mixed.evaluate(X, Y, verbose=0, return_dict=True)) == {"loss"}


def learnt():
    return kso.parametrize(
        network(), kso.parametrizations.SoftThreshold("channel", s_init=-2.0)
    )


def test_learnt_thresholds_are_logged(capsys):
    model = learnt()
    keras.config.enable_interactive_logging()
    history = fit(model, DensityLogger(), epochs=1, verbose=2)
    assert set(history) == {"loss", "density", "threshold"}
    made = [weight.parametrization for weight in kso.prunable_weights(model)]
    mean = np.mean([own.threshold_value().mean() for own in made])
    assert history["threshold"] == [pytest.approx(mean, rel=1e-6)]
    shown = capsys.readouterr().out
    assert "density: " in shown
    assert "threshold: 0.1" in shown  # sigmoid(-2) = 0.119


def test_kernels_without_a_threshold_do_not_count_for_the_mean():
    inputs = keras.Input((12,))
    hidden = kso.PrunableLayer(L.Dense(20), kso.SoftThreshold(s_init=-2.0))(
        inputs
    )
    masked = kso.PrunableLayer(L.Dense(8), kso.FixedMask(0.5))(hidden)
    model = keras.Model(inputs, L.Dense(4)(masked))
    (threshold,) = fit(model, DensityLogger(), epochs=1)["threshold"]
    assert threshold == pytest.approx(1 / (1 + np.exp(2.0)), rel=0.02)


CASES = {
    "density": (
        lambda: kso.parametrize(network(), kso.MagnitudeMask(0.25)),
        UpdateMasks,
    ),
    "threshold": (learnt, lambda: TargetDensity(0.25)),
    "moved": (
        lambda: kso.sparsify(network(), 0.25, seed=0),
        lambda: SET(frequency=1, end_step=9),
    ),
}


@pytest.mark.parametrize("column", CASES)
def test_loggers_before_and_behind_have_them(column, tmp_path):
    make, callback = CASES[column]
    before, after = (
        keras.callbacks.CSVLogger(tmp_path / f"{name}.csv") for name in "ba"
    )
    ours, model = callback(), make()
    for _ in range(2):  # a list of callbacks for each `fit`
        history = fit(model, before, ours, after)
        lines = [
            (tmp_path / f"{name}.csv").read_text().splitlines() for name in "ba"
        ]
        tables = [list(csv.DictReader(each)) for each in lines]
        assert tables[0] == tables[1]
        assert [float(row[column]) for row in tables[0]] == history[column]


def test_one_list_of_callbacks_in_a_custom_loop():
    seen = []
    logger = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda epoch, logs: seen.append(logs)
    )
    model = kso.sparsify(network(), 0.25, seed=0)
    hooks = keras.callbacks.CallbackList([logger, DensityLogger()], model=model)
    for epoch in range(2):
        hooks.on_train_begin()
        hooks.on_epoch_end(epoch, {"loss": 1.0})
        hooks.on_epoch_end(epoch)
        hooks.on_train_end()
    assert seen == [{"loss": 1.0, "density": 0.25}, {"density": 0.25}] * 2
    alone = DensityLogger()
    alone.set_model(model)
    alone.on_train_begin()
    alone.on_epoch_end(0, logs := {})
    assert logs == {"density": 0.25}
