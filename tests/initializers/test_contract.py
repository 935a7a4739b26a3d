"""What holds for every initializer of ours."""

import json

import keras
import numpy as np
import pytest

from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.initializers import (
    ApproximateIsometry,
    AttentionLayout,
    ExactOrthogonal,
    KernelLayout,
    RamanujanOrthogonal,
    RandomSparse,
)
from keras_sparse_ortho.orthogonal import Block, NByM
from tests.helpers import array

pytestmark = pytest.mark.core


@keras.saving.register_keras_serializable(package="tests")
def narrow(rng, count):
    return 0.1 * rng.random(count)


INITIALIZERS = {
    "eoi": lambda: ExactOrthogonal(0.2, seed=3),
    "gain": lambda: ExactOrthogonal(0.2, gain=1.4, seed=3),
    "range": lambda: ExactOrthogonal(0.2, seed=3, angles=(0.5, 1.5)),
    "law": lambda: ExactOrthogonal(0.2, seed=3, angles=narrow),
    "layout": lambda: ExactOrthogonal(0.2, seed=3, layout=KernelLayout.recurrent(4)),
    "block": lambda: ExactOrthogonal(0.25, seed=3, structure=Block(4, 1)),
    "regular": lambda: ExactOrthogonal(0.25, seed=3, structure=Block(6, 4, regular=True)),
    "n_by_m": lambda: ExactOrthogonal(0.2, seed=3, structure=NByM(2, 4)),
    "ai": lambda: ApproximateIsometry(0.2, seed=3, max_iterations=5),
    "sao": lambda: RamanujanOrthogonal(4, seed=3, relu=True),
    "random": lambda: RandomSparse(0.2, "glorot_uniform", seed=3),
    "rescaled": lambda: RandomSparse(
        0.2, keras.initializers.HeNormal(seed=4), seed=3, rescale=True
    ),
}
SHAPE = (24, 64)
SHAPES = {"sao": (24, 24)}  # of those that do not take every shape


@pytest.mark.parametrize("name", INITIALIZERS)
def test_counts_calls_and_repetition(name):
    initializer = INITIALIZERS[name]()
    shape = SHAPES.get(name, SHAPE)
    kernel, mask = initializer.sample(shape)
    if hasattr(initializer, "density") and name != "sequence":
        assert mask.sum() == round(initializer.density * mask.size)
    assert mask.shape == kernel.shape == shape
    assert not kernel[~mask].any()
    assert kernel.any()
    if "random" not in name:  # glorot_uniform draws a seed of its own
        np.testing.assert_array_equal(array(initializer(shape)), kernel)
        np.testing.assert_array_equal(INITIALIZERS[name]().sample(shape)[0], kernel)
    np.testing.assert_array_equal(INITIALIZERS[name]().sample(shape)[1], mask)


@pytest.mark.parametrize("name", INITIALIZERS)
def test_configuration_round_trip_through_json(name):
    shape = SHAPES.get(name, SHAPE)
    initializer = INITIALIZERS[name]()
    config = json.loads(json.dumps(keras.saving.serialize_keras_object(initializer)))
    twin = keras.saving.deserialize_keras_object(config)
    assert type(twin) is type(initializer)
    assert json.dumps(twin.get_config()) == json.dumps(initializer.get_config())
    np.testing.assert_array_equal(twin.sample(shape)[1], initializer.sample(shape)[1])
    assert keras.initializers.get(config).get_config() == twin.get_config()
    assert isinstance(initializer.clone(), type(initializer))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
@pytest.mark.parametrize("name", INITIALIZERS)
def test_dtypes(name, dtype):
    if dtype == "float64" and keras.backend.backend() == "jax":
        dtype = "float32"  # JAX has no float64 unless it is switched on
    shape = SHAPES.get(name, SHAPE)
    initializer = INITIALIZERS[name]()
    kernel = initializer(shape, dtype=dtype)
    assert keras.backend.standardize_dtype(kernel.dtype) == dtype
    _, mask = initializer.sample(shape, dtype)
    np.testing.assert_array_equal(mask, initializer.sample(shape)[1])
    with pytest.raises(ValueError, match=r"dtype bfloat16, float16, .*Received: dtype='int32'"):
        initializer(shape, dtype="int32")


def test_an_unseeded_initializer_follows_the_global_seed():
    keras.utils.set_random_seed(1)
    first, second = ExactOrthogonal(0.2), ExactOrthogonal(0.2)
    assert (first.sample(SHAPE)[0] != second.sample(SHAPE)[0]).any()
    np.testing.assert_array_equal(first.sample(SHAPE)[0], first.sample(SHAPE)[0])
    keras.utils.set_random_seed(1)
    np.testing.assert_array_equal(ExactOrthogonal(0.2).sample(SHAPE)[0], first.sample(SHAPE)[0])
    assert first.get_config()["seed"] is None


def test_rescaling_keeps_the_variance():
    plain, rescaled = (
        RandomSparse(0.1, keras.initializers.HeNormal(seed=1), seed=2, rescale=rescale)
        for rescale in (False, True)
    )
    shape = (600, 200)
    a, mask = plain.sample(shape)
    b, _ = rescaled.sample(shape)
    scale = np.sqrt(600 / mask.sum(axis=0))
    np.testing.assert_allclose(b, a * scale, rtol=1e-5)
    assert abs((b**2).sum(axis=0).mean() - 2.0) < 0.1
    conv, mask = RandomSparse(
        0.2, keras.initializers.Ones(), seed=2, rescale=True, layout=KernelLayout.depthwise()
    ).sample((3, 3, 8, 2))
    fan_in = mask.sum(axis=(0, 1))
    np.testing.assert_allclose(
        conv.max(axis=(0, 1)), np.where(fan_in, 3 / np.sqrt(fan_in.clip(1)), 0)
    )


def test_refusals():
    for pattern in (ExactOrthogonal(), RandomSparse()):  # without a density it cannot draw
        with pytest.raises(DensityError, match=r"a pattern for sparsify.*Received: density=None"):
            pattern.sample((4, 4))
    with pytest.raises(DensityError, match=r"Received: density=1.2"):
        RandomSparse(1.2)
    with pytest.raises(ValueError, match=r"`seed` must be a non-neg.* or None. Received: seed=1.5"):
        ExactOrthogonal(0.1, seed=1.5)
    with pytest.raises(ValueError, match=r"`layout` must be a KernelLayout, .*Received"):
        ExactOrthogonal(0.1, layout="dense")
    with pytest.raises(ValueError, match=r"must be a dense Keras initializer. Received"):
        RandomSparse(0.1, ExactOrthogonal(0.1))
    with pytest.raises(LayoutError, match=r"No projection of an attention layer.*\(5, 5, 5\)"):
        AttentionLayout(2, 4)((5, 5, 5))
    with pytest.raises(DensityError, match=r"least density is 0.015625"):
        ExactOrthogonal(0.001)(SHAPE)


def test_random_masks_of_another_seed_hold_other_values():
    pattern = RandomSparse(initializer=keras.initializers.GlorotUniform(seed=3))
    kernels = [pattern.at_density(1.0, seed, (8, 6)).sample((8, 6))[0] for seed in (1, 1, 2)]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert (kernels[0] != kernels[2]).all()
