"""Our initializers in every kind of tf_keras layer, and under other backends of Keras 3."""

import os
import subprocess
import sys

import numpy as np
import pytest

from keras_sparse_ortho.initializers import (
    ExactOrthogonal,
    KernelLayout,
    RandomSparse,
)

pytestmark = pytest.mark.tensorflow_only


@pytest.fixture(scope="module")
def layers():
    from keras_sparse_ortho.tfmot import register_initializers

    return register_initializers().layers


GROUPS = KernelLayout.convolution(groups=2)
GATES = KernelLayout.recurrent(3)
# layer, its arguments, the initializer's name, layout, input shape
KINDS = {
    "dense": ("Dense", (16,), {}, "kernel", None, (8,)),
    "conv1d": ("Conv1D", (16, 3), {}, "kernel", None, (6, 8)),
    "conv2d_groups": ("Conv2D", (16, 3), {"groups": 2}, "kernel", GROUPS, (6, 6, 8)),
    "conv3d": ("Conv3D", (16, 2), {}, "kernel", None, (4, 4, 4, 8)),
    "transposed": (
        "Conv2DTranspose",
        (16, 3),
        {},
        "kernel",
        KernelLayout.transposed_convolution(),
        (6, 6, 8),
    ),
    "depthwise": ("DepthwiseConv2D", (3,), {}, "depthwise", KernelLayout.depthwise(), (6, 6, 8)),
    "pointwise": ("SeparableConv2D", (16, 3), {}, "pointwise", None, (6, 6, 8)),
    "einsum": (
        "EinsumDense",
        ("abc,cde->abde", (6, 4, 4)),
        {},
        "kernel",
        KernelLayout.einsum("abc,cde->abde"),
        (6, 8),
    ),
    "gru": ("GRU", (16,), {}, "kernel", GATES, (6, 8)),
    "gru_recurrent": ("GRU", (16,), {}, "recurrent", GATES, (6, 8)),
    "simple_rnn": ("SimpleRNN", (16,), {}, "recurrent", None, (6, 8)),
}


@pytest.mark.parametrize("make", [ExactOrthogonal, RandomSparse])
@pytest.mark.parametrize("name", KINDS)
def test_the_kernel_is_the_sample(layers, name, make):
    kind, args, options, which, layout, shape = KINDS[name]
    initializer = make(0.4, layout=layout, **_seeded(make))
    layer = getattr(layers, kind)(*args, **options, **{f"{which}_initializer": initializer})
    layer.build((None, *shape))
    kernel, mask = initializer.sample(_kernel(layer, which).shape)
    np.testing.assert_array_equal(_kernel(layer, which).numpy(), kernel)
    assert mask.sum() == round(0.4 * mask.size)


def _seeded(make):
    import keras

    if make is RandomSparse:
        return {"seed": 1, "initializer": keras.initializers.HeNormal(seed=2)}
    return {"seed": 1}


def _kernel(layer, which):
    owner = getattr(layer, "cell", layer)
    for name in (f"{which}_kernel", which):
        if getattr(owner, name, None) is not None:
            return getattr(owner, name)
    raise AssertionError(f"no {which} in {owner}")


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "bfloat16", "float16", "float64"])
def test_every_dtype(layers, policy):
    eoi = ExactOrthogonal(0.2, seed=1)
    layer = layers.Dense(40, kernel_initializer=eoi, dtype=policy)
    layer.build((None, 24))
    dtype = policy.replace("mixed_bfloat16", "float32")
    assert layer.kernel.dtype.name == dtype
    kernel, _ = eoi.sample((24, 40), dtype)
    np.testing.assert_array_equal(layer.kernel.numpy(), kernel)


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
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "KERAS_BACKEND": "jax"},
    )
    assert done.stdout.split() == ["jax", "good"], done.stderr
