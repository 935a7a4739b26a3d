"""What holds for every initializer of ours, in files too; start, SAO and AI."""

import hashlib
import inspect
import json

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.initializers import (
    ApproximateIsometry,
    ExactOrthogonal,
    KernelLayout,
    RamanujanOrthogonal,
    RandomSparse,
    activation_gain,
)
from keras_sparse_ortho.orthogonal import Block, NByM
from tests.helpers import array

pytestmark = pytest.mark.core
L = keras.layers

INITIALIZERS = {
    "eoi": lambda: ExactOrthogonal(0.2, seed=3),
    "gain": lambda: ExactOrthogonal(0.2, gain=1.4, seed=3),
    "layout": lambda: ExactOrthogonal(
        0.2, seed=3, layout=KernelLayout.recurrent(4)
    ),
    "block": lambda: ExactOrthogonal(0.25, seed=3, structure=Block(4, 1)),
    "regular": lambda: ExactOrthogonal(
        0.25, seed=3, structure=Block(6, 4, regular=True)
    ),
    "n_by_m": lambda: ExactOrthogonal(0.2, seed=3, structure=NByM(2, 4)),
    "mirrored": lambda: ExactOrthogonal(0.2, seed=3, mirrored=True),
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
    if hasattr(initializer, "density"):
        assert mask.sum() == round(initializer.density * mask.size)
    assert mask.shape == kernel.shape == shape
    assert not kernel[~mask].any()
    assert kernel.any()
    if "random" not in name:  # glorot_uniform draws a seed of its own
        np.testing.assert_array_equal(array(initializer(shape)), kernel)
        np.testing.assert_array_equal(
            INITIALIZERS[name]().sample(shape)[0], kernel
        )
    np.testing.assert_array_equal(INITIALIZERS[name]().sample(shape)[1], mask)


@pytest.mark.parametrize("name", INITIALIZERS)
def test_configuration_round_trip_through_json(name):
    shape = SHAPES.get(name, SHAPE)
    initializer = INITIALIZERS[name]()
    config = json.loads(
        json.dumps(keras.saving.serialize_keras_object(initializer))
    )
    twin = keras.saving.deserialize_keras_object(config)
    assert type(twin) is type(initializer)
    assert json.dumps(twin.get_config()) == json.dumps(initializer.get_config())
    for ours, theirs in zip(
        initializer.sample(shape), twin.sample(shape), strict=True
    ):
        if "random" not in name or ours.dtype == bool:
            np.testing.assert_array_equal(ours, theirs)
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
    with pytest.raises(
        ValueError, match=r"dtype bfloat16, float16, .*Received: dtype='int32'"
    ):
        initializer(shape, dtype="int32")


def test_an_unseeded_initializer_follows_the_global_seed():
    keras.utils.set_random_seed(1)
    first, second = ExactOrthogonal(0.2), ExactOrthogonal(0.2)
    assert (first.sample(SHAPE)[0] != second.sample(SHAPE)[0]).any()
    np.testing.assert_array_equal(
        first.sample(SHAPE)[0], first.sample(SHAPE)[0]
    )
    keras.utils.set_random_seed(1)
    np.testing.assert_array_equal(
        ExactOrthogonal(0.2).sample(SHAPE)[0], first.sample(SHAPE)[0]
    )
    assert first.get_config()["seed"] is None


def test_rescaling_keeps_the_variance():
    plain, rescaled = (
        RandomSparse(
            0.1, keras.initializers.HeNormal(seed=1), seed=2, rescale=rescale
        )
        for rescale in (False, True)
    )
    shape = (600, 200)
    a, mask = plain.sample(shape)
    b, _ = rescaled.sample(shape)
    scale = np.sqrt(600 / mask.sum(axis=0))
    np.testing.assert_allclose(b, a * scale, rtol=1e-5)
    assert abs((b**2).sum(axis=0).mean() - 2.0) < 0.1
    conv, mask = RandomSparse(
        0.2,
        keras.initializers.Ones(),
        seed=2,
        rescale=True,
        layout=KernelLayout.depthwise(),
    ).sample((3, 3, 8, 2))
    fan_in = mask.sum(axis=(0, 1))
    np.testing.assert_allclose(
        conv.max(axis=(0, 1)), np.where(fan_in, 3 / np.sqrt(fan_in.clip(1)), 0)
    )


def test_refusals():
    # Without a density it cannot draw.
    for pattern in (
        ExactOrthogonal(),
        RandomSparse(),
    ):
        with pytest.raises(
            DensityError,
            match=r"a pattern for sparsify.*Received: density=None",
        ):
            pattern.sample((4, 4))
    with pytest.raises(DensityError, match=r"Received: density=1.2"):
        RandomSparse(1.2)
    for kind, seed in ((ExactOrthogonal, 1.5), (RandomSparse, -1)):
        with pytest.raises(
            ValueError,
            match=rf"`seed` must be a non-neg.* or None.*: seed={seed}",
        ):
            kind(0.1, seed=seed)
    with pytest.raises(
        ValueError, match=r"`layout` must be a KernelLayout, .*Received"
    ):
        ExactOrthogonal(0.1, layout="dense")
    with pytest.raises(
        ValueError, match=r"must be a dense Keras initializer. Received"
    ):
        RandomSparse(0.1, ExactOrthogonal(0.1))
    with pytest.raises(DensityError, match=r"least density is 0.015625"):
        ExactOrthogonal(0.001)(SHAPE)


def test_random_masks_of_another_seed_hold_other_values():
    pattern = RandomSparse(initializer=keras.initializers.GlorotUniform(seed=3))
    kernels = [
        pattern.at_density(1.0, seed, (8, 6)).sample((8, 6))[0]
        for seed in (1, 1, 2)
    ]
    np.testing.assert_array_equal(kernels[0], kernels[1])
    assert (kernels[0] != kernels[2]).all()


@pytest.mark.parametrize("make", [ExactOrthogonal, RandomSparse])
def test_a_configuration_has_every_argument(make):
    assert set(make(0.5).get_config()) == set(
        inspect.signature(make).parameters
    )


def test_a_float64_kernel_is_orthogonal_to_float64_and_the_float32_one_its_rounding():
    eoi = ExactOrthogonal(0.2, seed=3)
    fine, fine_mask = eoi.sample((40, 40), "float64")
    coarse, mask = eoi.sample((40, 40), "float32")
    assert np.abs(fine.T @ fine - np.eye(40)).max() < 1e-14
    np.testing.assert_array_equal(fine.astype("float32"), coarse)
    np.testing.assert_array_equal(fine_mask, mask)


def test_flattened_convolutions_inside_sparsify():
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            keras.layers.Conv2D(16, 3, name="conv"),
            keras.layers.Flatten(),
            keras.layers.Dense(10, name="head"),
        ]
    )
    sparse = kso.sparsify(
        model, 0.5, "uniform", ApproximateIsometry(1.0, gain=2.0), seed=0
    )
    conv, head = kso.prunable_weights(sparse)
    matrix = conv.value.reshape(27, 16)
    np.testing.assert_allclose(matrix.T @ matrix, 4 * np.eye(16), atol=1e-2)
    assert (conv.live, head.live) == (216, 2880)
    assert (conv.value != 0).sum() == 216


def test_refusals_of_ai():
    with pytest.raises(
        DensityError, match=r"must be in .*Received: density=None"
    ):
        ApproximateIsometry(None)
    with pytest.raises(ValueError, match=r"Received: gain=-1"):
        ApproximateIsometry(0.5, gain=-1)
    with pytest.raises(ValueError, match=r"Received: max_iterations=1.5"):
        ApproximateIsometry(0.5, max_iterations=1.5)
    config = {
        **ApproximateIsometry(0.5).get_config(),
        "tolerance": 1e-5,
        "min_decrease": 1e-6,
    }
    # As in files of earlier versions.
    ApproximateIsometry.from_config({**config, "mask": None})
    with pytest.raises(ValueError, match=r"`mask` has been removed"):
        ApproximateIsometry.from_config(
            {**config, "mask": {"class_name": "__numpy__"}}
        )


@pytest.mark.parametrize(
    ("width", "degree"), [(1, 1), (12, 3), (64, 16), (30, 30)]
)
def test_orthogonal_with_exact_degrees(width, degree):
    kernel, mask = RamanujanOrthogonal(degree, 1.5, seed=1).sample(
        (3, width, width)
    )
    assert not kernel[[0, 2]].any()
    matrix = kernel[1].astype(np.float64)
    assert np.abs(matrix.T @ matrix - 2.25 * np.eye(width)).max() < 1e-6
    assert set(mask[1].sum(axis=0)) == set(mask[1].sum(axis=1)) == {degree}
    support = np.linalg.svd(mask[1].astype(float), compute_uv=False)
    np.testing.assert_allclose(support[: width // degree], degree, rtol=1e-9)


def test_relu_form():
    kernel, mask = RamanujanOrthogonal(4, seed=1, relu=True).sample((16, 16))
    eye = np.eye(8)
    np.testing.assert_allclose(
        kernel.T @ kernel, np.block([[eye, -eye], [-eye, eye]]), atol=1e-6
    )
    np.testing.assert_array_equal(mask.sum(axis=0), 4)


def test_refusals_of_sao():
    with pytest.raises(
        LayoutError, match=r"degrees that do are \[4, 6\]. Received: degree=5"
    ):
        RamanujanOrthogonal(5)((12, 12))
    with pytest.raises(
        LayoutError, match=r"RamanujanOrthogonal needs square kernels"
    ):
        RamanujanOrthogonal(4)((12, 16))
    with pytest.raises(ValueError, match=r"positive integer"):
        RamanujanOrthogonal(0)


PINNED = {"covering": "e82f827d883eae44", "published": "5ce81018758119e2"}


@pytest.mark.parametrize("start", PINNED)
def test_every_backend_and_dtype_has_the_same_kernels(start):
    state = hashlib.sha256()
    for dtype in ("float32", "float16", "bfloat16"):
        kernel = ExactOrthogonal(0.2, seed=3, start=start)(
            (3, 3, 16, 40), dtype=dtype
        )
        state.update(array(keras.ops.cast(kernel, "float32")).tobytes())
    assert state.hexdigest()[:16] == PINNED[start]


def test_configurations_from_before():
    config = ExactOrthogonal(
        0.3, seed=3, layout=KernelLayout.depthwise()
    ).get_config()
    before = {**config, "norms": None, "angles": None, "taps": "center"}
    before["layout"] = {**config["layout"], "strides": [2], "transposed": False}
    del before["start"]
    assert ExactOrthogonal.from_config(before).get_config() == {
        **config,
        "taps": "center",
    }
    removed = {"norms": "equal", "rotations": [[0, 1, 0.5]], "angles": 0.3}
    for name, value in removed.items():
        with pytest.raises(
            ValueError, match=f"`{name}` has been removed.*Received: {name}="
        ):
            ExactOrthogonal.from_config({**before, name: value})
    for name, value in {"start": "cover", "taps": "shift"}.items():
        with pytest.raises(
            ValueError, match=f"`{name}` must be .*Received: {name}='{value}'"
        ):
            ExactOrthogonal.from_config({**before, name: value})


@pytest.mark.parametrize("name", ["gelu", "silu", "elu", "sigmoid"])
def test_variance_1_stays_variance_1(name):
    z = np.random.default_rng(0).normal(size=1_000_000).astype("float32")
    values = keras.ops.convert_to_numpy(keras.activations.get(name)(z))
    assert activation_gain(name) ** 2 * np.mean(values**2) == pytest.approx(
        1, abs=0.01
    )
