"""TFMOT's integration and distributed tests, carried over to our two wrappers; all are slow.

The cases are those of `prune_integration_test`, `prune_distributed_test` and of the combinations
with quantization and clustering, as of 0.8, written anew. docs/from_tfmot.md says what differs.
"""

import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import two_device_strategy

pytestmark = [
    pytest.mark.tensorflow_only,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*HDF5 file.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*initializer.*:UserWarning"),
]

HALF = {
    "mask": lambda model: kso.tfmot.prune_with_mask(model, density=0.5, budget="uniform"),
    "soft": lambda model: kso.tfmot.prune_with_soft_threshold(model),
}
both = pytest.mark.parametrize("kind", HALF)


def simple(tf_keras):
    """Two layers, as the one that TFMOT's tests are about."""
    L = tf_keras.layers
    return tf_keras.Sequential(
        [L.Dense(8, activation="relu", input_shape=(10,)), L.Dense(5, activation="softmax")]
    )


def callbacks(sparsity, kind, density=0.5):
    steering = [kso.tfmot.TargetDensity(density, frequency=1)] if kind == "soft" else []
    return [sparsity.UpdatePruningStep(), *steering]


def data():
    rng = np.random.default_rng(0)
    return rng.random((20, 10)), np.eye(5)[rng.integers(0, 5, 20)]


def train(tf_keras, sparsity, model, kind, epochs=1, x=None, y=None):
    if x is None:
        x, y = data()
    if model.optimizer is None:
        model.compile("sgd", "mse")
    wrapped = any(hasattr(layer, "pruning_vars") for layer in model.layers)
    used = callbacks(sparsity, kind) if wrapped else []
    model.fit(x, y, epochs=epochs, batch_size=20, verbose=0, callbacks=used)
    return model


def check(sparsity, model, inputs, live=None):
    """The count of live entries, and that stripping changes no output."""
    weights = kso.tfmot.prunable_weights(model)
    want = sum(round(w.size / 2) for w in weights) if live is None else live
    assert abs(sum(w.live for w in weights) - want) <= len(weights) / 2
    plain = sparsity.strip_pruning(model)
    np.testing.assert_allclose(
        plain.predict(inputs, verbose=0), model.predict(inputs, verbose=0), rtol=1e-6, atol=1e-6
    )
    assert abs(sum(w.live for w in kso.tfmot.prunable_weights(plain)) - want) <= len(weights) / 2


def single_layers(tf_keras):
    L = tf_keras.layers
    return {
        "conv1d": (L.Conv1D(4, 2), (3, 6)),
        "conv2d": (L.Conv2D(4, (2, 2)), (4, 6, 1)),
        "conv2d_transpose": (L.Conv2DTranspose(2, 3), (7, 6, 3)),
        "conv3d": (L.Conv3D(2, (3, 3, 3)), (5, 7, 6, 3)),
        "conv3d_transpose": (L.Conv3DTranspose(2, 3), (5, 7, 6, 3)),
        "separable1d": (L.SeparableConv1D(4, 3), (3, 6)),
        "separable2d": (L.SeparableConv2D(4, (2, 2)), (4, 6, 1)),
        "dense": (L.Dense(4), (6,)),
        "local1d": (L.LocallyConnected1D(4, 2), (3, 6)),
        "local2d": (L.LocallyConnected2D(4, (2, 2)), (4, 6, 1)),
        "gru": (L.GRU(10), (3, 4)),
        "lstm": (L.LSTM(10), (3, 4)),
        "simple_rnn": (L.SimpleRNN(10), (3, 4)),
        "cells": (L.RNN([L.LSTMCell(10), L.GRUCell(10), L.SimpleRNNCell(10)]), (3, 4)),
        "attention": (L.MultiHeadAttention(2, 4), (3, 4)),
    }


@both
def test_single_layers_reach_their_density(tf_keras, sparsity, kind):
    for name, (layer, shape) in single_layers(tf_keras).items():
        inputs = tf_keras.Input(shape)
        outputs = layer(inputs, value=inputs) if name == "attention" else layer(inputs)
        model = HALF[kind](tf_keras.Model(inputs, outputs))
        rng = np.random.default_rng(0)
        x, y = rng.normal(size=(32, *shape)), rng.normal(size=(32, *outputs.shape[1:]))
        train(tf_keras, sparsity, model, kind, 2, x, y)
        check(sparsity, model, x)


@both
def test_embeddings_recursive_models_and_mnist_in_three_forms(tf_keras, sparsity, kind):
    L = tf_keras.layers
    rng = np.random.default_rng(0)
    words = [L.Embedding(10, 3, input_length=5), L.Flatten(), L.Dense(1, activation="sigmoid")]
    model = HALF[kind](tf_keras.Sequential([tf_keras.Input((5,)), *words]))
    x, y = rng.integers(0, 10, (32, 5)), rng.integers(0, 2, (32, 1))
    train(tf_keras, sparsity, model, kind, 2, x, y)
    check(sparsity, model, x)
    inner = tf_keras.Sequential([L.Dense(10, input_shape=(10,))])
    model = HALF[kind](tf_keras.Sequential([inner, L.Flatten(), L.Dense(1)]))
    train(tf_keras, sparsity, model, kind, 2, rng.random((32, 10)), rng.random((32, 1)))
    check(sparsity, model, rng.random((32, 10)))

    def layers():
        first = L.Conv2D(8, 5, padding="same", activation="relu", input_shape=(28, 28, 1))
        last = [L.MaxPooling2D(), L.BatchNormalization(), L.Conv2D(8, 5, padding="same")]
        return [first, *last, L.Flatten(), L.Dense(16, activation="relu"), L.Dense(10)]

    def functional():
        inputs = x = tf_keras.Input((28, 28, 1))
        for layer in layers():
            x = layer(x)
        return tf_keras.Model(inputs, x)

    take = {
        "mask": lambda all_of_them: kso.tfmot.prune_with_mask(
            all_of_them, density=0.5, budget="uniform"
        ),
        "soft": kso.tfmot.prune_with_soft_threshold,
    }[kind]
    x, y = rng.random((32, 28, 28, 1)), rng.random((32, 10))
    for model in (
        HALF[kind](tf_keras.Sequential(layers())),
        HALF[kind](functional()),
        tf_keras.Sequential(take(layers())),
    ):
        train(tf_keras, sparsity, model, kind, 2, x, y)
        check(sparsity, model, x)


@both
def test_density_one_changes_nothing(tf_keras, sparsity, kind):
    """TFMOT: zero sparsity is no operation. Soft thresholds start at sigmoid(s_init): as near."""
    dense = simple(tf_keras)
    same = {
        "mask": lambda: kso.tfmot.prune_with_mask(dense, density=1.0),
        "soft": lambda: kso.tfmot.prune_with_soft_threshold(dense, s_init=-30.0),
    }[kind]()
    x, y = data()
    for model in (dense, same):
        model.compile("sgd", "mse")
        model.fit(x, y, verbose=0, batch_size=20)
    plain = sparsity.strip_pruning(same)
    for one, other in zip(dense.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


def test_few_weights_stay(tf_keras, sparsity):
    """TFMOT keeps one weight where `1 - sparsity` is less; a count of 0 is refused here."""
    with pytest.raises(kso.errors.BudgetError, match="Received"):
        kso.tfmot.prune_with_mask(simple(tf_keras), density=0.001, budget="uniform")
    masks = {"dense/kernel": np.eye(10, 8, dtype=bool)}
    masks["dense/kernel"][1:] = False
    model = simple(tf_keras)
    masks = {f"{model.layers[0].name}/kernel": masks["dense/kernel"]}
    model = kso.tfmot.prune_with_mask(model, masks)
    train(tf_keras, sparsity, model, "mask")
    assert kso.tfmot.prunable_weights(model)[0].live == 1


@both
def test_pretrained_models(tf_keras, sparsity, kind, tmp_path):
    dense = train(tf_keras, sparsity, simple(tf_keras), kind)
    x, _ = data()
    dense.save_weights(tmp_path / "weights.tf")
    dense.save_weights(tmp_path / "weights.h5")
    model = HALF[kind](dense)
    assert dense.optimizer is not None
    assert model.optimizer is None
    # Differs: the weights are copied, and masks are there at once.
    mine = {id(v) for v in dense.weights}
    assert not mine.intersection(id(v) for v in model.weights)
    loaded = simple(tf_keras)
    loaded.load_weights(tmp_path / "weights.tf").expect_partial()
    np.testing.assert_array_equal(
        HALF[kind](loaded).predict(x, verbose=0), model.predict(x, verbose=0)
    )
    if kind == "soft":
        exact = kso.tfmot.prune_with_soft_threshold(dense, s_init=-30.0)
        np.testing.assert_allclose(exact(x), dense(x), atol=1e-6)
    with pytest.raises(ValueError, match="Weight count mismatch"):
        HALF[kind](simple(tf_keras)).load_weights(tmp_path / "weights.h5")


@both
@pytest.mark.parametrize("form", ["keras", "h5", "tf"])
def test_stop_and_restart(tf_keras, sparsity, kind, form, tmp_path):
    model = train(tf_keras, sparsity, HALF[kind](simple(tf_keras)), kind, 2)
    x, _ = data()
    check(sparsity, model, x)
    path = tmp_path / {"keras": "m.keras", "h5": "m.h5", "tf": "m"}[form]
    model.save(path)
    loaded = tf_keras.models.load_model(path)
    check(sparsity, loaded, x)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6)
    if form == "tf":
        loaded.compile("sgd", "mse")
    loaded.fit(*data(), epochs=3, verbose=0, callbacks=[sparsity.UpdatePruningStep()])
    check(sparsity, loaded, x)


@both
def test_checkpoints_are_sparse(tf_keras, sparsity, kind, tmp_path):
    """Differs: TFMOT's are not, in the middle of an epoch (its issue 206)."""
    model = HALF[kind](simple(tf_keras))
    train(tf_keras, sparsity, model, kind, 2)
    saving = tf_keras.callbacks.ModelCheckpoint(
        str(tmp_path / "{epoch}-{batch}.tf"), save_weights_only=True, save_freq=1
    )
    model.fit(*data(), batch_size=4, verbose=0, callbacks=[saving])
    files = sorted(tmp_path.glob("*.index"))
    assert len(files) == 5
    want = [weight.live for weight in kso.tfmot.prunable_weights(model)]
    for file in files:
        fresh = HALF[kind](simple(tf_keras))
        fresh.load_weights(file.with_suffix("")).expect_partial()
        assert [weight.live for weight in kso.tfmot.prunable_weights(fresh)] == want


@both
def test_a_training_loop_of_ones_own(tf_keras, sparsity, kind):
    import tensorflow as tf

    model = HALF[kind](simple(tf_keras))
    model.optimizer = optimizer = tf_keras.optimizers.SGD()
    x, y = data()
    used = [sparsity.UpdatePruningStep()]
    if kind == "soft":
        used.append(kso.tfmot.TargetDensity(0.5, kso.schedules.OneShot(0.5, 1)))
    for callback in used:
        callback.set_model(model)
        callback.on_train_begin()
    for _ in range(2):
        for callback in used:
            callback.on_train_batch_begin(batch=-1)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x, training=True) - y) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        for callback in used:
            callback.on_epoch_end(batch=-1)
    check(sparsity, model, x)


@both
@pytest.mark.parametrize("strategy", ["one", "mirrored", "collective"])
def test_strategies(tf_keras, sparsity, kind, strategy, tmp_path):
    import tensorflow as tf

    made = {
        "one": lambda: tf.distribute.OneDeviceStrategy("/cpu:0"),
        "mirrored": two_device_strategy,
        "collective": tf.distribute.MultiWorkerMirroredStrategy,
    }[strategy]()
    with made.scope():
        model = HALF[kind](simple(tf_keras))
        model.compile("sgd", "mse")
    model.fit(*data(), epochs=2, batch_size=20, verbose=0, callbacks=callbacks(sparsity, kind))
    x, _ = data()
    check(sparsity, model, x)
    model.save(tmp_path / "model.h5")
    check(sparsity, tf_keras.models.load_model(tmp_path / "model.h5"), x)


def test_zeros_in_later_stages(tf_keras, sparsity):
    """The table of docs/from_tfmot.md."""
    import tensorflow_model_optimization as tfmot
    from tensorflow_model_optimization.python.core.clustering.keras.experimental import cluster

    L = tf_keras.layers
    inputs = tf_keras.Input((12, 12, 3))
    x = L.Conv2D(16, 3, padding="same", name="conv")(inputs)
    x = L.ReLU()(L.BatchNormalization()(x))
    x = L.DepthwiseConv2D(3, padding="same", name="depth")(x)
    x = L.ReLU()(L.BatchNormalization()(x))
    x = L.ReLU()(L.Conv2D(8, 1, name="bare")(x))
    outputs = L.Dense(10, name="dense")(L.GlobalAveragePooling2D()(x))
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(64, 12, 12, 3)).astype("float32"), rng.normal(size=(64, 10))

    def trained(model):
        model.compile("adam", "mse")
        model.fit(x, y, epochs=2, verbose=0)
        return model

    held = trained(kso.tfmot.prune_with_mask(tf_keras.Model(inputs, outputs), density=0.3))
    plain = sparsity.strip_pruning(held)
    zeros = {
        w.path.split("/")[0]: (w.variable.shape, w.value == 0)
        for w in kso.tfmot.prunable_weights(plain)
    }

    def copy(frozen=()):
        model = tf_keras.models.clone_model(plain)
        model.set_weights(plain.get_weights())
        for name in frozen:
            model.get_layer(name).trainable = False
        return model

    def kept(model):
        """The layers whose zeros are all zero still."""
        found = set()
        for name, (shape, dead) in zeros.items():
            [layer] = [one for one in model.layers if one.name.endswith(name)]
            value = next(w.numpy() for w in layer.weights if w.shape == shape)
            if not value[dead].any():
                found.add(name)
        return found

    def quantized(scheme, model):
        annotated = tfmot.quantization.keras.quantize_annotate_model(model)
        return trained(tfmot.quantization.keras.quantize_apply(annotated, scheme))

    def clustered(model, **options):
        start = tfmot.clustering.keras.CentroidInitialization.KMEANS_PLUS_PLUS
        options = {"number_of_clusters": 8, "cluster_centroids_init": start, **options}
        return tfmot.clustering.keras.strip_clustering(
            trained(cluster.cluster_weights(model, **options))
        )

    combine = tfmot.experimental.combine
    assert kept(trained(copy())) == set()
    assert kept(quantized(combine.Default8BitPrunePreserveQuantizeScheme(), copy())) == {
        "conv",
        "dense",
    }
    both_kinds = {"conv", "depth", "dense"}
    assert kept(quantized(kso.tfmot.PrunePreserveQuantizeScheme(), copy())) == both_kinds
    assert kept(clustered(copy())) == set()
    preserving = clustered(copy(), preserve_sparsity=True)
    assert kept(preserving) == {"conv", "bare", "dense"}
    frozen = clustered(copy(frozen=["depth"]), preserve_sparsity=True)
    assert kept(frozen) == {"conv", "depth", "bare", "dense"}
    scheme = combine.Default8BitClusterPreserveQuantizeScheme(preserve_sparsity=True)
    assert kept(quantized(scheme, frozen)) == {"conv", "dense"}
