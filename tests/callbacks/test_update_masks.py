"""`UpdateMasks`: when masks are updated, by what, and what it refuses."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import UpdateMasks
from keras_sparse_ortho.errors import DensityWarning, NotPrunableError
from keras_sparse_ortho.parametrizations import MagnitudeMask, StraightThroughTopK
from keras_sparse_ortho.schedules import Cubic, OneShot
from tests.helpers import jit, moments

L = keras.layers


def network(parametrization, **options):
    inputs = keras.Input((16,))
    x = L.Dense(32, activation="relu", name="hidden")(inputs)
    model = keras.Model(inputs, L.Dense(8, name="head")(x))
    model = kso.parametrize(model, parametrization, **options)
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=jit())
    return model


def fit(model, *callbacks, epochs=2):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 16)), rng.normal(size=(64, 8))
    return model.fit(x, y, batch_size=8, epochs=epochs, verbose=0, callbacks=list(callbacks))


class Watch(keras.callbacks.Callback):
    """Notes live entries of the first weight, and the weight itself, before every step."""

    def __init__(self):
        super().__init__()
        self.live, self.values = [], []

    def on_train_batch_begin(self, batch, logs=None):
        if keras.backend.backend() == "jax":
            self.model.jax_state_sync()
        weight = kso.prunable_weights(self.model)[0]
        self.live.append(weight.live)
        self.values.append(weight.raw_value())


@pytest.mark.core
def test_the_density_follows_the_cubic_schedule():
    schedule = Cubic(0.1, begin_step=2, end_step=12, frequency=4)
    model, watch = network(MagnitudeMask(schedule)), Watch()
    fit(model, UpdateMasks(), watch)
    steps = [0, 0, 2, 2, 2, 2, 6, 6, 6, 6, 10, 10, 12, 12, 12, 12]  # of the last update
    assert watch.live == [round(schedule.at(t) * 512) if t else 512 for t in steps]
    assert watch.live[-1] == 51


@pytest.mark.core
def test_magnitude_masks_keep_the_largest_and_forget_the_rest():
    model, watch = network(MagnitudeMask(OneShot(0.25, step=5))), Watch()
    fit(model, watch, UpdateMasks(), epochs=1)
    weight = kso.prunable_weights(model)[0]
    mask = weight.parametrization.mask_value()
    before = np.abs(watch.values[5])  # the watch comes first: as step 5 found it
    assert mask.sum() == 128
    assert before[mask].min() >= before[~mask].max()
    assert not weight.raw_value()[~mask].any()
    assert not any(slot[~mask].any() for slot in moments(model.optimizer, weight.variable))
    assert all(slot[mask].any() for slot in moments(model.optimizer, weight.variable))


@pytest.mark.core
def test_dead_entries_of_a_straight_through_mask_come_back():
    model, watch = network(StraightThroughTopK(0.25, frequency=4)), Watch()
    first = kso.prunable_weights(model)[0].parametrization.mask_value()
    fit(model, UpdateMasks(), watch, epochs=3)
    weight = kso.prunable_weights(model)[0]
    mask = weight.parametrization.mask_value()
    assert set(watch.live) == {128}
    assert mask.sum() == 128
    assert (mask & ~first).any()
    assert weight.raw_value()[~mask].all()  # raw weights stay dense, and trained
    assert (watch.values[0] != weight.raw_value()).mean() > 0.9


def test_what_is_due_at_the_last_step_is_done():
    model = network(MagnitudeMask(OneShot(0.1, step=8)))
    fit(model, UpdateMasks(), epochs=1)  # eight steps
    assert kso.prunable_weights(model)[0].live == 51


def test_a_mask_that_was_never_set_is_not_stripped():
    model = network(MagnitudeMask(OneShot(0.1, step=100)))
    fit(model)
    with pytest.raises(
        NotPrunableError, match=r"'hidden/kernel' cannot be stripped.*UpdateMasks\(\).*at least 100"
    ):
        kso.strip(model)


def test_it_refuses_models_without_scheduled_masks():
    model = kso.sparsify(keras.Sequential([keras.Input((16,)), L.Dense(8)]), 0.5)
    model.compile("sgd", "mse")
    with pytest.raises(NotPrunableError, match=r"UpdateMasks needs.*Received: model="):
        fit(model, UpdateMasks())


def test_weights_that_are_not_finite_are_named():
    model = network(MagnitudeMask(0.5, frequency=2))
    weight = kso.prunable_weights(model)[1]
    weight.variable.assign(np.full(weight.shape, np.nan))
    with pytest.raises(NotPrunableError, match="'head/kernel' is not finite"):
        fit(model, UpdateMasks())


# --- training without the callback ---------------------------------------------------------------

NEVER = r"never updated.*UpdateMasks\(\)\].*'hidden/kernel' and 1 more, after 8 steps"


@pytest.mark.core
@pytest.mark.parametrize("kind", [MagnitudeMask, StraightThroughTopK])
def test_training_without_the_callback_is_told_once(kind):
    model = network(kind(Cubic(0.1)))
    with pytest.warns(DensityWarning, match=NEVER) as caught:
        fit(model, epochs=3)
    (told,) = [warning for warning in caught if warning.category is DensityWarning]
    assert told.filename == __file__
    fit(model, epochs=1)  # told before
    with pytest.warns(DensityWarning, match="never updated.*after 32 steps"):
        kso.report(model)


@pytest.mark.core
def test_masks_that_somebody_updates_are_not_asked_for():
    class ByHand(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if keras.backend.backend() == "jax":
                self.model.jax_state_sync()
            for weight in kso.prunable_weights(self.model):
                weight.parametrization.update(8)

    schedule = Cubic(0.1, begin_step=0, end_step=8, frequency=2)
    model = network(MagnitudeMask(schedule))
    fit(model, ByHand())
    model = network(MagnitudeMask(schedule))
    for mask in (weight.parametrization for weight in kso.prunable_weights(model)):
        mask.update(8)  # a custom training loop
    x = np.ones((4, 16), "float32")
    model(x), model.predict(x, verbose=0), model.evaluate(x, np.ones((4, 8)), verbose=0)
    fit(model)
    kso.report(model)
    assert kso.prunable_weights(model)[0].live == 51


def test_a_schedule_that_begins_later_is_waited_for(recwarn):
    fit(network(MagnitudeMask(Cubic(0.1, begin_step=17, end_step=20))))  # 16 steps
    assert DensityWarning not in [warning.category for warning in recwarn]
    with pytest.warns(DensityWarning, match="after 16 steps"):
        fit(network(MagnitudeMask(Cubic(0.1, begin_step=9, end_step=20))))
    with pytest.warns(DensityWarning, match="after 16 steps"):
        fit(network(MagnitudeMask(Cubic(0.1, begin_step=0.6, end_step=0.8))))


def test_masks_that_are_not_trained_are_not_asked_for():
    teacher = network(MagnitudeMask(Cubic(0.1)))
    teacher.trainable = False
    inputs = keras.Input((16,))
    model = keras.Model(inputs, L.Dense(8)(teacher(inputs)))
    model.compile("sgd", "mse", jit_compile=jit())
    fit(model)


class Distiller(keras.Model):
    """Keras' example: a model around two others, which `fit` calls and nobody builds."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def call(self, x):
        return self.student(x)

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs):
        return keras.ops.mean((y_pred - self.teacher(x, training=False)) ** 2)


@pytest.mark.core
def test_a_student_inside_of_a_model():
    student, teacher = (
        keras.Sequential([keras.Input((16,)), L.Dense(8, name=name)]) for name in "st"
    )
    teacher.trainable = False
    student = kso.parametrize(student, MagnitudeMask(Cubic(0.25)))
    model = Distiller(student, teacher)
    model.compile("sgd", jit_compile=jit())
    fit(model, UpdateMasks())
    assert kso.report(student).density == 0.25
    # Layers that are not built, or could get weights of their own, are refused as before.
    with pytest.raises(NotPrunableError, match="give it an Input, or call it once"):
        kso.prunable_weights(Distiller(student, keras.Sequential([L.Dense(8)])))

    class Own(Distiller):
        def build(self, shape):
            self.scale = self.add_weight(shape=(1,))

    with pytest.raises(NotPrunableError, match=r"layers \['own'\] are not built"):
        kso.prunable_weights(Own(student, teacher))
