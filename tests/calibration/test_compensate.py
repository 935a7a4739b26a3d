"""`compensate`: refits under given masks, in the model itself."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.calibration import _compensate
from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError
from tests.helpers import array

L = keras.layers
pytestmark = pytest.mark.core


def network(head="head"):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((9, 4))
    x = L.SeparableConv1D(6, 3, activation="relu", name="separable")(inputs)
    x = L.Dense(8, activation="relu", name="hidden")(L.Flatten()(x))
    return keras.Model(inputs, L.Dense(3, name=head)(x))


def rows(count=100):
    return np.random.default_rng(0).normal(size=(count, 9, 4)).astype("float32") + 0.5


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_it_gives_what_prune_gives_with_a_refit(storage):
    dense, x = network(), rows()
    only = {} if storage == "masked" else {"exclude": "separable"}
    pruned = kso.prune(dense, 0.4, storage=storage, **only)
    expected = kso.prune(dense, 0.4, data=x, **only)
    masks = {w.path: w.storage.mask_value() for w in kso.prunable_weights(pruned) if w.storage}
    before = float(np.mean((array(pruned(x)) - array(dense(x))) ** 2))
    errors = kso.compensate(pruned, x, dense=dense)
    assert set(errors) == set(masks)
    assert all(0 < after <= given < 1 for given, after in errors.values())
    for one, two in zip(kso.prunable_weights(pruned), kso.prunable_weights(expected), strict=True):
        np.testing.assert_allclose(one.value, two.value, atol=1e-5)
        if one.path in masks:
            np.testing.assert_array_equal(one.storage.mask_value(), masks[one.path])
    assert float(np.mean((array(pruned(x)) - array(dense(x))) ** 2)) < before


def test_what_fails_leaves_the_model_as_it_was(monkeypatch):
    dense, x = network(), rows()
    pruned = kso.prune(dense, 0.4)
    before = pruned.get_weights()
    refit = _compensate.refit

    def failing(kernel, *rest):
        if kernel.shape[-1] == 3:
            raise ValueError("half way")
        return refit(kernel, *rest)

    monkeypatch.setattr(_compensate, "refit", failing)
    with pytest.raises(ValueError, match="half way"):
        kso.compensate(pruned, x, dense=dense)
    for one, two in zip(before, pruned.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_refusals():
    dense, x = network(), rows()
    with pytest.raises(NotPrunableError, match=r"no kernel under a fixed mask.*Received"):
        kso.compensate(dense, x, dense=dense)
    pruned = kso.prune(dense, 0.4)
    with pytest.raises(UnknownWeightError, match=r"'head/kernel' of shape \(8, 3\).*None"):
        kso.compensate(pruned, x, dense=network(head="other"))


def test_learnt_masks_and_separable_compact_kernels_stay():
    dense, x = network(), rows()
    learnt = kso.parametrize(dense, kso.SoftThreshold, include="hidden")
    pruned = kso.prune(learnt, 0.4, include="head")
    assert list(kso.compensate(pruned, x, dense=dense)) == ["head/kernel"]
