"""Layers as people write them, and what Keras does to masked models: taken, refused, or named."""

import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError
from tests.helpers import array, slow_on_jax

L = keras.layers
X = np.random.default_rng(0).normal(size=(4, 12)).astype("float32")


class Noise(L.Layer):
    """Draws without Keras' seeds, as the sampling of many autoencoders does."""

    def call(self, x):
        noise = np.random.default_rng().normal(size=(1, 12)).astype("float32")
        return x + keras.ops.convert_to_tensor(noise)


def functional(layer):
    inputs = keras.Input((12,))
    return keras.Model(inputs, L.Dense(4, name="head")(layer(inputs)))


@pytest.mark.core
def test_random_layers_are_not_taken_for_wrong_copies():
    model = functional(Noise())
    for sparse in (kso.sparsify(model, 0.5, seed=0), kso.prune(model, 0.5)):
        assert kso.report(sparse).density == 0.5
        kso.strip(sparse)


@pytest.mark.core
def test_what_is_held_beside_the_graph_is_a_layer_of_the_model():
    encoder = keras.Sequential([keras.Input((12,)), L.Dense(12, name="a"), L.Dense(6, name="b")])

    @keras.saving.register_keras_serializable("tests")
    class Holding(keras.Model):
        def __init__(self, encoder, **kwargs):
            x = keras.Input((12,))
            super().__init__(x, encoder.layers[1](x), **kwargs)
            self.encoder = encoder  # whose first layer is in no graph of this model

    model = Holding(encoder)
    paths = {weight.path for weight in kso.prunable_weights(model)}
    assert paths == {"b/kernel", f"{encoder.name}/a/kernel"}
    sparse = kso.sparsify(model, 0.5, seed=0)
    assert sparse.encoder.layers[1] is sparse.get_layer("b")
    np.testing.assert_array_equal(array(kso.strip(sparse)(X)), array(sparse(X)))


@pytest.mark.core
@slow_on_jax
def test_masked_layers_are_not_quantized(tmp_path):
    dense = functional(L.Dense(16, name="hidden"))
    sparse = kso.sparsify(dense, 0.5, seed=0, exclude="head")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")  # Keras also warns of its own Input
        sparse.quantize("int8")
    assert any("'hidden' cannot be quantized while it is wrapped" in str(w.message) for w in told)
    assert kso.prunable_weights(sparse)[0].path == "hidden/kernel"
    assert sparse.get_layer("head").quantization_mode == "int8"
    expected = array(sparse(X))
    sparse.save(tmp_path / "sparse.keras")
    loaded = keras.saving.load_model(tmp_path / "sparse.keras")
    np.testing.assert_allclose(array(loaded(X)), expected, atol=1e-6)
    np.testing.assert_allclose(array(kso.strip(sparse)(X)), expected, atol=1e-6)


@pytest.mark.core
@slow_on_jax
def test_quantized_layers_are_refused():
    model = functional(L.Dense(12, name="hidden"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras', of its own Input
        model.quantize("int8")
    for verb in (kso.sparsify, kso.prune):
        with pytest.raises(NotPrunableError, match=r"'hidden/kernel' is quantized.*Received"):
            verb(model, 0.5)


def named_dense(layer):
    class Written(keras.Model):
        def __init__(self):
            super().__init__()
            self.first, self.head = layer, L.Dense(4, name="head")

        def call(self, x):
            return self.head(self.first(x))

    model = Written()
    model(X)
    with pytest.warns(UserWarning, match="Matrices with .* stay dense"):
        sparse = kso.sparsify(model, 0.5, seed=0)
    return kso.report(sparse).dense


@pytest.mark.jax_only
def test_matrices_of_functions_in_jax_are_named():
    import jax

    def init(rng, inputs):
        return {"w": jax.random.normal(rng, (12, 12))}

    layer = L.JaxLayer(lambda params, inputs: inputs @ params["w"], init_fn=init, name="fn")
    assert list(named_dense(layer).values()) == ["not registered"]


@pytest.mark.torch_only
def test_matrices_of_modules_in_torch_are_named():
    import torch

    dense = named_dense(L.TorchModuleWrapper(torch.nn.Linear(12, 12), name="module"))
    assert list(dense.values()) == ["not registered"]
