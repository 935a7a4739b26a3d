"""TFMOT's integration and distributed tests, carried over to our two wrappers; all are slow.

The cases are those of `prune_integration_test`, `prune_distributed_test` and of the combinations
with quantization and clustering, as of 0.8, written anew. docs/from_tfmot.md says what differs.
"""

import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import two_device_strategy
from tests.tfmot.test_tfmot_cases import layers, sequential

pytestmark = [
    pytest.mark.tensorflow_only,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*HDF5 file.*:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*initializer.*:UserWarning"),
]

HALF = {
    "mask": lambda model: kso.tfmot.prune_with_mask(
        model, density=0.5, budget="uniform"
    ),
    "soft": lambda model: kso.tfmot.prune_with_soft_threshold(model),
}
both = pytest.mark.parametrize("kind", HALF)


def callbacks(sparsity, kind):
    steering = (
        [kso.tfmot.TargetDensity(0.5, frequency=1)] if kind == "soft" else []
    )
    return [sparsity.UpdatePruningStep(), *steering]


def check(sparsity, model, inputs):
    """The count of live entries, and that stripping changes no output."""
    weights = kso.tfmot.prunable_weights(model)
    want = sum(round(w.size / 2) for w in weights)
    assert abs(sum(w.live for w in weights) - want) <= len(weights) / 2
    plain = sparsity.strip_pruning(model)
    np.testing.assert_allclose(
        plain.predict(inputs, verbose=0),
        model.predict(inputs, verbose=0),
        rtol=1e-6,
        atol=1e-6,
    )
    assert (
        abs(sum(w.live for w in kso.tfmot.prunable_weights(plain)) - want)
        <= len(weights) / 2
    )


@both
def test_single_layers_reach_their_density(tf_keras, sparsity, kind):
    L = tf_keras.layers
    known = {
        **layers(tf_keras),
        "separable1d": (L.SeparableConv1D(4, 3), (3, 6), 2),
        "conv3d_transpose": (L.Conv3DTranspose(2, 3), (5, 7, 6, 3), 1),
        "local2d": (L.LocallyConnected2D(4, (2, 2)), (4, 6, 1), 1),
        "gru": (L.GRU(10), (3, 4), 2),
        "cells": (
            L.RNN([L.LSTMCell(10), L.GRUCell(10), L.SimpleRNNCell(10)]),
            (3, 4),
            6,
        ),
        "attention": (L.MultiHeadAttention(2, 4), (3, 4), 4),
    }
    for name, (layer, shape, _) in known.items():
        if name in ("embedding", "subclass", "method"):
            continue
        inputs = tf_keras.Input(shape)
        outputs = (
            layer(inputs, value=inputs)
            if name == "attention"
            else layer(inputs)
        )
        model = HALF[kind](tf_keras.Model(inputs, outputs))
        rng = np.random.default_rng(0)
        x, y = (
            rng.normal(size=(32, *shape)),
            rng.normal(size=(32, *outputs.shape[1:])),
        )
        model.compile("sgd", "mse")
        used = callbacks(sparsity, kind)
        model.fit(x, y, epochs=2, batch_size=20, verbose=0, callbacks=used)
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
    L = tf_keras.layers
    with made.scope():
        model = sequential(
            tf_keras, L.Dense(8, "relu"), L.Dense(5, "softmax"), shape=(10,)
        )
        model = HALF[kind](model)
        model.compile("sgd", "mse")
    rng = np.random.default_rng(0)
    x, y = rng.random((20, 10)), np.eye(5)[rng.integers(0, 5, 20)]
    model.fit(
        x,
        y,
        epochs=2,
        batch_size=20,
        verbose=0,
        callbacks=callbacks(sparsity, kind),
    )
    check(sparsity, model, x)
    model.save(tmp_path / "model.h5")
    check(sparsity, tf_keras.models.load_model(tmp_path / "model.h5"), x)


def test_zeros_in_later_stages(tf_keras, sparsity):
    """The table of docs/from_tfmot.md."""
    import tensorflow_model_optimization as tfmot
    from tensorflow_model_optimization.python.core.clustering.keras.experimental import (
        cluster,
    )

    L = tf_keras.layers
    inputs = tf_keras.Input((12, 12, 3))
    x = L.Conv2D(16, 3, padding="same", name="conv")(inputs)
    x = L.ReLU()(L.BatchNormalization()(x))
    x = L.DepthwiseConv2D(3, padding="same", name="depth")(x)
    x = L.ReLU()(L.BatchNormalization()(x))
    x = L.ReLU()(L.Conv2D(8, 1, name="bare")(x))
    outputs = L.Dense(10, name="dense")(L.GlobalAveragePooling2D()(x))
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(64, 12, 12, 3)).astype("float32"),
        rng.normal(size=(64, 10)),
    )

    def trained(model):
        model.compile("adam", "mse")
        model.fit(x, y, epochs=2, verbose=0)
        return model

    held = trained(
        kso.tfmot.prune_with_mask(tf_keras.Model(inputs, outputs), density=0.3)
    )
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
        return trained(
            tfmot.quantization.keras.quantize_apply(annotated, scheme)
        )

    def clustered(model, **options):
        start = tfmot.clustering.keras.CentroidInitialization.KMEANS_PLUS_PLUS
        options = {
            "number_of_clusters": 8,
            "cluster_centroids_init": start,
            **options,
        }
        return tfmot.clustering.keras.strip_clustering(
            trained(cluster.cluster_weights(model, **options))
        )

    combine = tfmot.experimental.combine
    assert kept(trained(copy())) == set()
    assert kept(
        quantized(combine.Default8BitPrunePreserveQuantizeScheme(), copy())
    ) == {
        "conv",
        "dense",
    }
    both_kinds = {"conv", "depth", "dense"}
    assert (
        kept(quantized(kso.tfmot.PrunePreserveQuantizeScheme(), copy()))
        == both_kinds
    )
    assert kept(clustered(copy())) == set()
    preserving = clustered(copy(), preserve_sparsity=True)
    assert kept(preserving) == {"conv", "bare", "dense"}
    frozen = clustered(copy(frozen=["depth"]), preserve_sparsity=True)
    assert kept(frozen) == {"conv", "depth", "bare", "dense"}
    scheme = combine.Default8BitClusterPreserveQuantizeScheme(
        preserve_sparsity=True
    )
    assert kept(quantized(scheme, frozen)) == {"conv", "dense"}
