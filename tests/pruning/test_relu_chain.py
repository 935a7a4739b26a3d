"""`sparsify` mirrors the kernels of deep ReLU networks without normalization by itself."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array

pytestmark = pytest.mark.core
L = keras.layers
DEEP = 30


def mlp(depth=DEEP, width=16, activation="relu", behind=None):
    """So many kernels, the last one linear; `behind` makes a layer behind each of the others."""
    x = inputs = keras.Input((8,))
    for number in range(depth - 1):
        x = L.Dense(width, activation, name=f"hidden_{number}")(x)
        if behind is not None:
            x = behind()(x)
    return keras.Model(inputs, L.Dense(5, name="head")(x))


def cnn(pooling=L.AveragePooling2D):
    x = inputs = keras.Input((8, 8, 3))
    for number in range(DEEP - 1):
        x = kso.layers.CircularPadding(1)(x)
        x = L.Conv2D(8, 3, name=f"hidden_{number}")(x)
        x = L.ReLU()(x)
        if number == 9:
            x = pooling(2)(x)
    return keras.Model(
        inputs, L.Dense(5, name="head")(L.GlobalAveragePooling2D()(x))
    )


def residual():
    x = inputs = keras.Input((8,))
    x = L.Dense(16, "relu", name="first")(x)
    for number in range(DEEP):
        x = x + L.Dense(16, "relu", name=f"hidden_{number}")(x)
    return keras.Model(inputs, L.Dense(5, name="head")(x))


def mirrored(model):
    """By path, whether the outputs of a kernel are `(u, -u)`."""
    forms = {}
    for weight in kso.prunable_weights(model):
        halves = (
            np.split(weight.value, 2, axis=-1)
            if weight.shape[-1] % 2 == 0
            else None
        )
        forms[weight.path] = halves is not None and np.array_equal(
            halves[0], -halves[1]
        )
    return forms


@pytest.mark.parametrize("make", [mlp, cnn])
def test_signals_keep_their_size_through_deep_chains(make):
    dense = make()
    sparse = kso.sparsify(dense, 0.3, seed=0)
    forms = mirrored(sparse)
    assert forms.pop("head/kernel") is False
    assert all(forms.values())
    weights = kso.prunable_weights(sparse)
    size = sum(weight.size for weight in weights)
    live = sum(np.count_nonzero(weight.mask) for weight in weights)
    assert live == round(0.3 * size)
    if make is cnn:
        return
    rows = np.random.default_rng(0).normal(size=(8, 8)).astype("float32")
    hidden = keras.Model(sparse.inputs[0], sparse.layers[-2].output)
    norms = np.linalg.norm(array(hidden(rows)), axis=1)
    np.testing.assert_allclose(norms, np.linalg.norm(rows, axis=1), rtol=1e-4)


def test_a_dense_head_reads_a_chain():
    dense = mlp(DEEP + 1)
    assert all(mirrored(kso.sparsify(dense, 0.3, seed=0, exclude=["head"])))


@pytest.mark.parametrize(
    "make",
    [
        lambda: mlp(DEEP - 1),
        lambda: mlp(width=15),
        lambda: mlp(activation="tanh"),
        lambda: mlp(activation=None),
        lambda: mlp(activation=None, behind=lambda: L.ReLU(6.0)),
        lambda: mlp(behind=L.BatchNormalization),
        lambda: cnn(L.MaxPooling2D),
        residual,
    ],
    ids=[
        "shallow",
        "odd",
        "tanh",
        "linear",
        "relu6",
        "normalized",
        "maximum",
        "residual",
    ],
)
def test_other_networks_are_not_mirrored(make):
    assert not any(mirrored(kso.sparsify(make(), 0.3, seed=0)).values())


def test_what_the_user_asks_for_is_not_mirrored():
    dense = mlp()
    asked = [
        {"initializer": kso.initializers.ExactOrthogonal()},
        {"initializer": "random_sparse"},
        {"structure": "2:4", "exclude": ["head", "hidden_0"]},
    ]
    for settings in asked:
        sparse = kso.sparsify(dense, 0.5, seed=0, **settings)
        assert not any(mirrored(sparse).values())


def test_densities_that_mirrored_kernels_cannot_have():
    sparse = kso.sparsify(mlp(), 0.07, seed=0)
    assert not any(mirrored(sparse).values())


def test_a_dense_kernel_in_front_is_no_mirrored_one():
    sparse = kso.sparsify(mlp(DEEP + 1), 0.3, seed=0, exclude=["hidden_0"])
    forms = mirrored(sparse)
    assert not any(forms.values())
