"""Mirrored kernels: their form, their counts, and the isometry through ReLU."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho.errors import DensityError, LayoutError
from keras_sparse_ortho.initializers import ExactOrthogonal, KernelLayout
from keras_sparse_ortho.orthogonal import Block
from tests.helpers import array
from tests.orthogonal.checks import assert_orthogonal

pytestmark = pytest.mark.core
ROOT = np.sqrt(2.0)
STRUCTURES = {
    "none": None,
    "blocks": Block(8, 8),
    "regular": Block(8, 8, regular=True),
    "2:4": "2:4",
}


def halves(kernel):
    """The four quarters of a kernel."""
    upper, lower = np.split(kernel, 2, axis=-2)
    return [*np.split(upper, 2, axis=-1), *np.split(lower, 2, axis=-1)]


def assert_mirrored(kernel):
    first, second, third, fourth = halves(kernel)
    np.testing.assert_array_equal(second, -first)
    np.testing.assert_array_equal(third, -first)
    np.testing.assert_array_equal(fourth, first)


# --- the form -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 64), (64, 128), (128, 64)])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_form_and_the_count(structure, shape):
    pattern = ExactOrthogonal(
        0.25, 1.5, seed=1, mirrored=True, structure=STRUCTURES[structure]
    )
    kernel, mask = pattern.sample(shape, "float32")
    assert_mirrored(kernel)
    assert_orthogonal(ROOT * halves(kernel)[0], 1.5)
    assert not kernel[~mask].any()
    assert mask.sum() == round(0.25 * mask.size)


@pytest.mark.parametrize("density", [0.05, 0.1234, 0.5003, 1.0])
@pytest.mark.parametrize("sides", [True, "outputs", "inputs"])
def test_counts_that_the_copies_cannot_share_are_exact(sides, density):
    kernel, mask = ExactOrthogonal(density, seed=0, mirrored=sides).sample(
        (30, 46)
    )
    assert mask.sum() == round(density * mask.size)
    assert not kernel[~mask].any()


def test_one_mirrored_side():
    first, _ = ExactOrthogonal(0.2, 1.2, seed=0, mirrored="outputs").sample(
        (17, 60)
    )
    left, right = np.split(first, 2, axis=1)
    np.testing.assert_array_equal(right, -left)
    assert_orthogonal(first, 1.2)  # as it is wide in its half, too
    last, _ = ExactOrthogonal(0.2, 1.2, seed=0, mirrored="inputs").sample(
        (60, 7)
    )
    upper, lower = np.split(last, 2)
    np.testing.assert_array_equal(lower, -upper)
    assert_orthogonal(last, 1.2)


@pytest.mark.parametrize("taps", ["center", "dense_center", "all"])
def test_taps_of_convolutions(taps):
    pattern = ExactOrthogonal(0.2, seed=2, mirrored=True, taps=taps)
    kernel, mask = pattern.sample((3, 3, 16, 32))
    assert_mirrored(kernel)
    part = ROOT * halves(kernel)[0]
    if taps == "all":
        assert_orthogonal(part.reshape(-1, 16))
        assert np.count_nonzero(kernel[0, 0])
    else:
        assert_orthogonal(part[1, 1])
        assert not kernel[0].any()
    assert mask.sum() == round(0.2 * mask.size)


@pytest.mark.parametrize("sides", [True, "outputs", "inputs"])
def test_regular_blocks_are_the_kernel_that_sample_draws(sides):
    pattern = ExactOrthogonal(
        0.25,
        ROOT,
        seed=3,
        mirrored=sides,
        structure=Block(8, 8, regular=True),
    )
    kernel, mask = pattern.sample((64, 128))
    blocks = pattern.sample_blocks((64, 128))
    np.testing.assert_array_equal(blocks.dense()[0, 0], kernel)
    np.testing.assert_array_equal(blocks.mask()[0, 0], mask)
    assert blocks.live == mask.sum()


# --- what passes ----------------------------------------------------------------------------------


def passed(activation, gain, structure=None, depth=50, density=0.25):
    """Inputs `(u, -u)`, and what `depth` layers `activation(y) K` make of them, in float32."""
    parts = np.random.default_rng(0).normal(size=(6, 32)).astype("float32")
    start = np.concatenate([parts, -parts], axis=1)
    values = keras.ops.convert_to_tensor(start)
    for seed in range(depth):
        pattern = ExactOrthogonal(
            density, gain, seed=seed, mirrored=True, structure=structure
        )
        values = activation(values) @ pattern((64, 64), "float32")
    return start, array(values)


def assert_isometry(start, end):
    """Equal norms, and equal distances of any two rows."""
    np.testing.assert_allclose(
        np.linalg.norm(end, axis=1), np.linalg.norm(start, axis=1), rtol=1e-6
    )
    np.testing.assert_allclose(
        np.linalg.norm(end[:, None] - end, axis=2),
        np.linalg.norm(start[:, None] - start, axis=2),
        rtol=1e-6,
        atol=1e-6,
    )


@pytest.mark.parametrize("structure", STRUCTURES)
def test_an_isometry_through_fifty_relus(structure):
    start, end = passed(keras.ops.relu, ROOT, STRUCTURES[structure])
    assert_isometry(start, end)
    np.testing.assert_array_equal(end[:, 32:], -end[:, :32])


def test_an_isometry_at_a_low_density():
    assert_isometry(*passed(keras.ops.relu, ROOT, density=0.05))


@pytest.mark.parametrize(
    ("activation", "gain"),
    [
        (keras.ops.gelu, ROOT),
        (keras.ops.silu, ROOT),
        (lambda x: keras.ops.leaky_relu(x, 0.2), ROOT / 1.2),
    ],
    ids=["gelu", "silu", "leaky_relu"],
)
def test_activations_whose_odd_part_is_linear_keep_it_too(activation, gain):
    start, end = passed(activation, gain)
    np.testing.assert_allclose(
        np.linalg.norm(end, axis=1), np.linalg.norm(start, axis=1), rtol=2e-5
    )


def test_a_convolution_is_an_isometry_under_circular_padding():
    parts = np.random.default_rng(0).normal(size=(2, 6, 6, 8))
    start = np.concatenate([parts, -parts], axis=-1).astype("float32")
    values = keras.ops.convert_to_tensor(start)
    for seed in range(50):
        kernel = ExactOrthogonal(0.1, ROOT, seed=seed, mirrored=True)(
            (3, 3, 16, 16), "float32"
        )
        padded = wrapped(keras.ops.relu(values))
        values = keras.ops.conv(padded, kernel, padding="valid")
    assert_isometry(start.reshape(2, -1), array(values).reshape(2, -1))


def wrapped(images):
    """Images with a circular frame of one pixel."""
    rows = keras.ops.concatenate(
        [images[:, -1:], images, images[:, :1]], axis=1
    )
    return keras.ops.concatenate(
        [rows[:, :, -1:], rows, rows[:, :, :1]], axis=2
    )


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "shape", "message"),
    [
        ({"mirrored": True}, (15, 16), r"must be even: .*15 inputs x 16"),
        ({"mirrored": True}, (16, 15), r"must be even: .*16 inputs x 15"),
        ({"mirrored": "outputs"}, (16, 15), r"must be even"),
        ({"mirrored": "inputs"}, (15, 16), r"must be even"),
        (
            {"mirrored": True, "layout": KernelLayout.recurrent(4)},
            (16, 64),
            r"several groups or gates. Received: a kernel of 16 inputs x 16",
        ),
        (
            {"mirrored": True, "structure": "2:4"},
            (12, 16),
            r"whole blocks or groups of NByM\(n=2, m=4\)",
        ),
        (
            {"mirrored": True, "structure": Block(16, 16)},
            (48, 64),
            r"needs inputs divisible by 16",
        ),
    ],
)
def test_kernels_without_the_form_are_refused(options, shape, message):
    with pytest.raises(LayoutError, match=message):
        ExactOrthogonal(0.5, seed=0, **options).sample(shape)


def test_other_refusals():
    with pytest.raises(ValueError, match=r"Received: mirrored='left'"):
        ExactOrthogonal(0.5, mirrored="left")
    with pytest.raises(DensityError, match=r"the least density is 0.0625"):
        ExactOrthogonal(0.05, seed=0, mirrored=True).sample((32, 32))
