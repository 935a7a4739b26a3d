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
    return struct.pack(f">{1 + array.ndim}I", header, *array.shape) + array.tobytes()


@pytest.fixture
def images():
    return np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)


@pytest.fixture
def folder(tmp_path, images):
    """A tiny Fashion-MNIST in Debian's layout."""
    for part in ("train", "t10k"):
        for kind, array in (("images-idx3", images), ("labels-idx1", np.uint8([0, 1, 2]))):
            path = tmp_path / f"{part}-{kind}-ubyte.gz"
            path.write_bytes(gzip.compress(idx(array)))
    return tmp_path


def refused(path, rank=3):
    with pytest.raises(data.DatasetError) as caught:
        data.read_idx(path, rank)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_idx_is_read_as_it_was_written(folder, images):
    np.testing.assert_array_equal(
        data.read_idx(folder / "train-images-idx3-ubyte.gz", rank=3), images
    )


def test_missing_file(tmp_path):
    assert "missing" in refused(tmp_path / "none.gz")


def test_no_gzip_file(tmp_path, images):
    path = tmp_path / "plain.gz"
    path.write_bytes(idx(images))
    assert "no gzip file" in refused(path)


@pytest.mark.parametrize("keep", [0.3, 0.9])
def test_truncated_gzip_file(tmp_path, keep):
    noise = np.random.default_rng(0).integers(0, 256, (8, 9, 9)).astype(np.uint8)
    content = gzip.compress(idx(noise))
    path = tmp_path / "cut.gz"
    path.write_bytes(content[: int(keep * len(content))])
    assert "damaged" in refused(path)


def test_flipped_bits(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (8, 9, 9)).astype(np.uint8)
    content = bytearray(gzip.compress(idx(noise)))
    content[len(content) // 2] ^= 0xFF
    path = tmp_path / "flipped.gz"
    path.write_bytes(content)
    assert "damaged" in refused(path)


@pytest.mark.parametrize("magic", [0x801, 0xD03, 0x01020304])
def test_wrong_magic_number(tmp_path, images, magic):
    path = tmp_path / "magic.gz"
    path.write_bytes(gzip.compress(idx(images, magic)))
    message = refused(path)
    assert "0x00000803" in message
    assert f"0x{magic:08x}" in message


@pytest.mark.parametrize(("cut", "rule"), [(2, "magic"), (6, "header"), (20, "must hold 60")])
def test_content_that_ends_early(tmp_path, images, cut, rule):
    path = tmp_path / "short.gz"
    path.write_bytes(gzip.compress(idx(images)[:cut]))
    assert rule in refused(path)


def test_fashion_mnist_is_standardized(folder):
    found = data.load_fashion_mnist(folder)
    assert found.x_train.shape == (3, 4, 5, 1)
    assert found.x_train.dtype == np.float32
    assert abs(found.x_train.mean()) < 1e-6
    assert abs(found.x_train.std() - 1) < 1e-6
    assert found.y_test.tolist() == [0, 1, 2]
    assert found.classes == 3


def test_fashion_mnist_with_a_missing_file(folder):
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(data.DatasetError, match=r"t10k-labels-idx1-ubyte.gz is missing"):
        data.load_fashion_mnist(folder)


def test_fashion_mnist_with_too_few_labels(folder):
    path = folder / "train-labels-idx1-ubyte.gz"
    path.write_bytes(gzip.compress(idx(np.uint8([0, 1]))))
    with pytest.raises(data.DatasetError, match="3 images, 2 labels"):
        data.load_fashion_mnist(folder)


def test_fashion_mnist_without_folder_and_network(tmp_path, monkeypatch):
    import keras

    def offline():
        raise OSError("no network")

    monkeypatch.setattr(keras.datasets.fashion_mnist, "load_data", offline)
    with pytest.raises(data.DatasetError, match=r"apt-get install .*no network"):
        data.load_fashion_mnist(tmp_path / "none")


def test_cifar10_has_three_channels_each_standardized(monkeypatch):
    import keras

    pixels = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    pixels[..., 2] //= 4  # a darker channel
    labels = np.arange(20, dtype=np.uint8)[:, None] % 10

    def few():  # in the forms that Keras gives them
        return (pixels, labels), (pixels[:5], labels[:5])

    monkeypatch.setattr(keras.datasets.cifar10, "load_data", few)
    found = data.load("cifar10")
    assert found.x_train.shape == (20, 32, 32, 3)
    assert found.x_train.dtype == np.float32
    x = found.x_train.astype(np.float64)  # sums over long axes lose digits in float32
    np.testing.assert_allclose(x.mean((0, 1, 2)), 0, atol=1e-6)
    np.testing.assert_allclose(x.std((0, 1, 2)), 1, atol=1e-6)
    assert found.y_test.tolist() == [0, 1, 2, 3, 4]

    def offline():
        raise OSError("no network")

    monkeypatch.setattr(keras.datasets.cifar10, "load_data", offline)
    with pytest.raises(data.DatasetError, match="CIFAR-10: no network"):
        data.load("cifar10")


def test_digits():
    found = data.load("digits")
    assert found.x_train.shape == (1347, 8, 8, 1)
    assert found.x_test.shape == (450, 8, 8, 1)
    assert found.classes == 10


def test_unknown_name():
    with pytest.raises(data.DatasetError, match="'cifar'"):
        data.load("cifar")
