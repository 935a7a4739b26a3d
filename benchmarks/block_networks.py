"""Whole networks for bench_blocks.py: Transformers, a VGG for small images, and an LSTM.

`gpt2` and `llama` start from embedded tokens, as embedding tables have no blocks. `hub_gpt2` and
`hub_llama` are whole backbones of keras-hub, which must be installed, with a small vocabulary.
"""

import functools
from typing import Any

import keras
from contemporary_networks import vgg16, vision_transformer

L = keras.layers
WIDTH, DEPTH, TOKENS, HEADS, VOCABULARY = 512, 4, 128, 8, 1024


def gpt2() -> keras.Model:
    """Radford et al. (2019): pre-norm decoder blocks with GELU, 512 wide, 4 deep, 128 tokens."""
    x = inputs = keras.Input((TOKENS, WIDTH))
    for k in range(DEPTH):
        y = L.LayerNormalization(name=f"attention_norm_{k}")(x)
        attention = L.MultiHeadAttention(HEADS, WIDTH // HEADS, name=f"attention_{k}")
        x = L.Add()([x, attention(y, y, use_causal_mask=True)])
        y = L.LayerNormalization(name=f"mlp_norm_{k}")(x)
        y = L.Dense(4 * WIDTH, activation="gelu", name=f"mlp_{k}_wide")(y)
        x = L.Add()([x, L.Dense(WIDTH, name=f"mlp_{k}_narrow")(y)])
    return keras.Model(inputs, L.LayerNormalization(name="last_norm")(x))


def llama() -> keras.Model:
    """Touvron et al. (2023), without rotations: RMS norms, two key heads, SwiGLU of 1536 units."""
    x = inputs = keras.Input((TOKENS, WIDTH))
    for k in range(DEPTH):
        y = L.RMSNormalization(name=f"attention_norm_{k}")(x)
        attention = L.GroupQueryAttention(
            WIDTH // HEADS, HEADS, 2, use_bias=False, name=f"attention_{k}"
        )
        x = L.Add()([x, attention(y, y, use_causal_mask=True)])
        y = L.RMSNormalization(name=f"mlp_norm_{k}")(x)
        options: dict[str, Any] = {"use_bias": False}
        gate = L.Dense(3 * WIDTH, activation="silu", name=f"mlp_{k}_gate", **options)(y)
        y = L.Multiply()([gate, L.Dense(3 * WIDTH, name=f"mlp_{k}_wide", **options)(y)])
        x = L.Add()([x, L.Dense(WIDTH, name=f"mlp_{k}_narrow", **options)(y)])
    return keras.Model(inputs, L.RMSNormalization(name="last_norm")(x))


def hub_gpt2() -> keras.Model:
    """keras-hub's GPT-2 of the same size, with its dropout."""
    import keras_hub

    return keras_hub.models.GPT2Backbone(
        VOCABULARY, DEPTH, HEADS, WIDTH, 4 * WIDTH, max_sequence_length=TOKENS
    )


def hub_llama() -> keras.Model:
    """keras-hub's Llama of the same size, with rotations and causal attention."""
    import keras_hub

    return keras_hub.models.LlamaBackbone(
        vocabulary_size=VOCABULARY,
        num_layers=DEPTH,
        num_query_heads=HEADS,
        hidden_dim=WIDTH,
        intermediate_dim=3 * WIDTH,
        num_key_value_heads=2,
    )


def vit() -> keras.Model:
    """A vision transformer, 256 wide, 6 deep, of 64 patches of 4 x 4 pixels."""
    return vision_transformer((32, 32, 3), 10, {"width": 256, "depth": 6, "heads": 4, "patch": 4})


def vgg() -> keras.Model:
    """The first ten convolutions of VGG-16, with batch normalization, for images of 32 x 32.

    Not the last three, of 512 channels at 2 x 2: XLA computes them at a hundredth of the usual
    speed on processors, so that blocks would be compared with that.
    """
    return vgg16((32, 32, 3), 10, {"filters": (64, 128, 256, 512)})


def lstm(units: int) -> keras.Model:
    """A layer on 64 steps of as many features."""
    return keras.Sequential([keras.Input((64, units)), L.LSTM(units, name="lstm")])


NETWORKS = {
    **{"gpt2": gpt2, "llama": llama, "vit256": vit, "vgg": vgg},
    **{f"lstm{units}": functools.partial(lstm, units) for units in (512, 1024)},
    **{"hub_gpt2": hub_gpt2, "hub_llama": hub_llama},
}
