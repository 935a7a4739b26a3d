"""What the rest of the package does with tf_keras models: budgets, scores, reports, schedules."""

import warnings

import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import run_python

pytestmark = pytest.mark.tensorflow_only


@pytest.fixture
def model(tf_keras):
    L = tf_keras.layers
    hidden = L.Dense(24, activation="relu", name="hidden")
    layers = [hidden, L.BatchNormalization(), L.Dense(5, name="head")]
    return tf_keras.Sequential([tf_keras.Input((16,)), *layers])


def fitted(model, *callbacks, epochs=3):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(40, 16)), rng.normal(size=(40, 5))
    model.compile("adam", "mse")
    model.fit(
        x, y, batch_size=4, epochs=epochs, verbose=0, callbacks=[*callbacks]
    )
    return model


# --- budgets, scores, reports ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["erk", "er", "uniform"])
def test_budgets_take_the_model(model, name):
    budget = getattr(kso.budgets, name)
    weights = kso.tfmot.prunable_weights(model)
    assert budget(model, 0.3) == budget(weights, 0.3)
    assert budget(model, 0.3).live == round(0.3 * (16 * 24 + 24 * 5))


def test_a_budget_is_read_from_a_pruned_model(model):
    budget = kso.budgets.erk(model, 0.3)
    pruned = kso.tfmot.prune_with_mask(model, budget=budget)
    assert kso.Budget.from_model(pruned) == budget
    assert kso.Budget.from_model(model).density == 1.0


def test_the_room_is_loaded_for_the_first_model_of_tf_keras():
    run_python(
        "-c",
        """
import tf_keras, keras_sparse_ortho as kso
model = tf_keras.Sequential([tf_keras.Input((4,)), tf_keras.layers.Dense(3, name="a")])
assert kso.Budget.from_model(model).size == 12
""",
    )


def test_magnitudes_and_random_scores(tf_keras, model):
    saliency = kso.saliency.magnitude(model, 0.25)
    pruned = kso.tfmot.prune_with_mask(model, saliency.masks)
    weights = kso.tfmot.prunable_weights(pruned)
    assert sum(weight.live for weight in weights) == 126
    for weight in weights:
        dead = np.abs(weight.raw_value())[~weight.state.mask()]
        assert not dead.any()
    assert kso.saliency.random(model, 0.25, seed=0).budget.live == 126


@pytest.mark.parametrize("name", ["snip", "grasp", "synflow"])
def test_scores_that_call_the_model_are_refused_with_a_remedy(model, name):
    score = getattr(kso.saliency, name)
    data = () if name == "synflow" else (np.ones((4, 16)), np.ones((4, 5)))
    with pytest.raises(
        kso.errors.NotPrunableError,
        match=r"must be one of Keras 3.*tfmot\.prune_with_mask.*Received: model=Sequential",
    ):
        score(model, 0.25, *([data] if data else []))


def test_report(model):
    report = kso.report(kso.tfmot.prune_exact_orthogonal(model, 0.3, seed=0))
    assert report.live == round(0.3 * 504)
    assert [row.state for row in report.rows] == ["sparse", "sparse"]
    assert report.rows[0].flops is None
    assert "hidden/kernel" in str(report)
    assert [row.state for row in kso.report(model).rows] == ["no mask"] * 2


# --- schedules inside TFMOT's wrapper -------------------------------------------------------------

SCHEDULES = {
    "cubic": (kso.schedules.Cubic(0.1), 21),  # 70% of 30 steps
    "linear": (kso.schedules.Linear(0.1, 3, 20, frequency=5), 20),
    "constant": (kso.schedules.Constant(0.1, 7, frequency=4), 7),
    "one_shot": (kso.schedules.OneShot(0.1, 0.5), 15),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_training_ends_at_the_density(sparsity, model, name):
    schedule, last = SCHEDULES[name]
    wrapped = sparsity.prune_low_magnitude(model, schedule)
    fitted(wrapped, sparsity.UpdatePruningStep())
    plain = sparsity.strip_pruning(wrapped)
    for weight in kso.tfmot.prunable_weights(plain):
        assert weight.live == round(0.1 * weight.size)
    resolved = schedule.resolved(30)
    begin = resolved.begin_step
    for step in range(1, 31):
        is_due, sparsity_at_step = fitted_answer(resolved, step)
        assert is_due == resolved.due(step - 1)
        if is_due:
            expected = resolved.at(step - 1)
            assert 1 - sparsity_at_step == pytest.approx(expected, abs=1e-6)
    assert begin <= last == (resolved.end_step or begin)


def fitted_answer(schedule, step):
    import tensorflow as tf

    is_due, sparsity = schedule(tf.constant(step, tf.int64))
    return bool(is_due), float(sparsity)


def test_fractions_need_a_fit(sparsity):
    import tensorflow as tf

    with pytest.raises(
        ValueError, match=r"Fractions of a run need.*Received: schedule=Cubic"
    ):
        kso.schedules.Cubic(0.1)(tf.constant(1, tf.int64))


def test_a_schedule_for_each_layer_by_budget(sparsity, model):
    wrapped = kso.tfmot.prune_by_budget(
        model, 0.2, "erk", kso.schedules.Cubic()
    )
    fitted(wrapped, sparsity.UpdatePruningStep())
    expected = kso.budgets.erk(model, 0.2, orthogonal=False).counts
    plain = sparsity.strip_pruning(wrapped)
    for weight in kso.tfmot.prunable_weights(plain):
        assert weight.live == expected[weight.path]
    late = kso.schedules.Cubic(initial_density=0.05)
    with pytest.raises(
        kso.errors.BudgetError, match=r"less density.*initial_density=0\.05"
    ):
        kso.tfmot.prune_by_budget(model, 0.2, "erk", late)


# --- callbacks, stripping, saving -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("callback", "twin"),
    [
        (lambda: kso.callbacks.TargetDensity(0.1), r"tfmot\.TargetDensity"),
        (kso.callbacks.UpdateMasks, "UpdatePruningStep"),
        (lambda: kso.callbacks.SET(), "none of its kind"),
    ],
)
def test_callbacks_of_keras_3_name_their_twins(model, callback, twin):
    with pytest.raises(
        kso.errors.NotPrunableError,
        match=rf"is for Keras 3 models.*{twin}.*Received: model='sequential",
    ):
        fitted(model, callback())


def test_thresholds_that_have_not_moved_warn_when_stripped(sparsity, model):
    soft = fitted(kso.tfmot.prune_with_soft_threshold(model))
    with pytest.warns(
        UserWarning,
        match=r"almost dense.*TargetDensity.*'(hidden|head)/kernel'",
    ) as caught:
        sparsity.strip_pruning(soft)
    assert len(caught) == 2  # one for each wrapper
    soft = kso.tfmot.prune_with_soft_threshold(model)
    steered = fitted(soft, kso.tfmot.TargetDensity(0.2, frequency=1))
    with warnings.catch_warnings(action="error", category=UserWarning):
        sparsity.strip_pruning(steered)


@pytest.mark.parametrize("form", ["keras", "tf"])
def test_saving_a_wrapped_model_warns_of_nothing(
    tf_keras, model, tmp_path, form
):
    sparse = kso.tfmot.prune_exact_orthogonal(model, 0.3, seed=0)
    path = tmp_path / ("model.keras" if form == "keras" else "model")
    with warnings.catch_warnings(action="error", category=UserWarning):
        sparse.save(path)
    loaded = tf_keras.models.load_model(path)
    for before, after in zip(
        sparse.get_weights(), loaded.get_weights(), strict=True
    ):
        np.testing.assert_array_equal(after, before)
