"""Every update on a device gives the weights, masks and moments of the one on the host, by bits."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho._ranking import ranked_on
from keras_sparse_ortho.callbacks import SET, RigL, TargetDensity, UpdateMasks
from keras_sparse_ortho.errors import NotPrunableError
from tests.helpers import array, jit_if_quicker

L = keras.layers
P = kso.parametrizations
ALWAYS = kso.schedules.Constant(0.25, 0, 100, 1)
X, Y = np.random.default_rng(0).normal(size=(2, 8, 12)).astype("float32")


def network(parametrization=None):
    """Two layers with ties among their weights, and an optimizer with moments."""
    dense = keras.Sequential(
        [keras.Input((12,)), L.Dense(20, "relu", name="hidden"), L.Dense(12, name="head")]
    )
    if parametrization is None:
        model = kso.prune(dense, 0.25)
    else:
        model = kso.parametrize(dense, parametrization)
    model.compile("adam", "mse", jit_compile=jit_if_quicker())
    model.optimizer.build(model.trainable_variables)
    rng = np.random.default_rng(0)
    for variable in model.trainable_variables:
        variable.assign(np.round(0.3 * rng.normal(size=variable.shape), 2))
    for slot in model.optimizer.variables:
        if len(slot.shape) > 1:
            slot.assign(rng.normal(size=slot.shape))
    for weight in kso.prunable_weights(model):
        weight.parametrization.settle()
    return model


def armed(callback, model):
    callback.set_model(model)
    callback.set_params({"epochs": 1, "steps": 100})
    callback.on_train_begin()
    callback.on_epoch_begin(0)
    return callback


CASES = {
    "gmp": lambda: (network(kso.MagnitudeMask(ALWAYS)), UpdateMasks()),
    "dnw": lambda: (network(P.StraightThroughTopK(ALWAYS)), UpdateMasks()),
    "set": lambda: (network(), SET(frequency=1, end_step=100)),
    "rigl": lambda: (network(), RigL((X, Y), 8, frequency=1, end_step=100)),
    "str": lambda: (network(P.SoftThreshold("channel")), TargetDensity(0.25, ALWAYS, freeze=False)),
    "str, frozen": lambda: (
        network(P.SoftThreshold(g="exp")),
        TargetDensity(0.25, kso.schedules.Cubic(0.25, 0, 5, frequency=1)),
    ),
}


QUICK = ("gmp", "set", "str, frozen")


@pytest.mark.core
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in CASES],
)
def test_the_device_does_what_the_host_does(case):
    found = {}
    for place in ("host", "device"):
        keras.utils.set_random_seed(0)
        model, callback = CASES[case]()
        with ranked_on(place):
            armed(callback, model)
            before = [array(v) for v in model.variables]
            for step in (4, 5):
                callback.on_step(step, 1)
        state = [array(v) for v in [*model.variables, *model.optimizer.variables]]
        assert any((a != b).any() for a, b in zip(before, state, strict=False))
        found[place] = state
    for one, other in zip(*found.values(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("case", ["gmp", "set", "str"])
def test_weights_that_are_not_finite_are_named_on_both(case):
    for place in ("host", "device"):
        model, callback = CASES[case]()
        with ranked_on(place):
            armed(callback, model)
            kernel = kso.prunable_weights(model)[1].variable
            kernel.assign(np.where(array(kernel) == 0, 0, np.nan))
            with pytest.raises(NotPrunableError, match=r"head/kernel' is not finite"):
                callback.on_step(4, 1)


def test_a_mask_is_carried_to_the_device_once(monkeypatch):
    """And nothing of the weight's size comes back, where ranks are made on the device."""
    model, callback = CASES["gmp"]()
    moved = []
    to_tensor = keras.ops.convert_to_tensor

    def counted(value, *args, **kwargs):
        if isinstance(value, np.ndarray) and value.size > 100:
            moved.append("up")
        return to_tensor(value, *args, **kwargs)

    def counted_back(to_numpy):
        def counted(value, *args, **kwargs):
            found = to_numpy(value, *args, **kwargs)
            if keras.ops.is_tensor(value) and found.size > 100:
                moved.append("down")
            return found

        return counted

    for place, expected in (("host", ["down", "up"] * 2), ("device", [])):
        with ranked_on(place):
            armed(callback, model)
            with monkeypatch.context() as patch:
                patch.setattr(keras.ops, "convert_to_tensor", counted)
                for holder, name in ((keras.ops, "convert_to_numpy"), (np, "asarray")):
                    patch.setattr(holder, name, counted_back(getattr(holder, name)))
                moved.clear()
                callback.on_step(4, 1)
        assert moved == expected
