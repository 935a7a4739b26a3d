"""Structured STR: thresholds of channels, and of the values between two thin factors."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import PrunableLayer
from keras_sparse_ortho.callbacks import TargetDensity
from keras_sparse_ortho.errors import NotPrunableError
from keras_sparse_ortho.parametrizations import (
    ChannelSoftThreshold,
    LowRankSoftThreshold,
)
from keras_sparse_ortho.schedules import Cubic
from tests.helpers import (
    array,
    classifier_loss,
    data,
    jit_if_quicker,
    reloaded,
    slow_on_jax,
    slow_on_tensorflow,
)
from tests.parametrizations.test_gradients import (
    COEFFICIENTS,
    FUNCTIONS,
    KERNEL,
    assert_finite_differences,
    built,
    differentiated,
    effective_value,
)

L = keras.layers
# Scales of 0, below, at, and above the thresholds that the tests have.
SCALED = (
    KERNEL
    / np.sqrt(np.mean(KERNEL**2, axis=0))
    * np.array([0, 0.2, 0.7, 1.1, 2], "float32")
)


@pytest.mark.core
@pytest.mark.parametrize("g", FUNCTIONS)
def test_gradients_of_channels_are_those_of_the_formula(g):
    model, made = built(ChannelSoftThreshold(g, s_init=-0.5))
    made.weight.variable.assign(SCALED)
    function, derivative = FUNCTIONS[g]
    t = function(-0.5)
    w = SCALED.astype("float64")
    n = np.sqrt(np.mean(w**2, axis=0))
    live = n > t
    assert list(live[[0, 1, 4]]) == [False, False, True]
    safe = np.where(live, n, 1)
    np.testing.assert_allclose(
        effective_value(made), np.where(live, w * (1 - t / safe), 0), atol=1e-6
    )
    assert not effective_value(made)[:, ~live].any()
    np.testing.assert_array_equal(made.live_channels(), live)

    inner = (COEFFICIENTS * w).sum(axis=0)
    own = (1 - t / safe) * COEFFICIENTS + t / (6 * safe**3) * inner * w
    found = differentiated(model)
    np.testing.assert_allclose(
        found["kernel"], np.where(live, own, 0), rtol=2e-5, atol=1e-5
    )
    expected = -derivative(-0.5) * np.sum(np.where(live, inner / safe, 0))
    np.testing.assert_allclose(
        found["kernel_s"], expected, rtol=2e-5, atol=1e-6
    )
    assert_finite_differences(
        model, made.weight.variable, found["kernel"], step=2e-3
    )
    assert_finite_differences(model, made.s, found["kernel_s"], step=1e-2)
    # Channels of zeros have no gradient, even without a threshold.
    made.s.assign(-200.0)
    found = differentiated(model)
    assert not found["kernel"][:, 0].any()
    assert np.isfinite(found["kernel_s"])


@pytest.mark.core
def test_frozen_channels():
    model, made = built(ChannelSoftThreshold(s_init=-0.5))
    made.weight.variable.assign(SCALED)
    effective = effective_value(made)
    mask = np.repeat([[False, True, False, True, True]], 6, axis=0)
    mask[0, 2] = True  # less than half of a channel: it goes
    mask[:3, 4] = False  # just half of one: it stays
    live = made.freeze(mask)
    np.testing.assert_array_equal(live[0], [False, True, False, True, True])
    np.testing.assert_array_equal(made.mask_value(), live)
    # The third lived by its scale, the second did not: it stays, much smaller.
    np.testing.assert_allclose(
        effective_value(made)[:, 3:], effective[:, 3:], atol=1e-7
    )
    np.testing.assert_allclose(
        effective_value(made)[:, 1], 1e-6 * SCALED[:, 1], rtol=1e-5
    )
    found = differentiated(model)
    np.testing.assert_allclose(
        found["kernel"], np.where(live, COEFFICIENTS, 0), rtol=1e-5
    )
    assert found["kernel_s"] == 0
    assert made.frozen


KINDS = {
    "dense": (L.Dense(6), (4,), (4, 6), 6),
    "convolution": (L.Conv2D(5, 3), (6, 6, 2), (3, 3, 2, 5), 5),
    "depthwise": (
        L.DepthwiseConv2D(3, depth_multiplier=2),
        (6, 6, 3),
        (3, 3, 3, 2),
        6,
    ),
    "transposed": (L.Conv2DTranspose(5, 3), (6, 6, 2), (3, 3, 5, 2), 5),
    "einsum": (
        L.EinsumDense("abc,cde->abde", (None, 2, 3)),
        (4, 5),
        (5, 2, 3),
        6,
    ),
}


@pytest.mark.core
@pytest.mark.parametrize("kind", KINDS)
def test_channels_are_the_outputs_of_the_layer(kind):
    layer, inputs, shape, count = KINDS[kind]
    layer = PrunableLayer(
        type(layer).from_config(layer.get_config()), ChannelSoftThreshold()
    )
    layer.build((None, *inputs))
    [made] = layer.parametrizations.values()
    assert made.weight.shape == shape
    assert made.live_channels().shape == (count,)
    x = np.random.default_rng(0).normal(size=(2, *inputs)).astype("float32")
    # A threshold between the two smallest scales takes one output of the layer.
    offsets = np.unique(np.round(made.critical_offsets(), 5))
    assert len(offsets) == count
    made.offset.assign(offsets[:2].mean())
    y = array(layer(x))
    y = y.reshape(-1, count) if kind == "einsum" else y.reshape(-1, y.shape[-1])
    assert np.count_nonzero(~y.any(axis=0)) == 1
    assert made.live_channels().sum() == count - 1


def network():
    inputs = keras.Input((6, 6, 2))
    x = L.Conv2D(16, 3, use_bias=False, name="conv")(inputs)
    x = L.ReLU()(L.BatchNormalization()(x))
    x = L.Dense(24, activation="relu", name="hidden")(L.Flatten()(x))
    return keras.Model(inputs, L.Dense(3, name="head")(x))


def fitted(model, *callbacks, epochs=3, learning_rate=0.05):
    x, y = data(model, 3)
    if not model.compiled:
        optimizer = keras.optimizers.SGD(learning_rate, momentum=0.9)
        model.compile(
            optimizer, classifier_loss(), jit_compile=jit_if_quicker()
        )
    model.fit(
        x,
        y,
        batch_size=8,
        shuffle=False,
        epochs=epochs,
        verbose=0,
        callbacks=[*callbacks],
    )
    return x


@pytest.mark.core
@pytest.mark.parametrize("freeze", [True, False])
@slow_on_jax
def test_target_density_counts_channels_with_their_entries(freeze, tmp_path):
    model = kso.parametrize(
        network(), ChannelSoftThreshold(s_init=-3.0), exclude="head"
    )
    ramp = Cubic(0.4, 0, 8, frequency=4)
    # Slowly, so that no layer loses all its channels.
    x = fitted(
        model, TargetDensity(0.4, ramp, freeze=freeze), learning_rate=0.01
    )
    weights = [w for w in kso.prunable_weights(model) if w.parametrization]
    assert [w.path for w in weights] == ["conv/kernel", "hidden/kernel"]
    largest = max(w.size // w.shape[-1] for w in weights)
    live, size = sum(w.live for w in weights), sum(w.size for w in weights)
    assert abs(live - 0.4 * size) <= largest
    for weight in weights:
        assert weight.parametrization.frozen == freeze
        mask = weight.parametrization.mask_value()
        assert (
            mask.all(axis=tuple(range(mask.ndim - 1))) | ~mask.any(axis=0)
        ).all()
        assert not weight.value[~mask].any()
        if freeze:
            assert not weight.raw_value()[~mask].any()
    expected = model.predict(x, verbose=0)
    loaded = reloaded(model, tmp_path)
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), expected, atol=1e-6
    )
    assert [w.live for w in kso.prunable_weights(loaded)][:2] == [
        w.live for w in weights
    ]
    np.testing.assert_allclose(
        kso.strip(model).predict(x, verbose=0), expected, atol=1e-6
    )


def low_rank(**options):
    model, made = built(LowRankSoftThreshold(**options))
    variables = {
        v.name.removeprefix("kernel_"): v for v in model.trainable_variables
    }
    return model, made, variables


@pytest.mark.core
@slow_on_jax
def test_low_rank_starts_from_the_weight():
    _, made, variables = low_rank(g="exp", s_init=-200.0)
    assert set(variables) == {"s", "left", "values", "right"}
    np.testing.assert_allclose(effective_value(made), KERNEL, atol=1e-6)
    singular = np.linalg.svd(KERNEL, compute_uv=False)
    np.testing.assert_allclose(
        array(made.values), singular / (2 * singular[0]), atol=1e-6
    )
    assert made.live_rank == 5
    _, made, _ = low_rank(rank=2, g="exp", s_init=-200.0)
    error = np.linalg.norm(effective_value(made) - KERNEL)
    # The best of rank 2.
    assert error == pytest.approx(np.linalg.norm(singular[2:]), rel=1e-5)
    left, right = made.factors()
    np.testing.assert_allclose(left @ right, effective_value(made), atol=1e-6)


@pytest.mark.core
@pytest.mark.parametrize("g", FUNCTIONS)
def test_gradients_of_low_rank_are_those_of_the_formula(g):
    model, made, variables = low_rank(g=g, s_init=-0.5)
    function, derivative = FUNCTIONS[g]
    values = np.array([1.5, -1.2, 0.9, 0.2, 0.0], "float32")
    made.values.assign(values)
    t = function(-0.5)
    left, right = (
        array(made.left).astype("float64"),
        array(made.right).astype("float64"),
    )
    shrunk = np.sign(values) * np.maximum(np.abs(values) - t, 0)
    np.testing.assert_allclose(
        effective_value(made), left * shrunk @ right.T, atol=1e-6
    )
    np.testing.assert_allclose(
        np.matmul(*made.factors()), effective_value(made), atol=1e-6
    )
    assert made.live_rank == np.count_nonzero(shrunk)
    expected = {
        "left": COEFFICIENTS @ right * shrunk,
        "right": COEFFICIENTS.T @ left * shrunk,
    }
    along = np.einsum("ij,ik,jk->k", COEFFICIENTS, left, right)
    expected["values"] = np.where(shrunk != 0, along, 0)
    expected["s"] = -derivative(-0.5) * np.sum(along * np.sign(shrunk))
    found = differentiated(model)
    for name, value in expected.items():
        gradient = found[f"kernel_{name}"]
        np.testing.assert_allclose(
            gradient, value, rtol=1e-4, atol=1e-5, err_msg=name
        )
        assert_finite_differences(model, variables[name], gradient, step=1e-2)


def sequences(**options):
    inputs = keras.Input((5, 20))
    x = L.Dense(24, activation="relu", name="lift")(inputs)
    x = L.LSTM(12, name="lstm", **options)(x)
    x = L.Dense(10, name="mix")(x[0] if isinstance(x, list | tuple) else x)
    return keras.Model(inputs, L.Dense(3, name="head")(x))


def cut(model, count):
    """Lets the `count` largest values of every low-rank weight live."""
    for weight in kso.prunable_weights(model):
        made = weight.parametrization
        if isinstance(made, LowRankSoftThreshold):
            made.values.assign(
                np.where(
                    np.arange(made.values.shape[0]) < count, made.values, 0
                )
            )
    return model


def check_stripped(model, x):
    """The stripped model, which computes the same."""
    expected = array(model(x))
    plain = kso.strip(model)
    np.testing.assert_allclose(array(plain(x)), expected, atol=1e-5)
    return plain


SEQUENCES = np.random.default_rng(2).normal(size=(6, 5, 20)).astype("float32")


@pytest.mark.core
@slow_on_jax
@slow_on_tensorflow
def test_strip_makes_thin_layers_where_they_are_smaller(tmp_path):
    model = kso.parametrize(sequences(), LowRankSoftThreshold(), exclude="head")
    model = cut(model, 4)
    model.compile("adam", "mse", jit_compile=jit_if_quicker())
    model.fit(SEQUENCES, np.ones((6, 3), "float32"), verbose=0, batch_size=3)
    expected = model.predict(SEQUENCES, verbose=0)
    loaded = reloaded(model, tmp_path)
    np.testing.assert_allclose(
        loaded.predict(SEQUENCES, verbose=0), expected, atol=1e-6
    )
    assert len(loaded.trainable_variables) == len(model.trainable_variables)
    plain = kso.strip(loaded)
    np.testing.assert_allclose(
        plain.predict(SEQUENCES, verbose=0), expected, atol=1e-5
    )
    shapes = {w.path: w.shape for w in kso.prunable_weights(plain)}
    assert shapes == {
        "lift/lift_thin/kernel": (20, 4),
        "lift/lift/kernel": (4, 24),
        "lstm/lstm_thin/kernel": (24, 4),
        "lstm/lstm/lstm_cell/kernel": (4, 48),
        "lstm/lstm/lstm_cell/recurrent_kernel": (12, 48),
        "mix/mix_thin/kernel": (12, 4),
        "mix/mix/kernel": (4, 10),
        "head/kernel": (10, 3),
    }
    plain.save(tmp_path / "plain.keras")
    assert not [
        la
        for la in plain._flatten_layers()
        if "sparse_ortho" in type(la).__module__
    ]
    again = keras.models.load_model(tmp_path / "plain.keras")
    np.testing.assert_allclose(
        again.predict(SEQUENCES, verbose=0), expected, atol=1e-5
    )


@pytest.mark.tensorflow_only
@pytest.mark.parametrize("count", [0, 11])
def test_strip_bakes_the_product_where_factors_are_not_smaller(count):
    model = kso.parametrize(
        sequences(), LowRankSoftThreshold(), include=["lift", "mix"]
    )
    model = cut(model, count)
    assert check_stripped(model, SEQUENCES).get_layer("lift").kernel.shape == (
        20,
        24,
    )


@pytest.mark.tensorflow_only
@pytest.mark.parametrize("options", [{"return_state": True}, {"unroll": True}])
def test_recurrent_layers_with_states_keep_their_shape(options):
    model = kso.parametrize(
        sequences(**options), LowRankSoftThreshold(), include="lstm"
    )
    plain = check_stripped(cut(model, 3), SEQUENCES)
    thin = isinstance(plain.get_layer("lstm"), keras.Sequential)
    assert thin == ("unroll" in options)


@pytest.mark.tensorflow_only
def test_layers_on_masked_sequences_keep_their_shape():
    inputs = keras.Input((6,), dtype="int32")
    x = L.Dense(20, name="lift")(
        L.Embedding(9, 24, mask_zero=True, name="words")(inputs)
    )
    model = keras.Model(
        inputs, L.Dense(2, name="head")(L.GRU(12, name="gru")(x))
    )
    model = cut(
        kso.parametrize(model, LowRankSoftThreshold(), include=["lift", "gru"]),
        3,
    )
    x = np.array([[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 8, 0]])
    # A Sequential model would not pass the mask on.
    plain = check_stripped(model, x)
    assert not [la for la in plain.layers if isinstance(la, keras.Sequential)]


@pytest.mark.tensorflow_only
def test_attention_and_models_written_as_a_class_get_the_product():
    class Written(keras.Model):
        def __init__(self):
            super().__init__()
            self.attention = L.MultiHeadAttention(2, 5, name="attention")
            self.dense = L.Dense(3, name="dense")

        def call(self, inputs):
            return self.dense(self.attention(inputs, inputs))

    model = Written()
    model(SEQUENCES)
    count = len(model.trainable_variables)
    model = cut(kso.parametrize(model, LowRankSoftThreshold()), 2)
    plain = check_stripped(model, SEQUENCES)
    assert type(plain.dense) is L.Dense
    assert len(plain.trainable_variables) == count
    assert np.linalg.matrix_rank(array(plain.dense.kernel), tol=1e-5) == 2


@pytest.mark.tensorflow_only
def test_what_low_rank_refuses():
    with pytest.raises(
        NotPrunableError,
        match=r"must be a matrix.*Received: shape=\(3, 3, 2, 16\)",
    ):
        kso.parametrize(network(), LowRankSoftThreshold())
    with pytest.raises(ValueError, match=r"`rank` must be .*Received: rank=0"):
        LowRankSoftThreshold(0)
    model = kso.parametrize(network(), LowRankSoftThreshold(), include="hidden")
    model = kso.parametrize(model, ChannelSoftThreshold(), include="conv")
    with pytest.raises(
        NotPrunableError, match=r"not both.*Received: .*'entries', 'ranks'"
    ):
        fitted(model, TargetDensity(0.5))


@pytest.mark.core
@slow_on_jax
@slow_on_tensorflow
def test_target_density_counts_ranks():
    exclude = ["head", ".*/recurrent_kernel"]
    model = kso.parametrize(
        sequences(), LowRankSoftThreshold(rank=10), exclude=exclude
    )
    model.compile(
        keras.optimizers.Adam(1e-2), "mse", jit_compile=jit_if_quicker()
    )
    steering = TargetDensity(0.2, Cubic(0.2, 0, 6, frequency=2))
    y = np.ones((6, 3), "float32")
    model.fit(
        SEQUENCES, y, batch_size=1, epochs=2, verbose=0, callbacks=[steering]
    )
    made = [
        layer.parametrizations
        for layer in model.layers
        if hasattr(layer, "parametrizations")
    ]
    made = [p for table in made for p in table.values()]
    assert len(made) == 3
    assert sum(p.live_rank for p in made) == 6  # of 3 x 10
    assert all(p.frozen for p in made)
    check_stripped(model, SEQUENCES)


@pytest.mark.parametrize("kind", [ChannelSoftThreshold, LowRankSoftThreshold])
def test_weight_decay(kind):
    model, made = built(kind(s_init=-2.0, weight_decay=0.3))
    squares = sum(
        float((array(v) ** 2).sum()) for v in model.trainable_variables
    )
    losses = float(sum(array(value) for value in model.losses))
    assert losses == pytest.approx(0.15 * squares, rel=1e-5)
    own = {} if kind is ChannelSoftThreshold else {"rank": None}
    config = {**own, "g": "sigmoid", "s_init": -2.0, "weight_decay": 0.3}
    assert kind.from_config(made.get_config()).get_config() == config
