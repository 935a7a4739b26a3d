"""`sparsify` with mirrored kernels: one side in the first and the last ones, gains, storages."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import ExactOrthogonal
from tests.helpers import array, reloaded

L = keras.layers
pytestmark = pytest.mark.core
MIRRORED = ExactOrthogonal(gain=np.sqrt(2.0), mirrored=True)


def stack(depth=3, units=32):
    hidden = [L.Dense(units, "relu", name=f"h{k}") for k in range(depth)]
    return keras.Sequential(
        [keras.Input((15,)), *hidden, L.Dense(5, name="head")]
    )


def forms(model):
    """Which side of each kernel is mirrored, by the path of its layer."""
    sides = {}
    for weight in kso.prunable_weights(model):
        if weight.storage is None:
            continue
        drawn_by = weight.storage.drawn_by
        sides[weight.path.removesuffix("/kernel")] = drawn_by.mirrored
    return sides


def test_the_first_and_the_last_kernel_mirror_one_side():
    sparse = kso.sparsify(stack(), 0.3, initializer=MIRRORED, seed=0)
    assert forms(sparse) == {
        "h0": "outputs",
        "h1": True,
        "h2": True,
        "head": "inputs",
    }
    summary = kso.report(sparse)
    assert max(row.orthogonality_error for row in summary.rows) < 1e-6
    assert summary.live == round(0.3 * summary.size)


def test_norms_keep_their_size_from_the_first_layer_to_the_head():
    model = kso.sparsify(
        stack(12, 64), 0.25, "uniform", MIRRORED, seed=0, exclude="head"
    )
    hidden = keras.Model(model.inputs[0], model.layers[-2].output)
    x = np.random.default_rng(0).normal(size=(8, 15)).astype("float32")
    np.testing.assert_allclose(
        np.linalg.norm(array(hidden(x)), axis=1),
        np.linalg.norm(x, axis=1),
        rtol=1e-5,
    )


def test_branches_nested_models_and_sums():
    inputs = keras.Input((16,))
    inside = keras.Sequential(
        [keras.Input((16,)), L.Dense(16, "relu", name="inside")],
        name="nested",
    )
    x = L.Dense(16, "relu", name="stem")(inputs)
    for name in ("a", "b"):
        x = L.Add()([x, L.Dense(16, "relu", name=name)(x)])
    x = inside(x)
    left = L.Dense(4, name="left")(x)
    right = L.Dense(4, name="right")(L.Dropout(0.1)(x))
    model = keras.Model(inputs, [left, right])
    sparse = kso.sparsify(model, 0.4, initializer=MIRRORED, seed=0)
    assert forms(sparse) == {
        "stem": "outputs",
        "a": True,
        "b": True,
        "nested/inside": True,
        "left": "inputs",
        "right": "inputs",
    }


def test_a_kernel_that_is_first_and_last_is_not_mirrored():
    model = keras.Sequential([keras.Input((15,)), L.Dense(5, name="head")])
    sparse = kso.sparsify(model, 0.5, initializer=MIRRORED, seed=0)
    assert forms(sparse) == {"head": False}


def test_a_given_side_is_that_of_all_selected_kernels():
    pattern = ExactOrthogonal(mirrored="outputs")
    sparse = kso.sparsify(
        stack(), 0.3, initializer=pattern, seed=0, include=["h1", "h2"]
    )
    assert forms(sparse) == {"h1": "outputs", "h2": "outputs"}


class Subclassed(keras.Model):
    """Two kernels; what calls them is not known."""

    def __init__(self):
        super().__init__()
        self.first = L.Dense(32, "relu", name="first")
        self.second = L.Dense(32, "relu", name="second")

    def call(self, inputs):
        """Both."""
        return self.second(self.first(inputs))


def test_a_model_that_is_no_graph_is_warned_of():
    model = Subclassed()
    model(np.zeros((1, 16), "float32"))
    with pytest.warns(
        UserWarning,
        match=r"which kernels come before and behind.*'first/kernel'",
    ):
        sparse = kso.sparsify(model, 0.3, initializer=MIRRORED, seed=0)
    assert set(forms(sparse).values()) == {True}


def test_a_kernel_inside_a_wrapper_is_at_the_place_of_the_wrapper():
    layers = [
        L.TimeDistributed(L.Dense(16, "relu"), name="a"),
        L.Dense(16, "relu", name="b"),
        L.GlobalAveragePooling1D(),
        L.Dense(3, name="head"),
    ]
    model = keras.Sequential([keras.Input((4, 7)), *layers])
    sparse = kso.sparsify(model, 0.5, initializer=MIRRORED, seed=0)
    assert list(forms(sparse).values()) == ["outputs", True, "inputs"]


@pytest.mark.parametrize(
    ("activation", "gain"),
    [
        ("relu", np.sqrt(2.0)),
        ("gelu", np.sqrt(2.0)),
        ("silu", np.sqrt(2.0)),
        (L.LeakyReLU(0.25), np.sqrt(2.0) / 1.25),
        ("tanh", np.sqrt(0.5)),
        (None, np.sqrt(0.5)),
    ],
)
def test_gains_are_those_of_the_pair(activation, gain):
    layers = [
        L.Dense(16, activation=activation, name="a"),
        L.Dense(4, name="b"),
    ]
    model = keras.Sequential([keras.Input((16,)), *layers])
    pattern = ExactOrthogonal(gain="auto", mirrored=True)
    sparse = kso.sparsify(model, 0.5, initializer=pattern, seed=0)
    assert [row.gain for row in kso.report(sparse).rows] == pytest.approx(
        [gain, 1.0], rel=1e-5
    )


def test_before_normalization_the_norm_is_that_of_the_default_kernel():
    layers = [
        L.Conv2D(16, 3, name="stem"),
        L.Conv2D(16, 3, name="a"),
        L.BatchNormalization(),
        L.ReLU(),
        L.GlobalAveragePooling2D(),
        L.Dense(4, name="head"),
    ]
    model = keras.Sequential([keras.Input((8, 8, 3)), *layers])
    norms = []
    for mirrored in (False, True):
        pattern = ExactOrthogonal(gain="auto", mirrored=mirrored)
        sparse = kso.sparsify(model, 0.4, "uniform", pattern, seed=0)
        norms.append(np.linalg.norm(kso.prunable_weights(sparse)[1].value))
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


def test_blocks_are_mirrored_and_live_in_their_storage():
    model = stack(3, 64)
    pattern = ExactOrthogonal(gain=np.sqrt(2.0), mirrored=True)
    sparse = kso.sparsify(
        model,
        0.5,
        "uniform",
        pattern,
        seed=0,
        structure=kso.Block(16, 16),
        storage="blocks",
        include=["h1", "h2"],
    )
    rows = {row.path: row for row in kso.report(sparse).rows}
    for path in ("h1/kernel", "h2/kernel"):
        assert rows[path].block == (16, 16)
        assert rows[path].orthogonality_error < 1e-6
        assert rows[path].live == 64 * 64 // 2
    kernel = kso.prunable_weights(sparse)[1].value
    np.testing.assert_array_equal(kernel[:32], -kernel[32:])
    np.testing.assert_array_equal(kernel[:, :32], -kernel[:, 32:])


def test_masks_from_layers_and_files(tmp_path):
    model = keras.Sequential(
        [
            keras.Input((16,)),
            L.Dense(
                16,
                kernel_initializer=ExactOrthogonal(
                    0.25, seed=1, mirrored="outputs"
                ),
                name="a",
            ),
            L.Dense(
                16,
                kernel_initializer=ExactOrthogonal(0.25, seed=2, mirrored=True),
                name="b",
            ),
        ]
    )
    sparse = reloaded(kso.apply_masks(model), tmp_path)
    assert forms(sparse) == {"a": "outputs", "b": True}
    assert [row.live for row in kso.report(sparse).rows] == [64, 64]
