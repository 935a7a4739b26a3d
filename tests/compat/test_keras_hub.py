"""Tasks of keras-hub: what is around the graph comes along."""

import keras
import keras_hub
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.compat.catalogue import bert, gpt2, text

pytestmark = [
    pytest.mark.core,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # keras-hub's; see test_models.py
]


def add_segments(x):
    return {**x, "segment_ids": x["token_ids"] * 0}


def test_a_preprocessor_comes_along():
    classifier = keras_hub.models.BertTextClassifier(
        bert(), num_classes=3, preprocessor=add_segments
    )
    sparse = kso.sparsify(classifier, 0.5, initializer="random_sparse", seed=0)
    assert sparse.preprocessor is add_segments
    sparse.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
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
