"""Storage forms: what a plan may say of one layer, fallbacks, and forms of others."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.initializers import Draw
from keras_sparse_ortho.models import Plan, Target, apply
from keras_sparse_ortho.parametrizations import (
    CompactMask,
    FakeQuantization,
    FixedMask,
)
from keras_sparse_ortho.storages import (
    FORMS,
    StorageForm,
    WrappedForm,
    register_storage,
)
from tests.helpers import array

L = keras.layers
pytestmark = pytest.mark.core
X = np.random.default_rng(0).normal(size=(4, 6, 16)).astype("float32")


def recurrent():
    keras.utils.set_random_seed(0)
    return keras.Sequential(
        [keras.Input((6, 16)), L.LSTM(16, name="rnn"), L.Dense(4, name="head")]
    )


def half_masks(weights):
    rng = np.random.default_rng(0)
    return {
        weight.path: Draw(rng.random(weight.shape) < 0.5) for weight in weights
    }


def test_kernels_of_one_layer_may_have_several_storages_and_quantizers(
    tmp_path,
):
    model = recurrent()
    weights = kso.prunable_weights(model)
    draws = half_masks(weights)
    storages = dict(zip(draws, ("masked", "compact", "masked"), strict=True))
    int4 = FakeQuantization("int4")
    targets = {
        path: Target(
            storages[path],
            draw,
            quantizer=int4 if "recurrent" in path else None,
        )
        for path, draw in draws.items()
    }
    mixed = apply(model, Plan(weights, targets))
    new_weights = {
        weight.path: weight for weight in kso.prunable_weights(mixed)
    }
    kinds = [type(weight.storage) for weight in new_weights.values()]
    assert kinds == [FixedMask, CompactMask, FixedMask]
    for path, weight in new_weights.items():
        np.testing.assert_array_equal(weight.mask, draws[path].mask)
        assert weight.storage.quantizer is targets[path].quantizer
    mixed.save(tmp_path / "mixed.keras")
    loaded = keras.models.load_model(tmp_path / "mixed.keras")
    np.testing.assert_array_equal(array(loaded(X)), array(mixed(X)))
    dtypes = [
        w.storage.quantizer and w.storage.quantizer.dtype
        for w in kso.prunable_weights(loaded)
    ]
    assert dtypes == [None, "int4", None]


def test_storages_that_one_layer_cannot_have_together_are_refused():
    model = recurrent()
    weights = kso.prunable_weights(model)[:2]
    targets = {
        path: Target("masked", draw)
        for path, draw in half_masks(weights).items()
    }
    targets[weights[1].path] = Target(
        "blocks", Draw(np.ones((16, 64), bool), block=(16, 16))
    )
    before = array(model(X))
    with pytest.raises(
        NotPrunableError,
        match=r"'rnn' must have one storage.*'.*kernel' masked",
    ):
        apply(model, Plan(weights, targets))
    np.testing.assert_array_equal(array(model(X)), before)


def test_a_plan_without_a_mask_says_so():
    model = recurrent()
    weight = kso.prunable_weights(model)[-1]
    with pytest.raises(
        ValueError, match=r"which entries of 'head/kernel' are live"
    ):
        apply(model, Plan([weight], {weight.path: Target("masked")}))
    sparse = kso.prune(model, 0.5)
    weight = kso.prunable_weights(sparse)[-1]
    with pytest.raises(
        NotPrunableError,
        match=r"a `quantizer`. Received: none for \['kernel'\]",
    ):
        apply(sparse, Plan([weight], {weight.path: Target("rounded")}))


def test_kernels_that_do_not_fit_blocks_are_compact_in_the_plan():
    model = keras.Sequential(
        [keras.Input((64,)), L.Dense(64, name="wide"), L.Dense(7, name="odd")]
    )
    with pytest.warns(
        UserWarning, match=r"'odd/kernel' is not on live blocks \(64 x 7 cannot"
    ):
        plan = kso.sparsify.plan(
            model, {"wide": 0.25, "odd": 0.5}, storage="blocks", seed=0
        )
    assert {path: target.storage for path, target in plan.items()} == {
        "wide/kernel": "blocks",
        "odd/kernel": "compact",
    }


@pytest.mark.parametrize(
    "storage", ["dense", "thin", "rounded", "bitmap", None, 3, ["masked"]]
)
def test_other_storages_are_refused(storage):
    with pytest.raises(
        ValueError, match=r"one of \['blocks', 'compact', 'masked'.*Received"
    ):
        kso.prune(recurrent(), 0.5, storage=storage)


class NegatedMask(FixedMask):
    """A fixed mask of a user, whose effective kernel has the other sign."""

    form_name = "negated"

    def effective(self, value):
        return -super().effective(value)


@pytest.fixture
def negated():
    @register_storage
    class NegatedForm(WrappedForm):
        name = "negated"
        parametrization_class = NegatedMask

    yield NegatedForm
    del FORMS["negated"]


def test_a_form_of_a_user_is_a_storage_like_ours(negated):
    model = recurrent()
    sparse = kso.prune(model, 0.5, storage="negated")
    masked = kso.prune(model, 0.5)
    for ours, theirs in zip(
        kso.prunable_weights(masked), kso.prunable_weights(sparse), strict=True
    ):
        np.testing.assert_array_equal(theirs.value, -ours.value)
    plain = kso.strip(sparse)
    np.testing.assert_allclose(array(plain(X)), array(sparse(X)), atol=1e-6)
    assert issubclass(negated, StorageForm)
