"""Soft thresholds in tf_keras: against Keras 3, the kernel always effective, targets met."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import (
    DensityError,
    DensityWarning,
    NotPrunableError,
)
from keras_sparse_ortho.schedules import Cubic

pytestmark = pytest.mark.tensorflow_only


RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 16)).astype("float32")
Y = RNG.normal(size=(64, 8)).astype("float32")


def network(which, **options):
    """The same two layers in Keras 3 and in tf_keras."""
    L = which.layers
    return which.Sequential(
        [
            which.Input((16,)),
            L.Dense(32, activation="relu", name="hidden", **options),
            L.Dense(8, name="head"),
        ]
    )


def states(model):
    return [weight.state for weight in kso.tfmot.prunable_weights(model)]


def live(model):
    return sum(weight.live for weight in kso.tfmot.prunable_weights(model))


def assert_kernels_are_effective(model):
    for state in states(model):
        kernel = state.weight.variable.numpy()
        # XLA rounds `g` otherwise.
        np.testing.assert_allclose(kernel, state.effective().numpy(), atol=1e-7)
        assert (kernel != state.raw.numpy()).any()


@pytest.mark.parametrize(
    ("g", "granularity"),
    [
        ("sigmoid", "layer"),
        ("exp", "channel"),
        pytest.param("softplus", "layer", marks=pytest.mark.slow),
    ],
)
def test_training_is_that_of_keras_3(tf_keras, g, granularity):
    settings = {
        "granularity": granularity,
        "g": g,
        "s_init": -3.0,
        "weight_decay": 1e-2,
    }
    ours, theirs = (
        network(which, kernel_regularizer="l2") for which in (keras, tf_keras)
    )
    theirs.set_weights(ours.get_weights())
    ours = kso.parametrize(ours, kso.parametrizations.SoftThreshold(**settings))
    theirs = kso.tfmot.prune_with_soft_threshold(theirs, **settings)
    losses = []
    for which, model in ((keras, ours), (tf_keras, theirs)):
        model.compile(which.optimizers.SGD(0.1, momentum=0.9), "mse")
        past = model.fit(
            X, Y, batch_size=16, epochs=4, shuffle=False, verbose=0
        )
        losses.append(past.history["loss"])
    np.testing.assert_allclose(*losses, rtol=1e-4)
    for mine, other in zip(
        kso.prunable_weights(ours),
        kso.tfmot.prunable_weights(theirs),
        strict=True,
    ):
        assert mine.path == other.path
        assert 0 < mine.live < mine.size
        np.testing.assert_allclose(
            mine.raw_value(), other.raw_value(), atol=1e-4
        )
        np.testing.assert_allclose(mine.value, other.value, atol=1e-4)
        s = keras.ops.convert_to_numpy(mine.parametrization.s)
        np.testing.assert_allclose(s, other.state.s.numpy(), rtol=1e-4)


@pytest.mark.parametrize(
    "optimizer",
    ["new", "xla", pytest.param("legacy", marks=pytest.mark.slow), "scaled"],
)
def test_the_kernel_is_effective_after_every_step(
    tf_keras, sparsity, optimizer
):
    model = kso.tfmot.prune_with_soft_threshold(network(tf_keras), s_init=-3.0)
    assert_kernels_are_effective(model)
    assert [v.name.split("/")[-1] for v in model.trainable_variables] == [
        *("raw:0", "bias:0", "s:0") * 2
    ]
    module = (
        tf_keras.optimizers.legacy
        if optimizer == "legacy"
        else tf_keras.optimizers
    )
    rule = module.Adam(1e-2)
    if optimizer == "scaled":
        rule = tf_keras.mixed_precision.LossScaleOptimizer(rule)
    model.compile(rule, "mse", jit_compile=optimizer == "xla")

    class Watch(tf_keras.callbacks.Callback):
        seen = 0

        def on_train_batch_end(self, batch, logs=None):
            assert_kernels_are_effective(self.model)
            self.seen += 1

    watch, before = Watch(), states(model)[0].raw.numpy()
    model.fit(X, Y, batch_size=32, epochs=2, verbose=0, callbacks=[watch])
    assert watch.seen == 4
    assert (states(model)[0].raw.numpy() != before).any()
    plain = sparsity.strip_pruning(model)
    assert plain.layers[0].kernel.numpy()[~states(model)[0].mask()].size > 20
    np.testing.assert_allclose(plain(X), model(X), atol=1e-6)
    assert not any(
        isinstance(v, kso.tfmot.PruneWithSoftThreshold) for v in plain.layers
    )
    assert len(plain.trainable_variables) == 4


def test_regularizers_and_constraints_act_on_raw_weights(tf_keras):
    options = {"kernel_regularizer": tf_keras.regularizers.L1(0.1)}
    options["kernel_constraint"] = tf_keras.constraints.NonNeg()
    model = kso.tfmot.prune_with_soft_threshold(
        network(tf_keras, **options), s_init=-2.0
    )
    raw = states(model)[0].raw.numpy()
    np.testing.assert_allclose(
        sum(model.losses), 0.1 * np.abs(raw).sum(), rtol=1e-5
    )
    np.testing.assert_allclose(
        sum(model.layers[0].losses), 0.1 * np.abs(raw).sum(), rtol=1e-5
    )
    model.compile(tf_keras.optimizers.SGD(0.1), "mse")
    model.fit(X, 0 * Y, verbose=0)
    assert states(model)[0].raw.numpy().min() == 0
    assert_kernels_are_effective(model)


def test_mixed_precision(tf_keras, sparsity):
    dense = network(tf_keras, dtype="mixed_bfloat16")
    model = kso.tfmot.prune_with_soft_threshold(dense, s_init=-2.0)
    [hidden, _] = states(model)
    assert hidden.raw.dtype == "float32"
    assert model.layers[0](X).dtype == "bfloat16"
    model.compile(tf_keras.optimizers.SGD(0.1), "mse")
    model.fit(X, Y, verbose=0)
    assert_kernels_are_effective(model)
    np.testing.assert_array_equal(sparsity.strip_pruning(model)(X), model(X))


def test_weights_of_the_wrapper_are_the_effective_ones(tf_keras):
    model = kso.tfmot.prune_with_soft_threshold(network(tf_keras), s_init=-2.0)
    wrapper = model.layers[0]
    before = wrapper.get_weights()
    wrapper.set_weights(before)
    np.testing.assert_allclose(wrapper.get_weights()[0], before[0], atol=1e-6)
    np.testing.assert_array_equal(wrapper.get_weights()[0] == 0, before[0] == 0)


# --- TargetDensity ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("g", "legacy"),
    [
        ("sigmoid", False),
        ("softplus", True),
        pytest.param("exp", False, marks=pytest.mark.slow),
    ],
)
def test_the_run_ends_at_the_density_asked_for(tf_keras, g, legacy):
    model = kso.tfmot.prune_with_soft_threshold(network(tf_keras), g=g)
    module = tf_keras.optimizers.legacy if legacy else tf_keras.optimizers
    optimizer = module.Adam(1e-2)
    model.compile(optimizer, "mse")
    steering = kso.tfmot.TargetDensity(0.1, Cubic(None, 0, 6, frequency=3))
    model.fit(X, Y, batch_size=8, epochs=2, verbose=0, callbacks=[steering])
    assert live(model) == round(0.1 * 768)
    masks = [state.mask() for state in states(model)]
    for state, mask in zip(states(model), masks, strict=True):
        assert state.frozen
        np.testing.assert_array_equal(state.raw.numpy() != 0, mask)
        if legacy:
            slots = [optimizer.get_slot(state.raw, name) for name in ("m", "v")]
        else:
            place = optimizer._index_dict[optimizer._var_key(state.raw)]
            slots = [optimizer._momentums[place], optimizer._velocities[place]]
        for slot in slots:  # so that none is moved by what it remembers
            assert not slot.numpy()[~mask].any()
            assert slot.numpy()[mask].all()
    model.fit(X, Y, verbose=0)  # and what is dead stays so
    for state, mask in zip(states(model), masks, strict=True):
        np.testing.assert_array_equal(state.mask(), mask)


def test_the_history_is_that_of_keras_3(tf_keras):
    ours, theirs = network(keras), network(tf_keras)
    theirs.set_weights(ours.get_weights())
    pasts = []
    for which, package, make in (
        (
            keras,
            kso.callbacks,
            lambda: kso.parametrize(ours, kso.SoftThreshold),
        ),
        (
            tf_keras,
            kso.tfmot,
            lambda: kso.tfmot.prune_with_soft_threshold(theirs),
        ),
    ):
        model = make()
        model.compile(which.optimizers.SGD(0.1), "mse")
        steering = package.TargetDensity(0.1, Cubic(None, 0, 18, frequency=3))
        past = model.fit(
            X,
            Y,
            batch_size=8,
            epochs=3,
            shuffle=False,
            verbose=0,
            callbacks=[steering],
        )
        pasts.append(past.history)
    np.testing.assert_allclose(
        pasts[0]["density"], pasts[1]["density"], atol=1e-2
    )
    np.testing.assert_allclose(
        pasts[0]["threshold"], pasts[1]["threshold"], rtol=0.05
    )
    assert pasts[1]["density"][-1] == round(0.1 * 768) / 768
    assert pasts[1]["threshold"][0] > pasts[1]["threshold"][-1] == 0.0


def test_loops_of_ones_own(tf_keras, sparsity):
    import tensorflow as tf

    for optimizer in (tf_keras.optimizers.Adam(), None):
        model = kso.tfmot.prune_with_soft_threshold(network(tf_keras))
        model.optimizer = optimizer
        # Its end is replaced.
        schedule = sparsity.PolynomialDecay(0.0, 0.5, 0, 6, frequency=2)
        steering = kso.tfmot.TargetDensity(0.3, schedule)
        steering.set_model(model)
        steering.on_train_begin()

        @tf.function
        def step(optimizer=optimizer, model=model):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(X, training=True) - Y) ** 2)
            variables = model.trainable_variables
            pairs = list(
                zip(tape.gradient(loss, variables), variables, strict=True)
            )
            if optimizer is not None:
                optimizer.apply_gradients(pairs)
            else:
                for gradient, variable in pairs:
                    variable.assign_sub(0.01 * gradient)

        for number in range(6):
            steering.on_train_batch_begin(batch=-1)
            step()
            if optimizer is not None:
                assert_kernels_are_effective(model)
            # In the middle: what is handed out is what the model computes with.
            if number == 3:
                np.testing.assert_allclose(
                    sparsity.strip_pruning(model)(X), model(X), atol=1e-6
                )
        steering.on_epoch_end(batch=-1)  # as TFMOT's guide has it
        plain = sparsity.strip_pruning(model)
        np.testing.assert_allclose(plain(X), model(X), atol=1e-6)
        # .3 * 768.
        assert (
            sum(weight.live for weight in kso.tfmot.prunable_weights(plain))
            == 230
        )


def test_refusals(tf_keras):
    model = kso.tfmot.prune_with_mask(network(tf_keras), density=0.3)
    model.compile("sgd", "mse")
    with pytest.raises(
        NotPrunableError, match=r"soft thresholds.*Received: model='sequential"
    ):
        model.fit(X, Y, verbose=0, callbacks=[kso.tfmot.TargetDensity(0.1)])
    with pytest.raises(DensityError, match="Received"):
        kso.tfmot.TargetDensity(1.5)
    wrong = {
        "granularity": "global",
        "g": "tanh",
        "s_init": np.inf,
        "weight_decay": -1.0,
    }
    for name, value in wrong.items():
        with pytest.raises(ValueError, match="Received"):
            kso.tfmot.prune_with_soft_threshold(
                network(tf_keras), **{name: value}
            )


def test_a_run_that_ends_with_nan_has_its_history(tf_keras):
    model = kso.tfmot.prune_with_soft_threshold(network(tf_keras))
    model.compile("adam", "mse")
    callbacks = [
        tf_keras.callbacks.TerminateOnNaN(),
        kso.tfmot.TargetDensity(0.3),
    ]
    with pytest.warns(
        DensityWarning,
        match=r"could not bring.*Received: The weight .* not finite",
    ):
        history = model.fit(
            X, Y * np.nan, batch_size=64, verbose=0, callbacks=callbacks
        )
    assert np.isnan(history.history["loss"]).all()


@pytest.mark.parametrize("granularity", ["layer", "channel"])
def test_what_is_frozen_stays_dead_whatever_moves_it(tf_keras, granularity):
    """As a loop with an optimizer that the callback does not know: moments go on."""
    import tensorflow as tf

    model = kso.tfmot.prune_with_soft_threshold(network(tf_keras), granularity)
    steering = kso.tfmot.TargetDensity(
        0.25, Cubic(0.25, begin_step=0, end_step=4, frequency=2)
    )
    steering.set_model(model)
    steering.on_train_begin()
    for step in range(8):
        steering.on_train_batch_begin(step)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(X) - Y) ** 2)
        for variable, slope in zip(
            model.trainable_weights,
            tape.gradient(loss, model.trainable_weights),
            strict=True,
        ):
            variable.assign_sub(0.05 * slope + 0.01)
    steering.on_epoch_end()
    assert live(model) == round(0.25 * (16 * 32 + 32 * 8))
    for state in states(model):
        dead = ~state.mask()
        assert state.raw.numpy()[dead].any()
        with tf.GradientTape() as tape:
            total = tf.reduce_sum(state.effective())
        assert (
            not tf.convert_to_tensor(tape.gradient(total, state.raw))
            .numpy()[dead]
            .any()
        )
