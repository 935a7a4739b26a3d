"""The loader of the examples: what it reads, and what it refuses."""

import gzip
import struct

import numpy as np
import pytest

from examples import data

pytestmark = pytest.mark.numpy_only


def idx(array, magic=None):
    """`array` as IDX bytes."""
    header = 0x800 | array.ndim if magic is None else magic
    return (
        struct.pack(f">{1 + array.ndim}I", header, *array.shape)
        + array.tobytes()
    )


IMAGES = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
PACKED = gzip.compress(
    idx(np.random.default_rng(0).integers(0, 256, (8, 9, 9)).astype(np.uint8))
)
FLIPPED = bytearray(PACKED)
FLIPPED[len(PACKED) // 2] ^= 0xFF
REFUSED = {
    "missing": (None, "missing"),
    "plain": (idx(IMAGES), "no gzip file"),
    "cut early": (PACKED[: int(0.3 * len(PACKED))], "damaged"),
    "cut late": (PACKED[: int(0.9 * len(PACKED))], "damaged"),
    "flipped bits": (bytes(FLIPPED), "damaged"),
    **{
        f"magic {magic:08x}": (
            gzip.compress(idx(IMAGES, magic)),
            f"0x00000803 (IDX, unsigned bytes, 3 dimensions). Received: 0x{magic:08x}",
        )
        for magic in (0x801, 0xD03, 0x01020304)
    },
    **{
        f"{cut} bytes": (gzip.compress(idx(IMAGES)[:cut]), rule)
        for cut, rule in ((2, "magic"), (6, "header"), (20, "must hold 60"))
    },
}


@pytest.fixture
def folder(tmp_path):
    """A tiny Fashion-MNIST in Debian's layout."""
    for part in ("train", "t10k"):
        for kind, array in (
            ("images-idx3", IMAGES),
            ("labels-idx1", np.uint8([0, 1, 2])),
        ):
            path = tmp_path / f"{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(idx(array)))
    return tmp_path


def test_idx_is_read_as_it_was_written(folder):
    np.testing.assert_array_equal(
        data.read_idx(folder / "train-images-idx3-ubyte.gz", rank=3), IMAGES
    )


@pytest.mark.parametrize("name", REFUSED)
def test_damaged_files_are_refused(tmp_path, name):
    content, rule = REFUSED[name]
    path = tmp_path / "file.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(data.DatasetError) as caught:
        data.read_idx(path, rank=3)
    assert str(path) in str(caught.value)
    assert rule in str(caught.value)


def test_fashion_mnist_is_standardized(folder):
    found = data.load_fashion_mnist(folder)
    assert found.x_train.shape == (3, 4, 5, 1)
    assert found.x_train.dtype == np.float32
    assert abs(found.x_train.mean()) < 1e-6
    assert abs(found.x_train.std() - 1) < 1e-6
    assert found.y_test.tolist() == [0, 1, 2]
    assert found.classes == 3


def test_fashion_mnist_with_a_missing_or_a_short_file(folder):
    (folder / "t10k-labels-idx1-ubyte.gz").rename(folder / "elsewhere")
    with pytest.raises(
        data.DatasetError, match=r"t10k-labels-idx1-ubyte.gz is missing"
    ):
        data.load_fashion_mnist(folder)
    (folder / "elsewhere").rename(folder / "t10k-labels-idx1-ubyte.gz")
    path = folder / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.uint8([0, 1]))))
    with pytest.raises(data.DatasetError, match="3 images, 2 labels"):
        data.load_fashion_mnist(folder)


def offline():
    raise OSError("no network")


def test_without_folder_and_network(tmp_path, monkeypatch):
    import keras

    monkeypatch.setattr(keras.datasets.fashion_mnist, "load_data", offline)
    with pytest.raises(
        data.DatasetError, match=r"apt-get install .*no network"
    ):
        data.load_fashion_mnist(tmp_path / "none")
    monkeypatch.setattr(keras.datasets.cifar10, "load_data", offline)
    with pytest.raises(data.DatasetError, match="CIFAR-10: no network"):
        data.load("cifar10")
    with pytest.raises(data.DatasetError, match="'cifar'"):
        data.load("cifar")


def test_cifar10_has_three_channels_each_standardized(monkeypatch):
    import keras

    pixels = np.random.default_rng(0).integers(
        0, 256, (20, 32, 32, 3), dtype=np.uint8
    )
    pixels[..., 2] //= 4  # a darker channel
    labels = np.arange(20, dtype=np.uint8)[:, None] % 10

    def few():  # in the forms that Keras gives them
        return (pixels, labels), (pixels[:5], labels[:5])

    monkeypatch.setattr(keras.datasets.cifar10, "load_data", few)
    found = data.load("cifar10")
    assert found.x_train.shape == (20, 32, 32, 3)
    assert found.x_train.dtype == np.float32
    # Sums over long axes lose digits in float32.
    x = found.x_train.astype(np.float64)
    np.testing.assert_allclose(x.mean((0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(x.std((0, 1, 2)), 1, atol=1e-6)
    assert found.y_test.tolist() == [0, 1, 2, 3, 4]
