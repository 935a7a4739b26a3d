"""A decoder with a narrower residual stream: SliceGPT, on layers of Keras alone.

    python examples/slice_transformer.py

Layer normalization centers and scales. Centering is a linear map, and scaling is the same in any
orthogonal basis; so the stream can be rotated in front of each normalization, if the kernels around
it are rotated with it, and nothing changes. In the basis of its principal components (from a few
hundred inputs) most of its variance is in the first directions: `sliced` keeps these. Between two
bases the stream passes through a small dense layer.

Ashkboos et al., "SliceGPT: Compress Large Language Models by Deleting Rows and Columns" (ICLR
2024), arXiv 2401.15024.
"""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np

L = keras.layers
EPSILON = 1e-5


@keras.saving.register_keras_serializable(package="kso_examples")
class Positions(L.Layer):
    """Adds a trained vector for each position."""

    def build(self, shape):
        """See `keras.layers.Layer`."""
        self.table = self.add_weight(
            shape=shape[1:], initializer="random_normal", name="positions"
        )

    def call(self, inputs):
        """See `keras.layers.Layer`."""
        return inputs + self.table


def decoder(
    length: int, symbols: int, width: int, depth: int, heads: int, hidden: int
):
    """Decoder blocks with normalization in front, for the next of `symbols`."""
    inputs = keras.Input((length,), dtype="int32")
    x = Positions(name="positions")(
        L.Embedding(symbols, width, name="embedding")(inputs)
    )
    for k in range(depth):
        y = L.LayerNormalization(epsilon=EPSILON, name=f"norm_{k}a")(x)
        x = L.Add(name=f"after_attention_{k}")(
            [x, _attention(heads, width // heads, k)(y)]
        )
        y = L.LayerNormalization(epsilon=EPSILON, name=f"norm_{k}b")(x)
        y = L.Dense(hidden, activation="gelu", name=f"wide_{k}")(y)
        x = L.Add(name=f"after_wide_{k}")(
            [x, L.Dense(width, name=f"narrow_{k}")(y)]
        )
    x = L.LayerNormalization(epsilon=EPSILON, name="norm")(x)
    return keras.Model(inputs, L.Dense(symbols, name="head")(x), name="decoder")


def _attention(heads: int, key: int, k: int, width: int | None = None):
    layer = L.MultiHeadAttention(
        heads,
        key,
        output_shape=width,
        flash_attention=False,
        name=f"attention_{k}",
    )
    return lambda x: layer(x, x, use_causal_mask=True)


def sliced(model: keras.Model, tokens: np.ndarray, width: int) -> keras.Model:
    """A `decoder` whose stream has its `width` principal directions only; all: the same outputs."""
    full = model.get_layer("embedding").output_dim
    blocks = range(
        sum(layer.name.startswith("attention_") for layer in model.layers)
    )
    norms = [
        model.get_layer(f"norm_{k}{part}") for k in blocks for part in "ab"
    ]
    norms.append(model.get_layer("norm"))
    center = np.eye(full) - np.full((full, full), 1 / full)
    streams = keras.Model(model.input, [norm.input for norm in norms]).predict(
        tokens, verbose=0
    )
    bases = [
        _principal(stream.reshape(-1, full) @ center, width)
        for stream in streams
    ]
    small = _small_decoder(model, width, blocks)

    def into(kernel, basis):  # what adds to the stream
        return kernel @ center @ basis

    # what reads a normalization: its scale and shift go in
    def reading(norm, basis, *denses):
        scale, shift = _values(norm)
        for dense, new in denses:
            kernel, bias = _values(dense)
            flat = kernel.reshape(full, -1)
            own = (basis.T @ (scale[:, None] * flat)).reshape(
                width, *kernel.shape[1:]
            )
            new.set_weights([own, bias + (shift @ flat).reshape(bias.shape)])

    for name in ("embedding", "positions"):
        [table] = _values(model.get_layer(name))
        small.get_layer(name).set_weights([into(table, bases[0])])
    for k in blocks:
        start, middle, end = bases[2 * k : 2 * k + 3]
        old, new = (one.get_layer(f"attention_{k}") for one in (model, small))
        parts = ("query_dense", "key_dense", "value_dense")
        projections = [
            (getattr(old, part), getattr(new, part)) for part in parts
        ]
        reading(norms[2 * k], start, *projections)
        kernel, bias = _values(old.output_dense)
        new.output_dense.set_weights([into(kernel, middle), into(bias, middle)])
        small.get_layer(f"turn_{k}a").set_weights([start.T @ middle])
        wide, narrow = (
            model.get_layer(f"{name}_{k}") for name in ("wide", "narrow")
        )
        reading(norms[2 * k + 1], middle, (wide, small.get_layer(f"wide_{k}")))
        kernel, bias = _values(narrow)
        small.get_layer(f"narrow_{k}").set_weights(
            [into(kernel, end), into(bias, end)]
        )
        small.get_layer(f"turn_{k}b").set_weights([middle.T @ end])
    reading(
        norms[-1], bases[-1], (model.get_layer("head"), small.get_layer("head"))
    )
    return small


def _small_decoder(
    model: keras.Model, width: int, blocks: range
) -> keras.Model:
    """The layers of the sliced model; RMS norms that divide by the length of the full stream."""
    embedding, head = (model.get_layer(name) for name in ("embedding", "head"))
    ratio = embedding.output_dim / width

    def norm(name):
        epsilon = EPSILON * ratio
        layer = L.RMSNormalization(epsilon=epsilon, name=name)
        layer.build((None, None, width))
        layer.set_weights([np.full(width, ratio**0.5)])
        return layer

    x = inputs = keras.Input(model.input.shape[1:], dtype="int32")
    x = L.Embedding(embedding.input_dim, width, name="embedding")(x)
    x = Positions(name="positions")(x)
    for k in blocks:
        attention = model.get_layer(f"attention_{k}").get_config()
        y = norm(f"norm_{k}a")(x)
        y = _attention(attention["num_heads"], attention["key_dim"], k, width)(
            y
        )
        turned = L.Dense(width, use_bias=False, name=f"turn_{k}a")(x)
        x = L.Add(name=f"after_attention_{k}")([turned, y])
        y = norm(f"norm_{k}b")(x)
        y = L.Dense(
            model.get_layer(f"wide_{k}").units,
            activation="gelu",
            name=f"wide_{k}",
        )(y)
        y = L.Dense(width, name=f"narrow_{k}")(y)
        turned = L.Dense(width, use_bias=False, name=f"turn_{k}b")(x)
        x = L.Add(name=f"after_wide_{k}")([turned, y])
    return keras.Model(
        inputs, L.Dense(head.units, name="head")(norm("norm")(x)), name="sliced"
    )


def _principal(rows: np.ndarray, width: int) -> np.ndarray:
    """The directions of largest variance, as columns, in float64."""
    rows = rows.astype("float64")
    return np.linalg.eigh(rows.T @ rows)[1][:, ::-1][:, :width]


def _values(layer) -> list[np.ndarray]:
    return [np.asarray(weight, "float64") for weight in layer.get_weights()]


def main() -> None:
    """Slices a decoder of random weights."""
    keras.utils.set_random_seed(0)
    model = decoder(
        length=32, symbols=50, width=32, depth=2, heads=4, hidden=64
    )
    rng = np.random.default_rng(0)
    model.set_weights(
        [w + 0.1 * rng.normal(size=w.shape) for w in model.get_weights()]
    )
    tokens = rng.integers(0, 50, (64, 32)).astype("int32")
    wanted = model.predict(tokens, verbose=0)
    for width in (32, 16):
        small = sliced(model, tokens, width)
        error = (
            np.abs(small.predict(tokens, verbose=0) - wanted).max()
            / np.abs(wanted).max()
        )
        print(
            f"width {width}: {small.count_params()} weights, relative difference {error:.1e}"
        )


if __name__ == "__main__":
    main()
