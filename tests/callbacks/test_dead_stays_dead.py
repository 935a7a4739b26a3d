"""Loops with an optimizer that the callbacks do not know: what dies stays dead."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.callbacks import SET, RigL, TargetDensity, UpdateMasks
from keras_sparse_ortho.schedules import Cubic
from tests.helpers import array

pytestmark = [pytest.mark.core, pytest.mark.each_backend]
BACKEND = keras.backend.backend()
STEPS = 30
FALL = Cubic(0.3, begin_step=0, end_step=20, frequency=2)
rng = np.random.default_rng(0)
X = rng.normal(size=(STEPS, 16, 24)).astype("float32")
Y = X[..., :4].argmax(-1).astype("int32")
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def network():
    keras.utils.set_random_seed(0)
    layers = [
        keras.layers.Dense(32, "relu", name="a"),
        keras.layers.Dense(4, name="b"),
    ]
    return keras.Sequential([keras.Input((24,)), *layers])


class Momentum:
    """An optimizer of somebody else: moments, and a weight decay that pushes everything."""

    def __init__(self, variables):
        self.moments = [
            np.zeros(variable.shape, "float32") for variable in variables
        ]

    def step(self, values, gradients):
        pairs = zip(self.moments, gradients, values, strict=True)
        self.moments = [0.9 * m + array(g) - 0.01 for m, g, _ in pairs]
        return [
            array(w) - 0.05 * m
            for w, m in zip(values, self.moments, strict=True)
        ]


def stateless(model, callback):
    """The reproducer's loop: the state is in lists, and the model holds none of it."""
    import jax

    def loss(trainable, rest, x, y):
        y_pred, rest = model.stateless_call(trainable, rest, x, training=True)
        return LOSS(y, y_pred), rest

    gradients = jax.jit(jax.grad(loss, has_aux=True))
    trainable = [v.value for v in model.trainable_variables]
    rest = [v.value for v in model.non_trainable_variables]
    optimizer = Momentum(model.trainable_variables)
    for step in range(STEPS):
        trainable, rest = callback.update_stateless(step, (trainable, rest))
        found, rest = gradients(trainable, rest, X[step], Y[step])
        trainable = optimizer.step(trainable, found)
    trainable, rest = callback.update_stateless(STEPS, (trainable, rest))
    variables = [*model.trainable_variables, *model.non_trainable_variables]
    for variable, value in zip(variables, [*trainable, *rest], strict=True):
        variable.assign(value)


def on_torch(model, callback):
    import torch

    optimizer = Momentum(model.trainable_variables)
    for step in range(STEPS):
        callback.update(step)
        model.zero_grad()
        LOSS(
            torch.from_numpy(Y[step]),
            model(torch.from_numpy(X[step]), training=True),
        ).backward()
        variables = model.trainable_variables
        gradients = [variable.value.grad.detach() for variable in variables]
        for variable, value in zip(
            variables, optimizer.step(variables, gradients), strict=True
        ):
            variable.assign(value)
    callback.update(STEPS)


def on_tensorflow(model, callback):
    import tensorflow as tf

    optimizer = Momentum(model.trainable_variables)
    for step in range(STEPS):
        callback.update(step)
        variables = model.trainable_variables
        with tf.GradientTape() as tape:
            loss = LOSS(Y[step], model(X[step], training=True))
        gradients = tape.gradient(
            loss, [variable.value for variable in variables]
        )
        for variable, value in zip(
            variables, optimizer.step(variables, gradients), strict=True
        ):
            variable.assign(value)
    callback.update(STEPS)


LOOP = {"jax": stateless, "torch": on_torch, "tensorflow": on_tensorflow}[
    BACKEND
]
THRESHOLDS = {
    "layer": kso.SoftThreshold(),
    "channel": kso.SoftThreshold("channel"),
    "channels": kso.parametrizations.ChannelSoftThreshold(),
    "ranks": kso.parametrizations.LowRankSoftThreshold(),
}


def share(model):
    own = [weight.parametrization for weight in kso.prunable_weights(model)]
    live, size = (
        sum(part) for part in zip(*(one.counts() for one in own), strict=True)
    )
    return live / size


@pytest.mark.parametrize("name", THRESHOLDS)
def test_frozen_thresholds_end_at_their_density(name, tmp_path):
    model = kso.parametrize(network(), THRESHOLDS[name])
    callback = TargetDensity(0.3, FALL)
    callback.set_model(model)
    LOOP(model, callback)
    callback.on_train_end()  # a warning would be an error
    assert share(model) == pytest.approx(0.3, abs=0.03)
    expected = array(model(X[0]))
    np.testing.assert_allclose(
        array(kso.strip(model)(X[0])), expected, atol=1e-5
    )
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(array(loaded(X[0])), expected, atol=1e-6)
    assert share(loaded) == share(model)
    all_dead = 0
    for weight in kso.prunable_weights(loaded):
        own = weight.parametrization
        dead = ~np.broadcast_to(array(own.frozen_mask), own.steered.shape)
        all_dead += dead.sum()
        assert not array(own.steered)[dead].any()
    assert all_dead > 0


OTHERS = {
    "UpdateMasks": (
        lambda: kso.parametrize(network(), kso.MagnitudeMask(FALL)),
        UpdateMasks,
    ),
    "SET": (
        lambda: kso.sparsify(network(), 0.3, seed=0),
        lambda: SET(frequency=2, end_step=20),
    ),
    "RigL": (
        lambda: kso.sparsify(network(), 0.3, seed=0),
        lambda: RigL((X[0], Y[0]), 8, frequency=2, end_step=20, loss=LOSS),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_masks_end_at_their_density(name, tmp_path):
    make, callback = (part() for part in OTHERS[name])
    callback.set_model(make)
    LOOP(make, callback)
    callback.on_train_end()
    assert kso.report(make).density == pytest.approx(0.3, abs=0.001)
    expected = array(make(X[0]))
    make.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(array(loaded(X[0])), expected, atol=1e-6)
    for weight in kso.prunable_weights(loaded):
        assert not weight.raw_value()[~weight.mask].any()


def test_a_threshold_that_is_finished_again_keeps_the_dead():
    model = kso.parametrize(network(), kso.SoftThreshold())
    kso.finish(model, 0.3)
    before = [weight.mask for weight in kso.prunable_weights(model)]
    for variable in model.trainable_variables:
        variable.assign(array(variable) + 0.5)
    for weight, mask in zip(kso.prunable_weights(model), before, strict=True):
        np.testing.assert_array_equal(weight.mask, mask)
    kso.finish(model, 0.1)
    assert kso.report(model).density == pytest.approx(0.1, abs=0.001)
    for weight, mask in zip(kso.prunable_weights(model), before, strict=True):
        assert not (weight.mask & ~mask).any()


def test_dead_entries_of_a_frozen_threshold_get_no_gradient():
    model = kso.parametrize(network(), kso.SoftThreshold())
    kso.finish(model, 0.3)
    weight = kso.prunable_weights(model)[0]
    mask = weight.mask
    weight.variable.assign(array(weight.variable) + 0.5)
    from keras_sparse_ortho.models import StatelessLoss

    model.compile(loss=LOSS)
    loss = StatelessLoss(model, [weight.variable])
    (gradient,) = loss.gradients(None, X[0], Y[0])
    assert not array(gradient)[~mask].any()
    assert array(gradient)[mask].any()


# --- losses of other packages ---------------------------------------------------------------------


def rigl(loss, y=Y[0]):
    model = kso.sparsify(network(), 0.3, seed=0)
    callback = RigL((X[0], y), 8, frequency=1, end_step=9, loss=loss)
    callback.set_model(model)
    callback.update(1)
    return [weight.mask for weight in kso.prunable_weights(model)]


def foreign_losses():
    if BACKEND == "jax":
        import jax
        import optax

        loss = optax.softmax_cross_entropy_with_integer_labels
        return [
            loss,
            jax.jit(loss),
            optax.losses.softmax_cross_entropy_with_integer_labels,
        ]
    if BACKEND == "torch":
        import functools

        import torch

        class Own(torch.nn.CrossEntropyLoss):
            pass

        loss = torch.nn.functional.cross_entropy
        return [
            loss,
            functools.partial(loss, reduction="sum"),
            torch.nn.CrossEntropyLoss(),
            Own(),
        ]
    return []


def test_losses_of_optax_and_torch_take_integer_labels():
    expected = rigl(LOSS)
    for loss in foreign_losses():
        for y in (Y[0], Y[0].astype("int64")):
            for mask, other in zip(rigl(loss, y), expected, strict=True):
                np.testing.assert_array_equal(mask, other)


@pytest.mark.torch_only
def test_integer_labels_for_each_output_become_floats():
    import torch

    bits = np.eye(4, dtype="int64")[Y[0]]
    floats = rigl(
        torch.nn.functional.binary_cross_entropy_with_logits,
        bits.astype("float32"),
    )
    for mask, other in zip(
        rigl(torch.nn.functional.binary_cross_entropy_with_logits, bits),
        floats,
        strict=True,
    ):
        np.testing.assert_array_equal(mask, other)


def broken(y_true, y_pred):
    raise TypeError("expected something else")


def test_a_loss_that_raises_is_named_with_its_arguments():
    message = (
        r"RigL calls its `loss` as loss\(y_true, y_pred\).*Received: loss=<function broken.*"
        r"\(y_true, y_pred\) of int32 \(8,\) and float32 \(8, 4\), TypeError: expected something"
    )
    with pytest.raises(ValueError, match=message):
        rigl(broken)
    for loss in foreign_losses()[:1]:
        with pytest.raises(
            ValueError, match=r"RigL calls its `loss` as loss\(y_pred, y_true\)"
        ):
            rigl(loss, np.zeros((16, 3, 2), "float32"))


@pytest.mark.jax_only
def test_a_compiled_model_takes_the_state_of_another_optimizer():
    model = kso.sparsify(network(), 0.3, seed=0)
    model.compile("adam", LOSS)
    callback = SET(frequency=1, end_step=9)
    callback.set_model(model)
    state = (
        [v.value for v in model.trainable_variables],
        [v.value for v in model.non_trainable_variables],
    )
    state = callback.update_stateless(0, state)
    assert [len(part) for part in callback.update_stateless(1, state)] == [
        len(p) for p in state
    ]
