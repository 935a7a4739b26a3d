"""What holds for every learnt or scheduled parametrization, on every backend, under XLA."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import TargetDensity, UpdateMasks
from keras_sparse_ortho.parametrizations import (
    Feather,
    MagnitudeMask,
    SoftThreshold,
    StraightThroughTopK,
)
from keras_sparse_ortho.schedules import Cubic
from tests.callbacks.runs import same, state
from tests.helpers import (
    classifier_loss,
    data,
    jit,
    jit_if_quicker,
    moments,
    part_of_a_run,
    slow_on_tensorflow,
)

pytestmark = pytest.mark.core
L = keras.layers

RAMP = Cubic(0.2, begin_step=2, end_step=10, frequency=3)

# Template and the callback that it needs, by name.
METHODS = {
    "magnitude": (lambda: MagnitudeMask(RAMP), lambda: UpdateMasks()),
    "feather": (lambda: Feather(RAMP, theta=0.5), lambda: UpdateMasks()),
    "top_k": (
        lambda: StraightThroughTopK(0.2, frequency=3),
        lambda: UpdateMasks(),
    ),
    "soft": (
        lambda: SoftThreshold(s_init=-3.0, weight_decay=1e-3),
        lambda: TargetDensity(0.2, RAMP),
    ),
    "soft_channel": (
        lambda: SoftThreshold("channel", s_init=-3.0),
        lambda: TargetDensity(
            0.2, Cubic(0.2, 0, 10, frequency=4), freeze=False
        ),
    ),
}


def network(method):
    """A convolution, normalization and dense layers, parametrized."""
    inputs = keras.Input((6, 6, 2))
    x = L.Conv2D(6, 3, use_bias=False, name="conv")(inputs)
    x = L.ReLU()(L.BatchNormalization(name="norm")(x))
    x = L.Dense(12, activation="relu", name="hidden")(L.Flatten()(x))
    model = keras.Model(inputs, L.Dense(3, name="head")(x))
    return kso.parametrize(model, METHODS[method][0]())


def compiled(method, optimizer="adamw", **options):
    """The network with fixed seeds, ready for `fit`, by default under XLA."""
    options.setdefault("jit_compile", jit())
    keras.utils.clear_session()
    keras.utils.set_random_seed(5)
    model = network(method)
    algorithm = {
        "adamw": lambda: keras.optimizers.AdamW(1e-2, weight_decay=0.05),
        "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    }[optimizer]()
    model.compile(algorithm, classifier_loss(), **options)
    return model


def fit(model, method, epochs, **options):
    """Trains four steps an epoch."""
    x, y = data(model, 3)
    callbacks = [METHODS[method][1](), *options.pop("callbacks", [])]
    options = {"batch_size": 8, "shuffle": False, "verbose": 0, **options}
    return model.fit(x, y, epochs=epochs, callbacks=callbacks, **options)


X = np.random.default_rng(1).normal(size=(5, 6, 6, 2)).astype("float32")


def _runs():
    """Each method under XLA; in every run some of them only, where XLA compiles, and one without.

    torch, where nothing is compiled, has all of them in every run.
    """
    backend, each = keras.backend.backend(), pytest.mark.each_backend
    quick = {"tensorflow": ["soft"], "jax": ["soft", "top_k"]}.get(
        backend, METHODS
    )
    for method in METHODS:
        if backend == "tensorflow" and method not in quick:
            marks = [each] if method == "top_k" else [pytest.mark.slow]
            yield pytest.param((method, False), id=method, marks=marks)
        marks = [each] if method in quick else [pytest.mark.slow]
        yield pytest.param(
            (method, jit(always=True)), id=f"{method}-xla", marks=marks
        )


@pytest.fixture(scope="module", params=_runs())
def run(request, tmp_path_factory):
    """A run in one go, and one that was saved half-way: compiled once each for all tests."""
    method, xla = request.param
    return Run(method, "adamw", tmp_path_factory.mktemp(method), xla)


class Run:
    def __init__(self, method, optimizer, folder, xla):
        self.method = method
        self.whole = compiled(method, optimizer, jit_compile=xla)
        # Four steps an epoch: the ramp is in its middle after two epochs, with its end to come.
        fit(self.whole, method, epochs=4)
        self.half = compiled(method, optimizer, jit_compile=xla)
        self.file = folder / "half.keras"
        with part_of_a_run():
            fit(self.half, method, epochs=2)
            self.half.save(self.file)


def test_counts_are_exact_in_the_end(run):
    method, model = run.method, run.whole
    weights = kso.prunable_weights(model)
    assert len(weights) == 3
    if method.startswith("soft"):
        assert sum(w.live for w in weights) == round(
            0.2 * sum(w.size for w in weights)
        )
        assert all(
            w.parametrization.frozen == (method == "soft") for w in weights
        )
    else:
        assert [w.live for w in weights] == [
            round(0.2 * w.size) for w in weights
        ]
    for weight in weights:
        dead = ~weight.parametrization.mask_value()
        assert not weight.value[dead].any()
        if method in ("magnitude", "soft"):  # sparse gradients
            assert not weight.raw_value()[dead].any()
            assert not any(
                slot[dead].any()
                for slot in moments(model.optimizer, weight.variable)
            )


def test_strip_gives_equal_outputs_and_the_same_zeros(run):
    model = run.whole
    counts = [w.live for w in kso.prunable_weights(model)]
    expected = model.predict(X, verbose=0)
    plain = kso.strip(model)
    np.testing.assert_allclose(plain.predict(X, verbose=0), expected, atol=1e-6)
    assert [w.live for w in kso.prunable_weights(plain)] == counts


def test_saving_and_cloning(run, tmp_path):
    model = run.half
    expected = model.predict(X, verbose=0)
    with part_of_a_run():
        model.save_weights(tmp_path / "model.weights.h5")
    loaded = keras.models.load_model(run.file)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    other = network(run.method)
    other.load_weights(tmp_path / "model.weights.h5")
    for copy in (loaded, clone, other):
        # Not compiled alike: XLA rounds otherwise.
        np.testing.assert_allclose(
            copy.predict(X, verbose=0), expected, rtol=1e-5, atol=1e-6
        )
        for ours, theirs in zip(
            kso.prunable_weights(model), kso.prunable_weights(copy), strict=True
        ):
            assert ours.path == theirs.path
            assert ours.live == theirs.live
            np.testing.assert_array_equal(ours.raw_value(), theirs.raw_value())
            a, b = ours.parametrization, theirs.parametrization
            assert a.get_config() == b.get_config()
            if isinstance(a, SoftThreshold):
                np.testing.assert_array_equal(
                    a.threshold_value(), b.threshold_value()
                )
                assert a.target_density == b.target_density == 0.2


def test_resumed_training_equals_training_in_one_go(run):
    resumed = keras.models.load_model(run.file)
    fit(resumed, run.method, epochs=4, initial_epoch=2)
    assert same(state(run.whole), state(resumed))


@slow_on_tensorflow
def test_resumed_training_with_another_optimizer(tmp_path):
    run = Run("soft", "sgd", tmp_path, jit_if_quicker())
    test_resumed_training_equals_training_in_one_go(run)


@pytest.mark.parametrize("method", METHODS)
def test_a_mask_change_does_not_recompile(method):
    traced = []

    class Counted(keras.layers.Layer):
        def call(self, inputs):
            traced.append(1)
            return inputs

    keras.utils.set_random_seed(0)
    inputs = keras.Input((6,))
    hidden = keras.layers.Dense(8, name="hidden")(Counted()(inputs))
    model = keras.Model(inputs, keras.layers.Dense(3, name="head")(hidden))
    model = kso.parametrize(model, METHODS[method][0]())
    model.compile("adam", "mse", jit_compile=keras.backend.backend() != "torch")
    x, y = np.ones((48, 6), "float32"), np.ones((48, 3), "float32")
    callback = METHODS[method][1]()
    model.fit(x, y, batch_size=4, epochs=1, verbose=0, callbacks=[callback])
    first = len(traced)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[callback])
    compiled_once = keras.backend.backend() != "torch"
    assert not compiled_once or len(traced) == first


@pytest.mark.parametrize(
    "method", ["soft", pytest.param("magnitude", marks=pytest.mark.slow)]
)
def test_steps_per_execution_ends_with_the_same_counts(method):
    # torch has one step an execution.
    many = (
        {} if keras.backend.backend() == "torch" else {"steps_per_execution": 4}
    )
    model = compiled(method, **many)
    fit(model, method, epochs=4)
    weights = kso.prunable_weights(model)
    assert sum(w.live for w in weights) == round(
        0.2 * sum(w.size for w in weights)
    )
