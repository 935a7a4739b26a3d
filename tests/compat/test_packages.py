"""Flax, keras-tuner and keras-hub: what is around their models, searches, and live blocks."""

import keras
import keras_hub
import keras_tuner
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.compat.catalogue import bert, gpt2, text
from tests.compat.fresh import in_a_fresh_process
from tests.helpers import array, jit_if_quicker, reloaded

pytestmark = [
    pytest.mark.core,
    # Those of keras-hub (see test_models.py), of embeddings that no output uses, and Keras' own, of
    # an optimizer in a checkpoint that a new model has not built; keras-tuner's, of `threading`.
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
L = keras.layers


@pytest.mark.jax_only
def test_matrices_of_flax_modules_stay_dense_and_are_named():
    from flax import linen

    inner = L.FlaxLayer(linen.Dense(12), name="module")
    model = keras.Sequential(
        [keras.Input((12,)), inner, L.Dense(4, name="head")]
    )
    with pytest.warns(UserWarning, match="Matrices with .* stay dense"):
        sparse = kso.sparsify(model, 0.5, seed=0)
    assert list(kso.report(sparse).dense.values()) == ["not registered"]
    np.testing.assert_array_equal(
        np.asarray(sparse.get_layer("module").params["params"]["kernel"]),
        np.asarray(inner.params["params"]["kernel"]),
    )
    assert kso.report(sparse).density == 0.5


def build(hp):
    hidden = L.Dense(hp.Int("units", 8, 16, step=8), activation="relu")
    model = keras.Sequential([keras.Input((12,)), hidden, L.Dense(1)])
    sparse = kso.sparsify(model, hp.Choice("density", [0.25, 0.5]), seed=0)
    sparse.compile("adam", "mse", jit_compile=jit_if_quicker())
    return sparse


def test_a_search(tmp_path):
    rng = np.random.default_rng(0)
    x, y = (
        rng.normal(size=(32, 12)).astype("float32"),
        rng.normal(size=(32, 1)).astype("float32"),
    )
    tuner = keras_tuner.RandomSearch(
        build,
        "val_loss",
        max_trials=3,
        seed=0,
        directory=tmp_path,
        project_name="search",
    )
    tuner.search(x, y, epochs=2, validation_data=(x, y), verbose=0)
    (best,), (parameters,) = (
        tuner.get_best_models(1),
        tuner.get_best_hyperparameters(1),
    )
    weights = kso.prunable_weights(best)
    size = sum(weight.size for weight in weights)
    assert sum(weight.live for weight in weights) == round(
        parameters["density"] * size
    )
    for weight in weights:
        assert not weight.raw_value()[
            ~weight.parametrization.mask_value()
        ].any()
    loss = best.evaluate(x, y, verbose=0)
    assert loss == pytest.approx(
        tuner.oracle.get_best_trials(1)[0].score, rel=1e-6
    )
    again = reloaded(best, tmp_path)
    np.testing.assert_array_equal(array(again(x)), array(best(x)))
    plain = kso.strip(best)
    np.testing.assert_array_equal(array(plain(x)), array(best(x)))


def add_segments(x):
    return {**x, "segment_ids": x["token_ids"] * 0}


def test_a_preprocessor_comes_along():
    classifier = keras_hub.models.BertTextClassifier(
        bert(), num_classes=3, preprocessor=add_segments
    )
    sparse = kso.sparsify(classifier, 0.5, initializer="random_sparse", seed=0)
    assert sparse.preprocessor is add_segments
    sparse.compile(
        "adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    sparse.fit(text(), np.zeros(4, "int32"), batch_size=2, verbose=0)
    assert sparse.predict(text(), verbose=0).shape == (4, 3)


def test_generate():
    """What a sparse model writes is what its stripped one writes."""
    model = keras_hub.models.GPT2CausalLM(gpt2(), preprocessor=None)
    sparse = kso.sparsify(model, 0.5, seed=0)
    plain = kso.strip(sparse)
    prompt = text()
    prompt["padding_mask"][:, 4:] = 0
    written = []
    for one in (sparse, plain):
        one.compile(sampler="greedy", jit_compile=False)
        written.append(one.generate(prompt, stop_token_ids=None)["token_ids"])
    np.testing.assert_array_equal(*written)
    assert (np.asarray(written[0])[:, 4:] != prompt["token_ids"][:, 4:]).any()


# --- live blocks inside the layers of transformers -----------------------------------------------

IDS = np.random.default_rng(0).integers(0, 100, (4, 8)).astype("int32")
X = {"token_ids": IDS, "padding_mask": np.ones_like(IDS)}
COMMON = {
    "vocabulary_size": 128,
    "num_layers": 1,
    "hidden_dim": 256,
    "intermediate_dim": 512,
}


def wide_gpt2():
    return keras_hub.models.GPT2Backbone(
        num_heads=4, max_sequence_length=8, **COMMON
    )


def wide_llama():
    return keras_hub.models.LlamaBackbone(
        num_query_heads=4, num_key_value_heads=2, **COMMON
    )


@pytest.mark.parametrize("make", [wide_gpt2, wide_llama])
def test_live_blocks_the_whole_way(make, tmp_path):
    model = make()
    sparse = kso.sparsify(
        model,
        0.4,
        structure=kso.Block(32, 32, regular=True),
        storage="blocks",
        exclude=".*embedding.*",
        seed=0,
    )
    stored = [
        weight
        for weight in kso.prunable_weights(sparse)
        if "embedding" not in weight.path
    ]
    # Attention 4, feed-forward 2 or 3.
    assert len(stored) == (6 if make is wide_gpt2 else 7)
    for weight in stored:
        assert type(weight.owner).__name__.startswith("BlockSparse"), (
            weight.path
        )
    target = np.zeros((4, 8, 256), "float32")
    sparse.compile("adam", "mse", jit_compile=False)
    moving = kso.callbacks.RigL(
        (X, target), 2, frequency=1, fraction=0.3, seed=0
    )
    before = {weight.path: weight.storage.mask_value() for weight in stored}
    sparse.fit(X, target, epochs=2, batch_size=2, verbose=0, callbacks=[moving])
    for weight in stored:
        mask = weight.storage.mask_value()
        assert mask.sum() == before[weight.path].sum()
    assert any((w.storage.mask_value() != before[w.path]).any() for w in stored)
    plain = kso.strip(sparse)
    assert type(plain) is type(model)
    assert all(weight.storage is None for weight in kso.prunable_weights(plain))
    np.testing.assert_allclose(array(plain(X)), array(sparse(X)), atol=1e-5)
    sparse.save(tmp_path / "sparse.keras")
    plain.save(tmp_path / "plain.keras")
    from_plain, from_sparse = in_a_fresh_process(tmp_path, X, ["keras_hub"])
    np.testing.assert_allclose(from_sparse[0], array(sparse(X)), atol=1e-6)
    np.testing.assert_allclose(from_plain[0], array(plain(X)), atol=1e-6)
