"""Small networks with all layers whose channels can go, and the exactness of their groups."""

import contextlib
import functools

import keras
import numpy as np

import keras_sparse_ortho as kso
from tests.helpers import array

L = keras.layers
ops = keras.ops


def unsettle(model, seed=0):
    """Random weights, biases and statistics: nothing is 0 or 1 by chance."""
    rng = np.random.default_rng(seed)
    for variable in model.weights:
        value = rng.uniform(0.5, 1.5, variable.shape)
        if len(variable.shape) > 1:
            depthwise = variable.shape[-1] == 1
            fan_in = np.prod(variable.shape[: -2 if depthwise else -1])
            value = rng.normal(size=variable.shape) / np.sqrt(fan_in)
        elif variable.name in ("bias", "beta", "moving_mean"):
            value = rng.normal(size=variable.shape) * 0.3
        variable.assign(value.astype("float32"))
    return model


def settle(model):
    """Statistics of batch normalization as after training: deep networks vanish without."""
    norms = [
        layer
        for layer in model.layers
        if isinstance(layer, L.BatchNormalization)
    ]
    momenta = [layer.momentum for layer in norms]
    for layer in norms:
        layer.momentum = 0.0
    model(samples(model, 32), training=True)
    for layer, momentum in zip(norms, momenta, strict=True):
        layer.momentum = momentum
    return model


def samples(model, count=4, seed=1):
    rng = np.random.default_rng(seed)
    batches = []
    for tensor in model.inputs:
        shape = (count, *tensor.shape[1:])
        if "int" in tensor.dtype:
            batches.append(rng.integers(1, 20, shape).astype("int32"))
        else:
            batches.append(rng.normal(size=shape).astype("float32"))
    return batches[0] if len(batches) == 1 else batches


def outputs(model, rows):
    """All outputs of a model, one row a sample."""
    call = model
    if keras.backend.backend() == "jax":
        call = functools.partial(model.predict, verbose=0)
    flat = [
        array(y).reshape(len(array(y)), -1)
        for y in keras.tree.flatten(call(rows))
    ]
    return np.concatenate(flat, axis=1)


@contextlib.contextmanager
def zero_rows(model, chosen):
    """Inside, the kernels have zeros in the rows of some channels, by group and index."""
    before = model.get_weights()
    weights = {weight.path: weight for weight in kso.prunable_weights(model)}
    for path, rows in gone_rows(chosen).items():
        weight = weights[path]
        matrix = array(weight.variable).reshape(-1, output_count(weight)).copy()
        matrix[rows] = 0
        weight.variable.assign(matrix.reshape(weight.shape))
    yield
    model.set_weights(before)


def gone_rows(chosen):
    """The rows of each kernel that belong to some channels, each once."""
    rows = {}
    for group, steps in chosen:
        for path, of_channels in group.rows.items():
            rows[path] = np.union1d(
                rows.get(path, []), of_channels[steps]
            ).astype(int)
    return rows


def output_count(weight):
    axes = (-1,) if weight.layout is None else weight.layout.outputs
    return int(np.prod([weight.shape[axis] for axis in axes]))


def row_counts(model):
    return {
        w.path: w.size // output_count(w) for w in kso.prunable_weights(model)
    }


def assert_groups_go(model, groups, exact=True):
    """Four channels in ten of each group are not read: all layers lose them, the outputs stay."""
    rng = np.random.default_rng(4)
    chosen = []
    for group in groups:
        count = max(round(group.steps * 0.4), 1)
        steps = rng.choice(
            group.steps, min(count, group.steps - 1), replace=False
        )
        chosen.append((group, steps))
    rows = samples(model)
    with zero_rows(model, chosen):
        small = kso.remove_channels(model, exact=exact)
        expected, result = outputs(model, rows), outputs(small, rows)
    np.testing.assert_allclose(result, expected, atol=1e-5, rtol=1e-5)
    assert np.median(expected.std(axis=0)) > 1e-4
    before, after = row_counts(model), row_counts(small)
    for path, rows in gone_rows(chosen).items():
        assert after[path] == before[path] - len(rows), path


def perceptron():
    layers = [
        L.Dense(12, activation="relu", name="a"),
        L.Dense(10, activation="tanh", name="b"),
    ]
    return keras.Sequential(
        [keras.Input((6,)), *layers, L.Dense(3, name="head")]
    )


def residual():
    """Additions of layers and of operations, normalization before and behind, several outputs."""
    image = keras.Input((8, 8, 3))
    x = L.ReLU()(
        L.BatchNormalization()(
            L.Conv2D(8, 3, padding="same", name="stem")(image)
        )
    )
    y = L.BatchNormalization()(L.Conv2D(8, 3, padding="same", name="branch")(x))
    x = ops.relu(x + y)
    y = L.Conv2D(8, 1, name="second")(L.PReLU(shared_axes=[1, 2])(x))
    x = L.Subtract()([x, y]) * 0.5 + 1.0
    z = L.Conv2D(6, 3, strides=2, name="down")(L.MaxPooling2D(2)(x))
    z = L.Dense(4, name="head")(L.Flatten()(z))
    return keras.Model(
        image, [z, L.Dense(2, name="other")(ops.mean(x, axis=(1, 2)))]
    )


def mobile():
    """Depthwise and separable kernels, a squeeze that multiplies, operations of a hard sigmoid."""
    image = keras.Input((9, 9, 3))
    x = L.Conv2D(8, 3, padding="same", name="stem")(image)
    x = L.DepthwiseConv2D(3, depth_multiplier=2, name="depthwise")(
        L.BatchNormalization()(x)
    )
    y = L.GlobalAveragePooling2D(keepdims=True)(x)
    y = L.Conv2D(4, 1, activation="relu", name="squeeze")(y)
    y = L.ReLU(6.0)(L.Conv2D(16, 1, name="excite")(y) + 3.0) * (1.0 / 6.0)
    x = L.Multiply()([x, y])
    x = L.SeparableConv2D(
        10, 3, padding="same", depth_multiplier=2, name="separable"
    )(x)
    x = ops.concatenate(
        [x, L.SpatialDropout2D(0.2)(x), L.Conv2D(4, 1, name="one")(x)], axis=-1
    )
    return keras.Model(
        image, L.Dense(4, name="head")(L.GlobalMaxPooling2D()(x))
    )


def grouped():
    """Grouped convolutions and group normalization; a mean over channels as a gate."""
    image = keras.Input((7, 7, 2))
    x = L.GroupNormalization(4, name="norm")(
        L.Conv2D(8, 1, name="first")(image)
    )
    x = L.Conv2D(16, 3, groups=4, activation="relu", name="grouped")(x)
    y = L.Conv2D(12, 1, name="second")(x)
    y = L.GroupNormalization(-1, name="each")(y)
    y = L.Multiply()([y, L.Conv2D(1, 1, activation="sigmoid", name="gate")(y)])
    y = L.Conv2DTranspose(6, 3, strides=2, name="up")(y)
    return keras.Model(image, L.Conv2D(2, 3, name="head")(y))


def channels_first():
    image = keras.Input((3, 8, 8))
    first = {"data_format": "channels_first"}
    x = L.Conv2D(8, 3, name="first", **first)(image)
    x = L.ReLU()(L.BatchNormalization(axis=1)(x))
    x = L.Conv2D(10, 3, padding="same", name="second", **first)(
        L.MaxPooling2D(2, **first)(x)
    )
    x = L.Concatenate(axis=1)([x, L.Conv2D(4, 1, name="third", **first)(x)])
    x = L.PReLU(shared_axes=[2, 3])(x)
    return keras.Model(image, L.Dense(3, name="head")(L.Flatten(**first)(x)))


def words():
    """An embedding with a mask, recurrent layers in both directions."""
    tokens = keras.Input((7,), dtype="int32")
    x = L.Embedding(20, 8, mask_zero=True, name="table")(tokens)
    x = L.GRU(7, return_sequences=True, name="gru")(x)
    x = L.Dense(6, name="mixing")(x)
    x = L.Bidirectional(L.LSTM(5, return_sequences=True), name="both")(x)
    x = L.SimpleRNN(6, name="simple")(x)
    return keras.Model(tokens, L.Dense(3, name="head")(x))


def positions():
    rows = keras.Input((4, 5))
    x = L.LayerNormalization(axis=1)(
        L.Dense(6, activation="relu", name="first")(rows)
    )
    x = L.Dense(5, name="second")(L.GlobalAveragePooling1D()(x))
    return keras.Model(rows, L.Dense(2, name="head")(L.RepeatVector(3)(x)))


def reshapes():
    """Positions into channels, permutations, slices and parts."""
    rows = keras.Input((8, 5))
    x = L.Dense(6, name="first")(rows)
    x = L.Dense(9, activation="gelu", name="second")(L.Reshape((4, 12))(x))
    early, late = ops.split(x, [4], axis=-1)
    x = ops.concatenate([early, late * 2.0], axis=-1)
    y = L.Dense(5, name="third")(ops.reshape(x, (-1, 2, 18)))
    z = L.Dense(5, name="fourth")(x[:, ::2, 2:])
    z = L.Permute((2, 1))(ops.maximum(y, z))
    z = L.Concatenate(axis=1)([L.Flatten()(z), ops.max(y, axis=1)])
    return keras.Model(rows, L.Dense(3, name="head")(z))


def transformer():
    """Heads and their widths, a feed-forward; with exact=False the stream as well."""
    rows = keras.Input((6, 5))
    places = np.random.default_rng(0).normal(size=(6, 8)).astype("float32")
    x = L.Dense(8, name="stream")(rows) + places
    for k in range(2):
        y = L.LayerNormalization(name=f"norm_{k}")(x)
        attention = L.MultiHeadAttention(
            4, 3, flash_attention=False, name=f"attention_{k}"
        )
        x = L.Add()([x, attention(y, y, use_causal_mask=True)])
        y = L.Dense(12, activation="gelu", name=f"wide_{k}")(
            L.LayerNormalization()(x)
        )
        x = x + L.Dense(8, name=f"narrow_{k}")(y)
    return keras.Model(
        rows, L.Dense(3, name="head")(L.GlobalAveragePooling1D()(x))
    )


NETWORKS = {
    network.__name__: network
    for network in (
        *(perceptron, residual, mobile, grouped, channels_first),
        *(words, positions, reshapes, transformer),
    )
}
