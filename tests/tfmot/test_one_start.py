"""One start in both Kerases: networks with normalization draw the same kernels at equal seeds."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError

pytestmark = pytest.mark.tensorflow_only


def network(which, add):
    """A residual block in a nested model, and layers without normalization behind them."""
    L = which.layers
    inputs = which.Input((8, 8, 4))
    x = L.Conv2D(4, 3, padding="same", name="conv")(inputs)
    x = L.ReLU()(L.BatchNormalization(name="norm")(x))
    block = which.Model(inputs, add(inputs, x), name="block")
    inputs = which.Input((8, 8, 4))
    x = L.Conv2D(
        4,
        3,
        padding="same",
        kernel_initializer=which.initializers.HeNormal(),
        name="stem",
    )(inputs)
    x = block(L.BatchNormalization()(x))
    x = L.GlobalAveragePooling2D()(x)
    neck = [which.Input((4,)), L.Dense(8, name="a"), L.LayerNormalization()]
    x = which.Sequential(neck, name="neck")(x)
    x = L.Dense(8, activation="relu", name="hidden")(x)
    return which.Model(inputs, L.Dense(3, name="head")(x))


def by_layer(which):
    return lambda x, y: which.layers.Add()([x, y])


def by_operator(_):
    return lambda x, y: x + y


def kernels(weights):
    return {w.path: w.value for w in weights}


@pytest.mark.parametrize("add", [by_layer, by_operator])
@pytest.mark.parametrize(
    "pattern",
    [
        "exact_orthogonal",
        "random_sparse",
        kso.initializers.ExactOrthogonal(gain="auto"),
    ],
)
def test_networks_with_normalization_draw_the_same_kernels(
    tf_keras, add, pattern
):
    move = network(keras, add(keras))
    stay = network(tf_keras, add(tf_keras))
    arguments = (0.3, "uniform", pattern)
    expected = kernels(
        kso.prunable_weights(kso.sparsify(move, *arguments, seed=0))
    )
    drawn = kernels(
        kso.tfmot.prunable_weights(
            kso.tfmot.prune_exact_orthogonal(stay, *arguments, seed=0)
        )
    )
    assert drawn.keys() == expected.keys()
    for path, kernel in expected.items():
        np.testing.assert_array_equal(drawn[path], kernel)


def unit(which, relu):
    class Unit(which.layers.Layer):
        def __init__(self, **kwargs):
            super().__init__(**kwargs)
            self.dense = which.layers.Dense(16, name="dense")
            self.norm = which.layers.BatchNormalization(name="norm")

        def build(self, shape):
            self.dense.build(shape)
            self.norm.build(shape)
            self.built = True

        def call(self, x):
            return x + relu(self.norm(self.dense(x)))

    inputs = which.Input((16,))
    x = Unit(name="unit")(inputs)
    return which.Model(inputs, which.layers.Dense(4, name="head")(x))


def test_calls_inside_a_layer_written_as_a_class_are_watched(tf_keras):
    import tensorflow as tf

    stay, move = unit(tf_keras, tf.nn.relu), unit(keras, keras.ops.relu)
    inner = stay.get_layer("unit").dense
    count = len(inner._inbound_nodes), len(inner._outbound_nodes)
    calls = kso.pruning.watch_calls(stay)
    assert len(calls.of_layer[id(inner)]) == 1
    assert (len(inner._inbound_nodes), len(inner._outbound_nodes)) == count
    weights = kso.tfmot.prunable_weights(stay)
    drawn = kso.pruning.draw_kernels(
        stay, weights, 0.3, "uniform", "exact_orthogonal", seed=0
    )
    sparse = kso.sparsify(move, 0.3, "uniform", seed=0)
    for weight in kso.prunable_weights(sparse):
        kernel = drawn[weight.path].kernel
        np.testing.assert_array_equal(kernel, weight.value)


def twin_class(which, wrap=lambda layer: layer):
    """A class of networks with BatchNormalization, whose layers `wrap` may change."""
    L = which.layers

    class Twin(which.Model):
        def __init__(self):
            super().__init__()
            self.hidden = [
                wrap(L.Dense(12, name="a")),
                wrap(L.Dense(12, name="b")),
            ]
            self.norms = [L.BatchNormalization() for _ in self.hidden]
            self.relu = L.ReLU()
            self.head = wrap(L.Dense(3, name="head"))

        def call(self, x, training=False):
            for dense, norm in zip(self.hidden, self.norms, strict=True):
                x = self.relu(norm(dense(x), training=training))
            return self.head(x)

    return Twin


def called(model):
    model(np.ones((2, 8), "float32"))
    return model


@pytest.mark.parametrize("pattern", ["exact_orthogonal", "random_sparse"])
def test_subclassed_networks_draw_the_same_kernels(tf_keras, pattern):
    arguments = (0.4, "uniform", pattern)
    sparse = kso.sparsify(called(twin_class(keras)()), *arguments, seed=0)
    plain = called(twin_class(tf_keras)())
    weights_before = plain.get_weights()
    nodes_before = len(plain.head._inbound_nodes)
    starts = kso.tfmot.exact_orthogonal_initializers(plain, *arguments, seed=0)
    assert len(plain.head._inbound_nodes) == nodes_before
    for before, after in zip(weights_before, plain.get_weights(), strict=True):
        np.testing.assert_array_equal(before, after)

    def wrap(layer):
        layer.kernel_initializer = starts[f"{layer.name}/kernel"]
        return kso.tfmot.PruneWithMask(layer)

    masked = called(twin_class(tf_keras, wrap)())
    expected = kernels(kso.prunable_weights(sparse))
    drawn = kernels(kso.tfmot.prunable_weights(masked))
    assert drawn.keys() == expected.keys() == starts.keys()
    for path, kernel in expected.items():
        np.testing.assert_array_equal(drawn[path], kernel)
    with pytest.raises(NotPrunableError, match=r"have a pruning wrapper"):
        kso.tfmot.exact_orthogonal_initializers(masked, 0.4)


def test_subclassed_networks_need_a_call(tf_keras):
    plain = twin_class(tf_keras)()
    with pytest.raises(NotPrunableError, match=r"is not built: .*call it"):
        kso.tfmot.exact_orthogonal_initializers(plain, 0.4)


def test_calls_that_take_no_symbols_are_named(tf_keras):
    import tensorflow as tf

    class ByCount(tf_keras.Model):
        def __init__(self):
            super().__init__()
            self.head = tf_keras.layers.Dense(3, name="head")

        def call(self, x):
            for _ in range(int(tf.reduce_sum(tf.shape(x)[:1]))):
                x = tf.identity(x)
            return self.head(x)

    plain = called(ByCount())
    gain_from_calls = kso.initializers.ExactOrthogonal(gain="auto")
    with pytest.warns(
        UserWarning, match=r"'head/kernel' \(the call of .* watched: TypeError"
    ):
        kso.tfmot.exact_orthogonal_initializers(
            plain, 0.5, "uniform", gain_from_calls, seed=0
        )


def test_weights_go_into_the_network_without_wrappers(tf_keras):
    plain = called(twin_class(tf_keras)())
    starts = kso.tfmot.exact_orthogonal_initializers(plain, 0.4, seed=0)

    def masked_layer(layer):
        layer.kernel_initializer = starts[f"{layer.name}/kernel"]
        return kso.tfmot.PruneWithMask(layer)

    for wrap in (masked_layer, kso.tfmot.PruneWithSoftThreshold):
        pruned = called(twin_class(tf_keras, wrap)())
        rng = np.random.default_rng(0)
        rows = rng.normal(size=(64, 8)).astype("float32")
        pruned.compile("adam", "mse")
        pruned.fit(rows, rng.normal(size=(64, 3)), verbose=0)
        kso.tfmot.copy_weights(pruned, plain)
        np.testing.assert_allclose(plain(rows), pruned(rows), atol=1e-5)
        weights = zip(
            kso.tfmot.prunable_weights(pruned),
            kso.tfmot.prunable_weights(plain),
            strict=True,
        )
        for source, target in weights:
            np.testing.assert_array_equal(target.value, source.value)
    before = plain.get_weights()
    other = tf_keras.Sequential(
        [tf_keras.Input((8,)), tf_keras.layers.Dense(5, name="head")]
    )
    with pytest.raises(
        NotPrunableError, match=r"Received: .* in `model`, .*Twin"
    ):
        kso.tfmot.copy_weights(other, plain)
    narrow = tf_keras.Sequential(
        [tf_keras.Input((8,)), tf_keras.layers.Dense(3, name="head")]
    )
    with pytest.raises(
        NotPrunableError,
        match=r"Dense 'head' with weights \[\(8, 5\).*\(8, 3\)",
    ):
        kso.tfmot.copy_weights(other, narrow)
    for value, after in zip(before, plain.get_weights(), strict=True):
        np.testing.assert_array_equal(value, after)


def test_masks_of_wrapped_kernels_count_zeros_that_are_live(tf_keras):
    L = tf_keras.layers
    model = tf_keras.Sequential(
        [tf_keras.Input((8, 8, 1)), L.Conv2D(16, 3, name="stem")]
    )
    held = kso.tfmot.prune_exact_orthogonal(model, 0.6, seed=0)
    (weight,) = kso.tfmot.prunable_weights(held)
    assert np.count_nonzero(weight.value) < weight.live == weight.mask.sum()
    again = kso.tfmot.prune_with_mask(model, {weight.path: weight.mask})
    (kernel,) = kso.tfmot.prunable_weights(again)
    np.testing.assert_array_equal(kernel.mask, weight.mask)


def test_names_that_nobody_has_are_answered_with_those_there_are(tf_keras):
    L = tf_keras.layers
    plain = called(twin_class(tf_keras)())
    starts = kso.tfmot.exact_orthogonal_initializers(plain, 0.4, seed=0)
    with pytest.raises(
        UnknownWeightError, match=r"a/kernel, b/kernel, head/kernel.*'c/kernel'"
    ):
        starts["c/kernel"]
    layers = [L.Dense(4, name="a"), L.Dense(4, name="b")]
    model = tf_keras.Sequential([tf_keras.Input((4,)), *layers])
    mask = np.eye(4, dtype=bool)
    for masks in ({"c/kernel": mask}, {"a/kernel": mask, "c/kernel": mask}):
        with pytest.raises(
            UnknownWeightError, match=r"a/kernel, b/kernel.*'c/kernel'"
        ):
            kso.tfmot.prune_with_mask(model, masks)
    with pytest.raises(
        NotPrunableError, match=r"Received: layer='d' of Keras 3"
    ):
        kso.tfmot.PruneWithMask(keras.layers.Dense(4, name="d"))
    with pytest.raises(NotPrunableError, match="is not built"):
        kso.tfmot.prunable_weights(twin_class(tf_keras)())
