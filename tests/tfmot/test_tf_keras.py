"""Our initializers in tf_keras layers, through every kind of saving."""

import numpy as np
import pytest

pytestmark = pytest.mark.tensorflow_only


def network(tf_keras):
    from keras_sparse_ortho.initializers import ExactOrthogonal, KernelLayout, RandomSparse

    gates = ExactOrthogonal(0.3, seed=2, layout=KernelLayout.recurrent(4))
    return tf_keras.Sequential(
        [
            tf_keras.layers.Input((6, 10)),
            tf_keras.layers.Conv1D(12, 3, kernel_initializer=ExactOrthogonal(0.3, seed=1)),
            tf_keras.layers.LSTM(8, kernel_initializer=gates, recurrent_initializer=gates),
            tf_keras.layers.Dense(16, kernel_initializer=RandomSparse(0.3, "he_normal", seed=3)),
            tf_keras.layers.Dense(4, kernel_initializer=ExactOrthogonal(0.3, seed=4)),
        ]
    )


def test_kernels_are_ours(tf_keras):
    from keras_sparse_ortho.initializers import ExactOrthogonal, KernelLayout

    model = network(tf_keras)
    conv, lstm, _, dense = model.layers
    np.testing.assert_array_equal(
        conv.kernel.numpy(), ExactOrthogonal(0.3, seed=1).sample((3, 10, 12))[0]
    )
    gates = KernelLayout.recurrent(4)
    recurrent = lstm.cell.recurrent_kernel.numpy()
    expected, _ = ExactOrthogonal(0.3, seed=2).sample((8, 32), layout=gates)
    np.testing.assert_array_equal(recurrent, expected)
    kernel = dense.kernel.numpy().astype("float64")
    assert np.abs(kernel.T @ kernel - np.eye(4)).max() < 1e-6


LAYERS = {
    "dense": lambda L: ((5, 4), L.Dense(6)),
    "groups": lambda L: ((8, 8, 4), L.Conv2D(6, 3, groups=2)),
    "transposed": lambda L: ((8, 8, 4), L.Conv2DTranspose(6, 3)),
    "depthwise": lambda L: ((8, 8, 4), L.DepthwiseConv2D(3)),
    "separable": lambda L: ((8, 8, 4), L.SeparableConv2D(6, 3)),
    "einsum": lambda L: ((5, 4), L.EinsumDense("abc,cd->abd", output_shape=(None, 6))),
    "rnn": lambda L: ((5, 4), L.SimpleRNN(6)),
    "gru": lambda L: ((5, 4), L.GRU(6)),
    "lstm": lambda L: ((5, 4), L.LSTM(6)),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_layouts_are_those_of_keras_3(tf_keras, kind):
    import keras

    import keras_sparse_ortho as kso

    found = []
    for which, weights_of in (
        (keras, kso.prunable_weights),
        (tf_keras, kso.tfmot.prunable_weights),
    ):
        shape, layer = LAYERS[kind](which.layers)
        model = which.Sequential([which.Input(shape), layer])
        found.append([(weight.shape, weight.layout) for weight in weights_of(model)])
    assert found[0] == found[1]
    assert found[0][0][1] is not None


@pytest.mark.filterwarnings("ignore:.*initializer.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*HDF5 file.*:UserWarning")
@pytest.mark.parametrize("form", ["clone", "keras", "h5", "saved_model"])
def test_round_trips(tf_keras, form, tmp_path):
    model = network(tf_keras)
    x = np.random.default_rng(0).normal(size=(3, 6, 10)).astype("float32")
    if form == "clone":
        loaded = tf_keras.models.clone_model(model)
        loaded.set_weights(model.get_weights())
    else:
        path = str(tmp_path / ("model" if form == "saved_model" else f"model.{form}"))
        model.save(path, save_format="tf" if form == "saved_model" else form)
        loaded = tf_keras.models.load_model(path)
    np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6)
    initializer = loaded.layers[0].kernel_initializer
    assert type(initializer).__name__ == "ExactOrthogonal"
    assert initializer.get_config() == model.layers[0].kernel_initializer.get_config()
