"""Small random models of keras-hub, the whole way: sparse, trained, saved, loaded, stripped."""

import keras
import keras_hub
import numpy as np
import pytest

import keras_sparse_ortho as kso
from tests.helpers import array

pytestmark = [
    pytest.mark.core,
    # Keras' and keras-hub's own: masks that T5 drops, weights that a head does not use, `compile`
    # of tasks, which is not restored, and TensorFlow datasets that cannot be shuffled.
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
hub = keras_hub.models
RNG = np.random.default_rng(0)
SMALL = {"vocabulary_size": 50, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
IMAGE = {"image_shape": (16, 16, 3)}


def ids():
    return RNG.integers(1, 50, (4, 8)).astype("int32")


def text():
    return {"token_ids": ids(), "padding_mask": np.ones((4, 8), "int32")}


def segments():
    return {**text(), "segment_ids": np.zeros((4, 8), "int32")}


def two_texts():
    sides = ("encoder", "decoder")
    return {f"{side}_{name}": value for side in sides for name, value in text().items()}


def positions():
    return {**segments(), "mask_positions": np.tile(np.arange(2, dtype="int32"), (4, 1))}


def images():
    return RNG.normal(size=(4, 16, 16, 3)).astype("float32")


def bert():
    return hub.BertBackbone(**SMALL, num_heads=2, max_sequence_length=16)


def gpt2():
    return hub.GPT2Backbone(**SMALL, num_heads=2, max_sequence_length=16)


def gemma():
    return hub.GemmaBackbone(**SMALL, num_query_heads=2, num_key_value_heads=1, head_dim=8)


def t5():
    return hub.T5Backbone(**SMALL, num_heads=2)


def mixtral():
    heads = {"num_query_heads": 2, "num_key_value_heads": 1}
    return hub.MixtralBackbone(**SMALL, **heads, num_experts=2, top_k=1)


def vit():
    sizes = {"patch_size": 8, "num_layers": 2, "num_heads": 2, "hidden_dim": 16, "mlp_dim": 32}
    return hub.ViTBackbone(**IMAGE, **sizes)


def resnet():
    return hub.ResNetBackbone(
        **IMAGE,
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
    )


MODELS = {
    "bert": (bert, segments),
    "gpt2": (gpt2, text),
    "gemma": (gemma, text),
    "t5": (t5, two_texts),
    "mixtral": (mixtral, text),
    "vit": (vit, images),
    "resnet": (resnet, images),
    "bert classifier": (
        lambda: hub.BertTextClassifier(bert(), num_classes=3, preprocessor=None),
        segments,
    ),
    "bert masked": (lambda: hub.BertMaskedLM(bert(), preprocessor=None), positions),
    "gpt2 causal": (lambda: hub.GPT2CausalLM(gpt2(), preprocessor=None), text),
    "gemma causal": (lambda: hub.GemmaCausalLM(gemma(), preprocessor=None), text),
    "vit classifier": (
        lambda: hub.ViTImageClassifier(vit(), num_classes=3, preprocessor=None),
        images,
    ),
    "resnet classifier": (
        lambda: hub.ResNetImageClassifier(resnet(), num_classes=3, preprocessor=None),
        images,
    ),
}


def outputs(model, x):
    return [array(value) for value in keras.tree.flatten(model(x))]


def assert_equal(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_the_whole_way(name, tmp_path):
    make, sample = MODELS[name]
    model, x = make(), sample()
    before = outputs(model, x)
    paths = {weight.path for weight in kso.prunable_weights(model)}
    sparse = kso.sparsify(model, 0.5, initializer="random_sparse", seed=0)
    assert_equal(outputs(model, x), before)
    assert isinstance(sparse, type(model))
    weights = kso.prunable_weights(sparse)
    assert {weight.path for weight in weights} == paths
    assert sum(w.live for w in weights) == round(0.5 * sum(w.size for w in weights))

    target = keras.tree.map_structure(lambda value: np.zeros(value.shape, "float32"), sparse(x))
    sparse.compile("adam", "mse", metrics=[], weighted_metrics=[])
    sparse.fit(x, target, batch_size=2, verbose=0)
    for weight in weights:
        assert not weight.raw_value()[~weight.parametrization.mask_value()].any(), weight.path
    expected = outputs(sparse, x)
    sparse.save(tmp_path / "sparse.keras")
    loaded = keras.saving.load_model(tmp_path / "sparse.keras", compile=False)
    assert isinstance(loaded, type(model))
    assert_equal(outputs(loaded, x), expected)

    plain = kso.strip(loaded)
    assert type(plain) is type(model)
    assert_equal(outputs(plain, x), expected)
    plain.save(tmp_path / "plain.keras")
    again = keras.saving.load_model(tmp_path / "plain.keras", compile=False)
    assert_equal(outputs(again, x), expected)


def add_segments(x):
    return {**x, "segment_ids": x["token_ids"] * 0}


def test_a_preprocessor_comes_along():
    classifier = hub.BertTextClassifier(bert(), num_classes=3, preprocessor=add_segments)
    sparse = kso.sparsify(classifier, 0.5, initializer="random_sparse", seed=0)
    assert sparse.preprocessor is add_segments
    sparse.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    sparse.fit(text(), np.zeros(4, "int32"), batch_size=2, verbose=0)
    assert sparse.predict(text(), verbose=0).shape == (4, 3)
