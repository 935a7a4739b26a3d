"""The pure parts: names, nesting, comparison."""

import types

import keras
import numpy as np
import pytest

from keras_sparse_ortho.export._compare import compare
from keras_sparse_ortho.export._model import (
    float32_clone,
    kernels_of,
    leaves,
    nesting_of,
    pack,
    signature_of,
    unique_names,
)
from keras_sparse_ortho.export._task import inputs_of

L = keras.layers
pytestmark = pytest.mark.tensorflow_only


def test_nesting_is_put_back_whatever_the_order_of_keys():
    nested = {"b": [10, (20, 30)], "a": {"d": 40, "c": 50}}
    flat = [value for _, value in leaves(nested)]
    assert pack(nesting_of(nested), flat) == {"a": {"c": 50, "d": 40}, "b": [10, [20, 30]]}
    assert [key for key, _ in leaves(nested)] == ["c", "d", None, None, None]


def test_names_do_not_depend_on_keras_numbering():
    assert unique_names(["keras_tensor_41"], "input") == ["input"]
    assert unique_names(["a", "input_layer_3", None], "input") == ["a", "input_1", "input_2"]
    assert unique_names(["dense", "dense", "x/y"], "output") == ["dense", "dense_1", "x_y"]


def test_measures():
    y, z = np.array([[0.0, 30.0], [40.0, 0.0]]), np.array([[3.0, 30.0], [40.0, 0.0]])
    largest = compare(["o"], [y], [z], "max")
    assert (largest.max_abs_diff, largest.mean_abs_diff) == (3.0, 0.75)
    assert largest.error == pytest.approx(3 / 40)
    assert compare(["o"], [y], [z], "rms").error == pytest.approx(1.5 / 25)
    assert largest.argmax_agreement == 1.0


@pytest.mark.parametrize("sign", [1, -1])
def test_differences_have_no_sign(sign):
    y = np.array([[4.0, 1.0], [2.0, 0.0]])
    z = y + sign * np.array([[3.0, 0.0], [0.0, -1.0]])
    found = compare(["o"], [y], [z], "max")
    assert (found.max_abs_diff, found.mean_abs_diff, found.error) == (3.0, 1.0, 0.75)


def test_small_outputs_are_measured_absolutely_by_max_and_relatively_by_rms():
    y, z = np.full((1, 2), 1e-3), np.full((1, 2), 2e-3)
    assert compare(["o"], [y], [z], "max").error == pytest.approx(1e-3)
    assert compare(["o"], [y], [z], "rms").error == pytest.approx(1.0)


@pytest.mark.parametrize("measure", ["max", "rms"])
def test_nan_is_an_infinite_error_at_its_output(measure):
    y = np.ones((2, 3))
    z = np.ones((2, 3))
    z[1, 1] = np.nan
    result = compare(["a", "b"], [y, y], [y, z], measure)
    assert (result.error, result.worst_output) == (float("inf"), "b")


def test_argmax_agreement_counts_rows_of_the_worst_output():
    y = np.eye(4)
    assert compare(["a", "b"], [y, y], [y, y[[0, 1, 3, 2]]], "max").argmax_agreement == 0.5
    cube = np.ones((2, 3, 4))
    assert compare(["c"], [cube], [cube], "max").argmax_agreement is None


def test_kernels_are_known_by_name_or_by_some_zeros():
    def variable(name, value):
        return keras.Variable(np.array(value, "float32"), name=name)

    variables = [
        variable("kernel", [[1.0, 1.0]]),
        variable("embeddings", [[0.0, 0.0]]),
        variable("mine", [[0.0, 1.0]]),
        variable("bias", [[0.0, 0.0]]),  # a fresh bias of rank 2, as GRU's
        variable("bias", [[0.0, 1.0]]),  # of keys: without a gradient, but for rounding
        variable("alpha", [[1.0, 2.0]]),
        variable("bias", [0.0, 1.0]),
    ]
    chosen = kernels_of(types.SimpleNamespace(weights=variables))
    assert [*chosen] == ["kernel", "embeddings", "mine"]


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16", "float16"])
def test_clone_computes_in_float32_with_the_same_weights(policy):
    keras.config.set_dtype_policy(policy)
    x = keras.Input((4, 3), dtype="float32")
    y = keras.layers.Bidirectional(keras.layers.GRU(2))(x)
    # A list, because Keras before 3.11 makes one of a single input when it restores a model.
    model = keras.Model([x], keras.layers.Dense(2)(y))
    model.compile("sgd", "mse")
    clone = float32_clone(model)
    assert {v.dtype for v in clone.weights} == {"float32"}
    data = np.random.default_rng(0).standard_normal((5, 4, 3)).astype("float32")
    out = clone([data])
    assert keras.backend.standardize_dtype(out.dtype) == "float32"
    half = keras.ops.convert_to_numpy(keras.ops.cast(model([data]), "float32"))
    np.testing.assert_allclose(keras.ops.convert_to_numpy(out), half, atol=0.02)
    for mine, theirs in zip(clone.weights, model.weights, strict=True):
        np.testing.assert_array_equal(
            keras.ops.convert_to_numpy(mine),
            keras.ops.convert_to_numpy(keras.ops.cast(theirs, "float32")),
        )


def test_data_with_targets_are_handed_over_as_for_fit():
    a, b, y = np.arange(12.0).reshape(6, 2), np.arange(18.0).reshape(6, 3), np.zeros(6)
    one = signature_of(keras.Sequential([keras.Input((2,)), L.Dense(1)]), 1, None)
    halves = [(a[:4], y[:4]), (a[4:], y[4:])]

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return halves[index]

    for given in (a, (a, y), (a, y, y), lambda: iter(halves), Batches(), iter(halves)):
        [found] = one.flatten(inputs_of(given, one), "sample")
        np.testing.assert_array_equal(found, a)
    inputs = [keras.Input((2,)), keras.Input((3,))]
    model = keras.Model(inputs, L.Dense(1)(L.Concatenate()(inputs)))
    two = signature_of(model, 1, None)
    for given in ([a, b], (a, b), ([a, b], y), lambda: iter([([a, b], y)])):
        found = two.flatten(inputs_of(given, two), "sample")
        for value, expected in zip(found, (a, b), strict=True):
            np.testing.assert_array_equal(value, expected)
