"""Live blocks inside the layers of keras-hub's transformers, the whole way."""

import keras_hub
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.compat.test_models import in_a_fresh_process
from tests.helpers import array

pytestmark = [
    pytest.mark.core,
    # Of embeddings that no output uses.
    pytest.mark.filterwarnings("ignore:Gradients do not exist:UserWarning"),
]
IDS = np.random.default_rng(0).integers(0, 100, (4, 8)).astype("int32")
X = {"token_ids": IDS, "padding_mask": np.ones_like(IDS)}
COMMON = {"vocabulary_size": 128, "num_layers": 1, "hidden_dim": 256, "intermediate_dim": 512}


def gpt2():
    return keras_hub.models.GPT2Backbone(num_heads=4, max_sequence_length=8, **COMMON)


def llama():
    return keras_hub.models.LlamaBackbone(num_query_heads=4, num_key_value_heads=2, **COMMON)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_the_whole_way(make, tmp_path):
    model = make()
    sparse = kso.sparsify(
        model,
        0.4,
        structure=kso.Block(32, 32, regular=True),
        storage="blocks",
        exclude=".*embedding.*",
        seed=0,
    )
    stored = [weight for weight in kso.prunable_weights(sparse) if "embedding" not in weight.path]
    assert len(stored) == (6 if make is gpt2 else 7)  # attention 4, feed-forward 2 or 3
    for weight in stored:
        assert type(weight.owner).__name__.startswith("BlockSparse"), weight.path
    target = np.zeros((4, 8, 256), "float32")
    sparse.compile("adam", "mse", jit_compile=False)
    moving = kso.callbacks.RigL((X, target), 2, frequency=1, fraction=0.3, seed=0)
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
