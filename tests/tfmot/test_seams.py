"""Where TFMOT and the wing meet: layers without names, stale methods, options, loops, policies."""

import ast
from pathlib import Path

import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.tfmot.test_tfmot_cases import sequential

pytestmark = pytest.mark.tensorflow_only

ROOT = Path(kso.__file__).parent


def test_layers_whose_configuration_leaves_the_name_out(tf_keras):
    class Block(tf_keras.layers.Layer):
        def __init__(self, units):
            super().__init__()
            self.units = units
            self.first = tf_keras.layers.Dense(units, name="first")
            self.last = tf_keras.layers.Dense(4, name="last")

        def call(self, inputs):
            return self.last(self.first(inputs))

        def get_config(self):
            return {"units": self.units}

    dense = sequential(tf_keras, Block(8))
    paths = [weight.path for weight in kso.tfmot.prunable_weights(dense)]
    mask = np.random.default_rng(0).random((8, 4)) < 0.5
    held = kso.tfmot.prune_with_mask(dense, {paths[1]: mask})
    soft = kso.tfmot.prune_with_soft_threshold(dense)
    for model in (held, soft, kso.tfmot.prune_exact_orthogonal(dense, 0.5, seed=0)):
        assert [weight.path for weight in kso.tfmot.prunable_weights(model)] == paths
    first, last = kso.tfmot.prunable_weights(held)
    np.testing.assert_array_equal(last.value != 0, mask)
    assert first.density == 1


def test_nothing_of_a_wrapper_stays_on_a_stripped_layer(tf_keras, sparsity):
    dense = sequential(tf_keras, tf_keras.layers.LSTM(8, name="l"), shape=(3, 4))
    held = kso.tfmot.prune_with_mask(dense, density=0.5, include="l/lstm_cell/kernel")
    assert [v.shape for v in held.layers[0].prunable_weights] == [(4, 32)]
    plain = sparsity.strip_pruning(held)
    assert not hasattr(plain.layers[0], "get_prunable_weights")
    again = sparsity.prune_low_magnitude(plain, sparsity.ConstantSparsity(0.5, 0))
    assert len(again.layers[0].pruning_vars) == 2
    conv = tf_keras.layers.ConvLSTM2D(2, 2)
    stripped = kso.tfmot.PruneWithMask(conv, density=0.5).layer
    with pytest.raises(ValueError, match="supported layer"):  # as before
        sparsity.prune_low_magnitude(stripped, sparsity.ConstantSparsity(0.5, 0))


@pytest.mark.parametrize("name", ["PruneWithMask", "PruneWithSoftThreshold"])
def test_options_that_would_have_no_effect_are_refused(tf_keras, sparsity, name):
    for options in (
        {"sparsity_m_by_n": (2, 4)},
        {"block_size": (4, 1)},
        {"pruning_schedule": sparsity.ConstantSparsity(0.5, 0)},
    ):
        with pytest.raises(ValueError, match=r"no effect.*structure=.*Received"):
            getattr(kso.tfmot, name)(tf_keras.layers.Dense(8), **options)


def test_density_of_one_layer(tf_keras):
    layer = kso.tfmot.PruneWithMask(tf_keras.layers.LSTM(8), density=0.25)
    layer.build((None, 3, 4))
    assert [int(state.mask().sum()) for state in layer.states] == [32, 64]
    clone = type(layer).from_config(layer.get_config())
    clone.build((None, 3, 4))
    assert [int(state.mask().sum()) for state in clone.states] == [32, 64]
    for options in ({"density": 0}, {"density": 0.5, "live": [4]}):
        with pytest.raises(ValueError, match="Received"):
            kso.tfmot.PruneWithMask(tf_keras.layers.Dense(8), **options)
    for options in ({"live": [4]}, {"initializers": [None]}):
        with pytest.raises(ValueError, match=r"one for each kernel.*recurrent_kernel"):
            kso.tfmot.PruneWithMask(tf_keras.layers.LSTM(8), **options).build((None, 3, 4))


def test_private_names_stand_in_one_file():
    """Every `x._name` in the wing is defined in it, or stands in `_tf_keras_internals.py`."""
    files = sorted((ROOT / "tfmot").glob("*.py"))
    trees = {file.name: ast.parse(file.read_text()) for file in files}
    own, used = set(), []
    for name, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                own.add(node.attr)
            if name == "_tf_keras_internals.py":
                continue
            if isinstance(node, ast.Attribute):
                used.append((name, node.attr))
            if isinstance(node, ast.ImportFrom) and "_model_optimization.python" in str(
                node.module
            ):
                used.append((name, f"_{node.module}"))
    used = [(name, attr) for name, attr in used if attr.startswith("_") and attr[:2] != "__"]
    assert len(files) == 7
    assert [pair for pair in used if pair[1] not in own] == []
