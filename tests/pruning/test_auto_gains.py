"""`gain="auto"`: what is chosen by what follows a layer."""

import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import ExactOrthogonal, RandomSparse
from tests.helpers import reloaded, slow_case_on_jax
from tests.models.networks import MODELS

L = keras.layers
pytestmark = pytest.mark.core
AUTO = ExactOrthogonal(gain="auto")


def gains(model, pattern=AUTO, density=0.3):
    """Gains by the path of the layer."""
    rows = kso.report(
        kso.sparsify(model, density, "uniform", pattern, seed=0)
    ).rows
    assert all(row.orthogonality_error < 1e-6 for row in rows)
    return {row.path.removesuffix("/kernel"): row.gain for row in rows}


def stacked(*layers, shape=(20,)):
    return keras.Sequential([keras.Input(shape), *layers])


# --- what follows ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("between", "gain"),
    [
        ([], 1.0),
        ([L.ReLU()], np.sqrt(2)),
        ([L.Activation("relu"), L.Dropout(0.5)], np.sqrt(2)),
        ([L.Dropout(0.1), L.Activation("tanh")], 1.0),
        ([L.LeakyReLU(negative_slope=0.5)], np.sqrt(8 / 5)),
        (
            [L.Reshape((4, 5)), L.MaxPooling1D(2), L.Flatten(), L.ReLU()],
            np.sqrt(2),
        ),
        ([L.Activation("gelu")], 1.5335),
        ([L.Activation("selu")], 1.0),  # self-normalizing
    ],
)
def test_activations_without_normalization(between, gain):
    model = stacked(L.Dense(20, name="a"), *between, L.Dense(7, name="b"))
    assert gains(model) == pytest.approx({"a": gain, "b": 1.0}, abs=1e-4)


def test_the_layers_own_activation():
    model = stacked(
        L.Dense(20, activation="relu", name="a"),
        L.Dense(20, activation="tanh", bias_initializer=keras.initializers.RandomNormal(0, 0.00448),
                name="b"),
        L.Dense(20, activation="tanh", use_bias=False, name="c"),
        L.Dense(5, activation="softmax", name="head"),
    )  # fmt: skip
    expected = {"a": np.sqrt(2), "b": 1.0247, "c": 1.0, "head": 1.0}
    assert gains(model) == pytest.approx(expected, abs=1e-4)


NORMS = [
    *(L.BatchNormalization, L.LayerNormalization, L.RMSNormalization),
    lambda: L.GroupNormalization(2),
]


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("first", [[], [L.ReLU], [lambda: L.Dropout(0.2)]])
def test_normalization_asks_for_the_norm_of_the_usual_initializer(norm, first):
    model = stacked(
        L.Dense(20, name="a"),
        *(f() for f in first),
        norm(),
        L.Dense(4, name="b"),
    )
    assert gains(model) == pytest.approx({"a": np.sqrt(0.3), "b": 1.0})


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (L.Dense(33, name="a"), (20,)),
        (L.Dense(33, kernel_initializer="lecun_uniform", name="a"), (20,)),
        (
            L.Dense(
                33,
                kernel_initializer=keras.initializers.RandomNormal(0, 0.3),
                name="a",
            ),
            (20,),
        ),
        (
            L.Dense(
                33,
                kernel_initializer=keras.initializers.RandomUniform(0, 0.3),
                name="a",
            ),
            (20,),
        ),
        (
            L.Dense(20, kernel_initializer="orthogonal", name="a"),
            (20,),
        ),  # from one draw
        (L.Conv2D(12, 3, groups=2, name="a"), (9, 9, 8)),
        (L.Conv2DTranspose(12, 3, strides=2, name="a"), (5, 5, 8)),
        (L.DepthwiseConv2D(3, depth_multiplier=2, name="a"), (9, 9, 8)),
    ],
)
def test_the_norm_is_that_of_the_usual_kernel_under_a_mask(layer, shape):
    model = stacked(layer, L.BatchNormalization(), shape=shape)
    [weight] = kso.prunable_weights(
        kso.sparsify(model, 0.3, initializer=AUTO, seed=0)
    )
    usual = (
        layer.get_config().get("kernel_initializer")
        or layer.get_config()["depthwise_initializer"]
    )
    masked = RandomSparse(0.3, usual, seed=0)
    many = [
        masked.at_density(0.3, seed, weight.shape).sample(weight.shape)
        for seed in range(200)
    ]
    expected = np.mean([np.square(kernel).sum() for kernel, _ in many])
    assert np.square(weight.value).sum() == pytest.approx(expected, rel=0.05)


def test_residual_branches_and_concatenations():
    inputs = keras.Input((12,))
    # Its ways: a sum that goes on, and a normalized one.
    x = L.Dense(12, name="stem")(inputs)
    y = L.Dense(12, name="inner")(L.ReLU()(L.BatchNormalization()(x)))
    y = L.Dense(12, activation="relu", name="branch")(L.LayerNormalization()(y))
    x = L.Concatenate()(
        [L.ReLU()(L.Add()([x, y])), L.Dense(3, name="side")(inputs)]
    )
    model = keras.Model(
        inputs, L.Dense(4, name="head")(L.Activation("tanh")(x))
    )
    found = gains(model, density=0.5)
    assert found["inner"] == pytest.approx(np.sqrt(0.5))
    expected = {"stem": 1.0, "branch": np.sqrt(2), "side": 1.0, "head": 1.0}
    assert {path: found[path] for path in expected} == pytest.approx(
        expected, abs=1e-4
    )


def test_nested_models_and_operations():
    layers = [L.Dense(16, name="a"), L.ReLU(), L.Dense(16, name="b")]
    block = keras.Sequential([keras.Input((16,)), *layers], name="block")
    inputs = keras.Input((16,))
    x = block(inputs)
    x = keras.ops.relu(x) + inputs
    x = L.LayerNormalization()(x)
    model = keras.Model(
        inputs, L.TimeDistributed(L.Dense(4, name="c"))(L.Reshape((2, 8))(x))
    )
    found = gains(model, density=0.5)
    assert found["block/a"] == pytest.approx(np.sqrt(2))
    # In the outer model, normalized.
    assert found["block/b"] == pytest.approx(np.sqrt(0.5))
    assert found["time_distributed/c"] == pytest.approx(1.0)


def test_einsum_dense_has_the_fans_of_its_equation():
    heads = L.EinsumDense("ab,bcd->acd", (4, 8), name="a")
    plain = L.Dense(32, name="a")
    found = [
        gains(stacked(layer, L.BatchNormalization()))
        for layer in (heads, plain)
    ]
    assert found[0] == pytest.approx(found[1])


# --- what is kept, and what is not known --------------------------------------------------------


def test_by_name_only_what_normalization_follows_has_another_gain_than_1():
    model = stacked(
        L.Dense(20, name="a"), L.ReLU(), L.BatchNormalization(),
        L.Dense(20, kernel_initializer="zeros", name="no_norm_to_keep"), L.LayerNormalization(),
        L.Dense(20, activation="relu", name="relu"), L.Lambda(lambda x: x), L.Dense(4, name="b"),
    )  # fmt: skip
    found = gains(model, pattern="exact_orthogonal")
    expected = {
        "a": np.sqrt(0.3),
        "no_norm_to_keep": 1.0,
        "relu": 1.0,
        "b": 1.0,
    }
    assert found == pytest.approx(expected)


def test_numbers_stay_and_what_was_chosen_is_saved(tmp_path):
    model = stacked(
        L.Dense(20, name="a"), L.BatchNormalization(), L.Dense(4, name="b")
    )
    assert gains(model, pattern=ExactOrthogonal(gain=1.7)) == {
        "a": 1.7,
        "b": 1.7,
    }
    sparse = kso.sparsify(model, 0.3, "uniform", AUTO, seed=0)
    loaded = reloaded(sparse, tmp_path)
    rows = kso.report(loaded).rows
    assert [row.gain for row in rows] == pytest.approx([np.sqrt(0.3), 1.0])
    assert all(row.orthogonality_error < 1e-6 for row in rows)
    assert ExactOrthogonal.from_config(AUTO.get_config()).gain == "auto"


@pytest.mark.parametrize(
    "name", [slow_case_on_jax("recurrent_and_attention"), "residual"]
)
def test_where_it_is_not_known_what_follows_the_own_activation_counts(name):
    with pytest.warns(
        UserWarning, match=r"not known what follows.*gain=1"
    ) as told:
        sparse = kso.sparsify(MODELS[name](), 0.4, initializer=AUTO, seed=0)
    [warning] = [w for w in told if w.category is UserWarning]  # not Keras' own
    assert warning.filename == __file__
    rows = kso.report(sparse).rows
    assert all(isinstance(row.gain, float) for row in rows)


@pytest.mark.parametrize("name", ["written", "composite"])
def test_calls_inside_layers_and_models_written_as_classes_are_known(name):
    with warnings.catch_warnings(action="error", category=UserWarning):
        sparse = kso.sparsify(MODELS[name](), 0.4, initializer=AUTO, seed=0)
    rows = kso.report(sparse).rows
    [last_of_block] = [row for row in rows if "block" in row.path][1:]
    assert last_of_block.gain != pytest.approx(1.0)  # normalized
    if name == "written":
        [first] = [row for row in rows if row.shape == (192, 12)]
        assert first.gain == pytest.approx(np.sqrt(2))


def test_refusals():
    with pytest.raises(
        ValueError, match=r"needs keras_sparse_ortho\.sparsify.*gain='auto'"
    ):
        ExactOrthogonal(0.5, gain="auto").sample((4, 4))
    with pytest.raises(
        ValueError, match=r"`gain` must be a number or \"auto\".*gain='usual'"
    ):
        ExactOrthogonal(0.5, gain="usual")
    model = stacked(L.Dense(8, name="a"))
    with pytest.raises(
        ValueError, match=r"needs a model, to find.*Received: initializer="
    ):
        kso.pruning.draw_kernels(
            kso.prunable_weights(model),
            kso.prunable_weights(model),
            0.5,
            "erk",
            AUTO,
        )
    inputs = keras.Input((8,))
    x = L.Dense(8, name="a")(inputs)
    two = [
        L.Dense(4, name=name)(L.Activation(name)(x))
        for name in ("tanh", "relu")
    ]
    with pytest.raises(
        ValueError, match=r"'a/kernel' goes to .* gains.*gains \[1.0, 1.4142\]"
    ):
        kso.sparsify(keras.Model(inputs, two), 0.5, initializer=AUTO)
    model = stacked(
        L.Dense(8, activation="softmax", name="a"), L.Dense(2, name="b")
    )
    with pytest.raises(
        ValueError, match=r"not possible for .*'a/kernel': Only elementwise"
    ):
        kso.sparsify(model, 0.5, initializer=AUTO)
    model = stacked(
        L.Dense(8, kernel_initializer="zeros", name="a"), L.BatchNormalization()
    )
    with pytest.raises(
        ValueError, match=r"not possible for .*'a/kernel': .*gives no norm"
    ):
        kso.sparsify(model, 0.5, initializer=AUTO)
