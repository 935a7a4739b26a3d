"""The models of the suite, by name: who wrote them, how to make them small, what to feed them."""

import dataclasses
from collections.abc import Callable

import keras
import keras_hub
import keras_rs
import numpy as np

from tests.compat import keras_io

hub = keras_hub.models
applications = keras.applications
layers = keras.layers


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, its data, and the modules that have its classes.

    And, if LiteRT lacks an operation that the dense model needs as well, its name.
    """

    make: Callable[[], keras.Model]
    data: Callable[[], object]
    modules: tuple[str, ...] = ("tests.compat.keras_io",)
    backends: tuple[str, ...] = ("tensorflow", "jax", "torch")
    litert: str | None = None


# --- data -----------------------------------------------------------------------------------------

ROWS = 4


def numbers(*shape, seed=0):
    return lambda: (
        np.random.default_rng(seed)
        .normal(size=(ROWS, *shape))
        .astype("float32")
    )


def ids(length=8, size=50, seed=0):
    return lambda: (
        np.random.default_rng(seed)
        .integers(1, size, (ROWS, length))
        .astype("int32")
    )


def text():
    return {"token_ids": ids()(), "padding_mask": np.ones((ROWS, 8), "int32")}


def segments():
    return {**text(), "segment_ids": np.zeros((ROWS, 8), "int32")}


def two_texts():
    sides = ("encoder", "decoder")
    return {
        f"{side}_{name}": value
        for side in sides
        for name, value in text().items()
    }


def positions():
    return {
        **segments(),
        "mask_positions": np.tile(np.arange(2, dtype="int32"), (ROWS, 1)),
    }


def whisper_data():
    decoder = {f"decoder_{name}": value for name, value in text().items()}
    return {"encoder_features": numbers(16, 8)(), **decoder}


def both(one, other):
    return lambda: [one(), other()]


def ratings():
    return {"user": ids(1, 20)()[:, 0], "item": ids(1, 30)()[:, 0]}


def clicks():
    return {
        "numbers": numbers(6)(),
        "user": ids(1, 20)()[:, 0],
        "item": ids(3, 30)(),
    }


# --- keras.applications ---------------------------------------------------------------------------


def application(name, side=32, **options):
    make = getattr(applications, name)
    settings = {
        "weights": None,
        "classes": 4,
        "classifier_activation": None,
        **options,
    }
    return Case(
        lambda: make(input_shape=(side, side, 3), **settings),
        numbers(side, side, 3),
    )


APPLICATIONS = {
    name: application(name)
    for name in (
        "EfficientNetB0",
        "DenseNet121",
        "ConvNeXtTiny",
        "ResNet50",
        "ResNet50V2",
    )
}
APPLICATIONS |= {
    "MobileNetV2": application("MobileNetV2", alpha=0.35),
    "MobileNetV3Small": application("MobileNetV3Small", alpha=0.75),
    "Xception": application("Xception", side=71),
    # Keras itself says that it does not work on torch.
    "NASNetMobile": dataclasses.replace(
        application("NASNetMobile"), backends=("tensorflow", "jax")
    ),
}

# --- keras-hub ------------------------------------------------------------------------------------

SMALL = {
    "vocabulary_size": 50,
    "num_layers": 2,
    "hidden_dim": 16,
    "intermediate_dim": 32,
}
HEADS = {"num_query_heads": 2, "num_key_value_heads": 1}
IMAGE = {"image_shape": (16, 16, 3)}


LENGTH = {"max_sequence_length": 8}


def backbone(kind, *common, **sizes):
    """A function that makes a backbone of keras-hub, with sizes that many of them share."""
    options = {
        key: value for part in common for key, value in part.items()
    } | sizes
    return lambda: getattr(hub, f"{kind}Backbone")(**options)


bert = backbone("Bert", SMALL, LENGTH, num_heads=2)
gpt2 = backbone("GPT2", SMALL, LENGTH, num_heads=2)
gemma = backbone("Gemma", SMALL, HEADS, head_dim=8)
bart = backbone("Bart", SMALL, LENGTH, num_heads=2)
opt = backbone("OPT", SMALL, LENGTH, num_heads=2)
vit = backbone(
    "ViT",
    IMAGE,
    patch_size=8,
    num_layers=2,
    num_heads=2,
    hidden_dim=16,
    mlp_dim=32,
)
resnet = backbone(
    "ResNet",
    IMAGE,
    input_conv_filters=[64],
    input_conv_kernel_sizes=[3],
    stackwise_num_filters=[64, 64],
    stackwise_num_blocks=[1, 1],
    stackwise_num_strides=[1, 2],
    block_type="basic_block",
)
qwen_moe = backbone(
    "QwenMoe",
    SMALL,
    HEADS,
    moe_intermediate_dim=16,
    shared_expert_intermediate_dim=16,
    num_experts=2,
    top_k=1,
)
whisper = backbone(
    "Whisper",
    SMALL,
    num_heads=2,
    num_mels=8,
    max_encoder_sequence_length=16,
    max_decoder_sequence_length=8,
)


def of_hub(make, data, task=None, **options):
    """A backbone, or a task around it without its preprocessor."""
    return Case(
        make
        if task is None
        else lambda: task(make(), preprocessor=None, **options),
        data,
        ("keras_hub",),
    )


HUB = {
    "BERT": of_hub(bert, segments),
    "BERT classifier": of_hub(
        bert, segments, hub.BertTextClassifier, num_classes=3
    ),
    "BERT masked LM": of_hub(bert, positions, hub.BertMaskedLM),
    "GPT2": of_hub(gpt2, text),
    "GPT2 causal LM": of_hub(gpt2, text, hub.GPT2CausalLM),
    "Gemma": of_hub(gemma, text),
    "Gemma causal LM": of_hub(gemma, text, hub.GemmaCausalLM),
    "Llama": of_hub(backbone("Llama", SMALL, HEADS), text),
    "T5": of_hub(backbone("T5", SMALL, num_heads=2), two_texts),
    "Mixtral": of_hub(
        backbone("Mixtral", SMALL, HEADS, num_experts=2, top_k=1), text
    ),
    "Qwen MoE": of_hub(qwen_moe, text),
    "ALBERT": of_hub(
        backbone("Albert", SMALL, LENGTH, num_heads=2, embedding_dim=8),
        segments,
    ),
    "BART": of_hub(bart, two_texts),
    "BART seq2seq LM": of_hub(bart, two_texts, hub.BartSeq2SeqLM),
    "FNet": dataclasses.replace(
        of_hub(
            backbone("FNet", SMALL, LENGTH),
            lambda: {
                name: value
                for name, value in segments().items()
                if name != "padding_mask"
            },
        ),
        litert="FFT2D",
    ),
    "XLNet": of_hub(backbone("XLNet", SMALL, num_heads=2), segments),
    "DeBERTaV3": of_hub(
        backbone("DebertaV3", SMALL, LENGTH, num_heads=2, bucket_size=8),
        text,
    ),
    "BLOOM": of_hub(backbone("Bloom", SMALL, num_heads=2), text),
    "OPT": of_hub(opt, text),
    "OPT causal LM": of_hub(opt, text, hub.OPTCausalLM),
    "Whisper": of_hub(whisper, whisper_data),
    "ViT": of_hub(vit, numbers(16, 16, 3)),
    "ViT classifier": of_hub(
        vit, numbers(16, 16, 3), hub.ViTImageClassifier, num_classes=3
    ),
    "ResNet": of_hub(resnet, numbers(16, 16, 3)),
    "ResNet classifier": of_hub(
        resnet, numbers(16, 16, 3), hub.ResNetImageClassifier, num_classes=3
    ),
}

# --- keras-rs -------------------------------------------------------------------------------------


def dcn():
    features = keras.Input((12,))
    x = features
    for projection in (None, 4):
        x = keras_rs.layers.FeatureCross(projection_dim=projection)(features, x)
    return keras.Model(
        features, layers.Dense(1)(layers.Dense(16, activation="relu")(x))
    )


def dlrm():
    """Meta's recommender: embeddings and a bottom MLP meet in dot products."""
    numbers = keras.Input((6,), name="numbers")
    user = keras.Input((), dtype="int32", name="user")
    item = keras.Input((3,), dtype="int32", name="item")
    parts = [
        layers.Dense(8, activation="relu")(
            layers.Dense(16, activation="relu")(numbers)
        ),
        layers.Embedding(20, 8)(user),
        keras_rs.layers.EmbedReduce(30, 8)(item),
    ]
    met = keras_rs.layers.DotInteraction()(parts)
    x = layers.Dense(16, activation="relu")(
        layers.Concatenate()([parts[0], met])
    )
    return keras.Model(
        {"numbers": numbers, "user": user, "item": item}, layers.Dense(1)(x)
    )


RECOMMENDERS = {
    "DCN (FeatureCross)": Case(dcn, numbers(12), ("keras_rs",)),
    "DLRM (DotInteraction, EmbedReduce)": Case(dlrm, clicks, ("keras_rs",)),
    "two towers": Case(keras_io.TwoTowers, ratings),
}

# --- keras.io -------------------------------------------------------------------------------------

EXAMPLES = {
    "TransformerBlock": Case(keras_io.text_transformer, ids()),
    "U-Net": Case(keras_io.unet, numbers(16, 16, 3)),
    "Siamese": Case(
        keras_io.siamese, both(numbers(16, 16, 1), numbers(16, 16, 1, seed=1))
    ),
    "seq2seq with attention": Case(
        keras_io.translation, both(ids(), ids(seed=1))
    ),
    "switch transformer": Case(keras_io.switch_transformer, ids()),
    "masked LM, tied by hand": Case(keras_io.masked_language_model, ids()),
    "causal LM, ReversibleEmbedding": Case(
        keras_io.causal_language_model, ids()
    ),
    "ConvLSTM": Case(keras_io.next_frame, numbers(4, 8, 8, 1)),
    "timeseries autoencoder": Case(
        keras_io.timeseries_autoencoder, numbers(24, 1)
    ),
    "MLP-Mixer": Case(keras_io.mlp_mixer, numbers(16, 16, 3)),
    "VAE": Case(keras_io.VariationalAutoencoder, numbers(8, 8, 1)),
}

CASES = {
    f"{origin}: {name}": case
    for origin, cases in {
        "keras.applications": APPLICATIONS,
        "keras-hub": HUB,
        "keras-rs": RECOMMENDERS,
        "keras.io": EXAMPLES,
    }.items()
    for name, case in cases.items()
}
