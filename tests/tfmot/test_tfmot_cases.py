"""The cases of TFMOT's own suite for pruning (as of 0.8), written anew for our wrappers.

What differs: a layer without weights is refused alone and left as it is in a model; layers that
TFMOT does not support are pruned; masks hold without the callback; lists of layers and unbuilt
models are refused. The slow ones are in `test_integration.py`.
"""

import json

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError

pytestmark = pytest.mark.tensorflow_only


MODELS = {
    "mask": lambda model: kso.tfmot.prune_with_mask(
        model, density=0.5, budget="uniform"
    ),
    "soft": lambda model: kso.tfmot.prune_with_soft_threshold(
        model, s_init=-2.0
    ),
}
WRAPPERS = {"mask": "PruneWithMask", "soft": "PruneWithSoftThreshold"}
both = pytest.mark.parametrize("kind", MODELS)


def sequential(tf_keras, *layers, shape=(16,)):
    return tf_keras.Sequential([tf_keras.Input(shape), *layers])


def functional(tf_keras):
    L = tf_keras.layers
    first, second = tf_keras.Input((10,)), tf_keras.Input((10,))
    outputs = L.Add()([L.Dense(10)(first), L.Dense(10)(second)])
    return tf_keras.Model([first, second], outputs)


def wrapped(model):
    return [
        layer
        for layer in model.layers
        if type(layer).__name__ in WRAPPERS.values()
    ]


def subclass_of_dense(tf_keras, **members):
    return type("Own", (tf_keras.layers.Dense,), members)(10)


def layers(tf_keras):
    """Layer, input shape, and how many masks it has."""
    L = tf_keras.layers
    method = subclass_of_dense(
        tf_keras, get_prunable_weights=lambda own: [own.kernel]
    )
    return {
        "dense": (L.Dense(10), (16,), 1),
        "embedding": (L.Embedding(10, 10), (6,), 1),
        "conv1d": (L.Conv1D(4, 2), (5, 6), 1),
        "conv2d": (L.Conv2D(4, 3), (8, 8, 4), 1),
        "conv3d": (L.Conv3D(2, 3), (5, 7, 6, 3), 1),
        "transposed": (L.Conv2DTranspose(2, 3), (7, 6, 3), 1),
        "separable": (L.SeparableConv2D(4, 2), (4, 6, 2), 2),
        "local": (L.LocallyConnected1D(4, 2), (5, 6), 1),
        "rnn": (L.RNN(L.LSTMCell(4)), (5, 6), 2),
        "stacked": (L.RNN([L.GRUCell(4), L.SimpleRNNCell(4)]), (5, 6), 4),
        "conv_lstm": (L.ConvLSTM2D(2, 2), (2, 4, 4, 2), 2),
        "subclass": (subclass_of_dense(tf_keras), (16,), 1),
        "method": (method, (16,), 1),
    }


NAMES = [
    "dense",
    "embedding",
    "conv1d",
    "conv2d",
    "conv3d",
    "transposed",
    "separable",
    "local",
]
NAMES += ["stacked", "subclass", "method"]
NAMES += [
    pytest.param(name, marks=pytest.mark.slow) for name in ("rnn", "conv_lstm")
]


@pytest.mark.parametrize("name", NAMES)
def test_one_layer(tf_keras, sparsity, name):
    import tensorflow as tf

    layer, shape, masks = layers(tf_keras)[name]
    x = np.random.default_rng(0).integers(0, 10, (8, *shape)).astype("float32")
    with tf_keras.utils.custom_object_scope({"Own": type(layer)}):
        for kind, prune in MODELS.items():
            flat = tf_keras.layers.Flatten()
            model = prune(sequential(tf_keras, layer, flat, shape=shape))
            [wrapper] = wrapped(model)
            assert type(wrapper).__name__ == WRAPPERS[kind]
            assert len(wrapper.pruning_vars) == masks
            assert wrapper.name.startswith(
                f"prune_with_{'mask' if kind == 'mask' else 'soft'}"
            )
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(x, training=True) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            assert all(g is not None for g in gradients)
            for weight in kso.tfmot.prunable_weights(model):
                if kind == "mask":
                    assert weight.live == round(weight.size / 2)
                assert weight.live < weight.size
            plain = sparsity.strip_pruning(model)
            np.testing.assert_allclose(plain(x), model(x), atol=1e-5)


@both
def test_whole_models(tf_keras, kind):
    from tensorflow_model_optimization.python.core.sparsity.keras import (
        pruning_wrapper,
    )

    L = tf_keras.layers
    inner = sequential(tf_keras, L.Dense(8), L.BatchNormalization(), shape=(4,))
    model = MODELS[kind](
        sequential(tf_keras, L.LSTM(4), inner, L.Dense(10), shape=(5, 4))
    )
    assert len(pruning_wrapper.collect_prunable_layers(model)) == 3
    own = subclass_of_dense(tf_keras)
    dense = sequential(
        tf_keras, L.Dense(10), L.Dropout(0.4), L.BatchNormalization(), own
    )
    with tf_keras.utils.custom_object_scope({"Own": type(own)}):
        model = MODELS[kind](dense)
    names = [type(layer).__name__ for layer in model.layers]
    assert names == [
        WRAPPERS[kind],
        "Dropout",
        "BatchNormalization",
        WRAPPERS[kind],
    ]
    assert len(wrapped(MODELS[kind](functional(tf_keras)))) == 2
    inputs, shared = tf_keras.Input((10,)), L.Dense(10)
    twice = MODELS[kind](tf_keras.Model(inputs, shared(shared(inputs))))
    assert len(wrapped(twice)) == 1


@both
def test_refused(tf_keras, kind):
    class Subclassed(tf_keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = tf_keras.layers.Dense(10)

        def call(self, inputs):
            return self.dense(inputs)

    L = tf_keras.layers
    model = Subclassed()
    model(np.ones((1, 4), "float32"))
    with pytest.raises(
        NotPrunableError, match=r"subclassed model.*Received: model=Subclassed"
    ):
        MODELS[kind](model)
    for other in (object(), keras.Sequential([keras.layers.Dense(4)])):
        with pytest.raises(
            NotPrunableError, match=r"tf_keras models.*Received: model=<"
        ):
            MODELS[kind](other)
    with pytest.raises(
        NotPrunableError, match="Nothing in the model would be pruned"
    ):
        MODELS[kind](sequential(tf_keras, L.Dropout(0.4)))
    alone = getattr(kso.tfmot, WRAPPERS[kind])(L.Dropout(0.4))
    with pytest.raises(NotPrunableError, match="no kernel"):
        alone.build((None, 4))


@both
def test_tfmot_does_not_wrap_ours_again(tf_keras, sparsity, kind):
    model = MODELS[kind](sequential(tf_keras, tf_keras.layers.Dense(10)))
    [layer] = wrapped(model)
    assert sparsity.prune_low_magnitude([layer]) == [layer]
    assert sparsity.prune_low_magnitude(model).layers[0] is layer
    with pytest.raises(
        NotPrunableError, match=r"pruning wrapper already.*Received: \['dense"
    ):
        MODELS[kind](model)


@both
def test_configurations(tf_keras, sparsity, kind):
    L = tf_keras.layers
    stack = [
        L.Conv2D(4, 3),
        L.MaxPooling2D(),
        L.Flatten(),
        L.Dense(10),
        L.Dropout(0.4),
    ]
    for dense in (
        sequential(tf_keras, *stack, shape=(8, 8, 1)),
        functional(tf_keras),
    ):
        model = MODELS[kind](dense)
        loaded = tf_keras.models.model_from_json(model.to_json())
        assert loaded.built
        configs = [json.loads(one.to_json()) for one in (model, loaded)]
        assert configs[0] == configs[1]
        assert type(model).from_config(model.get_config()).built
        assert sparsity.strip_pruning(model).get_config() == dense.get_config()


@both
def test_callbacks(tf_keras, sparsity, kind, tmp_path):
    model = MODELS[kind](sequential(tf_keras, tf_keras.layers.Dense(10)))
    schedule = sparsity.ConstantSparsity(0.5, 0)
    other = sparsity.prune_low_magnitude(
        sequential(tf_keras, tf_keras.layers.Dense(10)), schedule
    )
    for one in (model, other):
        one.compile("sgd", "mse")
        folder = str(tmp_path / one.layers[0].name)
        callbacks = [
            sparsity.UpdatePruningStep(),
            sparsity.PruningSummaries(log_dir=folder),
        ]
        one.fit(
            np.ones((20, 16)),
            np.ones((20, 10)),
            epochs=3,
            verbose=0,
            callbacks=callbacks,
        )
    steps = [int(one.layers[0].pruning_step) for one in (model, other)]
    assert steps[0] == steps[1] == 3
    for one in (model, other):
        assert list((tmp_path / one.layers[0].name / "metrics").iterdir())
    _, mask, threshold = model.layers[0].pruning_vars[0]
    [weight] = kso.tfmot.prunable_weights(model)
    np.testing.assert_array_equal(mask.numpy() != 0, weight.state.mask())
    assert (float(threshold) > 0) == (kind == "soft")
