"""The weights of a dense model, loaded into a sparse one under its masks."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.contrib import load_dense_weights
from keras_sparse_ortho.errors import NotPrunableError
from tests.helpers import array
from tests.models.networks import SHAPE, written

L = keras.layers
pytestmark = pytest.mark.core
X = np.random.default_rng(0).normal(size=(2, *SHAPE)).astype("float32")


def network():
    head = L.Dense(4, name="head")
    layers = [L.Conv2D(8, 3), L.BatchNormalization(), L.Flatten(), L.Dense(16, name="wide"), head]
    return keras.Sequential([keras.Input(SHAPE), *layers])


BLOCKS = {"include": "wide", "structure": kso.Block(8, 8, regular=True), "storage": "auto"}
WAYS = {
    "masked": (network, {}),
    "compact": (network, {"storage": "compact"}),
    "blocks": (network, BLOCKS),
    "class": (written, {}),
    "class, compact": (written, {"storage": "compact"}),
}


@pytest.mark.parametrize("name", sorted(WAYS))
def test_values_are_taken_under_the_mask(name, tmp_path):
    make, options = WAYS[name]
    keras.utils.set_random_seed(5)
    dense = make()
    for variable in dense.weights:  # moving averages and biases, too
        variable.assign(np.random.default_rng(1).normal(size=variable.shape))
    dense.save_weights(tmp_path / "dense.weights.h5")
    values = {weight.path: weight.value for weight in kso.prunable_weights(dense)}
    others = [array(v) for v in dense.weights if len(v.shape) == 1]
    keras.utils.clear_session(free_memory=False)  # the same names once more
    sparse = kso.sparsify(make(), 0.5, seed=0, **options)
    masks = {w.path: np.ones(w.shape, bool) for w in kso.prunable_weights(sparse)}
    wrapped = [w for w in kso.prunable_weights(sparse) if w.storage]
    masks |= {w.path: w.storage.mask_value() for w in wrapped}
    held = [id(variable) for variable in sparse.weights]
    dead = load_dense_weights(sparse, tmp_path / "dense.weights.h5")
    assert [id(variable) for variable in sparse.weights] == held
    assert dead == {w.path: (~masks[w.path]).sum() for w in wrapped}
    for weight in kso.prunable_weights(sparse):
        np.testing.assert_array_equal(
            weight.value, np.where(masks[weight.path], values[weight.path], 0)
        )
    for weight in kso.prunable_weights(dense):
        weight.variable.assign(values[weight.path] * masks[weight.path])
    np.testing.assert_allclose(array(sparse(X)), array(dense(X)), rtol=1e-5, atol=1e-4)
    plain = kso.strip(sparse)
    for found, expected in zip(
        [v for v in plain.weights if len(v.shape) == 1], others, strict=True
    ):
        np.testing.assert_array_equal(array(found), expected)


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_layers_of_other_shapes_are_skipped(storage, tmp_path):
    dense = network()
    dense.save_weights(tmp_path / "dense.weights.h5")
    values = {weight.path: weight.value for weight in kso.prunable_weights(dense)}
    keras.utils.clear_session(free_memory=False)  # the same names once more
    *layers, _ = network().layers
    other = keras.Sequential([keras.Input(SHAPE), *layers, L.Dense(5, name="head")])
    sparse = kso.sparsify(other, 0.5, seed=0, storage=storage)
    before = kso.prunable_weights(sparse)[-1].value
    with pytest.raises(ValueError, match="head"):
        load_dense_weights(sparse, tmp_path / "dense.weights.h5")
    with pytest.warns(UserWarning, match="head"):
        dead = load_dense_weights(sparse, tmp_path / "dense.weights.h5", skip_mismatch=True)
    *loaded, head = kso.prunable_weights(sparse)
    assert [*dead] == [weight.path for weight in loaded]
    np.testing.assert_array_equal(head.value, before)
    for weight in loaded:
        np.testing.assert_array_equal(weight.value, weight.mask * values[weight.path])


def test_learnt_thresholds_get_all_of_the_file(tmp_path):
    dense = network()
    dense.save_weights(tmp_path / "dense.weights.h5")
    for learnt in (kso.SoftThreshold(), kso.parametrizations.LowRankSoftThreshold()):
        sparse = kso.parametrize(network(), learnt, include="wide")
        load_dense_weights(sparse, tmp_path / "dense.weights.h5")
        expected = array(kso.parametrize(dense, learnt, include="wide")(X))
        np.testing.assert_allclose(array(sparse(X)), expected, atol=1e-5)


@pytest.mark.parametrize("make", [network, written])
def test_files_of_other_models_are_refused_and_change_nothing(make, tmp_path):
    other = keras.Sequential([keras.Input((3,)), L.Dense(2)])
    other.save_weights(tmp_path / "other.weights.h5")
    sparse = kso.sparsify(make(), 0.25, seed=0)
    before = [array(variable) for variable in sparse.weights]
    layers = [id(layer) for layer in sparse.layers]
    with pytest.raises(ValueError, match=r"variables|structure|mismatch|objects"):
        load_dense_weights(sparse, tmp_path / "other.weights.h5")
    assert [id(layer) for layer in sparse.layers] == layers
    for variable, value in zip(sparse.weights, before, strict=True):
        np.testing.assert_array_equal(array(variable), value)
    with pytest.raises(NotPrunableError, match="has no masks"):
        load_dense_weights(make(), tmp_path / "other.weights.h5")
