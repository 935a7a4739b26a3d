"""Our initializers in tf_keras layers, through every kind of saving, under every backend."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import (
    ExactOrthogonal,
    KernelLayout,
    RandomSparse,
)
from tests.helpers import run_python

pytestmark = pytest.mark.tensorflow_only

# Name, arguments, and the shape of the input.
LAYERS = {
    "dense": ("Dense", (6,), {}, (5, 4)),
    "groups": ("Conv2D", (6, 3), {"groups": 2}, (8, 8, 4)),
    "transposed": ("Conv2DTranspose", (6, 3), {}, (8, 8, 4)),
    "depthwise": ("DepthwiseConv2D", (3,), {}, (8, 8, 4)),
    "separable": ("SeparableConv2D", (6, 3), {}, (8, 8, 4)),
    "einsum": ("EinsumDense", ("abc,cde->abde", (5, 4, 4)), {}, (5, 4)),
    "rnn": ("SimpleRNN", (6,), {}, (5, 4)),
    "gru": ("GRU", (6,), {}, (5, 4)),
    "lstm": ("LSTM", (6,), {}, (5, 4)),
}


def kernels(which, weights_of, kind, **more):
    name, args, options, shape = LAYERS[kind]
    layer = getattr(which.layers, name)(*args, **options, **more)
    return weights_of(which.Sequential([which.Input(shape), layer]))


@pytest.mark.parametrize("kind", LAYERS)
def test_layouts_are_those_of_keras_3(tf_keras, kind):
    ours = kernels(keras, kso.prunable_weights, kind)
    theirs = kernels(tf_keras, kso.tfmot.prunable_weights, kind)
    found = [
        [(weight.shape, weight.layout) for weight in weights]
        for weights in (ours, theirs)
    ]
    assert found[0] == found[1]
    assert found[0][0][1] is not None


@pytest.mark.parametrize("make", [ExactOrthogonal, RandomSparse])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_kernel_is_the_sample(tf_keras, kind, make):
    options = (
        {"initializer": keras.initializers.HeNormal(seed=2)}
        if make is RandomSparse
        else {}
    )
    for plain in kernels(tf_keras, kso.tfmot.prunable_weights, kind):
        initializer = make(0.4, seed=1, layout=plain.layout, **options)
        name = f"{plain.attribute.removesuffix('_kernel')}_initializer"
        found = kernels(
            tf_keras, kso.tfmot.prunable_weights, kind, **{name: initializer}
        )
        [weight] = [
            weight for weight in found if weight.attribute == plain.attribute
        ]
        kernel, mask = initializer.sample(weight.shape)
        np.testing.assert_array_equal(weight.value, kernel)
        assert mask.sum() == round(0.4 * mask.size)


@pytest.mark.parametrize(
    "policy", ["mixed_bfloat16", "bfloat16", "float16", "float64"]
)
def test_every_dtype(tf_keras, policy):
    eoi = ExactOrthogonal(0.2, seed=1)
    layer = tf_keras.layers.Dense(40, kernel_initializer=eoi, dtype=policy)
    layer.build((None, 24))
    dtype = policy.replace("mixed_bfloat16", "float32")
    assert layer.kernel.dtype.name == dtype
    kernel, _ = eoi.sample((24, 40), dtype)
    np.testing.assert_array_equal(layer.kernel.numpy(), kernel)


@pytest.mark.filterwarnings("ignore:.*initializer.*:UserWarning")
@pytest.mark.filterwarnings("ignore:.*HDF5 file.*:UserWarning")
@pytest.mark.parametrize(
    "form",
    [
        "clone",
        "keras",
        "h5",
        pytest.param("saved_model", marks=pytest.mark.slow),
    ],
)
def test_round_trips(tf_keras, form, tmp_path):
    L = tf_keras.layers
    gates = ExactOrthogonal(0.3, seed=2, layout=KernelLayout.recurrent(4))
    model = tf_keras.Sequential(
        [
            L.Input((6, 10)),
            L.Conv1D(12, 3, kernel_initializer=ExactOrthogonal(0.3, seed=1)),
            L.LSTM(8, kernel_initializer=gates, recurrent_initializer=gates),
            L.Dense(
                16, kernel_initializer=RandomSparse(0.3, "he_normal", seed=3)
            ),
        ]
    )
    x = np.random.default_rng(0).normal(size=(3, 6, 10)).astype("float32")
    if form == "clone":
        loaded = tf_keras.models.clone_model(model)
        loaded.set_weights(model.get_weights())
    else:
        path = str(
            tmp_path / ("model" if form == "saved_model" else f"model.{form}")
        )
        model.save(path, save_format="tf" if form == "saved_model" else form)
        loaded = tf_keras.models.load_model(path)
    np.testing.assert_allclose(
        loaded.predict(x, verbose=0), model.predict(x, verbose=0), atol=1e-6
    )
    initializer = loaded.layers[0].kernel_initializer
    assert type(initializer).__name__ == "ExactOrthogonal"
    assert (
        initializer.get_config()
        == model.layers[0].kernel_initializer.get_config()
    )


CODE = """
import keras, numpy as np, keras_sparse_ortho as kso
from keras_sparse_ortho.initializers import ExactOrthogonal
tf_keras = kso.tfmot.register_initializers()
own = ExactOrthogonal(0.3, seed=1)
model = tf_keras.Sequential([
    tf_keras.layers.Input((8,)), tf_keras.layers.Dense(16, kernel_initializer=own)])
assert (model.layers[0].kernel.numpy() == own.sample((8, 16))[0]).all()
model.save("model")
loaded = tf_keras.models.load_model("model")
x = np.ones((2, 8), "float32")
assert (loaded(x).numpy() == model(x).numpy()).all()
print(keras.backend.backend(), "good")
"""


@pytest.mark.slow
def test_whatever_the_backend_of_keras_is(tmp_path):
    done = run_python("-c", CODE, cwd=tmp_path, KERAS_BACKEND="jax")
    assert done.split() == ["jax", "good"]


def test_weights_that_a_layer_creates_as_never_trainable_are_no_kernels(
    tf_keras,
):
    class Frontend(tf_keras.layers.Layer):
        def build(self, input_shape):
            self.mel_kernel = self.add_weight(
                "mel_kernel", (8, 8), trainable=False
            )
            self.out_kernel = self.add_weight("out_kernel", (8, 8))

        def call(self, x):
            return x @ self.mel_kernel @ self.out_kernel

    class Fixed(tf_keras.layers.Dense):
        def build(self, input_shape):
            self.kernel = self.add_weight(
                "kernel", (8, self.units), trainable=False
            )
            self.bias, self.built = None, True

    layers = [Frontend(name="front"), Fixed(8, use_bias=False, name="fixed")]
    frozen = tf_keras.layers.Dense(4, trainable=False, name="frozen")
    model = tf_keras.Sequential([tf_keras.Input((8,)), *layers, frozen])
    model.trainable = False
    paths = ["front/out_kernel", "frozen/kernel"]
    assert [
        weight.path for weight in kso.tfmot.prunable_weights(model)
    ] == paths


def test_outputs_of_depthwise_kernels_keep_a_live_entry(tf_keras):
    L = tf_keras.layers
    layers = [L.DepthwiseConv2D(3, name="a"), L.SeparableConv2D(8, 3, name="b")]
    model = tf_keras.Sequential([tf_keras.Input((8, 8, 16)), *layers])
    for layer in layers:
        kernel = layer.depthwise_kernel
        kernel.assign(kernel * np.geomspace(1e-6, 1, 16).reshape(1, 1, 16, 1))
    for pruned in (
        kso.tfmot.prune_with_mask(model, density=0.2),
        kso.tfmot.prune_with_mask(model, density=0.2, budget="uniform"),
    ):
        for weight in kso.tfmot.prunable_weights(pruned):
            if "depthwise_kernel" in weight.path:
                assert (
                    kso.orthogonal.dead_outputs(weight.mask, weight.layout) == 0
                )


def test_mirrored_kernels_are_those_of_keras_3(tf_keras):
    pattern = ExactOrthogonal(gain=2**0.5, mirrored="outputs")
    drawn = []
    for which, draws in (
        (keras, kso.sparsify),
        (tf_keras, kso.tfmot.prune_exact_orthogonal),
    ):
        layer = which.layers.Dense(32, name="a")
        model = which.Sequential([which.Input((12,)), layer])
        sparse = draws(model, 0.3, initializer=pattern, seed=0)
        weights_of = kso.prunable_weights
        if which is tf_keras:
            weights_of = kso.tfmot.prunable_weights
        drawn.append(weights_of(sparse)[0].value)
    np.testing.assert_array_equal(drawn[0], drawn[1])
    np.testing.assert_array_equal(drawn[0][:, :16], -drawn[0][:, 16:])
