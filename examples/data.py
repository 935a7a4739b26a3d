"""The data of examples and benchmarks: scikit-learn's digits, Fashion-MNIST and CIFAR-10."""

from __future__ import annotations

import dataclasses
import gzip
import math
import zlib
from pathlib import Path

import numpy as np

DEBIAN_FOLDER = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package `dataset-fashion-mnist` puts its files."""

_BYTES = 8  # IDX's code for unsigned bytes, the third byte of the magic number


class DatasetError(ValueError):
    """A data file is missing or damaged."""


@dataclasses.dataclass(frozen=True)
class Dataset:
    """Images, float32 `(rows, height, width, channels)`, standardized; labels, integers from 0."""

    name: str
    x_train: np.ndarray
    y_train: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray

    @property
    def classes(self) -> int:
        """Number of classes."""
        return int(self.y_train.max()) + 1


def load(name: str) -> Dataset:
    """The dataset called `digits`, `fashion_mnist` or `cifar10`."""
    loaders = {
        "digits": load_digits,
        "fashion_mnist": load_fashion_mnist,
        "cifar10": load_cifar10,
    }
    if name not in loaders:
        raise DatasetError(
            f"The dataset must be one of {sorted(loaders)}. Received: {name!r}"
        )
    return loaders[name]()


def load_digits() -> Dataset:
    """1797 handwritten digits of 8 x 8 pixels, part of scikit-learn; a quarter is held out."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    images, labels = load_digits(return_X_y=True)
    x_train, x_test, y_train, y_test = train_test_split(
        images.reshape(-1, 8, 8),
        labels,
        test_size=0.25,
        stratify=labels,
        random_state=0,
    )
    return _standardized("digits", x_train, y_train, x_test, y_test)


def load_fashion_mnist(folder: Path = DEBIAN_FOLDER) -> Dataset:
    """70000 pictures of clothes of 28 x 28 pixels; 10000 are the test set.

    Reads the gzip files in `folder` if it exists (`apt-get install dataset-fashion-mnist`), else
    lets Keras download them.
    """
    if folder.is_dir():
        parts = [
            _read_labelled(folder, "train"),
            _read_labelled(folder, "t10k"),
        ]
    else:
        import keras

        try:
            parts = list(keras.datasets.fashion_mnist.load_data())
        except Exception as error:  # whatever the download raises
            raise DatasetError(
                f"Fashion-MNIST is not in {folder} (apt-get install dataset-fashion-mnist), and "
                f"Keras could not download it: {error}"
            ) from error
    (x_train, y_train), (x_test, y_test) = parts
    return _standardized("fashion_mnist", x_train, y_train, x_test, y_test)


def load_cifar10() -> Dataset:
    """60000 photographs of 32 x 32 pixels in three colours; 10000 are the test set.

    Keras downloads them, or takes them from `~/.keras/datasets`.
    """
    import keras

    try:
        (x_train, y_train), (x_test, y_test) = (
            keras.datasets.cifar10.load_data()
        )
    except Exception as error:  # whatever the download raises
        raise DatasetError(f"Keras could not get CIFAR-10: {error}") from error
    return _standardized(
        "cifar10", x_train, y_train[:, 0], x_test, y_test[:, 0]
    )


def read_idx(path: Path, rank: int) -> np.ndarray:
    """Reads a gzip file in the IDX format that holds unsigned bytes.

    The file starts with the magic number `0x0000080r`, where `r` is the number of dimensions, then
    one big-endian 32-bit integer for each dimension, then the entries in C order.

    Args:
        path: The file, e.g. `train-images-idx3-ubyte.gz`.
        rank: The number of dimensions that it must have.

    Raises:
        DatasetError: A file that is missing, damaged, or something else.
    """
    try:
        with gzip.open(path, "rb") as stream:
            content = stream.read()
    except FileNotFoundError:
        raise DatasetError(f"The file {path} is missing.") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DatasetError(
            f"{path} is damaged or no gzip file: {error}"
        ) from None
    magic = int.from_bytes(content[:4], "big")
    wanted = _BYTES << 8 | rank
    if len(content) < 4 or magic != wanted:
        raise DatasetError(
            f"{path} must start with the magic number 0x{wanted:08x} (IDX, unsigned bytes, "
            f"{rank} dimensions). Received: 0x{magic:08x}"
        )
    header = 4 + 4 * rank
    if len(content) < header:
        raise DatasetError(f"{path} ends within its header of {header} bytes.")
    shape = [
        int(size) for size in np.frombuffer(content, ">u4", rank, offset=4)
    ]
    if len(content) - header != math.prod(shape):
        raise DatasetError(
            f"{path} must hold {math.prod(shape)} entries, for the shape {tuple(shape)}. "
            f"Received: {len(content) - header}"
        )
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def _read_labelled(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    images = read_idx(folder / f"{part}-images-idx3-ubyte.gz", rank=3)
    labels = read_idx(folder / f"{part}-labels-idx1-ubyte.gz", rank=1)
    if len(images) != len(labels):
        raise DatasetError(
            f"The {part} files in {folder} must hold as many images as labels. "
            f"Received: {len(images)} images, {len(labels)} labels"
        )
    return images, labels


def _standardized(
    name: str,
    x_train: np.ndarray,
    y_train: np.ndarray,
    x_test: np.ndarray,
    y_test: np.ndarray,
) -> Dataset:
    """Pixels with mean 0 and variance 1 in each channel of the training set, channels last."""
    if x_train.ndim == 3:
        x_train, x_test = x_train[..., None], x_test[..., None]
    mean, deviation = (
        moment(x_train, axis=(0, 1, 2), dtype="float64").astype("float32")
        for moment in (np.mean, np.std)
    )

    def scaled(images: np.ndarray) -> np.ndarray:
        return (images.astype("float32") - mean) / deviation

    return Dataset(
        name,
        scaled(x_train),
        y_train.astype("int32"),
        scaled(x_test),
        y_test.astype("int32"),
    )
