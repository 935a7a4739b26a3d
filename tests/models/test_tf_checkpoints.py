"""`tf.train.Checkpoint` and SavedModels of all that public functions return.

Plain Keras saves neither the layers that a class keeps in a list, nor variables without an
attribute: so every test compares all variables.
"""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import SET, TargetDensity, UpdateMasks
from keras_sparse_ortho.initializers import ExactOrthogonal
from keras_sparse_ortho.layers import BlockSparseDense
from keras_sparse_ortho.parametrizations import (
    CompactMask,
    Feather,
    LowRankSoftThreshold,
)
from keras_sparse_ortho.schedules import Cubic
from tests.helpers import array, part_of_a_run, reloaded
from tests.models.returned import CASES, CLASSES, RETURNED, x

L = keras.layers
pytestmark = pytest.mark.tensorflow_only
y = np.random.default_rng(1).normal(size=(len(x), CLASSES)).astype("float32")


def disturb(model):
    """Changes all numbers, and the step of the last update: no value is that of another model."""
    for variable in model.weights:
        if "float" in variable.dtype:
            variable.assign_add(
                np.random.default_rng(2).uniform(0.1, 0.2, variable.shape)
            )
        elif variable.shape == ():
            variable.assign(7)


def assert_equal(variables, others):
    for ours, theirs in zip(variables, others, strict=True):
        np.testing.assert_array_equal(
            array(ours), array(theirs), err_msg=ours.path
        )


def assert_same(one, two):
    assert_equal(one.weights, two.weights)
    np.testing.assert_array_equal(array(one(x)), array(two(x)))


@pytest.mark.parametrize("name", CASES)
def test_checkpoint(name, tmp_path):
    import tensorflow as tf

    one, two = RETURNED[name](), RETURNED[name]()
    disturb(one)
    path = tf.train.Checkpoint(model=one).save(str(tmp_path / "model"))
    # A graph and a counter.
    assert len(tf.train.list_variables(path)) == len(one.weights) + 2
    status = tf.train.Checkpoint(model=two).restore(path)
    status.assert_existing_objects_matched().assert_consumed()
    assert_same(one, two)


@pytest.mark.parametrize("kind", ["sequential", "custom_layer", "subclassed"])
@pytest.mark.parametrize("storage", ["masked", "compact", "blocks"])
def test_checkpoints_of_loaded_models_are_those_of_returned_ones(
    storage, kind, tmp_path
):
    import tensorflow as tf

    returned = RETURNED[f"{storage} of {kind}"]()
    loaded = reloaded(returned, tmp_path)
    for number, (one, two) in enumerate(
        [(returned, loaded), (loaded, returned)]
    ):
        disturb(one)
        path = tf.train.Checkpoint(model=one).save(
            str(tmp_path / f"model{number}")
        )
        tf.train.Checkpoint(model=two).restore(
            path
        ).assert_existing_objects_matched()
        assert_same(one, two)


def compiled(model):
    model.compile(keras.optimizers.Adam(0.01), "mse", jit_compile=False)
    return model


RUNS = {
    "magnitude": (
        lambda: kso.parametrize(
            dense(), kso.MagnitudeMask(Cubic(0.2, 0, end_step=16, frequency=2))
        ),
        UpdateMasks,
    ),
    "soft": (
        lambda: kso.parametrize(dense(), kso.SoftThreshold(s_init=-3.0)),
        lambda: TargetDensity(0.2, Cubic(None, 0, end_step=16, frequency=2)),
    ),
    "SET": (
        lambda: kso.sparsify(dense(), 0.5, storage="compact"),
        lambda: SET(frequency=2, end_step=16),
    ),
}


def dense():
    return keras.Sequential(
        [
            keras.Input(x.shape[1:]),
            L.Flatten(),
            L.Dense(16, "tanh", name="a"),
            L.Dense(CLASSES, name="b"),
        ]
    )


@pytest.mark.parametrize("run", RUNS)
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(
    run, tmp_path
):
    import tensorflow as tf

    make, callback = RUNS[run]

    def fit(model, epochs):
        with part_of_a_run():
            options = {"batch_size": 4, "shuffle": False, "verbose": 0}
            model.fit(x, y, epochs=epochs, callbacks=[callback()], **options)

    def managed(model):
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        return tf.train.CheckpointManager(
            checkpoint, str(tmp_path), max_to_keep=1
        )

    one, two = compiled(make()), compiled(make())
    fit(one, 3)
    managed(one).save()
    status = managed(two).checkpoint.restore(managed(two).latest_checkpoint)
    status.assert_existing_objects_matched()
    for model in (one, two):
        fit(model, 2)
    status.assert_consumed()
    assert_same(one, two)
    assert_equal(one.optimizer.variables, two.optimizer.variables)


def test_a_converted_optimizer_is_in_the_checkpoint(tmp_path):
    import tensorflow as tf

    def converted(epochs):
        model = compiled(kso.sparsify(dense(), 0.5))
        model.fit(x, y, epochs=epochs, verbose=0)
        return kso.convert(model, "compact")

    one, two = converted(2), converted(1)
    path = tf.train.Checkpoint(model=one).save(str(tmp_path / "model"))
    tf.train.Checkpoint(model=two).restore(path).assert_consumed()
    assert_equal(one.optimizer.variables, two.optimizer.variables)


LAYERS = {
    "masked": lambda: kso.PrunableLayer(
        L.Dense(16, kernel_initializer=ExactOrthogonal(0.5))
    ),
    "compact": lambda: kso.PrunableLayer(
        L.Dense(16, kernel_initializer=ExactOrthogonal(0.5)), CompactMask()
    ),
    "feather": lambda: kso.PrunableLayer(L.Dense(16), Feather(0.5)),
    "low rank": lambda: kso.PrunableLayer(L.Dense(16), LowRankSoftThreshold()),
    "quantized": lambda: BlockSparseDense(
        16,
        density=0.5,
        block=4,
        quantizer=kso.parametrizations.FakeQuantization(),
    ),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_a_checkpoint_waits_for_layers_that_are_built_later(layer, tmp_path):
    import tensorflow as tf

    def unbuilt():
        return keras.Sequential([LAYERS[layer](), L.Dense(CLASSES)])

    one, two = unbuilt(), unbuilt()
    one(x)
    disturb(one)
    path = tf.train.Checkpoint(model=one).save(str(tmp_path / "model"))
    status = tf.train.Checkpoint(model=two).restore(path)
    two(x)
    status.assert_existing_objects_matched().assert_consumed()
    assert_same(one, two)


QUICK = ["masked of functional", "compact of subclassed", "blocks of recurrent"]


@pytest.mark.parametrize(
    "name",
    [
        *QUICK,
        *(
            pytest.param(n, marks=pytest.mark.slow)
            for n in RETURNED
            if n not in QUICK
        ),
    ],
)
def test_saved_model(name, tmp_path):
    import tensorflow as tf

    model = RETURNED[name]()
    tf.saved_model.save(model, str(tmp_path))
    serve = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
    (argument,) = serve.structured_input_signature[1]
    # The signature of a subclassed model has the batch size that it was called with.
    row = x[:1]
    (outputs,) = serve(**{argument: tf.constant(row)}).values()
    np.testing.assert_allclose(array(outputs), array(model(row)), atol=1e-5)


def test_a_trained_model_can_be_a_saved_model_and_be_trained_on(tmp_path):
    import tensorflow as tf

    model = compiled(RETURNED["compact of custom_layer"]())
    model.fit(x, y, verbose=0)
    tf.saved_model.save(model, str(tmp_path))
    model.fit(x, y, verbose=0)
