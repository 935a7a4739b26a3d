"""Files of models that hold our initializers, with every kind of argument."""

import inspect

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import (
    AttentionLayout,
    ExactOrthogonal,
    KernelLayout,
    RandomSparse,
)
from tests.helpers import array

L = keras.layers
pytestmark = pytest.mark.core


@keras.saving.register_keras_serializable(package="tests")
def small_angles(rng, count):
    return 0.1 + 0.2 * rng.random(count)


def recurrent(layout):
    return L.GRU(
        8,
        kernel_initializer=ExactOrthogonal(0.3, seed=1, layout=layout),
        recurrent_initializer=ExactOrthogonal(0.3, layout=layout),
    )


def attention():
    eoi = ExactOrthogonal(0.3, seed=1, layout=AttentionLayout(2, 4, value_dim=4))
    return L.MultiHeadAttention(2, 4, kernel_initializer=eoi)


LAYERS = {
    "angles_range": (lambda: L.Dense(8, kernel_initializer=ExactOrthogonal(0.3, angles=(0, 1))), 1),
    "angle": (lambda: L.Dense(8, kernel_initializer=ExactOrthogonal(0.3, angles=1.4)), 1),
    "angles_law": (
        lambda: L.Dense(8, kernel_initializer=ExactOrthogonal(0.3, seed=3, angles=small_angles)),
        1,
    ),
    "taps": (
        lambda: L.Conv1D(8, 3, kernel_initializer=ExactOrthogonal(0.3, seed=4, taps="shift")),
        1,
    ),
    "recurrent_layout": (lambda: recurrent(KernelLayout.recurrent(3)), 1),
    "attention_layout": (attention, 2),
    "random_sparse": (
        lambda: L.Dense(
            8,
            kernel_initializer=RandomSparse(
                0.3, keras.initializers.VarianceScaling(2.0, seed=5), seed=2, rescale=True
            ),
        ),
        1,
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_file_keeps_the_initializer_and_its_kernels(name, tmp_path):
    make, inputs = LAYERS[name]
    x = keras.Input((5, 8))
    model = keras.Model(x, make()(*[x] * inputs))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    before, after = (kso.prunable_weights(m) for m in (model, loaded))
    assert [w.path for w in before] == [w.path for w in after]
    for ours, theirs in zip(before, after, strict=True):
        np.testing.assert_array_equal(ours.raw_value(), theirs.raw_value())
        assert theirs.initializer.get_config() == ours.initializer.get_config()
        if ours.initializer.seed is not None or ours.initializer.get_config().get("rotations"):
            kernel, mask = theirs.initializer.sample(theirs.shape)
            np.testing.assert_array_equal(kernel, theirs.raw_value())
            assert not theirs.raw_value()[~mask].any()


@pytest.mark.parametrize("make", [ExactOrthogonal, RandomSparse, AttentionLayout])
def test_a_configuration_has_every_argument(make):
    instance = make(2, 4) if make is AttentionLayout else make(0.5)
    assert set(instance.get_config()) == set(inspect.signature(make).parameters)


def test_a_fresh_layer_from_a_configuration_draws_the_seeded_kernel():
    layer = L.Dense(16, kernel_initializer=ExactOrthogonal(0.2, gain=1.3, seed=9))
    twin = L.Dense.from_config(layer.get_config())
    layer.build((None, 24))
    twin.build((None, 24))
    np.testing.assert_array_equal(array(layer.kernel), array(twin.kernel))


def test_an_unseeded_initializer_draws_anew_in_a_clone():
    eoi = ExactOrthogonal(0.2)
    kernel = eoi.sample((16, 16))[0]
    assert (eoi.clone().sample((16, 16))[0] != kernel).any()
    assert (ExactOrthogonal.from_config(eoi.get_config()).sample((16, 16))[0] != kernel).any()


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "bfloat16", "float16"])
def test_layers_of_every_policy_hold_the_rounded_float32_kernel(policy):
    eoi = ExactOrthogonal(0.2, gain=1.1, seed=3)
    layer = L.Dense(40, kernel_initializer=eoi, dtype=policy)
    layer.build((None, 24))
    kernel, mask = eoi.sample((24, 40), "float32")
    assert layer.kernel.dtype == ("float32" if "mixed" in policy else policy)
    rounded = keras.ops.cast(keras.ops.cast(kernel, layer.kernel.dtype), "float32")
    stored = array(keras.ops.cast(layer.kernel, "float32"))
    np.testing.assert_array_equal(stored, array(rounded))
    assert not stored[~mask].any()


def test_a_float64_kernel_is_orthogonal_to_float64_and_the_float32_one_its_rounding():
    eoi = ExactOrthogonal(0.2, seed=3)
    fine, fine_mask = eoi.sample((40, 40), "float64")
    coarse, mask = eoi.sample((40, 40), "float32")
    assert np.abs(fine.T @ fine - np.eye(40)).max() < 1e-14
    np.testing.assert_array_equal(fine.astype("float32"), coarse)
    np.testing.assert_array_equal(fine_mask, mask)
