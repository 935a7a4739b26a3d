"""Where TFMOT and the wing meet: layers without names, stale methods, options, loops, policies."""

import ast
import importlib.metadata
import tomllib
from pathlib import Path

import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import BudgetError, NotPrunableError

pytestmark = pytest.mark.tensorflow_only

ROOT = Path(kso.__file__).parent


def sequential(tf_keras, *layers, shape=(16,)):
    return tf_keras.Sequential([tf_keras.Input(shape), *layers])


def mlp(tf_keras):
    L = tf_keras.layers
    return sequential(tf_keras, L.Dense(32, "relu", name="a"), L.Dense(4, name="c"))


def batch():
    rng = np.random.default_rng(0)
    return rng.normal(size=(64, 16)).astype("float32"), rng.normal(size=(64, 4)).astype("float32")


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
    for model in (
        kso.tfmot.prune_with_mask(dense, {paths[1]: mask}),
        kso.tfmot.prune_exact_orthogonal(dense, 0.5, seed=0),
        kso.tfmot.prune_with_soft_threshold(dense),
    ):
        assert [weight.path for weight in kso.tfmot.prunable_weights(model)] == paths
    held = kso.tfmot.prune_with_mask(dense, {paths[1]: mask})
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


def test_patterns_that_do_not_meet_a_budget_are_refused(tf_keras, sparsity):
    dense = mlp(tf_keras)
    schedule = sparsity.ConstantSparsity(0.8, 0, frequency=1)
    prune = kso.tfmot.prune_by_budget
    with pytest.raises(BudgetError, match=r"leaves the density 0\.5.*Received: density=0\.1425"):
        prune(dense, 0.2, "erk", schedule, sparsity_m_by_n=(2, 4))
    with pytest.raises(NotPrunableError, match=r"two blocks wide.*'c/kernel'"):
        prune(dense, 0.2, "erk", schedule, block_size=(4, 4))
    with pytest.raises(BudgetError, match="less than half a block"):
        prune(dense, 0.01, "uniform", schedule, block_size=(8, 8), exclude="c")


@pytest.mark.slow
def test_patterns_that_meet_a_budget_do(tf_keras, sparsity):
    dense, prune = mlp(tf_keras), kso.tfmot.prune_by_budget
    schedule = sparsity.ConstantSparsity(0.8, 0, frequency=1)
    model = prune(dense, 0.5, "uniform", schedule, sparsity_m_by_n=(2, 4))
    blocks = prune(dense, 0.2, "uniform", schedule, block_size=(4, 4), exclude="c")
    x, y = batch()
    for one in (model, blocks):
        one.compile("adam", "mse")
        one.fit(x, y, verbose=0, callbacks=[sparsity.UpdatePruningStep()])
    for weight in kso.tfmot.prunable_weights(model):
        assert weight.density == 0.5
    first = kso.tfmot.prunable_weights(blocks)[0]
    assert abs(first.live - 0.2 * first.size) <= 8


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
    value = layer.states[0].raw.numpy()
    assert np.abs(value[value != 0]).min() > 0
    clone = type(layer).from_config(layer.get_config())
    clone.build((None, 3, 4))
    assert [int(state.mask().sum()) for state in clone.states] == [32, 64]
    for options, error in (
        ({"density": 0}, kso.errors.DensityError),
        ({"density": 0.5, "live": [4]}, ValueError),
    ):
        with pytest.raises(error, match="Received"):
            kso.tfmot.PruneWithMask(tf_keras.layers.Dense(8), **options)
    for options in ({"live": [4]}, {"initializers": [None]}):
        with pytest.raises(ValueError, match=r"one for each kernel.*recurrent_kernel"):
            kso.tfmot.PruneWithMask(tf_keras.layers.LSTM(8), **options).build((None, 3, 4))


def test_lists_and_models_that_are_not_built(tf_keras, sparsity):
    L = tf_keras.layers
    soft, mask = kso.tfmot.prune_with_soft_threshold, kso.tfmot.prune_with_mask
    wrapped = mask([L.Dense(32), L.Dropout(0.5), L.Dense(4)], density=0.25, budget="uniform")
    model = tf_keras.Sequential(wrapped)
    x, y = batch()
    model.compile("adam", "mse")
    # TFMOT's own wrapper has no step to set before it is built.
    model.fit(x, y, verbose=0, callbacks=[sparsity.UpdatePruningStep()])
    assert [w.density for w in kso.tfmot.prunable_weights(model)] == [0.25, 0.25]
    unbuilt = tf_keras.Sequential([L.BatchNormalization(), L.Bidirectional(L.GRU(2)), L.Dense(4)])
    names = [type(layer).__name__ for layer in soft(unbuilt).layers]
    assert names == ["BatchNormalization", "PruneWithSoftThreshold", "PruneWithSoftThreshold"]
    ours = L.Dense(4, kernel_initializer=kso.initializers.ExactOrthogonal(0.5, seed=1))
    model = mask(tf_keras.Sequential([L.Dense(16), ours]))
    model.build((None, 16))
    assert [w.density for w in kso.tfmot.prunable_weights(model)] == [1, 0.5]

    class Own(L.Layer):
        pass

    for arguments, error, match in (
        (([L.Dense(4)], None), NotPrunableError, "Nothing would be pruned"),
        (([Own()], 0.5), NotPrunableError, "not known before it is built"),
        (([mlp(tf_keras)], 0.5), NotPrunableError, "single tf_keras layers"),
    ):
        with pytest.raises(error, match=match):
            mask(arguments[0], density=arguments[1], budget="uniform")
    with pytest.raises(ValueError, match=r"budget='uniform'.*Received: \{'budget': 'erk'"):
        mask([L.Dense(4)], density=0.5)
    with pytest.raises(NotPrunableError, match="needs the sizes of all layers"):
        kso.tfmot.prune_exact_orthogonal([L.Dense(4)], 0.5)


def test_pruning_policies(tf_keras, sparsity):
    class OnlyDense(sparsity.PruningPolicy):
        def allow_pruning(self, layer):
            return type(layer) is tf_keras.layers.Dense

        def ensure_model_supports_pruning(self, model):
            if len(model.layers) > 3:
                raise ValueError("too long")

    L = tf_keras.layers
    dense = sequential(tf_keras, L.Conv1D(4, 2), L.Flatten(), L.Dense(8), shape=(8, 4))
    own = {"pruning_policy": OnlyDense()}
    schedule = sparsity.ConstantSparsity(0.5, 0)
    for model in (
        kso.tfmot.prune_with_mask(dense, density=0.5, **own),
        kso.tfmot.prune_with_soft_threshold(dense, **own),
        kso.tfmot.prune_exact_orthogonal(dense, 0.5, seed=0, **own),
        kso.tfmot.prune_by_budget(dense, 0.5, "uniform", schedule, **own),
        sparsity.prune_low_magnitude(dense, schedule, **own),
    ):
        wrapped = [hasattr(layer, "pruning_vars") for layer in model.layers]
        assert wrapped == [False, False, True]
    long = sequential(tf_keras, *(L.Dense(4) for _ in range(4)))
    with pytest.raises(ValueError, match="too long"):
        kso.tfmot.prune_with_mask(long, density=0.5, **own)
    policy = sparsity.PruneForLatencyOnXNNPack()
    with pytest.raises(ValueError, match="Could not find"):  # in TFMOT's words
        kso.tfmot.prune_with_mask(dense, density=0.5, pruning_policy=policy)


def test_target_density_in_a_loop_of_ones_own(tf_keras, sparsity):
    import tensorflow as tf

    x, y = batch()
    for optimizer in (tf_keras.optimizers.Adam(), None):
        model = kso.tfmot.prune_with_soft_threshold(mlp(tf_keras))
        model.optimizer = optimizer
        schedule = sparsity.PolynomialDecay(0.0, 0.5, 0, 6, frequency=2)  # its end is replaced
        steering = kso.tfmot.TargetDensity(0.3, schedule)
        steering.set_model(model)
        steering.on_train_begin()
        for step in range(6):
            steering.on_train_batch_begin(batch=-1)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
            variables = model.trainable_variables
            pairs = list(zip(tape.gradient(loss, variables), variables, strict=True))
            if optimizer is not None:
                optimizer.apply_gradients(pairs)
            else:
                for gradient, variable in pairs:
                    variable.assign_sub(0.01 * gradient)
            if step == 3:  # in the middle: what is handed out is what the model computes with
                np.testing.assert_allclose(sparsity.strip_pruning(model)(x), model(x), atol=1e-6)
        steering.on_epoch_end(batch=-1)  # as TFMOT's guide has it
        plain = sparsity.strip_pruning(model)
        np.testing.assert_allclose(plain(x), model(x), atol=1e-6)
        assert sum(weight.live for weight in kso.tfmot.prunable_weights(plain)) == 192  # .3 * 640


def test_tfmot_prunes_one_update_earlier_than_keras_3(tf_keras, sparsity):
    """TFMOT counts updates from 1; here from 0, which is what `TfmotSchedule` says."""
    import keras

    schedule = sparsity.PolynomialDecay(0.0, 0.9, begin_step=2, end_step=8, power=1, frequency=2)
    x, y = batch()

    def densities(kind, masked, callback):
        """The density that each update computed with, from the second on."""
        seen = []

        class Watch(kind.callbacks.Callback):
            def on_train_batch_end(self, batch, logs=None):
                seen.append(masked())

        model.compile(kind.optimizers.SGD(0.0), "mse")
        model.fit(x, y, batch_size=4, verbose=0, callbacks=[callback, Watch()])
        return seen

    model = sparsity.prune_low_magnitude(mlp(tf_keras), schedule)
    masks = [mask for layer in model.layers for _, mask, _ in layer.pruning_vars]
    live = lambda: sum(float(mask.numpy().sum()) for mask in masks)  # noqa: E731
    theirs = densities(tf_keras, live, sparsity.UpdatePruningStep())
    L = keras.layers
    model = keras.Sequential([keras.Input((16,)), L.Dense(32, "relu"), L.Dense(4)])
    model = kso.parametrize(model, kso.parametrizations.MagnitudeMask(schedule))
    weights = kso.prunable_weights(model)
    live = lambda: sum(weight.live for weight in weights)  # noqa: E731
    ours = densities(keras, live, kso.callbacks.UpdateMasks())
    assert ours[0] == theirs[0] == 640
    np.testing.assert_allclose(ours[1:], theirs[:-1], atol=2)  # it rounds each layer for itself
    assert ours[1:] != theirs[1:]


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
    assert len(files) > 8
    assert [pair for pair in used if pair[1] not in own] == []


def test_versions_of_tfmot_are_bounded():
    """Its private names were read in 0.8: the next minor release is not taken unseen."""
    requirements = importlib.metadata.requires("tensorflow-model-optimization")
    assert requirements is not None
    table = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
    [bound] = [
        requirement
        for requirement in table["project"]["optional-dependencies"]["tfmot"]
        if requirement.startswith("tensorflow-model-optimization")
    ]
    assert bound == "tensorflow-model-optimization>=0.8.1,<0.9"
    installed = importlib.metadata.version("tensorflow-model-optimization").split(".")
    assert [int(part) for part in installed[:2]] == [0, 8]
