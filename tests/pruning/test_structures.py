"""`sparsify` with a structure: budgets in whole blocks, and masks that stay so in training."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.analysis import orthogonality_error
from keras_sparse_ortho.errors import BudgetError, LayoutError
from keras_sparse_ortho.initializers import (
    ExactOrthogonal,
    RamanujanOrthogonal,
    SparseInitializer,
)
from keras_sparse_ortho.orthogonal import Block, NByM
from tests.helpers import classifier_loss, data, jit_if_quicker

pytestmark = pytest.mark.core


def network():
    widths = {"a": 128, "b": 256, "head": 10}
    layers = [
        keras.layers.Dense(width, "relu", name=name)
        for name, width in widths.items()
    ]
    return keras.Sequential([keras.Input((256,)), *layers])


def test_regular_blocks_of_every_kind_of_kernel():
    layers = keras.layers
    every = [
        layers.Conv2D(16, 3, padding="same", activation="relu", name="widen"),
        layers.Conv2D(32, 3, groups=2, activation="relu", name="groups"),
        layers.Reshape((16, 32)),
        layers.LSTM(32, name="gates"),
        layers.Dense(64, activation="relu", name="dense"),
    ]
    model = keras.Sequential([keras.Input((6, 6, 8)), *every])
    structure = kso.Block(4, 8, regular=True)
    found = kso.prunable_weights(
        kso.sparsify(model, 0.55, "uniform", structure=structure, seed=1)
    )
    for weight in found:
        assert not weight.raw_value()[~weight.mask].any()
        live = weight.layout.to_canonical(weight.mask)
        *_, inputs, outputs = live.shape
        live = live.reshape(
            live.shape[0] * live.shape[1], -1, inputs // 4, 4, outputs // 8, 8
        )
        blocks = live.all(axis=(3, 5))
        np.testing.assert_array_equal(blocks, live.any(axis=(3, 5)))
        for axis in (2, 3):
            assert len(np.unique(blocks.sum(axis=axis))) == 1, weight.path
    units = [structure.unit(w.layout.canonical_shape(w.shape)) for w in found]
    missing = 0.55 * sum(w.size for w in found) - sum(w.live for w in found)
    assert 0 <= round(missing) < max(units)


def own_structures():
    """A layer without a structure between two that have their own; `head` fits neither."""
    block = ExactOrthogonal(0.3, seed=1, structure=Block(16, 1))
    pairs = ExactOrthogonal(0.25, seed=2, structure=NByM(2, 4))
    first = keras.layers.Dense(48, kernel_initializer=block, name="a")
    second = keras.layers.Dense(32, kernel_initializer=pairs, name="b")
    return keras.Sequential(
        [keras.Input((64,)), first, second, keras.layers.Dense(10, name="head")]
    )


def assert_structured(model):
    masks = {
        weight.path: weight.parametrization.mask_value()
        for weight in kso.prunable_weights(model)
        if weight.parametrization is not None
    }
    assert set(np.unique(masks["a/kernel"].reshape(4, 16, 48).sum(axis=1))) == {
        0,
        16,
    }
    assert masks["b/kernel"].reshape(12, 4, 32).sum(axis=1).max() <= 2
    return masks


@pytest.mark.parametrize("density", [0.2, 0.25, 0.4])
def test_the_layers_own_structures_hold_where_kernels_are_drawn_anew(density):
    sparse = kso.sparsify(own_structures(), density, seed=1)
    masks = assert_structured(sparse)
    size = sum(mask.size for mask in masks.values())
    assert sum(mask.sum() for mask in masks.values()) == round(density * size)
    for weight in kso.prunable_weights(sparse):
        assert orthogonality_error(weight.value, weight.layout, gain=1.0) < 1e-6


def test_densities_that_the_structures_do_not_allow():
    with pytest.raises(
        BudgetError, match=r"Block\(rows=16, cols=1\), NByM\(n=2, m=4\) allow"
    ):
        kso.sparsify(own_structures(), 0.9, exclude="head")


@keras.saving.register_keras_serializable(package="tests")
class Diagonal(SparseInitializer):
    def sample(self, shape, dtype=None, layout=None):
        return np.eye(*shape, dtype="float32"), np.eye(*shape, dtype=bool)


def test_an_initializer_without_a_density_is_refused():
    with pytest.raises(
        ValueError, match=r"Diagonal has no `density` .*Use it as"
    ):
        kso.sparsify(network(), 0.1, initializer=Diagonal())


def square(width, *more):
    layers = [keras.layers.Dense(width, name=name) for name in ("a", "b")]
    return keras.Sequential([keras.Input((width,)), *layers, *more])


@pytest.mark.parametrize("budget", ["uniform", "erk"])
@pytest.mark.parametrize("relu", [False, True])
def test_the_degree_follows_from_the_density(budget, relu):
    pattern = RamanujanOrthogonal(2, 1.5, relu=relu)
    sparse = kso.sparsify(square(24), 0.25, budget, pattern, seed=1)
    first, second = (
        weight.parametrization.mask_value()
        for weight in kso.prunable_weights(sparse)
    )
    for mask in (first, second):
        assert set(mask.sum(axis=0)) == set(mask.sum(axis=1)) == {6}
    assert (first != second).any()
    largest = np.linalg.norm(kso.prunable_weights(sparse)[0].value, 2)
    np.testing.assert_allclose(
        largest, 1.5 * (np.sqrt(2) if relu else 1), rtol=1e-6
    )


def test_inadmissible_degrees_are_refused_with_their_neighbours():
    pattern = RamanujanOrthogonal(2)
    near = r"'a/kernel'.* 0.166666667 \(degree 4\) and 0.25 \(degree 6\). Received: density=0.199"
    with pytest.raises(LayoutError, match=near):
        kso.sparsify(square(24), 0.2, "uniform", pattern)
    with pytest.raises(
        LayoutError,
        match=r"'head/kernel' does not fit: .* needs square kernels",
    ):
        kso.sparsify(
            square(24, keras.layers.Dense(9, name="head")),
            0.25,
            "uniform",
            pattern,
        )
    with pytest.raises(
        LayoutError, match=r"square kernels of even width.*25 inputs x 25"
    ):
        kso.sparsify(
            square(25), 0.2, "uniform", RamanujanOrthogonal(2, relu=True)
        )
    conv = keras.layers.Conv2D(8, 3, name="conv", padding="same")
    model = keras.Sequential([keras.Input((6, 6, 8)), conv])
    (weight,) = kso.prunable_weights(
        kso.sparsify(model, 4 / 72, "uniform", pattern)
    )
    assert weight.live == 32
    with pytest.raises(
        LayoutError,
        match=r"kernel that allow it are 0.111111111 \(degree 8\)\. ",
    ):
        kso.sparsify(model, 0.3, "uniform", pattern)


@pytest.mark.parametrize("adopt", [False, True])
def test_dynamic_sparse_training_keeps_structures(adopt):
    model = own_structures()
    model = (
        kso.apply_masks(model) if adopt else kso.sparsify(model, 0.3, seed=1)
    )
    model.compile("sgd", classifier_loss(), jit_compile=jit_if_quicker())
    x, y = data(model, 10, count=8)
    weights = [
        w for w in kso.prunable_weights(model) if w.parametrization is not None
    ]
    for callback in (
        kso.callbacks.SET(frequency=1, end_step=9, exclude="b"),
        kso.callbacks.RigL((x, y), 8, frequency=1, end_step=18, exclude="b"),
    ):
        before = [weight.parametrization.mask_value() for weight in weights]
        model.fit(x, y, batch_size=2, verbose=0, callbacks=[callback])
        masks = assert_structured(model)
        for weight, mask, now in zip(
            weights, before, masks.values(), strict=True
        ):
            assert (mask != now).any() == (weight.path != "b/kernel"), weight
            assert np.count_nonzero(mask) == np.count_nonzero(now), weight
            assert not weight.raw_value()[~now].any(), weight
