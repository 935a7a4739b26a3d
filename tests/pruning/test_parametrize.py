"""`parametrize`: which weights, what values, what density."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError, NotPrunableError, UnknownWeightError
from keras_sparse_ortho.parametrizations import (
    FixedMask,
    MagnitudeMask,
    SoftThreshold,
    StraightThroughTopK,
)
from tests.models.networks import MODELS

L = keras.layers


def dense():
    layers = [L.Dense(32, name="hidden"), L.Dense(8, name="head")]
    return keras.Sequential([keras.Input((16,)), *layers])


@pytest.mark.core
@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_every_kind_of_model_keeps_its_outputs(make):
    model = make()
    plain = {w.path: w.raw_value() for w in kso.prunable_weights(model)}
    # Thresholds next to 0: the outputs are those of the plain model.
    wrapped = kso.parametrize(model, SoftThreshold(s_init=-100.0))
    weights = kso.prunable_weights(wrapped)
    assert [w.path for w in weights] == list(plain)
    for weight in weights:
        assert isinstance(weight.parametrization, SoftThreshold)
        np.testing.assert_array_equal(weight.value, plain[weight.path])


def test_the_straight_through_mask_ranks_the_weights_that_were_given():
    model = dense()
    kernel = np.abs(model.get_layer("hidden").get_weights()[0])
    wrapped = kso.parametrize(model, StraightThroughTopK(), budget="uniform", density=0.25)
    weight = kso.prunable_weights(wrapped)[0]
    mask = weight.parametrization.mask_value()
    assert mask.sum() == 128
    assert kernel[mask].min() >= kernel[~mask].max()


def test_a_second_density_is_told():
    cubic = MagnitudeMask(kso.schedules.Cubic(0.1))
    with pytest.warns(UserWarning, match=r"replaces.*0.1 in the MagnitudeMask, replaced by 0.25"):
        model = kso.parametrize(dense(), cubic, 0.25)
    shares = [w.parametrization.schedule.density for w in kso.prunable_weights(model)]
    assert 0.1 not in shares
    with pytest.warns(UserWarning, match=r"0.5 in the FixedMask, replaced by 0.25"):
        kso.parametrize(dense(), FixedMask(0.5), budget={".*": 0.25})
    kso.parametrize(dense(), cubic, 0.1)  # the same density
    kso.parametrize(dense(), MagnitudeMask(kso.schedules.Cubic()), 0.1)


def test_include_and_exclude():
    model = kso.parametrize(dense(), MagnitudeMask(0.5), exclude="head")
    kinds = [type(w.parametrization) for w in kso.prunable_weights(model)]
    assert kinds == [MagnitudeMask, type(None)]
    with pytest.raises(UnknownWeightError, match="Received: include='tail'"):
        kso.parametrize(dense(), MagnitudeMask(0.5), include="tail")


def test_refusals():
    with pytest.raises(NotPrunableError, match=r"SoftThreshold learns its density.*density=0.09"):
        kso.parametrize(dense(), SoftThreshold(), density=0.1, budget="uniform")
    with pytest.raises(BudgetError, match=r"`budget` must be one of.*Received: budget='magic'"):
        kso.parametrize(dense(), MagnitudeMask(0.5), density=0.1, budget="magic")
    with pytest.raises(ValueError, match=r"must be a Parametrization, .* Received: 0.1"):
        kso.parametrize(dense(), 0.1)
    with pytest.raises(NotPrunableError, match="wrapped already"):
        kso.parametrize(kso.sparsify(dense(), 0.5), MagnitudeMask(0.5))
