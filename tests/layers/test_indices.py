"""Indices of compact and block storage that are set or loaded: the possible ones alone."""

import h5py
import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.layers import BlockSparseDense
from tests.helpers import array, assert_same

pytestmark = pytest.mark.core
L = keras.layers


def model_of(kind):
    if kind == "compact":
        dense = keras.Sequential([keras.Input((8,)), L.Dense(8, name="d")])
        return kso.sparsify(dense, 0.5, seed=0, storage="compact")
    layer = BlockSparseDense(8, density=0.5, block=2, seed=0, name="d")
    return keras.Sequential([keras.Input((8,)), layer])


DAMAGED = {
    "out of range": lambda value: np.append(
        value[..., :-1], value[..., -1:] + 100, axis=-1
    ),
    "negative": lambda value: np.append(
        value[..., :1] - 100, value[..., 1:], axis=-1
    ),
    "twice": lambda value: np.append(
        value[..., :-1], value[..., -2:-1], axis=-1
    ),
    "not in order": lambda value: value[..., ::-1],
    "of another shape": lambda value: value[:-1],
    "no integers": lambda value: value + 0.5,
}


CASES = [
    *(
        (
            "compact",
            "kernel_indices",
            how,
            r"'d/kernel'.*strictly increasing.*Received: ",
        )
        for how in (
            "out of range",
            "negative",
            "twice",
            "not in order",
            "no integers",
        )
    ),
    *(
        ("blocks", "inputs_of", how, r"layer 'd'.*Received: ")
        for how in ("out of range", "negative", "twice", "no integers")
    ),
    ("blocks", "slots_of", "not in order", "`slots_of` must list"),
    (
        "blocks",
        "blocks",
        "of another shape",
        "does not fit|expected shape|shape",
    ),
]


def names_of(layer):
    # `get_weights` of a wrapped layer has the order of the layer inside.
    inside = layer.layer if isinstance(layer, kso.PrunableLayer) else layer
    return [variable.name for variable in inside.weights]


@pytest.mark.parametrize(("kind", "name", "how", "message"), CASES)
def test_set_weights_refuses_them_and_sets_nothing(kind, name, how, message):
    model = model_of(kind)
    layer = model.layers[0]
    before = layer.get_weights()
    given = [np.array(value) for value in before]
    given[0] += 1
    at = names_of(layer).index(name)
    given[at] = DAMAGED[how](given[at])
    with pytest.raises(ValueError, match=f"(?s){message}"):
        layer.set_weights(given)
    assert_same(layer.get_weights(), before)
    # A model assigns weight after weight, by Keras: the indices refuse by themselves.
    with pytest.raises(ValueError, match=f"(?s){message}"):
        model.set_weights(given)
    np.testing.assert_array_equal(layer.get_weights()[at], before[at])


@pytest.mark.parametrize(("kind", "name", "how", "message"), CASES)
def test_files_with_them_are_refused_and_change_nothing(
    kind, name, how, message, tmp_path
):
    model = model_of(kind)
    layer = model.layers[0]
    path = tmp_path / "m.weights.h5"
    model.save_weights(path)
    index, places = layer.get_weights()[names_of(layer).index(name)], {}
    with h5py.File(path, "r+") as file:
        file.visititems(lambda key, item: places.update({key: item}))
        data = {
            key: item[()]
            for key, item in places.items()
            if isinstance(item, h5py.Dataset)
        }
        [key] = [
            key for key, value in data.items() if np.array_equal(value, index)
        ]
        del file[key]
        file[key] = DAMAGED[how](index)
    model = model_of(kind)
    layer = model.layers[0]
    layer.set_weights(
        [w + 1 if w.dtype.kind == "f" else w for w in layer.get_weights()]
    )
    before = layer.get_weights()
    with pytest.raises(ValueError, match=f"(?s){message}"):
        model.load_weights(path)
    assert_same(layer.get_weights(), before)


@pytest.mark.parametrize("kind", ["compact", "blocks"])
def test_those_of_another_model_are_taken(kind):
    """`EarlyStopping` and the like read weights and set them again."""
    model, other = model_of(kind), model_of(kind)
    x = np.random.default_rng(0).normal(size=(3, 8)).astype("float32")
    given = [
        np.array(w) * 2 if w.dtype.kind == "f" else w
        for w in other.get_weights()
    ]
    model.set_weights(given)
    other.layers[0].set_weights(given)
    np.testing.assert_array_equal(array(model(x)), array(other(x)))
    copy = (
        kso.convert(model, "masked") if kind == "compact" else kso.strip(model)
    )
    np.testing.assert_allclose(
        array(copy(x)), array(model(x)), rtol=1e-5, atol=1e-6
    )
