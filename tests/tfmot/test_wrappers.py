"""Single wrappers in tf_keras: frozen, masked, refused, and with optimizers of their own start."""

import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError
from tests.tfmot.test_tfmot_cases import sequential

pytestmark = pytest.mark.tensorflow_only


def test_schedules_may_begin_sparser_than_the_density_that_stays(
    tf_keras, sparsity
):
    """0.7 of the entries are pruned at first, 0.75 at the end."""
    dense = sequential(tf_keras, tf_keras.layers.Dense(8, name="a"))
    decay = sparsity.PolynomialDecay(0.7, 0.9, 0, 10)
    model = kso.tfmot.prune_by_budget(dense, 0.25, "uniform", decay)
    schedule = model.layers[0].pruning_schedule
    assert (schedule.initial_sparsity, schedule.final_sparsity) == (0.7, 0.75)


def test_a_frozen_layer_trains_no_threshold(tf_keras):
    layers = (
        tf_keras.layers.Dense(8, name="a"),
        tf_keras.layers.Dense(4, name="b"),
    )
    model = kso.tfmot.prune_with_soft_threshold(sequential(tf_keras, *layers))
    model.layers[0].trainable = False
    assert model.layers[0].trainable_weights == []
    names = {
        variable.name.split("/")[0] for variable in model.trainable_variables
    }
    assert names == {"b", "prune_with_soft_threshold_b"}


def test_masks_of_tokens_pass_through_the_wrapper(tf_keras):
    embedding = tf_keras.layers.Embedding(5, 4, mask_zero=True)
    layer = kso.tfmot.PruneWithMask(embedding, density=0.5)
    tokens = np.array([[1, 2, 0], [3, 0, 0]])
    layer(tokens)
    np.testing.assert_array_equal(layer.compute_mask(tokens), tokens != 0)


def test_every_mask_must_name_a_weight(tf_keras):
    dense = sequential(tf_keras, tf_keras.layers.Dense(8, name="a"))
    mask = np.ones((16, 8), dtype=bool)
    with pytest.raises(UnknownWeightError, match=r"Received: masks='b/kernel'"):
        kso.tfmot.prune_with_mask(dense, {"a/kernel": mask, "b/kernel": mask})


def test_a_layer_that_is_not_finite_is_refused(tf_keras):
    layer = tf_keras.layers.Dense(4, name="a")
    layer.build((None, 4))
    layer.kernel.assign(np.full((4, 4), np.inf))
    with pytest.raises(
        NotPrunableError, match=r"'a/kernel' is not finite. Received: 16"
    ):
        kso.tfmot.PruneWithMask(layer, {"kernel": np.eye(4, dtype=bool)}).build(
            (None, 4)
        )


def test_a_live_entry_at_the_threshold_stays_live_when_it_is_frozen(tf_keras):
    dense = tf_keras.layers.Dense(1, use_bias=False)
    layer = kso.tfmot.PruneWithSoftThreshold(dense, s_init=0.0)
    layer.build((None, 3))
    (state,) = layer.states
    state.raw.assign([[0.25], [-0.5], [2.0]])  # the threshold is 0.5
    mask = np.array([[False], [True], [True]])
    state.freeze(mask)
    np.testing.assert_array_equal(state.mask(), mask)
    assert float(state.effective()[1, 0]) < 0.0


def test_accumulators_of_dead_entries_start_again(tf_keras):
    """Those of Adagrad do not start at 0: a step would be divided by it."""
    model = kso.tfmot.prune_with_soft_threshold(
        sequential(tf_keras, tf_keras.layers.Dense(8, name="a"))
    )
    optimizer = tf_keras.optimizers.Adagrad(
        0.01, initial_accumulator_value=0.25
    )
    model.compile(optimizer, "mse")
    x = np.random.default_rng(0).normal(size=(32, 16))
    y = x[:, :8]
    steer = kso.tfmot.TargetDensity(0.25, frequency=1)
    model.fit(x, y, batch_size=4, epochs=2, verbose=0, callbacks=[steer])
    (weight,) = kso.tfmot.prunable_weights(model)
    accumulators = [
        v.numpy() for v in optimizer.variables if v.shape == weight.shape
    ]
    assert weight.live == 32
    assert any(np.all(one[~weight.mask] == 0.25) for one in accumulators)
    assert all(np.all(one[weight.mask] > 0.25) for one in accumulators)


def test_infinite_weights_are_not_ranked(tf_keras):
    model = kso.tfmot.prune_with_soft_threshold(
        sequential(tf_keras, tf_keras.layers.Dense(8, name="a"))
    )
    raw = model.layers[0].states[0].raw
    raw.assign(np.where(np.arange(8) == 3, np.inf, raw.numpy()))
    model.compile("sgd", "mse")
    steer = kso.tfmot.TargetDensity(0.25, frequency=1)
    with pytest.raises(
        NotPrunableError, match=r"'a/kernel' is not finite, or .*: 16 infinite"
    ):
        model.fit(
            np.ones((8, 16)), np.ones((8, 8)), verbose=0, callbacks=[steer]
        )


def test_variables_of_several_kernels_have_names_of_their_own(tf_keras):
    """Files in HDF5 hold variables by name."""
    layer = kso.tfmot.PruneWithMask(
        tf_keras.layers.GRU(4, name="gru"), density=0.5
    )
    layer.build((None, 5, 8))
    names = [variable.name for variable in layer.weights]
    assert sum("mask" in name.rpartition("/")[2] for name in names) == 2
    assert len({*names}) == len(names)


def test_the_default_schedule_takes_seven_tenths_of_all_epochs(tf_keras):
    model = kso.tfmot.prune_with_soft_threshold(
        sequential(tf_keras, tf_keras.layers.Dense(8, name="a"))
    )
    model.compile("sgd", "mse")
    x = np.random.default_rng(0).normal(size=(32, 16))
    options = {"batch_size": 8, "epochs": 10, "verbose": 0}
    steer = kso.tfmot.TargetDensity(0.25, frequency=1)
    densities = model.fit(x, x[:, :8], callbacks=[steer], **options).history[
        "density"
    ]
    assert densities[0] > 0.7
    assert densities[5] > 0.25
    assert densities[-3:] == [0.25] * 3
