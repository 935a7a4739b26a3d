"""Matrices of unregistered layers: named by a warning, and masked by one argument."""

import csv
import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import NotPrunableError, UnknownWeightError
from keras_sparse_ortho.initializers import (
    ExactOrthogonal,
    KernelLayout,
    kernel_layouts,
)
from tests.helpers import Chain, array, reloaded, slow_on_jax
from tests.pruning.checks import with_mixer

L = keras.layers
pytestmark = pytest.mark.core
TOLD = "Matrices with 57.14% of all entries stay dense, .* Received: 'mixer/mix' \\(3, 8, 8\\)$"


def test_they_are_told_of_unless_they_are_left_on_purpose(tmp_path):
    model = with_mixer()
    with pytest.warns(UserWarning, match=TOLD):
        sparse = kso.sparsify(model, 0.5, seed=0)
    for leave in ({"exclude": "mixer"}, {"include": "lift"}):
        kso.prune(model, 0.5, **leave)  # without a warning
    assert [w.path for w in kso.prunable_weights(sparse)] == [
        "lift/kernel",
        "head/kernel",
    ]
    with pytest.raises(
        UnknownWeightError, match=r"its full path.* Received: include=.mixer.$"
    ):
        kso.prune(model, 0.5, include="mixer")

    partly = kso.report(kso.prune(model, 0.25, exclude=["head", "mixer"]))
    assert partly.dense == {
        "head/kernel": "no mask",
        "mixer/mix": "not registered",
    }
    assert (partly.sparse_density, partly.density) == (
        0.25,
        (16 + 80) / (64 + 80),
    )
    assert partly.whole_density == (16 + 80 + 192) / (64 + 80 + 192)
    lines = [line.split() for line in str(partly).splitlines()]
    assert ["sparse", "kernels", "64", "16", "0.2500"] in lines
    assert ["whole", "model", "336", "288", "0.8571"] in lines
    [line] = [line for line in lines if line[:1] == ["mixer/mix"]]
    assert line[1:5] == ["3x8x8", "192", "192", "1.0000"]
    assert line[-2:] == ["not", "registered"]
    assert partly.to_dict()["unregistered"][0]["path"] == "mixer/mix"
    partly.to_csv(tmp_path / "report.csv")
    with (tmp_path / "report.csv").open(newline="", encoding="utf-8") as stream:
        states = {
            line["path"]: line["state"] for line in csv.DictReader(stream)
        }
    assert states == {"lift/kernel": "sparse", **partly.dense}
    assert "why" not in str(kso.report(with_mixer()))  # nothing is sparse in it


def every_path():
    """Matrices that are not registered are taken in by their full paths."""
    return [
        w.path for w in kso.prunable_weights(with_mixer(), unregistered=True)
    ]


def assert_same(model, other, x):
    np.testing.assert_array_equal(array(model(x)), array(other(x)))


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_guessed_ones_are_masked_like_all_others(storage, tmp_path):
    x = np.random.default_rng(0).normal(size=(5, 8)).astype("float32")
    model = kso.sparsify(
        with_mixer(), 0.5, seed=0, include=every_path(), storage=storage
    )
    [mix] = [w for w in kso.prunable_weights(model) if w.path == "mixer/mix"]
    assert mix.layout == KernelLayout(inputs=(1,), outputs=(2,), batch=(0,))
    for matrix in mix.value:
        np.testing.assert_allclose(matrix.T @ matrix, np.eye(8), atol=1e-6)
    figures = kso.report(model)
    assert figures.live == 168
    assert figures.whole_density == figures.density == 0.5
    assert (figures.dense, figures.unregistered) == ({}, ())
    model.save(tmp_path / "model.keras")
    assert_same(keras.saving.load_model(tmp_path / "model.keras"), model, x)
    assert_same(kso.strip(model), model, x)
    converted = (
        kso.convert(model, "masked")
        if storage == "compact"
        else kso.convert(model, "compact")
    )
    assert_same(converted, model, x)


@slow_on_jax
def test_every_verb_takes_them_in():
    model = with_mixer()
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 8)).astype("float32"), np.zeros(4, "int32")
    model.compile(
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    options = {"include": every_path()}
    for made in (
        kso.prune(model, 0.25, score="snip", data=(x, y), **options),
        kso.prune(model, 0.25, score="synflow", **options),
        kso.prune(model, 0.25, budget="uniform", **options),
        kso.prune(
            model,
            score=kso.saliency.magnitude(model, 0.25, include=["mixer/mix"]),
        ),
        kso.apply_masks(
            model, {"mixer/mix": np.arange(192).reshape(3, 8, 8) % 4 == 0}
        ),
        kso.parametrize(
            model, kso.parametrizations.StraightThroughTopK(0.25), **options
        ),
    ):
        rows = {row.path: row for row in kso.report(made).rows}
        assert rows["mixer/mix"].state == "sparse"
        assert {
            row.density for row in rows.values() if row.state == "no mask"
        } <= {1.0}
        assert sum(
            row.live for row in rows.values() if row.state == "sparse"
        ) in (84, 48)
    drawn = with_mixer(mix_initializer=ExactOrthogonal(0.25, seed=0))
    assert {
        row.path: row.state for row in kso.report(kso.apply_masks(drawn)).rows
    } == {
        "lift/kernel": "no mask",
        "mixer/mix": "sparse",
        "head/kernel": "no mask",
    }


def test_a_weight_held_by_two_layers_is_listed_once():
    class Tied(L.Layer):
        def __init__(self, embedding, **kwargs):
            super().__init__(**kwargs)
            self.table = embedding.embeddings

        def call(self, x):
            return keras.ops.matmul(x, keras.ops.transpose(self.table))

    embedding = L.Embedding(12, 8, name="words")
    embedding.build()
    model = keras.Sequential(
        [keras.Input((3,), dtype="int32"), embedding, Tied(embedding)]
    )
    found = kso.prunable_weights(model, unregistered=True)
    assert [weight.path for weight in found] == ["words/embeddings"]


def stand_in(name, package="keras_hub.src.models"):
    """A class of the name and the package that are known, without the package."""
    return type(name, (L.Layer,), {"__module__": package})()


def test_layers_of_keras_hub_are_known_by_name():
    experts = kernel_layouts(stand_in("QwenMoeExperts"))
    fused = KernelLayout(inputs=(1,), outputs=(2,), batch=(0,), gates=2)
    assert experts["expert_feedforward_gate_dense"] == fused
    assert experts["expert_feedforward_output_dense"].gates == 1
    assert set(kernel_layouts(stand_in("RelativeEmbedding"))) == {
        "rel_embedding"
    }
    assert kernel_layouts(stand_in("RelativeEmbedding", "elsewhere")) == {}


X = np.random.default_rng(0).normal(size=(4, 12)).astype("float32")


# --- other layers as people write them, and what Keras does to masked models ----------------------


class Noise(L.Layer):
    """Draws without Keras' seeds, as the sampling of many autoencoders does."""

    def call(self, x):
        noise = np.random.default_rng().normal(size=(1, 12)).astype("float32")
        return x + keras.ops.convert_to_tensor(noise)


def functional(layer):
    inputs = keras.Input((12,))
    return keras.Model(inputs, L.Dense(4, name="head")(layer(inputs)))


def test_random_layers_are_not_taken_for_wrong_copies():
    model = functional(Noise())
    for sparse in (kso.sparsify(model, 0.5, seed=0), kso.prune(model, 0.5)):
        assert kso.report(sparse).density == 0.5
        kso.strip(sparse)


def test_what_is_held_beside_the_graph_is_a_layer_of_the_model():
    encoder = keras.Sequential(
        [keras.Input((12,)), L.Dense(12, name="a"), L.Dense(6, name="b")]
    )

    @keras.saving.register_keras_serializable("tests")
    class Holding(keras.Model):
        def __init__(self, encoder, **kwargs):
            x = keras.Input((12,))
            super().__init__(x, encoder.layers[1](x), **kwargs)
            self.encoder = (
                encoder  # whose first layer is in no graph of this model
            )

    model = Holding(encoder)
    paths = {weight.path for weight in kso.prunable_weights(model)}
    assert paths == {"b/kernel", f"{encoder.name}/a/kernel"}
    sparse = kso.sparsify(model, 0.5, seed=0)
    assert sparse.encoder.layers[1] is sparse.get_layer("b")
    np.testing.assert_array_equal(array(kso.strip(sparse)(X)), array(sparse(X)))


@slow_on_jax
def test_masked_layers_are_not_quantized(tmp_path):
    dense = functional(L.Dense(16, name="hidden"))
    sparse = kso.sparsify(dense, 0.5, seed=0, exclude="head")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")  # Keras also warns of its own Input
        sparse.quantize("int8")
    assert any(
        "'hidden' cannot be quantized while it is wrapped" in str(w.message)
        for w in told
    )
    assert kso.prunable_weights(sparse)[0].path == "hidden/kernel"
    assert sparse.get_layer("head").quantization_mode == "int8"
    expected = array(sparse(X))
    loaded = reloaded(sparse, tmp_path)
    np.testing.assert_allclose(array(loaded(X)), expected, atol=1e-6)
    np.testing.assert_allclose(array(kso.strip(sparse)(X)), expected, atol=1e-6)


@slow_on_jax
def test_quantized_layers_are_refused():
    model = functional(L.Dense(12, name="hidden"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras', of its own Input
        model.quantize("int8")
    for verb in (kso.sparsify, kso.prune):
        with pytest.raises(
            NotPrunableError, match=r"'hidden/kernel' is quantized.*Received"
        ):
            verb(model, 0.5)


def named_dense(layer):
    model = Chain(layer, L.Dense(4, name="head"))
    model(X)
    with pytest.warns(UserWarning, match="Matrices with .* stay dense"):
        sparse = kso.sparsify(model, 0.5, seed=0)
    return kso.report(sparse).dense


@pytest.mark.jax_only
def test_matrices_of_functions_in_jax_are_named():
    import jax

    def init(rng, inputs):
        return {"w": jax.random.normal(rng, (12, 12))}

    layer = L.JaxLayer(
        lambda params, inputs: inputs @ params["w"], init_fn=init, name="fn"
    )
    assert list(named_dense(layer).values()) == ["not registered"]


@pytest.mark.torch_only
def test_matrices_of_modules_in_torch_are_named():
    import torch

    dense = named_dense(
        L.TorchModuleWrapper(torch.nn.Linear(12, 12), name="module")
    )
    assert list(dense.values()) == ["not registered"]
