"""`prune` and `parametrize`: which weights are kept, what scores, budgets and masks do to them."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import (
    BudgetError,
    DensityError,
    NotPrunableError,
    UnknownWeightError,
)
from keras_sparse_ortho.parametrizations import (
    FixedMask,
    MagnitudeMask,
    SoftThreshold,
    StraightThroughTopK,
)
from tests.helpers import array, classifier_loss
from tests.models.networks import MODELS

L = keras.layers
pytestmark = pytest.mark.core


def dense():
    layers = [
        L.Dense(16, activation="relu", name="hidden"),
        L.Dense(3, name="head"),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    model.compile("sgd", classifier_loss())
    return model


def samples():
    rng = np.random.default_rng(0)
    return rng.normal(size=(32, 8)).astype("float32"), rng.integers(0, 3, 32)


def masks_of(model):
    return {
        w.path: w.parametrization.mask_value()
        for w in kso.prunable_weights(model)
    }


def test_magnitudes_of_all_kernels_are_compared_by_default():
    model = dense()
    values = {
        w.path: np.abs(w.raw_value()) for w in kso.prunable_weights(model)
    }
    pruned = kso.prune(model, 0.25)
    everything = np.concatenate([v.ravel() for v in values.values()])
    count = round(0.25 * everything.size)
    threshold = np.sort(everything)[-count]
    for path, mask in masks_of(pruned).items():
        np.testing.assert_array_equal(mask, values[path] >= threshold)
    for weight in kso.prunable_weights(pruned):
        given = model.get_layer(weight.path.split("/")[0]).kernel
        np.testing.assert_array_equal(weight.value, array(given) * weight.mask)


def test_a_global_score_that_empties_a_kernel_is_refused():
    layers = [L.Dense(16, name="wide"), L.Dense(4, name="small")]
    model = keras.Sequential([keras.Input((16,)), *layers])
    small = model.get_layer("small").kernel
    small.assign(1e-6 * array(small))
    with pytest.raises(
        BudgetError, match=r"Layer collapse: magnitude.*\['small/kernel'\]"
    ):
        kso.prune(model, 0.1)
    assert (
        kso.prunable_weights(kso.prune(model, 0.1, budget="uniform"))[1].live
        == 6
    )


@pytest.mark.parametrize(
    "score", ["snip", "grasp", "synflow", "random", "magnitude"]
)
def test_a_score_by_name_is_that_of_its_function(score):
    model, function = dense(), getattr(kso.saliency, score)
    data = {"data": samples()} if score in ("snip", "grasp") else {}
    keras.utils.set_random_seed(0)
    by_name = kso.prune(model, 0.4, score=score, **data)
    keras.utils.set_random_seed(0)
    scored = function(model, 0.4, *data.values())
    by_function = kso.prune(model, score=scored)
    for path, mask in scored.masks.items():
        np.testing.assert_array_equal(masks_of(by_name)[path], mask)
        np.testing.assert_array_equal(masks_of(by_function)[path], mask)


@pytest.mark.parametrize("score", ["snip", "magnitude"])
def test_a_budget_says_how_many_of_each_kernel(score):
    model = dense()
    # One batch, whatever the seed.
    data = tuple(rows[:8] for rows in samples()) if score == "snip" else None
    pruned = kso.prune(
        model,
        score=score,
        data=data,
        budget={"hidden": 0.125, "head/kernel": 0.5},
    )
    assert [w.live for w in kso.prunable_weights(pruned)] == [16, 24]
    scores = getattr(kso.saliency, score)(
        model, 0.3, *([data] if data else [])
    ).scores
    for path, mask in masks_of(pruned).items():
        assert scores[path][mask].min() >= scores[path][~mask].max()
    by_erk = kso.prunable_weights(kso.prune(model, 0.3, budget="erk"))
    assert sum(weight.live for weight in by_erk) == round(0.3 * 176)


def test_patterns_of_a_budget():
    model = dense()
    for budget in (
        {".*": 0.25},
        {"hidden": 0.25, "head": 0.25},
        {".*kernel": 0.5, "head": 0.25},
    ):
        if budget == {".*kernel": 0.5, "head": 0.25}:
            with pytest.raises(
                BudgetError,
                match=r"'head/kernel' with other densities.*Received",
            ):
                kso.sparsify(model, budget=budget, seed=0)
            budget = {".*kernel": 0.25, "head/kernel": 0.25}
        sparse = kso.sparsify(model, budget=budget, seed=0)
        assert [w.live for w in kso.prunable_weights(sparse)] == [32, 12]
    path_wins = kso.sparsify(
        model, budget={".*": 0.25, "head/kernel": 0.5}, seed=0
    )
    assert [w.live for w in kso.prunable_weights(path_wins)] == [32, 24]


def test_refusals():
    model = dense()
    with pytest.raises(
        DensityError, match=r"prune needs a `density`.*Received: density=None"
    ):
        kso.prune(model)
    for score in ("snap", np.abs, "SNIP"):
        with pytest.raises(
            ValueError,
            match=r"`score` must be one of.*\"wanda\". Received: score=",
        ):
            kso.prune(model, 0.5, score=score)
    for score in ("snip", "grasp", "obs", "wanda"):
        with pytest.raises(
            ValueError,
            match=rf"give `data`.*Received: score='{score}', data=None",
        ):
            kso.prune(model, 0.5, score=score)
    for score in ("random", "synflow"):
        with pytest.raises(
            ValueError,
            match=rf"leave `data` out.*'{score}', data of type tuple",
        ):
            kso.prune(model, 0.5, score=score, data=samples())
    scored = kso.saliency.magnitude(model, 0.5)
    with pytest.raises(
        DensityError, match=r"made for the density 0.5.*Received: density=0.4"
    ):
        kso.prune(model, 0.4, score=scored)
    with pytest.raises(
        BudgetError, match=r"call keras_sparse_ortho.prune\(.*score='snip'\)"
    ):
        kso.sparsify(model, 0.5, "snip")
    with pytest.raises(BudgetError, match=r"missing \['head/kernel'\]"):
        kso.prune(model, budget={"hidden": 0.5})
    with pytest.raises(
        UnknownWeightError, match=r"names no prunable weight.*budget='tail'"
    ):
        kso.prune(model, budget={"tail": 0.5})
    with pytest.raises(
        NotPrunableError, match=r"'hidden/kernel' must be a bool array.*0 live"
    ):
        kso.apply_masks(model, {"hidden/kernel": np.zeros((8, 16), dtype=bool)})


def test_sparsify_warns_where_training_is_lost():
    model = dense()
    kso.sparsify(model, 0.5, seed=0)  # fresh: not a word
    model.fit(*samples(), verbose=0)
    with pytest.warns(
        UserWarning, match=r"call keras_sparse_ortho.prune.*has made 1 steps"
    ):
        kso.sparsify(model, 0.5, seed=0)
    copied = keras.models.clone_model(model)
    copied.set_weights(model.get_weights())
    with pytest.warns(
        UserWarning, match=r"'head/kernel', which differs from the draw of its"
    ):
        kso.sparsify(copied, 0.5, seed=0)
    kso.prune(model, 0.5)  # keeps what was trained


def test_einsum_dense_draws_with_fans_of_its_own_and_is_fresh_all_the_same():
    layer = L.EinsumDense(
        "abc,cde->abde", (5, 4, 8), bias_axes="de", name="heads"
    )
    model = keras.Sequential([keras.Input((5, 128)), layer])
    kso.sparsify(model, 0.5, seed=0)  # not a word
    layer.kernel.assign(array(layer.kernel) + 1e-3)
    with pytest.warns(
        UserWarning, match=r"'heads/kernel', which differs from the draw of its"
    ):
        kso.sparsify(model, 0.5, seed=0)


def test_a_model_made_sparse_in_two_calls_has_lost_nothing():
    attention = L.MultiHeadAttention(2, 4, name="attention")
    inputs = keras.Input((5, 8))
    x = L.Dense(8, name="first")(attention(inputs, inputs))
    x = L.SeparableConv1D(8, 3, name="separable")(x)
    model = keras.Model(inputs, L.LSTM(4, name="last")(x))
    half = kso.sparsify(model, 0.5, seed=0, include="first")
    whole = kso.sparsify(half, 0.5, seed=0, exclude="first")  # not a word
    assert all(weight.parametrization for weight in kso.prunable_weights(whole))


def wide():
    layers = [L.Dense(32, name="hidden"), L.Dense(8, name="head")]
    return keras.Sequential([keras.Input((16,)), *layers])


# --- `parametrize`: which weights, what values, what density --------------------------------------


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
    model = wide()
    kernel = np.abs(model.get_layer("hidden").get_weights()[0])
    wrapped = kso.parametrize(
        model, StraightThroughTopK(), budget="uniform", density=0.25
    )
    weight = kso.prunable_weights(wrapped)[0]
    mask = weight.parametrization.mask_value()
    assert mask.sum() == 128
    assert kernel[mask].min() >= kernel[~mask].max()


def test_a_second_density_is_told():
    cubic = MagnitudeMask(kso.schedules.Cubic(0.1))
    with pytest.warns(
        UserWarning,
        match=r"replaces.*0.1 in the MagnitudeMask, replaced by 0.25",
    ):
        model = kso.parametrize(wide(), cubic, 0.25)
    shares = [
        w.parametrization.schedule.density for w in kso.prunable_weights(model)
    ]
    assert 0.1 not in shares
    with pytest.warns(
        UserWarning, match=r"0.5 in the FixedMask, replaced by 0.25"
    ):
        kso.parametrize(wide(), FixedMask(0.5), budget={".*": 0.25})
    kso.parametrize(wide(), cubic, 0.1)  # the same density
    kso.parametrize(wide(), MagnitudeMask(kso.schedules.Cubic()), 0.1)


def test_parametrize_refuses():
    with pytest.raises(
        NotPrunableError,
        match=r"SoftThreshold learns its density.*density=0.09",
    ):
        kso.parametrize(wide(), SoftThreshold(), density=0.1, budget="uniform")
    with pytest.raises(
        BudgetError, match=r"`budget` must be one of.*Received: budget='magic'"
    ):
        kso.parametrize(wide(), MagnitudeMask(0.5), density=0.1, budget="magic")
    with pytest.raises(
        ValueError, match=r"must be a Parametrization, .* Received: 0.1"
    ):
        kso.parametrize(wide(), 0.1)
    with pytest.raises(NotPrunableError, match="wrapped already"):
        kso.parametrize(kso.sparsify(wide(), 0.5), MagnitudeMask(0.5))
