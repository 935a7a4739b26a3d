"""The density asked for is the density that a run ends with, or a warning says why it is not."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import (
    SET,
    BestAtDensity,
    TargetDensity,
    UpdateMasks,
)
from keras_sparse_ortho.errors import DensityWarning, NotPrunableError
from keras_sparse_ortho.parametrizations import (
    ChannelSoftThreshold,
    LowRankSoftThreshold,
    MagnitudeMask,
    SoftThreshold,
    StraightThroughTopK,
)
from keras_sparse_ortho.schedules import Constant, Cubic, Linear
from tests.callbacks import runs
from tests.callbacks.runs import HERE, SIZE, Watch, live, weights
from tests.helpers import array, moments, part_of_a_run, slow_on_jax

L = keras.layers
ASKED = 0.1
REACHED = round(ASKED * SIZE) / SIZE
# Few steps of small networks: on TensorFlow tracing would take most of the time.
EAGERLY = {"run_eagerly": keras.backend.backend() != "jax"}
RESTORED = r"an earlier epoch were restored.*BestAtDensity.*finish\(model\)"


def network(parametrization, optimizer=None):
    optimizer = optimizer or keras.optimizers.SGD(0.01)
    return runs.network(
        parametrization, optimizer, jit_compile=False, **EAGERLY
    )


def fit(model, *callbacks, epochs=4, **options):
    """Four steps an epoch."""
    return runs.fit(model, *callbacks, epochs=epochs, count=32, **options)


def density(model):
    return live(model) / SIZE


def made(model):
    return weights(model)[0].parametrization


METHODS = {
    "STR": (SoftThreshold, lambda: TargetDensity(ASKED)),
    "GMP": (lambda: MagnitudeMask(Cubic(ASKED)), UpdateMasks),
    "DNW": (lambda: StraightThroughTopK(Cubic(ASKED)), UpdateMasks),
}


@pytest.fixture
def method(request):
    make, callback = METHODS[request.param]
    return network(make()), callback


def best_is_dense(**options):
    """EarlyStopping that finds the densest epoch, the first, the best."""
    return keras.callbacks.EarlyStopping(
        "density", mode="max", patience=9, restore_best_weights=True, **options
    )


def places(caught):
    return [w.filename for w in caught if w.category is DensityWarning]


@pytest.mark.core
@pytest.mark.parametrize(
    ("method", "first"),
    [
        ("STR", "ours"),
        ("GMP", "theirs"),
        pytest.param("STR", "theirs", marks=pytest.mark.slow),
        pytest.param("GMP", "ours", marks=pytest.mark.slow),
        pytest.param("DNW", "ours", marks=pytest.mark.slow),
        pytest.param("DNW", "theirs", marks=pytest.mark.slow),
    ],
    indirect=["method"],
)
def test_weights_of_a_denser_epoch_are_restored(method, first, tmp_path):
    model, callback = method
    pair = [callback(), best_is_dense()]
    watch = Watch(density)
    with pytest.warns(DensityWarning, match=RESTORED) as caught:
        fit(model, *(pair if first == "ours" else pair[::-1]), watch)
    assert places(caught) == [HERE]  # where the user called `fit`
    # They are as they were in that epoch, and not pruned without training.
    assert density(model) == watch.seen[0] > 0.3
    assert watch.seen[-1] == REACHED
    for act in (
        kso.report,
        kso.strip,
        lambda model: model.save(tmp_path / "model.keras"),
    ):
        with pytest.warns(
            DensityWarning, match=r"restored or saved as the best.*finish"
        ) as caught:
            act(model)
        assert places(caught) == [__file__]
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    with pytest.warns(
        DensityWarning, match=r"\(\d+ of 768 live\), where .* was asked for"
    ):
        kso.strip(loaded)
    for each in (model, loaded):  # every warning is an error from here on
        assert kso.finish(each) is each
        assert density(each) == REACHED
        kso.strip(each)
        each.save(tmp_path / "finished.keras")


@pytest.mark.core
@pytest.mark.parametrize(
    "method",
    [
        "STR",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("GMP", "DNW")
        ),
    ],
    indirect=True,
)
def test_only_epochs_at_the_density_count(method, tmp_path):
    model, callback = method
    stop, best = best_is_dense(), tmp_path / "best.keras"
    checkpoint = keras.callbacks.ModelCheckpoint(
        best, monitor="density", mode="max", save_best_only=True
    )
    slower = keras.callbacks.ReduceLROnPlateau(
        "density", mode="max", patience=3, factor=0.5
    )
    wrapped = [BestAtDensity(c) for c in (stop, checkpoint, slower)]
    watch = Watch(density)
    fit(model, *wrapped[:1], callback(), *wrapped[1:], watch, epochs=6)
    # Masks have the count with the update before the last, thresholds are fixed in the fifth.
    assert stop.best_epoch == (
        4 if isinstance(made(model), SoftThreshold) else 3
    )
    assert watch.seen[2] > watch.seen[stop.best_epoch] == REACHED
    assert density(model) == REACHED
    kso.strip(keras.saving.load_model(best))
    assert float(array(model.optimizer.learning_rate)) == pytest.approx(0.01)


RAMP = Cubic(ASKED, 0, 20)


@pytest.mark.parametrize(
    ("parametrization", "callback"),
    [
        (MagnitudeMask(RAMP), UpdateMasks()),
        pytest.param(
            SoftThreshold(), TargetDensity(ASKED, RAMP), marks=pytest.mark.slow
        ),
    ],
)
@slow_on_jax
def test_a_run_that_ends_before_its_schedule(parametrization, callback):
    model = network(parametrization)
    with pytest.warns(
        DensityWarning,
        match=r"ends at step 20, and the run at step 4.*follow its length",
    ):
        fit(model, callback, epochs=1)
    assert density(model) > 0.3
    # A stop is another reason.
    stop = Watch(lambda model: setattr(model, "stop_training", True))
    with pytest.warns(
        DensityWarning, match=r"stopped at step 8, before .* step 20"
    ):
        fit(model, callback, stop, epochs=2)
    fit(model, callback, epochs=3)  # goes on at step 8
    assert density(model) == REACHED


@slow_on_jax
def test_nothing_is_said_before_training_and_within():
    model = network(MagnitudeMask(Cubic(ASKED)))
    kso.report(model)
    watch = Watch(
        lambda model: (kso.report(model).density, kso.strip(model))[0]
    )
    fit(model, UpdateMasks(), watch)
    assert watch.seen[0] > 0.3
    # An interrupted run leaves nothing behind that would keep it quiet.
    model = network(SoftThreshold())
    with pytest.raises(ZeroDivisionError):
        fit(model, TargetDensity(ASKED), Watch(lambda _: 1 / 0))
    with pytest.warns(DensityWarning):
        kso.report(model)


@slow_on_jax
def test_a_later_run_does_not_undo_it():
    model = network(MagnitudeMask(Cubic(ASKED)))
    fit(model, UpdateMasks())
    before = [w.mask for w in weights(model)]
    watch = Watch(density)
    # Whose schedule would begin with all entries.
    fit(model, UpdateMasks(), watch, epochs=2)
    assert watch.seen == [density(model)] * 2
    model.compile("sgd", "mse", **EAGERLY)  # steps count from 0 again
    fit(model, UpdateMasks(), watch, epochs=2)
    for weight, mask in zip(weights(model), before, strict=True):
        np.testing.assert_array_equal(weight.mask, mask)


@slow_on_jax
def test_thresholds_that_were_fixed_stay_and_it_is_said():
    model = network(SoftThreshold())
    fit(model, TargetDensity(0.5), epochs=2)
    with pytest.warns(
        DensityWarning, match=r"fixed before, by another run.*where 0.1003"
    ):
        fit(model, TargetDensity(ASKED), epochs=2)
    assert density(kso.finish(model)) == REACHED
    with pytest.warns(
        DensityWarning, match=r"more entries than that are already 0"
    ):
        fit(model, TargetDensity(0.5), epochs=2)


@slow_on_jax
def test_a_second_fit_is_a_run_of_its_own():
    model = network(SoftThreshold())
    # The optimizer has made as many steps as the schedule takes.
    fit(model, epochs=2)
    watch = Watch(density)
    fit(model, TargetDensity(ASKED), watch, epochs=3)
    assert watch.seen[0] > 0.3
    assert watch.seen[-1] == REACHED


@pytest.mark.parametrize(
    ("parametrization", "options"),
    [
        (SoftThreshold(), {"freeze": False}),
        pytest.param(
            SoftThreshold(),
            {"schedule": Constant(ASKED, frequency=5)},
            marks=pytest.mark.slow,
        ),
        (ChannelSoftThreshold(), {}),
        pytest.param(LowRankSoftThreshold(), {}, marks=pytest.mark.slow),
    ],
)
@slow_on_jax
def test_no_false_alarm(parametrization, options):
    model = network(parametrization)
    fit(model, TargetDensity(ASKED, **options), epochs=3)
    kso.strip(model)
    kso.strip(kso.finish(model))


@pytest.mark.parametrize("learnt", [True, False])
@slow_on_jax
def test_finish_forgets_what_dies(learnt):
    model = network(
        SoftThreshold() if learnt else MagnitudeMask(Linear(0.25, 0, 1000)),
        "adam",
    )
    with part_of_a_run():
        fit(model, *([] if learnt else [UpdateMasks()]), epochs=1)
    kso.finish(model, 0.25 if learnt else None)
    assert density(model) == 0.25
    for weight in weights(model):
        for slot in moments(model.optimizer, weight.variable):
            assert not slot[weight.value == 0].any()
            assert slot[weight.value != 0].any()


def test_the_best_of_a_second_fit_is_not_judged_by_the_first():
    model = network(MagnitudeMask(Cubic(ASKED)))
    seen = []
    note = keras.callbacks.LambdaCallback()
    note.on_train_batch_end = lambda batch, logs=None: seen.append(batch)
    best = BestAtDensity(note)
    fit(model, UpdateMasks(), best, epochs=4)
    assert seen  # after the first epoch at the density
    seen.clear()
    with pytest.warns(DensityWarning):  # a schedule longer than the run
        fit(
            network(MagnitudeMask(Cubic(ASKED, 0, 100))),
            UpdateMasks(),
            best,
            epochs=1,
        )
    assert not seen


def test_refusals():
    model = network(SoftThreshold())
    with pytest.raises(
        NotPrunableError, match=r"needs a `density`.*density=None"
    ):
        kso.finish(model)
    assert density(kso.finish(model, 0.25)) == 0.25
    assert density(kso.finish(model, 0.125)) == 0.125  # another one after that
    kso.strip(model)
    with pytest.raises(
        NotPrunableError, match=r"finish\(\) is for.*Received: model='seq"
    ):
        kso.finish(runs.dense())
    with pytest.raises(
        NotPrunableError, match=r"have the density.*Received: density=0.5"
    ):
        kso.finish(network(MagnitudeMask(0.1)), 0.5)
    with pytest.raises(
        ValueError, match=r"must be a Keras callback.*Received: callback=3"
    ):
        BestAtDensity(3)


@pytest.mark.core
@pytest.mark.parametrize("method", ["STR", "GMP"], indirect=True)
def test_a_run_that_ends_with_nan_has_its_history(method):
    model, callback = method
    x, y = runs.xy(32)
    stop = keras.callbacks.TerminateOnNaN()
    told = r"could not bring.*left infinite or NaN ones.*Received: The weight '.*' is not finite"
    with pytest.warns(DensityWarning, match=told) as caught:
        history = model.fit(
            x,
            y * np.nan,
            batch_size=32,
            verbose=0,
            callbacks=[stop, callback()],
        )
    assert np.isnan(history.history["loss"]).all()
    assert places(caught) == [__file__]
    # The same callback in a run that is fine.
    model = network(made(model).clone())
    fit(model, callback())


@pytest.mark.core
def test_thresholds_that_nothing_steers_are_told_when_they_stay_dense(tmp_path):
    model = network(SoftThreshold())
    kso.strip(model)  # not trained
    fit(model, epochs=1)
    told = (
        r"nearly all entries.*TargetDensity\(density\).*Received: density=0.9"
    )
    for act in (kso.report, kso.strip):
        with pytest.warns(DensityWarning, match=told) as caught:
            act(model)
        assert places(caught) == [__file__]
    pruned = network(SoftThreshold(s_init=-2.0))
    fit(pruned, epochs=1)
    assert density(pruned) < 0.95
    kso.strip(pruned)
    kso.strip(kso.finish(model, 0.5))


ONE_EPOCH = r"nothing left to do.*one `fit` for each epoch.*`begin_step=0, end_step=...`"


@pytest.mark.core
@pytest.mark.parametrize("method", ["STR", "GMP"], indirect=True)
def test_a_fit_for_each_epoch_is_told_of_its_schedule(method):
    model, callback = method
    callback = callback()
    fit(model, callback, epochs=1)
    with pytest.warns(UserWarning, match=ONE_EPOCH) as caught:
        fit(model, callback, epochs=1)
    assert HERE in [warning.filename for warning in caught]
    fit(model, callback, epochs=2)  # trains on


@pytest.mark.core
def test_a_schedule_in_steps_spans_fits_of_one_epoch():
    # Its begin is step 0 of the optimizer.
    ramp = Cubic(ASKED, end_step=12, frequency=1)
    model, watch = network(MagnitudeMask(ramp)), Watch(density)
    for _ in range(3):
        with part_of_a_run():
            fit(model, UpdateMasks(), watch, epochs=1)
    assert watch.seen[0] > watch.seen[1] > watch.seen[2]
    assert density(model) == pytest.approx(ASKED, abs=0.002)
    fit(model, UpdateMasks(), epochs=1)


@pytest.mark.core
def test_dynamic_training_in_a_fit_for_each_epoch():
    model = network(None)
    fit(model, SET(frequency=1), epochs=1)
    with pytest.warns(
        UserWarning, match=r"no update: its default `end_step`.*at step 4"
    ):
        fit(model, SET(frequency=1), epochs=1)
    fit(model, SET(frequency=1, end_step=20), epochs=1)
