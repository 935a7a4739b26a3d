"""`UpdateMasks`: when masks are updated, by what, and what it refuses."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import UpdateMasks
from keras_sparse_ortho.errors import DensityWarning, NotPrunableError
from keras_sparse_ortho.parametrizations import MagnitudeMask, StraightThroughTopK
from keras_sparse_ortho.schedules import Cubic, OneShot
from tests.callbacks.runs import HERE, Watch, fit, network, weights
from tests.helpers import jit, moments

L = keras.layers


@pytest.mark.core
def test_the_density_follows_the_cubic_schedule():
    schedule = Cubic(0.1, begin_step=2, end_step=12, frequency=4)
    watch = Watch(lambda model: weights(model)[0].live, steps=True)
    fit(network(MagnitudeMask(schedule)), UpdateMasks(), watch)
    steps = [0, 0, 2, 2, 2, 2, 6, 6, 6, 6, 10, 10, 12, 12, 12, 12]  # of the last update
    assert watch.seen == [round(schedule.at(t) * 512) if t else 512 for t in steps]
    assert watch.seen[-1] == 51


@pytest.mark.core
def test_magnitude_masks_keep_the_largest_and_forget_the_rest():
    model = network(MagnitudeMask(OneShot(0.25, step=5)))
    watch = Watch(lambda model: weights(model)[0].raw_value(), steps=True)
    fit(model, watch, UpdateMasks(), epochs=1)
    weight = weights(model)[0]
    mask = weight.mask
    before = np.abs(watch.seen[5])  # the watch comes first: as step 5 found it
    assert mask.sum() == 128
    assert before[mask].min() >= before[~mask].max()
    for values in (weight.raw_value(), *moments(model.optimizer, weight.variable)):
        assert not values[~mask].any()
        assert values[mask].any()


@pytest.mark.core
def test_dead_entries_of_a_straight_through_mask_come_back():
    model = network(StraightThroughTopK(0.25, frequency=4))
    start = weights(model)[0].raw_value()
    first = weights(model)[0].mask
    history = fit(model, UpdateMasks(), epochs=3).history
    weight = weights(model)[0]
    assert history["density"] == [0.25] * 3
    assert 0 < history["moved"][-1] < 1
    assert weight.mask.sum() == 128
    assert (weight.mask & ~first).any()
    assert weight.raw_value()[~weight.mask].all()  # raw weights stay dense, and trained
    assert (start != weight.raw_value()).mean() > 0.9


def test_what_is_due_at_the_last_step_is_done():
    model = network(MagnitudeMask(OneShot(0.1, step=8)))
    fit(model, UpdateMasks(), epochs=1)  # eight steps
    assert weights(model)[0].live == 51


def test_refusals():
    never = network(MagnitudeMask(OneShot(0.1, step=100)))
    fit(never)
    with pytest.raises(
        NotPrunableError, match=r"'hidden/kernel' cannot be stripped.*UpdateMasks\(\).*at least 100"
    ):
        kso.strip(never)
    with pytest.raises(NotPrunableError, match=r"UpdateMasks needs.*Received: model="):
        fit(network(), UpdateMasks())
    model = network(MagnitudeMask(0.5, frequency=2))
    weight = weights(model)[1]
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
    assert told.filename == HERE
    fit(model, epochs=1)  # told before
    with pytest.warns(DensityWarning, match="never updated.*after 32 steps"):
        kso.report(model)


@pytest.mark.core
def test_masks_that_somebody_updates_are_not_asked_for():
    schedule = Cubic(0.1, begin_step=0, end_step=8, frequency=2)

    def update(model):
        for weight in weights(model):
            weight.parametrization.update(8)

    fit(network(MagnitudeMask(schedule)), Watch(update))
    model = network(MagnitudeMask(schedule))
    update(model)  # a custom training loop
    x = np.ones((4, 16), "float32")
    model(x), model.predict(x, verbose=0), model.evaluate(x, np.ones((4, 8)), verbose=0)
    fit(model)
    kso.report(model)
    assert weights(model)[0].live == 51


def test_a_schedule_that_begins_later_is_waited_for(recwarn):
    fit(network(MagnitudeMask(Cubic(0.1, begin_step=17, end_step=20))))  # 16 steps
    assert DensityWarning not in [warning.category for warning in recwarn]
    for begin, end in ((9, 20), (0.6, 0.8)):
        with pytest.warns(DensityWarning, match="after 16 steps"):
            fit(network(MagnitudeMask(Cubic(0.1, begin_step=begin, end_step=end))))


def test_masks_that_are_not_trained_are_not_asked_for():
    teacher = network(MagnitudeMask(Cubic(0.1)))
    teacher.trainable = False
    model = keras.Sequential([keras.Input((16,)), teacher, L.Dense(8)])
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
    student = keras.Sequential([keras.Input((16,)), L.Dense(8, name="s")])
    student = kso.parametrize(student, MagnitudeMask(Cubic(0.25)))
    teacher = keras.Sequential([keras.Input((16,)), L.Dense(8, name="t")])
    teacher.trainable = False
    model = Distiller(student, teacher)
    model.compile("sgd", jit_compile=jit())
    fit(model, UpdateMasks())
    assert kso.report(student).density == 0.25
    # Layers that are not built, or could get weights of their own, are refused as before.
    with pytest.raises(NotPrunableError, match="give it an Input, or call it once"):
        weights(Distiller(student, keras.Sequential([L.Dense(8)])))

    class Own(Distiller):
        def build(self, shape):
            self.scale = self.add_weight(shape=(1,))

    with pytest.raises(NotPrunableError, match=r"layers \['own'\] are not built"):
        weights(Own(student, teacher))
