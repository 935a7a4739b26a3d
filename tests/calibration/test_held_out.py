"""Held-out rows: one in four, put together to batches as large as those that they come from."""

import keras
import numpy as np
import pytest

from keras_sparse_ortho.calibration import OutputErrors
from keras_sparse_ortho.models import output_kinds

L = keras.layers

pytestmark = pytest.mark.core


class Watching(L.Layer):
    """Notes the first number of each row that passes, a list for each call."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def call(self, inputs):
        numbers = keras.ops.convert_to_numpy(inputs)[:, 0, 0]
        self.calls.append(numbers.astype(int).tolist())
        return inputs

    def compute_output_spec(self, inputs):
        return keras.KerasTensor(inputs.shape, inputs.dtype)


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        ([(8, 3)] * 5, [[3, 7, 11, 15, 19, 23, 27, 31], [35, 39]]),
        (
            [(8, 3), (8, 3), (8, 5), (8, 3)],
            [[3, 7, 11, 15], [19, 23], [27, 31]],
        ),
        ([(2, 3), (4, 3)], [[1, 5]]),
    ],
    ids=["full", "lengths", "few"],
)
def test_neighbours_of_equal_shapes_are_one_batch(shapes, expected):
    watching = Watching()
    inputs = keras.Input((None, 1))
    outputs = L.GlobalAveragePooling1D()(watching(inputs))
    model = keras.Model(inputs, outputs)
    batches, start = [], 0
    for rows, length in shapes:
        numbers = np.arange(start, start + rows, dtype="float32")
        batch = np.tile(numbers[:, None, None], (1, length, 1))
        batches.append(keras.ops.convert_to_tensor(batch))
        start += rows
    errors = OutputErrors(model, batches, output_kinds(model, 1))
    assert watching.calls == expected
    assert errors.error() == 0.0
