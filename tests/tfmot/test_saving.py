"""Saving at every stage: masks are intact in a new process, and stripped files need no package."""

import itertools

import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import run_python

pytestmark = [
    pytest.mark.tensorflow_only,
    pytest.mark.filterwarnings("ignore:.*HDF5 file.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*initializer.*:UserWarning"),
]

FORMS = {"keras": "model.keras", "h5": "model.h5", "tf": "model"}
STAGES = ("wrapped", "fitted", "stripped")
KINDS = ("sequential", "functional", "soft")
# All but the one that takes longest, and is as the fitted one.
SAVED = [
    (kind, stage, form)
    for kind in KINDS
    for stage in STAGES
    for form in FORMS
    if (kind, stage, form) != ("functional", "wrapped", "tf")
]


def sequential(tf_keras):
    L = tf_keras.layers
    layers = [
        L.Conv2D(8, 3, activation="relu", name="conv"),
        L.DepthwiseConv2D(3, name="depth"),
    ]
    layers += [L.Flatten(), L.Dense(5, name="head")]
    return tf_keras.Sequential([tf_keras.Input((6, 6, 4)), *layers])


def functional(tf_keras):
    """With a model inside, which is used twice."""
    L = tf_keras.layers
    inner = tf_keras.Sequential(
        [tf_keras.Input((24,)), L.Dense(24, activation="relu", name="a")],
        name="inner",
    )
    inputs = tf_keras.Input((6, 6, 4))
    x = L.Reshape((6, 24))(inputs)
    x = L.GRU(8, return_sequences=True, name="gru")(x)
    x = L.MultiHeadAttention(2, 4, name="attention")(x, x)
    x = L.Dense(24, name="b")(L.BatchNormalization()(L.Flatten()(x)))
    x = inner(L.Add()([x, inner(x)]))
    return tf_keras.Model(inputs, L.Dense(5, name="head")(x))


def soft(tf_keras):
    L = tf_keras.layers
    layers = [
        L.Reshape((6, 24)),
        L.SimpleRNN(12, name="rnn"),
        L.Dense(5, name="head"),
    ]
    return tf_keras.Sequential([tf_keras.Input((6, 6, 4)), *layers])


BUILDERS = {"sequential": sequential, "functional": functional, "soft": soft}
X = np.random.default_rng(0).normal(size=(16, 6, 6, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(16, 5)).astype("float32")


def through_stages(kind):
    """Yields the name of a stage and the model that has come to it."""
    import tensorflow as tf

    tf_keras = kso.tfmot.register_initializers()
    from tensorflow_model_optimization.sparsity.keras import (
        UpdatePruningStep,
        strip_pruning,
    )

    tf.random.set_seed(0)
    model = BUILDERS[kind](tf_keras)
    if kind == "soft":
        # So high that no draw of the kernels is nearly dense, of which `strip_pruning` warns.
        model = kso.tfmot.prune_with_soft_threshold(
            model, "channel", s_init=-1.5
        )
    else:
        model = kso.tfmot.prune_exact_orthogonal(model, 0.4, seed=1)
    yield "wrapped", model
    model.compile(tf_keras.optimizers.Adam(1e-2), "mse")
    model.fit(X, Y, epochs=2, verbose=0, callbacks=[UpdatePruningStep()])
    yield "fitted", model
    yield "stripped", strip_pruning(model)


@pytest.fixture(scope="module")
def fitted():
    """Every kind of model in the middle of training; no test here changes them."""
    return {
        kind: dict(itertools.islice(through_stages(kind), 2))["fitted"]
        for kind in KINDS
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every stage of every kind of model, saved in every form; what each answered."""
    folder = tmp_path_factory.mktemp("stages")
    np.save(folder / "x.npy", X)
    for kind in KINDS:
        for stage, model in through_stages(kind):
            place = folder / f"{kind}_{stage}"
            place.mkdir()
            for form, name in FORMS.items():
                if (kind, stage, form) in SAVED:
                    model.save(place / name, save_format=form)
            arrays = {"y": model(X).numpy()}
            for index, weight in enumerate(kso.tfmot.prunable_weights(model)):
                # A live entry may be 0: away from a 3 x 3's center.
                if weight.state is not None:
                    own = {"value": weight.value, "mask": weight.state.mask()}
                    own |= {
                        "raw": weight.raw_value(),
                        "s": getattr(weight.state, "s", 0),
                    }
                    arrays |= {
                        f"{name}{index}": value for name, value in own.items()
                    }
            np.savez(place / "arrays.npz", **arrays)
    return folder


IN_A_NEW_PROCESS = f"""
import sys
import numpy as np
import tf_keras

x = np.load("x.npy")


def load(place, name):
    model = tf_keras.models.load_model(f"{{place}}/{{name}}")
    arrays = np.load(f"{{place}}/arrays.npz")
    assert np.abs(model(x).numpy() - arrays["y"]).max() < 1e-5, (place, name)
    print(place, name)
    return model, arrays


for kind, stage, form in {SAVED}:
    if stage == "stripped":
        load(f"{{kind}}_stripped", {FORMS}[form])
assert "keras_sparse_ortho" not in sys.modules
assert "tensorflow_model_optimization" not in sys.modules

import keras_sparse_ortho as kso
kso.tfmot

for kind, stage, form in {SAVED}:
    if stage == "stripped":
        continue
    name, key = {FORMS}[form], (kind, stage, form)
    model, arrays = load(f"{{kind}}_{{stage}}", name)
    weights = kso.tfmot.prunable_weights(model)
    assert len(weights) == (9 if kind == "functional" else 3), key
    for index, weight in enumerate(weights):
        value, mask, raw, s = (arrays[f"{{k}}{{index}}"] for k in ("value", "mask", "raw", "s"))
        assert weight.wrapped, (key, weight)
        assert (weight.value == value).all(), (key, weight)
        assert (weight.raw_value() == raw).all(), (key, weight)
        if kind == "soft":
            assert (raw != value).any() and not (raw == 0).any()
            assert (weight.state.s.numpy() == s).all() and s.size > 1
            assert (weight.variable.numpy() == value).all(), (key, weight)
        assert (weight.state.mask() == mask).all(), (key, weight)
        assert not value[~mask].any(), (key, weight)
    if stage == "fitted" and kind in ("functional", "soft"):  # the masks hold when training goes on
        model.fit(x, np.ones((16, 5)), verbose=0)
        for index, weight in enumerate(weights):
            assert not weight.variable.numpy()[~weight.state.mask()].any(), (key, weight)
            assert (weight.value != arrays[f"value{{index}}"]).any()
        if name != "model":  # of a SavedModel tf_keras restores no optimizer
            assert int(model.optimizer.iterations) == 3, key
"""


@pytest.mark.slow  # some 20 seconds: each stage in three forms
def test_every_stage_in_a_new_process(folder):
    """Stripped files load without this package and TFMOT; in the others the masks are intact."""
    done = run_python("-W", "ignore", "-c", IN_A_NEW_PROCESS, cwd=folder)
    assert len(done.splitlines()) == len(SAVED)


@pytest.mark.parametrize("kind", KINDS)
def test_clones(tf_keras, sparsity, fitted, kind):
    """A clone draws the same kernels and masks anew; weights carry over, and stripping works."""
    model = fitted[kind]
    clone = tf_keras.models.clone_model(model)
    weights = kso.tfmot.prunable_weights(clone)
    for old, new in zip(
        kso.tfmot.prunable_weights(model), weights, strict=True
    ):
        assert new.wrapped
        assert kind == "soft" or np.array_equal(
            new.state.mask(), old.state.mask()
        )
        assert (new.value != old.value).any()
    clone.set_weights(model.get_weights())
    np.testing.assert_allclose(clone(X), model(X), atol=1e-6)
    assert kind != "soft" or np.array_equal(clone(X), model(X))
    for weight in weights:
        np.testing.assert_array_equal(weight.variable, weight.value)
    np.testing.assert_allclose(
        sparsity.strip_pruning(clone)(X), model(X), atol=1e-6
    )


@pytest.mark.parametrize("kind", ["sequential", "soft"])
def test_nothing_is_saved_twice(fitted, kind, tmp_path):
    import h5py

    model = fitted[kind]
    # Not compiled: no moments in the file.
    clone = type(model).from_config(model.get_config())
    clone.save_weights(tmp_path / "model.weights.h5")
    sizes = []
    with h5py.File(tmp_path / "model.weights.h5") as file:
        file.visititems(lambda _, one: sizes.append(getattr(one, "size", 0)))
    assert sum(sizes) == sum(np.size(variable) for variable in clone.weights)


def test_a_wrapped_block_from_a_saved_model_with_its_class(tf_keras, tmp_path):
    L = tf_keras.layers

    class Residual(L.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.conv = L.Conv2D(4, 3, padding="same", name="conv")
            self.norm = L.BatchNormalization(name="norm")

        def call(self, x):
            return x + self.norm(self.conv(x))

    inputs = tf_keras.Input((6, 6, 4))
    plain = tf_keras.Model(inputs, Residual(name="block")(inputs))
    held = kso.tfmot.prune_exact_orthogonal(plain, 0.3, seed=0)
    held.save(tmp_path / "model")
    loaded = tf_keras.models.load_model(
        tmp_path / "model", custom_objects={"Residual": Residual}
    )
    x = np.random.default_rng(0).normal(size=(2, 6, 6, 4)).astype("float32")
    np.testing.assert_array_equal(loaded(x), held(x))
    (expected,) = kso.tfmot.prunable_weights(held)
    (weight,) = kso.tfmot.prunable_weights(loaded)
    np.testing.assert_array_equal(weight.mask, expected.mask)
