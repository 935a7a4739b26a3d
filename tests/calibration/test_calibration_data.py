"""Calibration data: rows that are too few, and statistics that are exact moments of all of it."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from tests.helpers import array, assert_same

L = keras.layers
pytestmark = pytest.mark.core


def network(axis=-1):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 4))
    x = L.BatchNormalization(axis=axis, name="first")(L.Dense(6, name="hidden")(inputs))
    x = L.BatchNormalization(name="second")(L.Dense(3, name="head")(L.ReLU()(x)))
    return keras.Model(inputs, x)


def rows(count=150):
    rng = np.random.default_rng(0)
    return (rng.normal(size=(count, 5, 4)) * 3 + np.arange(5.0)[:, None]).astype("float32")


@pytest.mark.parametrize("axis", [-1, 1])
def test_moments_are_exact_and_those_of_the_restored_layers_before(axis):
    model, x = network(axis), rows()
    hidden = array(model.get_layer("hidden")(x))
    assert kso.restore_statistics(model, x) == ["first", "second"]
    others = (0, 1) if axis == -1 else (0, 2)
    first = model.get_layer("first")
    np.testing.assert_allclose(array(first.moving_mean), hidden.mean(others), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(array(first.moving_variance), hidden.var(others), rtol=1e-4)
    outputs = array(model(x, training=False))  # normalized: gamma is 1, beta 0
    np.testing.assert_allclose(outputs.mean((0, 1)), 0, atol=1e-4)
    variance = array(model.get_layer("second").moving_variance)
    np.testing.assert_allclose(outputs.var((0, 1)), variance / (variance + 1e-3), rtol=1e-4)


def test_masked_positions_do_not_count():
    inputs = keras.Input((4, 2))
    norm = L.BatchNormalization(name="norm")
    model = keras.Model(inputs, norm(L.Masking(-1.0)(inputs)))
    x = np.random.default_rng(0).normal(size=(18, 4, 2)).astype("float32")
    x[:, 3] = -1.0
    kso.restore_statistics(model, x)
    kept = x[:, :3].reshape(-1, 2)
    np.testing.assert_allclose(array(norm.moving_mean), kept.mean(0), atol=1e-6)
    np.testing.assert_allclose(array(norm.moving_variance), kept.var(0), atol=1e-5)


def test_refusals_and_failures():
    plain = keras.Sequential([keras.Input((4,)), L.Dense(3)])
    with pytest.raises(NotPrunableError, match=r"must have layers BatchNormalization. Received"):
        kso.restore_statistics(plain, np.zeros((4, 4), "float32"))

    class Failing(L.Layer):
        def call(self, x):
            raise RuntimeError("half way")

        def compute_output_shape(self, shape):
            return shape

    inputs = keras.Input((4,))
    norm = L.BatchNormalization()
    model = keras.Model(inputs, Failing()(norm(inputs)))
    before = norm.get_weights()
    with pytest.raises(RuntimeError, match="half way"):
        kso.restore_statistics(model, np.arange(400.0).reshape(100, 4))
    assert_same(before, norm.get_weights())


class Interrupting(L.Layer):
    """Stands behind a normalization; Ctrl-C once the statistics of that one were set."""

    def __init__(self, norm):
        super().__init__()
        self.norm = [norm]  # a list: it is no part of this layer
        self.armed = False

    def call(self, x):
        if self.armed and array(self.norm[0].moving_mean).any():
            raise KeyboardInterrupt
        return x

    def compute_output_shape(self, shape):
        return shape


def test_an_interrupt_half_way_restores_what_was_set():
    inputs = keras.Input((4,))
    first, second = L.BatchNormalization(), L.BatchNormalization()
    stop = Interrupting(first)
    model = keras.Model(inputs, second(stop(first(inputs))))
    before = model.get_weights()
    stop.armed = True
    with pytest.raises(KeyboardInterrupt):
        kso.restore_statistics(model, np.arange(1.0, 401.0).reshape(100, 4))
    assert_same(before, model.get_weights())


def test_frozen_layers_keep_their_statistics():
    model, x = network(), rows()
    first, second = model.get_layer("first"), model.get_layer("second")
    first.trainable = False
    before = first.get_weights()
    assert kso.restore_statistics(model, x) == ["second"]
    assert_same(before, first.get_weights())
    assert np.abs(array(second.moving_mean)).max() > 0.01
    model.trainable = False
    statistics = second.get_weights()
    with pytest.warns(UserWarning, match=r"Set `trainable = True`.*for 'first', 'second'") as told:
        assert kso.restore_statistics(model, x) == []
    assert told[0].filename == __file__
    assert_same(statistics, second.get_weights())


def small(inputs=6):
    keras.utils.set_random_seed(0)
    layers = [L.Dense(8, name="a"), L.BatchNormalization(), L.Dense(3, name="b")]
    return keras.Sequential([keras.Input((inputs,)), *layers])


def some_rows(count, inputs=6):
    return np.random.default_rng(0).normal(size=(count, inputs)).astype("float32")


USES = {
    "obs": lambda model, x: kso.prune(model, 0.5, score="obs", data=x),
    "wanda": lambda model, x: kso.prune(model, 0.5, score="wanda", data=x),
    "refit": lambda model, x: kso.prune(model, 0.5, data=x),
    "statistics": kso.restore_statistics,
}


@pytest.mark.parametrize("use", USES)
def test_few_rows_and_equal_rows_warn_at_the_line_of_the_user(use):
    for x, received in (
        (some_rows(15), "15 different among 15 rows"),
        (np.repeat(some_rows(1), 70, axis=0), "1 different among 70 rows"),
        ([(some_rows(10),)] * 3, "10 different among 30 rows"),
    ):
        with pytest.warns(UserWarning, match=f"at least 16 different rows.*{received}") as told:
            USES[use](small(), x)
        ours = {warning.filename for warning in told if "different" in str(warning.message)}
        assert ours == {__file__}
    USES[use](small(), some_rows(16))  # no warning


def test_rows_of_several_inputs_differ_where_one_input_does():
    inputs = [keras.Input((3,)), keras.Input((3,))]
    model = keras.Model(inputs, L.Dense(2)(L.Concatenate()(inputs)))
    x = [np.ones((20, 3), "float32"), some_rows(20, 3)]
    kso.prune(model, 0.5, score="obs", data=(x,))  # no warning
    with pytest.warns(UserWarning, match="1 different among 20 rows"):
        kso.prune(model, 0.5, score="obs", data=([x[0], x[0]],))
