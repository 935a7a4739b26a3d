"""Extra batches: the n-th is the same whatever was asked for before, from every kind of data."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho.callbacks._batch_source import BatchSource
from tests.helpers import array

X = np.arange(20.0).reshape(10, 2)
Y = np.arange(10)


class Pieces(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return X[3 * index : 3 * index + 3], Y[3 * index : 3 * index + 3]


class Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index):
        return X[index % 10 : index % 10 + 1], Y[index % 10 : index % 10 + 1]


def pieces():
    return [(X[k : k + 3], Y[k : k + 3]) for k in (0, 3, 6)]


def tf_dataset():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(3, drop_remainder=True)


def torch_loader():
    import torch

    dataset = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    return torch.utils.data.DataLoader(dataset, batch_size=3, drop_last=True)


@pytest.mark.core
@pytest.mark.parametrize(
    "make", [Pieces, pieces, lambda: lambda: iter(pieces()), tf_dataset, torch_loader]
)
def test_batches_in_any_order(make):
    source = BatchSource(make(), 4, 0)
    for number in (0, 1, 2, 3, 8, 4, 0, 7):
        x, y, weight = source.batch(number)
        np.testing.assert_array_equal(np.asarray(y), Y[3 * (number % 3) :][:3])
        np.testing.assert_array_equal(np.asarray(x), X[3 * (number % 3) :][:3])
        assert weight is None


def test_endless_data():
    source = BatchSource(Endless(), 4, 0)
    assert source.batch(123)[1] == [3]

    def count():
        number = 0
        while True:
            yield np.full(2, number), np.full(2, number)
            number += 1

    source = BatchSource(count, 4, 0)
    assert [source.batch(k)[0][0] for k in (5, 6, 2)] == [5, 6, 2]


def test_samples_of_arrays():
    weight = Y / 10
    data = ({"a": X, "b": [X + 1, keras.ops.convert_to_tensor(X)]}, Y, weight)
    source = BatchSource(data, 4, seed=3)
    first = source.batch(0)
    x, y, w = first
    assert len(set(y)) == 4
    np.testing.assert_array_equal(x["a"], X[y])
    np.testing.assert_array_equal(x["b"][0], X[y] + 1)
    np.testing.assert_array_equal(array(x["b"][1]), X[y])
    np.testing.assert_array_equal(w, weight[y])
    other = BatchSource(data, 4, seed=3)
    other.batch(5)
    np.testing.assert_array_equal(other.batch(0)[1], y)
    assert any((source.batch(k)[1] != y).any() for k in range(1, 4))
    assert any((BatchSource(data, 4, seed=4).batch(k)[1] != y).any() for k in range(3))
    # A batch larger than the data is all of it.
    np.testing.assert_array_equal(BatchSource((X, None), 100, 0).batch(1)[0], X)
    np.testing.assert_array_equal(BatchSource(X, 100, 0).batch(1)[0], X)


def test_files_are_read_piece_by_piece(tmp_path):
    import h5py

    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = X, Y
        x, y, _ = BatchSource((file["x"], file["y"]), 4, 0).batch(0)
        np.testing.assert_array_equal(x, X[y])


def test_refusals():
    with pytest.raises(ValueError, match=r"cannot start again.*Received: .*generator"):
        BatchSource((batch for batch in pieces()), 4, 0)
    with pytest.raises(ValueError, match=r"a list holds batches.*Received: .*list"):
        BatchSource([X, Y], 4, 0)
    with pytest.raises(ValueError, match=r"as many samples each. Received: 2 parts of lengths"):
        BatchSource((X, Y[:5]), 4, 0)
    with pytest.raises(ValueError, match=r"must hold samples"):
        BatchSource((X[:0], Y[:0]), 4, 0)
    with pytest.raises(ValueError, match=r"must hold a batch"):
        BatchSource(lambda: iter(()), 4, 0).batch(0)
    with pytest.raises(ValueError, match=r"Received: batch_size=0"):
        BatchSource((X, Y), 0, 0)
    with pytest.raises(ValueError, match=r"Received: data of type int"):
        BatchSource(3, 4, 0)
