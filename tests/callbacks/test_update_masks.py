"""`UpdateMasks`: when masks are updated, by what, and what it refuses."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import UpdateMasks
from keras_sparse_ortho.errors import (
    DensityError,
    DensityWarning,
    LayoutError,
    NotPrunableError,
)
from keras_sparse_ortho.parametrizations import (
    MagnitudeMask,
    StraightThroughTopK,
)
from keras_sparse_ortho.schedules import Cubic, OneShot
from tests.callbacks.runs import (
    HERE,
    Watch,
    fit,
    network,
    same,
    state,
    weights,
    xy,
)
from tests.helpers import jit, moments, part_of_a_run

L = keras.layers


@pytest.mark.core
def test_the_density_follows_the_cubic_schedule():
    schedule = Cubic(0.1, begin_step=2, end_step=12, frequency=4)
    watch = Watch(lambda model: weights(model)[0].live, steps=True)
    fit(network(MagnitudeMask(schedule)), UpdateMasks(), watch)
    steps = [
        0,
        0,
        2,
        2,
        2,
        2,
        6,
        6,
        6,
        6,
        10,
        10,
        12,
        12,
        12,
        12,
    ]  # of the last update
    assert watch.seen == [
        round(schedule.at(t) * 512) if t else 512 for t in steps
    ]
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
    for values in (
        weight.raw_value(),
        *moments(model.optimizer, weight.variable),
    ):
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
    # Raw weights stay dense, and trained.
    assert weight.raw_value()[~weight.mask].all()
    assert (start != weight.raw_value()).mean() > 0.9


def test_what_is_due_at_the_last_step_is_done():
    model = network(MagnitudeMask(OneShot(0.1, step=8)))
    fit(model, UpdateMasks(), epochs=1)  # eight steps
    assert weights(model)[0].live == 51


def test_refusals():
    never = network(MagnitudeMask(OneShot(0.1, step=100)))
    fit(never)
    with pytest.raises(
        NotPrunableError,
        match=r"'hidden/kernel' cannot be stripped.*UpdateMasks\(\).*at least 100",
    ):
        kso.strip(never)
    with pytest.raises(
        NotPrunableError, match=r"UpdateMasks needs.*Received: model="
    ):
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
    (told,) = [
        warning for warning in caught if warning.category is DensityWarning
    ]
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
    (
        model(x),
        model.predict(x, verbose=0),
        model.evaluate(x, np.ones((4, 8)), verbose=0),
    )
    fit(model)
    kso.report(model)
    assert weights(model)[0].live == 51


def test_a_schedule_that_begins_later_is_waited_for(recwarn):
    # 16 steps.
    fit(network(MagnitudeMask(Cubic(0.1, begin_step=17, end_step=20))))
    assert DensityWarning not in [warning.category for warning in recwarn]
    for begin, end in ((9, 20), (0.6, 0.8)):
        with pytest.warns(DensityWarning, match="after 16 steps"):
            fit(
                network(
                    MagnitudeMask(Cubic(0.1, begin_step=begin, end_step=end))
                )
            )


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

    def compute_loss(
        self, x=None, y=None, y_pred=None, sample_weight=None, **kwargs
    ):
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
    with pytest.raises(
        NotPrunableError, match="give it an Input, or call it once"
    ):
        weights(Distiller(student, keras.Sequential([L.Dense(8)])))

    class Own(Distiller):
        def build(self, shape):
            self.scale = self.add_weight(shape=(1,))

    with pytest.raises(
        NotPrunableError, match=r"layers \['own'\] are not built"
    ):
        weights(Own(student, teacher))


# --- structures -----------------------------------------------------------------------------------

RAMP = Cubic(0.25, begin_step=2, end_step=12, frequency=4)
# By structure: entries that live or die together in the kernels of 16 x 32 and 32 x 8, and what a
# mask looks like.
STRUCTURES = {
    "any": (kso.Block(4, 2), 8, 8),
    "regular": (kso.Block(4, 4, regular=True), 128, 128),
    "4x1": ("4x1", 4, 4),
    "1:4": ("1:4", 1, 1),
    "inputs": ("inputs", 32, 8),
    "outputs": ("outputs", 16, 32),
}


def groups(mask, structure):
    """The mask of each group as a row."""
    rows, cols = {"inputs": (1, mask.shape[1]), "outputs": (len(mask), 1)}.get(
        structure,
        (4, 4 if structure == "regular" else 2 if structure == "any" else 1),
    )
    split = mask.reshape(len(mask) // rows, rows, mask.shape[1] // cols, cols)
    return split.transpose(0, 2, 1, 3).reshape(-1, rows * cols)


@pytest.mark.core
@pytest.mark.parametrize("kind", STRUCTURES)
def test_structures_have_exact_counts_and_go_on_from_files(kind, tmp_path):
    structure, *units = STRUCTURES[kind]
    keras.utils.set_random_seed(3)
    model = network(MagnitudeMask(RAMP, structure=structure))
    watch = Watch(
        lambda model: [weight.live for weight in weights(model)], steps=True
    )
    fit(model, UpdateMasks(), watch, shuffle=False)
    for step, live in zip(
        [2, 2, 2, 2, 6, 6, 6, 6, 10, 10, 12, 12, 12, 12],
        watch.seen[2:],
        strict=True,
    ):
        wanted = [
            RAMP.at(step) * size / unit
            for size, unit in zip((512, 256), units, strict=True)
        ]
        assert live == [
            max(round(n), 1) * unit
            for n, unit in zip(wanted, units, strict=True)
        ]
    for weight in weights(model):
        found = groups(weight.mask, kind)
        assert (
            (found.sum(axis=1) == 1).all()
            if kind == "1:4"
            else (found[:, 0] == found.T).all()
        )
        assert not weight.raw_value()[~weight.mask].any()
    keras.utils.set_random_seed(3)
    half = network(MagnitudeMask(RAMP, structure=structure))
    with part_of_a_run():
        fit(half, UpdateMasks(), epochs=1, shuffle=False)
        half.save(tmp_path / "half.keras")
    again = keras.saving.load_model(tmp_path / "half.keras")
    fit(again, UpdateMasks(), initial_epoch=1, shuffle=False)
    assert same(state(again), state(model))


@pytest.mark.core
@pytest.mark.parametrize("policy", ["float32", "mixed_bfloat16"])
def test_what_has_stopped_at_the_end_of_its_schedule_goes_on_on_blocks(policy):
    keras.config.set_dtype_policy(policy)
    rounded = {"atol": 1e-6 if policy == "float32" else 0.03}
    options = {"shuffle": False, "batch_size": 8, "verbose": 0}
    models = []
    for stop in (False, True):
        keras.utils.set_random_seed(3)
        # Which takes no other.
        executed = 1 if keras.backend.backend() == "torch" else 2
        model = network(
            MagnitudeMask(RAMP, structure=(4, 4)), steps_per_execution=executed
        )
        with part_of_a_run():
            model.fit(
                *xy(), epochs=1, **options, callbacks=[UpdateMasks(stop=stop)]
            )
        models.append(model)
    whole, model = models
    fit_on = {**options, "epochs": 2, "initial_epoch": 1}
    whole.fit(*xy(), **fit_on, callbacks=[UpdateMasks()])
    with pytest.raises(
        NotPrunableError,
        match=r"whose schedule has ended. Received: MagnitudeM",
    ):
        kso.convert(model, "blocks")
    model.fit(*xy(), **fit_on, callbacks=[UpdateMasks(stop=True)])
    steps = int(model.optimizer.iterations)
    assert steps == 12 + whole.steps_per_execution  # of 16
    expected = model.predict(xy()[0], verbose=0)
    model = kso.convert(model, "blocks")
    assert all(weight.storage.in_blocks for weight in weights(model))
    np.testing.assert_allclose(
        model.predict(xy()[0], verbose=0), expected, **rounded
    )
    model.fit(*(part[8 * (steps - 8) :] for part in xy()), epochs=1, **options)
    assert (
        int(model.optimizer.iterations) == int(whole.optimizer.iterations) == 16
    )
    for ours, theirs in zip(weights(model), weights(whole), strict=True):
        np.testing.assert_array_equal(ours.mask, theirs.mask)
        np.testing.assert_allclose(
            ours.value, theirs.value, rtol=1e-5, **rounded
        )


def test_structures_that_do_not_fit():
    for structure, error, message in (
        ("rows", ValueError, r'`structure` as text must be "n:m"'),
        (3, ValueError, r'"inputs", "outputs" or None. Received: structure=3'),
        ((3, 3), LayoutError, "inputs divisible by 3"),
        ("1:8", DensityError, "allows at most 0.125. Received: density=0.25"),
    ):
        with pytest.raises(error, match=message):
            network(MagnitudeMask(0.25, structure=structure))
