"""Data as `fit` takes it: the first batches, and the n-th, whatever was asked for before."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho._data import BatchSource, first_batches, samples
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

    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(
        3, drop_remainder=True
    )


def torch_loader():
    import torch

    dataset = torch.utils.data.TensorDataset(
        torch.from_numpy(X), torch.from_numpy(Y)
    )
    return torch.utils.data.DataLoader(dataset, batch_size=3, drop_last=True)


IN_BATCHES = [
    *(Pieces, pieces, lambda: lambda: iter(pieces()), tf_dataset),
    pytest.param(
        torch_loader, marks=pytest.mark.slow_on("tensorflow", "jax")
    ),  # imports torch
]


@pytest.mark.core
@pytest.mark.parametrize("make", IN_BATCHES)
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
    assert any(
        (BatchSource(data, 4, seed=4).batch(k)[1] != y).any() for k in range(3)
    )
    # A batch larger than the data is all of it.
    np.testing.assert_array_equal(BatchSource((X, None), 100, 0).batch(1)[0], X)
    np.testing.assert_array_equal(BatchSource(X, 100, 0).batch(1)[0], X)


def test_files_give_the_first_batches_in_the_order_drawn(tmp_path):
    import h5py

    options = {"batch_size": 4, "batches": None, "seed": 5}
    with h5py.File(tmp_path / "data.h5", "w") as file:
        file["x"], file["y"] = X, Y
        from_file = first_batches((file["x"], file["y"]), **options)
        x, y, _ = BatchSource((file["x"], file["y"]), 4, 0).batch(0)
        np.testing.assert_array_equal(x, X[y])
    for one, other in zip(
        from_file, first_batches((X, Y), **options), strict=True
    ):
        np.testing.assert_array_equal(one[0], other[0])
        np.testing.assert_array_equal(one[1], other[1])


@pytest.mark.core
@pytest.mark.parametrize(
    "make", [*IN_BATCHES, lambda: iter(pieces())]
)  # one pass is enough
def test_the_first_batches_of_data_that_come_in_batches(make):
    for count, expected in (
        (1, [0]),
        (2, [0, 3]),
        (None, [0, 3, 6]),
        (9, [0, 3, 6]),
    ):
        taken = first_batches(make(), batches=count)
        assert [int(np.asarray(y)[0]) for _, y, _ in taken] == expected
        for x, y, weight in taken:
            np.testing.assert_array_equal(np.asarray(x), X[np.asarray(y)])
            assert weight is None
            assert samples((x, y, weight)) == 3


def test_the_first_batches_of_arrays():
    # Pinned: seeds draw what they always drew.
    order = np.random.default_rng(3).permutation(10)
    for k, (x, y, weight) in enumerate(
        first_batches((X, Y), batch_size=4, batches=None, seed=3)
    ):
        np.testing.assert_array_equal(y, order[4 * k : 4 * k + 4])
        np.testing.assert_array_equal(x, X[y])
        assert weight is None
    assert k == 2
    [(_, y, weight)] = first_batches(
        (X, Y, Y / 10), batch_size=4, shuffle=False
    )
    np.testing.assert_array_equal(y, Y[:4])
    np.testing.assert_array_equal(weight, Y[:4] / 10)
    # A seed of its own.
    drawn = [first_batches((X, Y), batch_size=4)[0][1] for _ in range(9)]
    assert any((drawn[0] != other).any() for other in drawn)


@pytest.mark.parametrize(
    "pack", [lambda a: a, lambda a: {"a": a}, lambda a: (a,)]
)
def test_inputs_alone(pack):
    [(x, y, weight)] = first_batches(pack(X), shuffle=False)
    np.testing.assert_array_equal(x["a"] if isinstance(x, dict) else x, X)
    assert (y, weight) == (None, None)
    x, y, weight = BatchSource(pack(X), 100, 0).batch(2)
    np.testing.assert_array_equal(x["a"] if isinstance(x, dict) else x, X)
    assert (y, weight) == (None, None)


def every_use(data):
    """What reads data: the first batches, the n-th one."""
    return (lambda: first_batches(data)), (
        lambda: BatchSource(data, 4, 0).batch(0)
    )


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            [X, Y],
            r"A list must hold batches.*as a tuple, `\(x, y\)`.*Received: a list whose .* ndarray",
        ),
        ((X, Y[:5]), r"same number of samples.*Received: \[5, 10\] samples"),
        ((X[:0], Y[:0]), r"at least one. Received: \[0\] samples"),
        ((X, 3), r"same number of samples.*Received: \[0, 10\] samples"),
        ((X, Y, Y, Y), r"`\(x, y, sample_weight\)`. Received: a tuple of 4"),
        ((), r"Received: a tuple of 0"),
        ((Pieces(), Y), r"its own targets: pass it alone.*a Pieces in it"),
        (lambda: iter(()), "must have at least one batch"),
        ([], "must have at least one batch"),
        (
            [[1.0, 2.0], [3.0, 4.0]],
            r"of arrays. Received: inputs of type float",
        ),
        ([(X[:0], Y[:0])], r"at least one row.*shapes \(0, "),
        ([(X[:3], Y[:0])], r"at least one row.*empty ones out"),
        (3, "Received: data of type int"),
        ("data.csv", "Received: data of type str"),
        (None, "Received: data of type NoneType"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refusals(data, message):
    for use in every_use(data):
        with pytest.raises(ValueError, match=message):
            use()


def test_refusals_of_generators_beside_targets_and_where_they_must_start_again():
    with pytest.raises(
        ValueError, match=r"its own targets.*a tuple with a generator in it"
    ):
        first_batches(((batch for batch in pieces()), Y))
    with pytest.raises(
        ValueError, match=r"cannot start again.*Received: .*generator"
    ):
        BatchSource((batch for batch in pieces()), 4, 0)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, None, "4"])
def test_what_is_no_number_of_samples(size):
    with pytest.raises(
        ValueError, match=rf"`batch_size`.*Received: batch_size={size!r}"
    ):
        BatchSource((X, Y), size, 0)
    with pytest.raises(
        ValueError, match=rf"`batch_size`.*Received: batch_size={size!r}"
    ):
        first_batches((X, Y), batch_size=size)
    if size is not None:
        with pytest.raises(
            ValueError, match=rf"`batches`.*Received: batches={size!r}"
        ):
            first_batches((X, Y), batches=size)
