"""Calibration data: rows that are too few, and statistics that are exact moments of all of it."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.calibration import (
    _restore_statistics,
    calibration_batches,
)
from keras_sparse_ortho.errors import NotPrunableError
from tests.helpers import array, assert_same

L = keras.layers
pytestmark = pytest.mark.core


def network(axis=-1):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5, 4))
    x = L.BatchNormalization(axis=axis, name="first")(
        L.Dense(6, name="hidden")(inputs)
    )
    x = L.BatchNormalization(name="second")(
        L.Dense(3, name="head")(L.ReLU()(x))
    )
    return keras.Model(inputs, x)


def rows(count=150):
    rng = np.random.default_rng(0)
    return (
        rng.normal(size=(count, 5, 4)) * 3 + np.arange(5.0)[:, None]
    ).astype("float32")


@pytest.mark.parametrize("axis", [-1, 1])
def test_moments_are_exact_and_those_of_the_restored_layers_before(axis):
    model, x = network(axis), rows()
    hidden = array(model.get_layer("hidden")(x))
    assert kso.restore_statistics(model, x) == ["first", "second"]
    others = (0, 1) if axis == -1 else (0, 2)
    first = model.get_layer("first")
    np.testing.assert_allclose(
        array(first.moving_mean), hidden.mean(others), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        array(first.moving_variance), hidden.var(others), rtol=1e-4
    )
    outputs = array(model(x, training=False))  # normalized: gamma is 1, beta 0
    np.testing.assert_allclose(outputs.mean((0, 1)), 0, atol=1e-4)
    variance = array(model.get_layer("second").moving_variance)
    np.testing.assert_allclose(
        outputs.var((0, 1)), variance / (variance + 1e-3), rtol=1e-4
    )


def test_masked_positions_do_not_count():
    inputs = keras.Input((4, 2))
    norm = L.BatchNormalization(name="norm")
    model = keras.Model(inputs, norm(L.Masking(-1.0)(inputs)))
    x = np.random.default_rng(0).normal(size=(18, 4, 2)).astype("float32")
    x[:, 3] = -1.0
    kso.restore_statistics(model, x)
    kept = x[:, :3].reshape(-1, 2)
    np.testing.assert_allclose(array(norm.moving_mean), kept.mean(0), atol=1e-6)
    np.testing.assert_allclose(
        array(norm.moving_variance), kept.var(0), atol=1e-5
    )


def test_refusals_and_failures():
    plain = keras.Sequential([keras.Input((4,)), L.Dense(3)])
    with pytest.raises(
        NotPrunableError, match=r"must have layers BatchNormalization. Received"
    ):
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
    with pytest.warns(
        UserWarning, match=r"Set `trainable = True`.*for 'first', 'second'"
    ) as told:
        assert kso.restore_statistics(model, x) == []
    assert told[0].filename == __file__
    assert_same(statistics, second.get_weights())


def trained():
    """A network of four classes, whose statistics are those of all of them; and its rows."""
    keras.utils.set_random_seed(0)
    rng = np.random.default_rng(0)
    centers = 2 * rng.normal(size=(4, 16))
    classes = np.arange(800) % 4
    x = (centers[classes] + rng.normal(size=(800, 16))).astype("float32")
    layers = [keras.Input((16,))]
    for k in range(2):
        layers += [
            L.Dense(24, use_bias=False),
            L.BatchNormalization(name=f"norm_{k}"),
            L.ReLU(),
        ]
    model = keras.Sequential([*layers, L.Dense(4, activation="softmax")])
    model.compile(
        keras.optimizers.Adam(1e-2), "sparse_categorical_crossentropy"
    )
    model.fit(x, classes, epochs=8, batch_size=50, verbose=0)
    for norm in (model.get_layer("norm_0"), model.get_layer("norm_1")):
        assert not np.all(array(norm.moving_mean) == 0)
    return model, x, classes


@pytest.fixture(scope="module")
def of_four():
    return trained()


def agreement(one, other, x):
    return np.mean(array(one(x)).argmax(-1) == array(other(x)).argmax(-1))


def distance(one, other, x):
    return np.mean((array(one(x)) - array(other(x))) ** 2)


def test_statistics_of_a_network_that_was_not_pruned_stay_to_the_last_bit(
    of_four,
):
    model, x, classes = of_four
    before = [array(value) for value in model.get_weights()]
    other_rows = x[classes == 0]
    with pytest.warns(
        UserWarning, match=r"reference=dense\).*for 'norm_0', 'norm_1'"
    ) as told:
        assert kso.restore_statistics(model, other_rows) == []
    (warning,) = [each for each in told if each.category is UserWarning]
    assert warning.filename == __file__
    kso.restore_statistics(model, other_rows, reference=model)
    assert_same(before, model.get_weights())
    whole = kso.prune(model, 1.0)
    kso.restore_statistics(whole, other_rows)
    for name in ("norm_0", "norm_1"):
        assert_same(
            model.get_layer(name).weights, whole.get_layer(name).weights
        )


def test_rows_like_those_of_training_restore_statistics(of_four):
    model, x, _ = of_four
    reference = kso.strip(model)  # another object with the same weights
    pruned = kso.prune(model, 0.08, budget="uniform")
    before = distance(pruned, model, x[256:])
    # Made from `model`.
    assert kso.restore_statistics(pruned, x[:256]) == [
        "norm_0",
        "norm_1",
    ]
    assert distance(pruned, model, x[256:]) < before
    again = kso.prune(model, 0.08, budget="uniform")
    kso.restore_statistics(again, x[:256], reference=reference)
    np.testing.assert_allclose(array(again(x)), array(pruned(x)), atol=1e-4)


def test_rows_of_one_class_cost_less_than_their_exact_moments(of_four):
    model, x, classes = of_four
    rows = x[classes == 0]
    pruned = kso.prune(model, 0.15, budget="uniform")
    of_rows = kso.prune(model, 0.15, budget="uniform")
    kso.restore_statistics(pruned, rows)
    for name in ("norm_0", "norm_1"):
        reset(of_rows.get_layer(name))
    # Without a reference: layers get the moments of the rows.
    fresh = from_nothing(of_rows)
    kso.restore_statistics(fresh, rows)
    assert agreement(pruned, model, x) > agreement(fresh, model, x) + 0.05


def reset(norm):
    """Gives a layer the statistics that it was made with."""
    norm.moving_mean.assign(np.zeros(norm.moving_mean.shape))
    norm.moving_variance.assign(np.ones(norm.moving_variance.shape))


def from_nothing(model):
    """The plain Keras model, which remembers no model before it."""
    plain = kso.strip(model)
    copy = keras.models.clone_model(plain)
    copy.set_weights(plain.get_weights())
    return copy


def test_statistics_move_with_scale_and_shift():
    inputs = keras.Input((2,))
    dense = keras.Model(
        inputs, L.BatchNormalization(name="norm")(L.Dense(2, name="a")(inputs))
    )
    dense.get_layer("a").set_weights([np.eye(2), np.zeros(2)])
    statistics = np.array([3.0, -1.0]), np.array([4.0, 9.0])
    dense.get_layer("norm").set_weights([np.ones(2), np.zeros(2), *statistics])
    other = keras.models.clone_model(dense)
    other.set_weights(dense.get_weights())
    other.get_layer("a").set_weights(
        [np.diag([0.5, 1.0]), np.array([1.0, 0.0])]
    )
    kso.restore_statistics(other, some_rows(40, 2), reference=dense)
    *_, mean, variance = other.get_layer("norm").get_weights()
    np.testing.assert_allclose(mean, [0.5 * 3.0 + 1.0, -1.0], rtol=1e-5)
    np.testing.assert_allclose(variance, [0.25 * 4.0, 9.0], rtol=1e-5)


def test_held_out_rows_keep_the_statistics_that_they_prefer(
    of_four, monkeypatch
):
    model, x, _ = of_four
    pruned = kso.prune(model, 0.12, budget="uniform")
    before = [array(value) for value in pruned.get_weights()]
    distances = iter([1.0, 2.0])
    monkeypatch.setattr(
        _restore_statistics, "_distance", lambda *_: next(distances)
    )
    assert kso.restore_statistics(pruned, x[:64]) == []
    assert_same(before, pruned.get_weights())


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, ValueError])
def test_an_interrupt_at_the_end_puts_statistics_back(
    of_four, interrupt, monkeypatch
):
    model, x, _ = of_four
    pruned = kso.prune(model, 0.12, budget="uniform")
    before = [array(value) for value in pruned.get_weights()]
    calls = []

    def failing(*_):
        calls.append(1)
        if len(calls) == 2:
            raise interrupt("half way")
        return 1.0

    monkeypatch.setattr(_restore_statistics, "_distance", failing)
    with pytest.raises(interrupt, match="half way"):
        kso.restore_statistics(pruned, x[:64])
    assert_same(before, pruned.get_weights())


def test_a_reference_of_another_form_is_refused(of_four):
    model, x, _ = of_four
    with pytest.raises(
        ValueError, match=r"`reference` must be .*lacks 'norm_0', 'norm_1'"
    ):
        kso.restore_statistics(
            kso.prune(model, 0.5), x[:64], reference=small(16)
        )


def small(inputs=6):
    keras.utils.set_random_seed(0)
    layers = [
        L.Dense(8, name="a"),
        L.BatchNormalization(),
        L.Dense(3, name="b"),
    ]
    return keras.Sequential([keras.Input((inputs,)), *layers])


def some_rows(count, inputs=6):
    return (
        np.random.default_rng(0).normal(size=(count, inputs)).astype("float32")
    )


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
        with pytest.warns(
            UserWarning, match=f"at least 16 different rows.*{received}"
        ) as told:
            USES[use](small(), x)
        ours = {
            warning.filename
            for warning in told
            if "different" in str(warning.message)
        }
        assert ours == {__file__}
    USES[use](small(), some_rows(16))  # no warning


def test_rows_of_several_inputs_differ_where_one_input_does():
    inputs = [keras.Input((3,)), keras.Input((3,))]
    model = keras.Model(inputs, L.Dense(2)(L.Concatenate()(inputs)))
    x = [np.ones((20, 3), "float32"), some_rows(20, 3)]
    kso.prune(model, 0.5, score="obs", data=(x,))  # no warning
    with pytest.warns(UserWarning, match="1 different among 20 rows"):
        kso.prune(model, 0.5, score="obs", data=([x[0], x[0]],))


class Wrapped(keras.Model):
    """A model that is no graph."""

    def __init__(self):
        super().__init__()
        self.dense = L.Dense(3)

    def call(self, inputs):
        return self.dense(inputs)


def of_layers(shape, *layers):
    return keras.Sequential([keras.Input(shape), *layers])


@pytest.mark.parametrize(
    ("model", "first_batch"),
    [
        (of_layers((4,), L.Dense(3)), 512),
        (of_layers((64, 64, 3), L.Conv2D(8, 1)), 128),
        (of_layers((64, 64, 3), of_layers((64, 64, 3), L.Conv2D(9, 1))), 64),
        (of_layers((128, 8), L.Dense(8)), 64),  # attention would have scores
        (of_layers((None, 4), L.Dense(3)), 64),
        (of_layers((8, 8, 3), L.Resizing(64, 64), L.Flatten()), 320),
        (keras.Sequential([keras.Input(batch_shape=(64, 4)), L.Dense(3)]), 64),
        (Wrapped(), 64),
    ],
)
def test_arrays_go_in_batches_by_the_largest_tensor(model, first_batch):
    sizes = [4]
    if not isinstance(model, Wrapped):
        sizes = [size or 5 for size in model.inputs[0].shape[1:]]
    x = np.random.default_rng(0).normal(size=(520, *sizes)).astype("float32")
    model(x[:64])
    *batches, rest = calibration_batches(model, x)
    assert {len(batch) for batch in batches} == {first_batch}
    assert len(rest) == 520 % first_batch
    joined = np.concatenate([array(batch) for batch in (*batches, rest)])
    np.testing.assert_array_equal(joined, x)
