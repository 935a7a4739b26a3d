"""Masks of exact orthogonal kernels inside TFMOT: zeros, moments, stripping."""

import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.tfmot.test_tfmot_cases import sequential

pytestmark = pytest.mark.tensorflow_only


@pytest.mark.parametrize("jit", [False, True])
def test_zeros_and_moments_stay_and_stripping_keeps_them(tf_keras, sparsity, jit):
    L = tf_keras.layers
    dense = sequential(tf_keras, L.Dense(32, "relu", name="a"), L.Dense(10, name="head"))
    model = kso.tfmot.prune_exact_orthogonal(dense, 0.3, seed=0)
    weights = kso.tfmot.prunable_weights(model)
    assert sum(w.live for w in weights) == round(0.3 * sum(w.size for w in weights))
    model.compile(tf_keras.optimizers.Adam(1e-2), "mse", jit_compile=jit)
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 16)), rng.normal(size=(64, 10))
    callbacks = [] if jit else [sparsity.UpdatePruningStep()]  # which masks do not need
    model.fit(x, y, epochs=2, verbose=0, callbacks=callbacks)
    optimizer = model.optimizer
    for weight in weights:
        mask = weight.state.mask()
        slot = optimizer._index_dict[optimizer._var_key(weight.variable)]
        for values in (weight.variable, optimizer._momentums[slot], optimizer._velocities[slot]):
            assert not values.numpy()[~mask].any()
            assert values.numpy()[mask].any()
    plain = sparsity.strip_pruning(model)
    np.testing.assert_allclose(plain.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
    assert not any(isinstance(layer, kso.tfmot.PruneWithMask) for layer in plain.layers)


def test_infinite_gradients_stay_off_the_mask(tf_keras):
    import tensorflow as tf

    dense = sequential(tf_keras, tf_keras.layers.Dense(4))
    [weight] = kso.tfmot.prunable_weights(kso.tfmot.prune_exact_orthogonal(dense, 0.5, seed=0))
    with tf.GradientTape() as tape:
        kernel = weight.state.effective()
    upstream = tf.fill(kernel.shape, np.inf)
    gradient = tape.gradient(kernel, weight.variable, output_gradients=upstream).numpy()
    mask = weight.state.mask()
    assert np.isinf(gradient[mask]).all()
    assert not gradient[~mask].any()


def test_gain_auto_is_refused_and_dead_outputs_are_named(tf_keras):
    L = tf_keras.layers
    model = sequential(tf_keras, L.Dense(64, name="a"), L.Dense(8, name="head"))
    pattern = kso.initializers.ExactOrthogonal(gain="auto")
    with pytest.raises(ValueError, match=r"needs? a Keras 3 model.*ive a number"):
        kso.tfmot.prune_exact_orthogonal(model, 0.2, initializer=pattern)
    with pytest.warns(UserWarning, match=r"Received: 24 of 'a/kernel'$") as told:
        kso.tfmot.prune_exact_orthogonal(model, 48 / 1536, seed=0)
    assert told[0].filename == __file__
    [first, _] = kso.tfmot.prunable_weights(
        kso.tfmot.prune_exact_orthogonal(model, 72 / 1536, seed=0)
    )
    assert first.live == 64
