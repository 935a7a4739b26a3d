"""Networks that quantization-aware training has rounded, and what their files hold."""

import keras
import numpy as np

import keras_sparse_ortho as kso
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.quantization import integers_of, quantize_aware, round_biases

L = keras.layers


def mlp():
    layers = [L.Dense(48, activation="relu", name="hidden"), L.Dense(6, name="head")]
    return keras.Sequential([keras.Input((24,)), *layers]), {}


def cnn():
    inputs = keras.Input((10, 10, 3))
    x = L.Conv2D(12, 3, use_bias=False, name="first")(inputs)
    x = L.ReLU()(L.BatchNormalization(momentum=0.8, name="first_norm")(x))
    y = L.DepthwiseConv2D(3, padding="same", name="depthwise")(x)
    y = L.ReLU(6.0)(L.BatchNormalization(momentum=0.8)(y))
    y = L.BatchNormalization(momentum=0.8)(L.Conv2D(12, 1, name="pointwise")(y))
    x = L.MaxPooling2D()(L.ReLU()(L.Add()([x, y])))
    return keras.Model(inputs, L.Dense(6, name="head")(L.Flatten()(x))), {"exclude": "depthwise"}


def encoder():
    inputs = keras.Input((6, 16))
    y = L.LayerNormalization(name="first_norm")(inputs)
    x = L.Add()([inputs, L.MultiHeadAttention(2, 8, name="attention")(y, y)])
    y = L.LayerNormalization(name="second_norm")(x)
    y = L.Dense(32, activation="gelu", name="wide")(y)
    x = L.Add()([x, L.Dense(16, name="narrow")(y)])
    x = L.GlobalAveragePooling1D()(L.LayerNormalization(name="last_norm")(x))
    return keras.Model(inputs, L.Dense(6, name="head")(x)), {}


def trained(make, weights, activations="int8", rounded=True):
    """A sparse network that has learnt something, and rows of its data."""
    keras.utils.set_random_seed(0)
    dense, options = make()
    model = kso.sparsify(dense, **{"density": 0.4, "seed": 0, **options})
    model = quantize_aware(model, weights, activations, momentum=0.8)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, *model.input_shape[1:])).astype("float32")
    y = (x.reshape(512, -1) @ rng.normal(size=(x[0].size, 6))).argmax(1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss)
    model.fit(x, y, batch_size=32, epochs=4, verbose=0)
    if make is cnn:  # channels whose sign the folding changes
        norm = model.get_layer("first_norm")
        norm.gamma.assign(norm.gamma * np.where(np.arange(12) % 3, 1.0, -1.0))
    return round_biases(model) if activations and rounded else model, x


def tensors_of(path):
    """The int8 constants of a file with their scales, and the scales of its other tensors."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType

    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    run = Interpreter(model_path=str(path), experimental_op_resolver_type=plain)
    run.allocate_tensors()
    constants, scales = [], []
    for about in run.get_tensor_details():
        own = about["quantization_parameters"]["scales"]
        if about["dtype"] == np.int8 and len(own):
            scales += own.tolist()
            constants.append((run.get_tensor(about["index"]), own))
    return constants, scales


def as_in_file(weight, integers):
    """The integers of a kernel of Keras in LiteRT's order."""
    kind = type(weight.owner)
    if kind is L.DepthwiseConv2D:
        return integers.reshape(1, *integers.shape[:2], -1)
    if kind is L.Conv2D:
        return integers.transpose(3, 0, 1, 2)
    if weight.path.startswith("attention/attention_output"):  # heads and their units are inputs
        return integers.reshape(-1, integers.shape[-1]).T
    return integers.reshape(len(integers), -1).T


def check_integers(model, path):
    """Each channel of a kernel holds the integers that were trained, times a number."""
    constants, _ = tensors_of(path)
    for weight in kso.prunable_weights(model):
        integers = as_in_file(weight, integers_of(weight)[0])
        axis = 3 if type(weight.owner) is L.DepthwiseConv2D else 0
        rows = reduced(integers, axis)
        assert any(
            np.all((rows == own).all(1) | (rows == -own).all(1))
            for constant, _ in constants
            if constant.shape == integers.shape
            for own in [reduced(constant, axis)]
        ), weight.path
        assert not integers[as_in_file(weight, ~weight.mask)].any()


def reduced(integers, axis=0):
    """A row for each channel, without the divisor that its integers have in common."""
    rows = np.moveaxis(integers, axis, 0).reshape(integers.shape[axis], -1).astype(int)
    return rows // np.maximum(np.gcd.reduce(rows, axis=1, keepdims=True), 1)


def block_mlp():
    x = inputs = keras.Input((64,))
    x = L.Dense(64, activation="relu", name="hidden")(x)
    return keras.Model(inputs, L.Dense(6, name="head")(x))


def block_cnn():
    x = inputs = keras.Input((6, 6, 32))
    x = L.Conv2D(32, 3, use_bias=False, name="hidden")(x)
    x = L.GlobalAveragePooling2D()(L.ReLU()(L.BatchNormalization(name="norm")(x)))
    return keras.Model(inputs, L.Dense(6, name="head")(x))


def check_ranges(model, path):
    """Each range that was trained is one of the file, with its step."""
    _, scales = tensors_of(path)
    for layer, _ in walk(model, ""):
        parts = (getattr(layer, name, None) for name in ("of_activation", "of_output"))
        for own in (*getattr(layer, "of_inputs", ()), *parts):
            if own is not None:
                assert np.min(np.abs(np.array(scales) - own.step())) < 1e-5 * own.step(), layer.path
