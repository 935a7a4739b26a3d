"""Batches of the benchmarks: a new order in each epoch, all rows once, the same for a seed."""

import keras
import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow_only


def epochs(rows, count=3):
    return [np.concatenate([x for x, _ in rows["x"].as_numpy_iterator()]) for _ in range(count)]


def test_every_epoch_has_its_own_order_of_all_rows(training):
    keras.utils.set_random_seed(0)  # what makes Keras repeat an order
    x = np.arange(50)
    found = epochs(training.shuffled(x, -x, 8, seed=3))
    for order in found:
        np.testing.assert_array_equal(np.sort(order), x[:48])  # whole batches only
    assert len({tuple(order) for order in found}) == 3
    again, other = (epochs(training.shuffled(x, -x, 8, seed)) for seed in (3, 4))
    np.testing.assert_array_equal(again, found)
    assert not np.array_equal(other, found)


def test_labels_stay_with_their_rows_and_steps_are_known(training):
    rows = training.shuffled(np.arange(20), -np.arange(20), 5, seed=0)["x"]
    assert rows.cardinality() == 4
    assert all((x == -y).all() and x.shape == (5,) for x, y in rows.as_numpy_iterator())
