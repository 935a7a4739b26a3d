"""Matrices of unregistered layers: named by a warning, and masked by one argument."""

import csv

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import UnknownWeightError
from keras_sparse_ortho.initializers import ExactOrthogonal, KernelLayout, kernel_layouts
from tests.helpers import array, slow_on_jax
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
    assert [w.path for w in kso.prunable_weights(sparse)] == ["lift/kernel", "head/kernel"]
    with pytest.raises(UnknownWeightError, match=r"its full path.* Received: include=.mixer.$"):
        kso.prune(model, 0.5, include="mixer")

    partly = kso.report(kso.prune(model, 0.25, exclude=["head", "mixer"]))
    assert partly.dense == {"head/kernel": "no mask", "mixer/mix": "not registered"}
    assert (partly.sparse_density, partly.density) == (0.25, (16 + 80) / (64 + 80))
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
        states = {line["path"]: line["state"] for line in csv.DictReader(stream)}
    assert states == {"lift/kernel": "sparse", **partly.dense}
    assert "why" not in str(kso.report(with_mixer()))  # nothing is sparse in it


def every_path():
    """Matrices that are not registered are taken in by their full paths."""
    return [w.path for w in kso.prunable_weights(with_mixer(), unregistered=True)]


def assert_same(model, other, x):
    np.testing.assert_array_equal(array(model(x)), array(other(x)))


@pytest.mark.parametrize("storage", ["masked", "compact"])
def test_guessed_ones_are_masked_like_all_others(storage, tmp_path):
    x = np.random.default_rng(0).normal(size=(5, 8)).astype("float32")
    model = kso.sparsify(with_mixer(), 0.5, seed=0, include=every_path(), storage=storage)
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
        kso.convert(model, "masked") if storage == "compact" else kso.convert(model, "compact")
    )
    assert_same(converted, model, x)


@slow_on_jax
def test_every_verb_takes_them_in():
    model = with_mixer()
    x, y = np.ones((4, 8), "float32"), np.zeros(4, "int32")
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    options = {"include": every_path()}
    for made in (
        kso.prune(model, 0.25, score="snip", data=(x, y), **options),
        kso.prune(model, 0.25, score="synflow", **options),
        kso.prune(model, 0.25, budget="uniform", **options),
        kso.prune(model, score=kso.saliency.magnitude(model, 0.25, include=["mixer/mix"])),
        kso.apply_masks(model, {"mixer/mix": np.arange(192).reshape(3, 8, 8) % 4 == 0}),
        kso.parametrize(model, kso.parametrizations.StraightThroughTopK(0.25), **options),
    ):
        rows = {row.path: row for row in kso.report(made).rows}
        assert rows["mixer/mix"].state == "sparse"
        assert {row.density for row in rows.values() if row.state == "no mask"} <= {1.0}
        assert sum(row.live for row in rows.values() if row.state == "sparse") in (84, 48)
    drawn = with_mixer(mix_initializer=ExactOrthogonal(0.25, seed=0))
    assert {row.path: row.state for row in kso.report(kso.apply_masks(drawn)).rows} == {
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
    model = keras.Sequential([keras.Input((3,), dtype="int32"), embedding, Tied(embedding)])
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
    assert set(kernel_layouts(stand_in("RelativeEmbedding"))) == {"rel_embedding"}
    assert kernel_layouts(stand_in("RelativeEmbedding", "elsewhere")) == {}
