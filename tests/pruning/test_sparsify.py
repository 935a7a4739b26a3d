"""`sparsify`, and the masks of `prune` and `apply_masks`: exact counts, seeds, refusals."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.analysis import orthogonality_error
from keras_sparse_ortho.errors import (
    BudgetError,
    DensityError,
    NotPrunableError,
    UnknownWeightError,
)
from keras_sparse_ortho.initializers import ExactOrthogonal, RandomSparse
from keras_sparse_ortho.orthogonal import depthwise_outputs
from tests.helpers import array
from tests.models.networks import MODELS, sequential, wrappers

L = keras.layers
pytestmark = pytest.mark.core


def weights(model):
    return kso.prunable_weights(model)


@pytest.mark.parametrize("budget", ["erk", "er", "uniform"])
@pytest.mark.parametrize("name", MODELS)
def test_anew_kernels_are_orthogonal_and_counts_exact(name, budget):
    model = kso.sparsify(MODELS[name](), 0.3, budget, seed=4)
    found = weights(model)
    size = sum(weight.size for weight in found)
    assert sum(weight.live for weight in found) == round(0.3 * size)
    for weight in found:
        mask = weight.parametrization.mask_value()
        assert not weight.raw_value()[~mask].any()
        drawn = weight.storage.drawn_by
        options = {"gain": drawn.gain, "taps": drawn.taps or "center"}
        assert (
            orthogonality_error(weight.value, weight.layout, **options) < 1e-6
        )


@pytest.mark.parametrize("name", MODELS)
def test_kept_weights_are_the_largest_of_each_kernel(name):
    model = MODELS[name]()
    given = {weight.path: weight.raw_value() for weight in weights(model)}
    sparse = kso.prune(model, 0.25, budget="erk")
    assert sum(w.live for w in weights(sparse)) == round(
        0.25 * sum(value.size for value in given.values())
    )
    for weight in weights(sparse):
        mask = weight.parametrization.mask_value()
        np.testing.assert_array_equal(weight.value, given[weight.path] * mask)
        if not mask.all():
            magnitude = np.abs(given[weight.path])
            ranked = mask
            # One input an output.
            if depthwise_outputs(magnitude.shape, weight.layout):
                taps = tuple(range(magnitude.ndim - 2))
                assert mask.any(axis=taps).all()  # each output has a live entry
                ranked = mask & (magnitude < magnitude.max(axis=taps))
            assert magnitude[ranked].min() >= magnitude[~mask].max()


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_pruned_keeps_its_values(name):
    model = MODELS[name]()
    kernels = {id(weight.variable) for weight in weights(model)}
    rng = np.random.default_rng(0)
    expected = {v.shape: [] for v in model.weights}
    for variable in model.weights:
        if id(variable) not in kernels:
            if "seed" not in variable.path:
                variable.assign(rng.normal(size=variable.shape))
            expected[variable.shape].append(array(variable).tolist())
    sparse = kso.sparsify(model, 0.3, seed=1)
    pruned = {id(weight.variable) for weight in weights(sparse)}
    for variable in sparse.weights:
        if id(variable) not in pruned and "mask" not in variable.name:
            assert array(variable).tolist() in expected[variable.shape], (
                variable.path
            )


def test_seeds():
    def masks(seed):
        return {
            w.path: w.value
            for w in weights(kso.sparsify(twins(), 0.3, seed=seed))
        }

    def twins():
        return keras.Sequential(
            [keras.Input((16,)), L.Dense(16, name="a"), L.Dense(16, name="b")]
        )

    first, again, other = masks(1), masks(1), masks(2)
    for path in first:
        np.testing.assert_array_equal(first[path], again[path])
        assert (first[path] != other[path]).any()
    assert (first["a/kernel"] != first["b/kernel"]).any()
    keras.utils.set_random_seed(3)
    drawn = masks(None)
    assert (drawn["a/kernel"] != masks(None)["a/kernel"]).any()
    keras.utils.set_random_seed(3)
    np.testing.assert_array_equal(drawn["a/kernel"], masks(None)["a/kernel"])


def test_adopting_wraps_exactly_the_layers_with_our_initializers():
    inputs = keras.Input((16,))
    x = L.Dense(
        24, kernel_initializer=ExactOrthogonal(0.2, gain=1.5), name="ours"
    )(inputs)
    x = L.Dense(24, kernel_initializer=RandomSparse(0.25), name="random")(x)
    model = keras.Model(inputs, L.Dense(3, name="usual")(x))
    sparse = kso.apply_masks(model)
    assert [layer.name for layer in wrappers(sparse)] == ["ours", "random"]
    np.testing.assert_array_equal(
        array(sparse.get_layer("ours").layer.kernel),
        array(model.get_layer("ours").kernel),
    )
    assert [w.live for w in weights(sparse)] == [77, 144, 72]
    data = np.random.default_rng(0).normal(size=(4, 16)).astype("float32")
    np.testing.assert_allclose(
        array(sparse(data)), array(model(data)), atol=1e-6
    )


def test_adopting_a_model_trained_without_masks_is_refused():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            L.Dense(4, kernel_initializer=ExactOrthogonal(0.5), name="hidden"),
        ]
    )
    model.compile("sgd", "mse")
    model.fit(np.ones((8, 8)), np.zeros((8, 4)), verbose=0)
    with pytest.raises(
        NotPrunableError, match="'hidden/kernel' has changed since"
    ):
        kso.apply_masks(model)


def test_patterns_of_initializers():
    model = kso.sparsify(
        sequential(), 0.3, initializer=ExactOrthogonal(1.0, gain=2.0), seed=0
    )
    for weight in weights(model):
        assert orthogonality_error(weight.value, weight.layout, gain=2.0) < 1e-6
    for pattern in (
        "random_sparse",
        RandomSparse(1.0, "he_normal", rescale=True),
    ):
        dense = sequential()
        a, b = (
            weights(kso.sparsify(dense, 0.3, initializer=pattern, seed=0))
            for _ in range(2)
        )
        for one, two in zip(a, b, strict=True):
            assert np.count_nonzero(one.value) == one.live
            np.testing.assert_array_equal(one.value, two.value)


def test_bad_input_is_refused():
    model = sequential()
    for error, options, message in (
        (
            DensityError,
            {"density": 1.5},
            r"must be .*\(0, 1\].*Received: density=",
        ),
        (
            DensityError,
            {"density": None},
            r"needs a `density`.*apply_masks\(model\).*Received",
        ),
        (
            BudgetError,
            {"density": 0.001},
            r"least global density.* is 0\.0\d+.*Received",
        ),
        (
            BudgetError,
            {"budget": "ERK"},
            r"one of \['er', 'erk', 'uniform'\].*budget='ERK'",
        ),
        (
            UnknownWeightError,
            {"exclude": "tail"},
            r"There are: .*head/kernel.*exclude='tail'",
        ),
        (
            ValueError,
            {"initializer": "dense"},
            r"`initializer` must be .*initializer='dense'",
        ),
        (
            ValueError,
            {"initializer": None},
            r"prune\(model, density\). Received: initializer=None",
        ),
        (
            ValueError,
            {"seed": "a"},
            r"`seed` must be .* integer or None. Received: seed='a'",
        ),
    ):
        with pytest.raises(error, match=message):
            kso.sparsify(model, **{"density": 0.3, **options})
    with pytest.raises(
        BudgetError, match=r"unknown \['heat/kernel'\], missing"
    ):
        kso.sparsify(model, budget=kso.Budget({"heat/kernel": 0.5}))
    with pytest.raises(
        NotPrunableError, match="no layer with one of our initializers"
    ):
        kso.apply_masks(model)
    with pytest.raises(
        NotPrunableError, match="no kernel that could be pruned"
    ):
        kso.sparsify(keras.Sequential([keras.Input((3,)), L.ReLU()]), 0.5)
    with pytest.raises(NotPrunableError, match="must be built"):
        kso.sparsify(keras.Sequential([L.Dense(3)]), 0.5)
    with pytest.raises(NotPrunableError, match=r"wrapped already.*head/kernel"):
        kso.sparsify(kso.sparsify(model, 0.5, seed=0), 0.5)
    model.layers[0].kernel.assign(np.full(model.layers[0].kernel.shape, np.inf))
    with pytest.raises(
        NotPrunableError, match=r"conv2d.*/kernel' is not finite. Received: 216"
    ):
        kso.sparsify(model, 0.3)


def test_a_name_selects_no_longer_names():
    layers = [keras.layers.Dense(8, name=name) for name in ("d", "d_1")]
    model = kso.sparsify(
        keras.Sequential([keras.Input((8,)), *layers]), 0.5, seed=0, include="d"
    )
    assert [w.path for w in weights(model) if w.parametrization] == ["d/kernel"]
