"""Depthwise kernels: each output keeps a live entry by default, and the plan says so."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.orthogonal import dead_outputs
from tests.helpers import array

L = keras.layers
pytestmark = pytest.mark.core
RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 6, 6, 8)).astype("float32")
Y = RNG.integers(4, size=64)


def mobile():
    """A depthwise, a grouped and a separable convolution whose channels differ in scale."""
    keras.utils.set_random_seed(0)
    image = keras.Input((6, 6, 8))
    x = L.DepthwiseConv2D(
        3, depth_multiplier=2, padding="same", name="depthwise"
    )(image)
    x = L.Conv2D(16, 1, activation="relu", name="wide")(x)
    x = L.Conv2D(16, 3, groups=16, padding="same", name="grouped")(x)
    x = L.SeparableConv2D(24, 3, activation="relu", name="separable")(x)
    x = L.Dense(4, name="head")(L.GlobalAveragePooling2D()(x))
    model = keras.Model(image, x)
    for name in ("depthwise", "grouped", "separable"):
        kernel = model.get_layer(name).weights[0]
        scales = np.geomspace(0.001, 1, kernel.shape[-2] * kernel.shape[-1])
        shape = (1, 1, kernel.shape[-2], kernel.shape[-1])
        kernel.assign(array(kernel) * scales.reshape(shape))
    return model


DEPTHWISE = {
    "depthwise/kernel": 16,
    "grouped/kernel": 16,
    "separable/depthwise_kernel": 16,
}


def masks(model):
    return {weight.path: weight for weight in kso.prunable_weights(model)}


def dead(model):
    return {
        path: dead_outputs(masks(model)[path].mask, masks(model)[path].layout)
        for path in DEPTHWISE
    }


def fitted(density):
    model = kso.parametrize(
        mobile(), kso.MagnitudeMask(kso.schedules.OneShot(density, 1))
    )
    model.compile(
        "sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    model.fit(
        X, Y, batch_size=32, verbose=0, callbacks=[kso.callbacks.UpdateMasks()]
    )
    return model


WAYS = {
    "magnitude": lambda d: kso.prune(mobile(), d),
    "erk": lambda d: kso.prune(mobile(), d, budget="erk"),
    "uniform": lambda d: kso.prune(mobile(), d, budget="uniform"),
    "obs": lambda d: kso.prune(mobile(), d, score="obs", data=X),
    "error": lambda d: kso.prune(
        mobile(), d, score="obs", budget="error", data=X
    ),
    "wanda": lambda d: kso.prune(mobile(), d, score="wanda", data=X),
    "refit": lambda d: kso.prune(mobile(), d, data=X),
    "compact": lambda d: kso.prune(mobile(), d, storage="compact"),
    "synflow": lambda d: kso.prune(
        mobile(), score=kso.saliency.synflow(mobile(), d, rounds=5)
    ),
    "random": lambda d: kso.prune(
        mobile(), score=kso.saliency.random(mobile(), d, seed=0)
    ),
    "exact": lambda d: kso.sparsify(mobile(), d, seed=0),
    "random_sparse": lambda d: kso.sparsify(
        mobile(), d, initializer="random_sparse", seed=0
    ),
    "random_uniform": lambda d: kso.sparsify(
        mobile(), d, "uniform", initializer="random_sparse", seed=0
    ),
}


@pytest.mark.filterwarnings("ignore:sparsify draws new kernels")
@pytest.mark.parametrize("density", [0.5, 0.15])
@pytest.mark.parametrize("way", WAYS)
def test_no_output_of_a_depthwise_kernel_dies(way, density):
    model = WAYS[way](density)
    assert dead(model) == dict.fromkeys(DEPTHWISE, 0)
    rows = kso.report(model).rows
    assert sum(row.live for row in rows) == round(
        density * sum(row.size for row in rows)
    )


def test_gradual_masks_keep_the_floor():
    model = fitted(0.15)
    assert dead(model) == dict.fromkeys(DEPTHWISE, 0)


def test_fixed_masks_keep_the_floor():
    model = kso.parametrize(mobile(), kso.FixedMask(0.15))
    assert dead(model) == dict.fromkeys(DEPTHWISE, 0)


def test_the_best_entry_of_an_output_is_the_one_that_stays():
    model, pruned = mobile(), kso.prune(mobile(), 0.15)
    for path in ("depthwise/kernel", "separable/depthwise_kernel"):
        value, mask = np.abs(masks(model)[path].value), masks(pruned)[path].mask
        best = value.reshape(9, -1).argmax(axis=0)
        assert mask.reshape(9, -1)[best, np.arange(best.size)].all()


def test_the_plan_says_so():
    text = str(kso.prune.plan(mobile(), 0.5))
    lines = {line.split()[0]: line for line in text.splitlines()}
    for path in DEPTHWISE:
        assert "masked, each output live" in lines[path]
    assert "output" not in lines["head/kernel"]
    assert "output" not in lines["separable/pointwise_kernel"]


def test_a_budget_of_ones_own_is_kept_with_a_warning():
    budget = {"depthwise/kernel": 10 / 144, ".*": 0.5}
    with pytest.warns(
        UserWarning,
        match=r"fewer live entries than outputs.*6 of 16 of 'depthwise",
    ):
        model = kso.prune(mobile(), budget=budget)
    assert masks(model)["depthwise/kernel"].live == 10
    assert dead(model)["depthwise/kernel"] == 6
    with pytest.warns(UserWarning, match="fewer live entries"):
        plan = kso.prune.plan(mobile(), budget=budget)
    assert "6 of 16 outputs dead" in str(plan)


def test_budgets_by_name_say_what_they_lift():
    budget = kso.budgets.uniform(mobile(), 0.08, orthogonal=False)
    assert budget.counts["depthwise/kernel"] == 16
    assert budget.lifted_from["depthwise/kernel"] < 16
    assert "lifted from" in repr(budget)
    # 48 outputs, 44 entries.
    few = kso.budgets.uniform(mobile(), 0.03, orthogonal=False)
    assert few.live < sum(DEPTHWISE.values())
    assert few.counts["head/kernel"] > 1


def test_kernels_of_many_inputs_and_vectors_have_no_floor():
    layers = [
        L.Conv2D(8, 3, name="a"),
        L.Flatten(),
        L.Dense(16, name="b"),
        L.Dense(4, name="c"),
    ]
    model = keras.Sequential([keras.Input((6, 6, 3)), *layers])
    kernel = model.layers[0].kernel
    kernel.assign(array(kernel) * np.geomspace(1e-6, 1, 8))
    pruned = kso.prune(model, 0.3)
    assert dead_outputs(masks(pruned)["a/kernel"].mask) > 0
    assert "output" not in str(kso.prune.plan(model, 0.3))


def test_inputs_of_one_channel_keep_their_outputs_too():
    model = keras.Sequential(
        [
            keras.Input((6, 6, 1)),
            L.Conv2D(16, 3, name="a"),
            L.Flatten(),
            L.Dense(4),
        ]
    )
    kernel = model.layers[0].kernel
    kernel.assign(array(kernel) * np.geomspace(1e-6, 1, 16))
    assert dead_outputs(masks(kso.prune(model, 0.3))["a/kernel"].mask) == 0
    one = keras.Sequential(
        [keras.Input((1,)), L.Dense(64, name="a"), L.Dense(4)]
    )
    assert "output" not in str(kso.prune.plan(one, 0.5))
