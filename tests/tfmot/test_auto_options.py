"""What the wing refuses and warns of as `sparsify` does."""

import pytest

pytestmark = pytest.mark.tensorflow_only


def test_gain_auto_is_refused_and_dead_outputs_are_named():
    import keras_sparse_ortho as kso

    tf_keras = kso.tfmot.register_initializers()
    layers = tf_keras.layers
    model = tf_keras.Sequential(
        [tf_keras.Input((16,)), layers.Dense(64, name="a"), layers.Dense(8, name="head")]
    )
    for options in ({"gain": "auto"}, {"taps": "auto"}):
        pattern = kso.initializers.ExactOrthogonal(**options)
        with pytest.raises(ValueError, match=r"need a Keras 3 model.*Give a number"):
            kso.tfmot.prune_exact_orthogonal(model, 0.2, initializer=pattern)
    with pytest.warns(UserWarning, match=r"Received: 24 of 'a/kernel'$") as told:
        kso.tfmot.prune_exact_orthogonal(model, 48 / 1536, seed=0)
    assert told[0].filename == __file__
    [first, _] = kso.tfmot.prunable_weights(
        kso.tfmot.prune_exact_orthogonal(model, 72 / 1536, seed=0)
    )
    assert first.live == 64
