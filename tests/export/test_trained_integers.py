"""Files of quantization-aware training: the integers, zeros and ranges are those of training."""

import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import _export_litert, export_litert, load_litert
from keras_sparse_ortho.export._trained_integers import IntegersError, with_trained_integers
from keras_sparse_ortho.parametrizations import Palette
from keras_sparse_ortho.quantization import quantize_aware, round_biases, trained_integers

pytestmark = pytest.mark.tensorflow_only

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
    constants, _ = tensors_of(path)
    kernels = {kernel.path: kernel for kernel in trained_integers(model)}
    for weight in kso.prunable_weights(model):
        integers = as_in_file(weight, kernels[weight.path].integers)
        axis = 3 if type(weight.owner) is L.DepthwiseConv2D else 0
        others = tuple(k for k in range(integers.ndim) if k != axis)
        found = []
        for constant, _ in constants:
            if constant.shape == integers.shape:
                sign = np.sign(np.sum(constant * integers.astype(float), others, keepdims=True))
                found.append(np.array_equal(constant, np.where(integers == 0, 0, sign * integers)))
        assert any(found), weight.path
        assert not integers[as_in_file(weight, ~weight.mask)].any()


SLOW_TEST = pytest.mark.slow
WEIGHTS = {
    "int8": "int8",
    "int4": "int4",
    "palette": Palette(16, "int8"),
    "ternary": "ternary",
}
# One kind of network for each kind of weights, and four bits under folded normalization: the
# other pairs take as long.
QUICK = [(mlp, "palette"), (mlp, "ternary"), (cnn, "int4")]
SLOW = [(mlp, "int8"), (mlp, "int4"), (mlp, "ternary"), (cnn, "int8"), (cnn, "palette")]
SLOW += [(cnn, "ternary"), (encoder, "int8"), (encoder, "int4")]
CASES = QUICK + [pytest.param(*case, marks=SLOW_TEST) for case in SLOW]


@pytest.mark.parametrize(("make", "weights"), CASES)
def test_integers_and_ranges_of_the_file_are_those_of_training(make, weights, tmp_path):
    model, x = trained(make, WEIGHTS[weights])
    report = export_litert(model, tmp_path / "m.tflite", quantization="int8", sample=x[:256])
    assert report.error < 0.01
    sizes = {weight.value().size for weight in kso.prunable_weights(model)}
    kernels = [weight for weight in report.weights if weight.size in sizes]
    assert {weight.dtype for weight in kernels} == {"int8"}
    assert len(kernels) == len(kso.prunable_weights(model))
    check_integers(model, report.path)
    _, scales = tensors_of(report.path)
    for layer in model.layers:
        for own in (*getattr(layer, "of_inputs", ()), getattr(layer, "of_output", None)):
            if own is not None:
                want = (float(own.high) - float(own.low)) / 255
                assert np.min(np.abs(np.array(scales) - want)) < 1e-5 * want


@pytest.mark.slow
def test_the_file_has_rounded_biases_whether_keras_has_them_or_not(tmp_path):
    model, x = trained(cnn, "int4", rounded=False)
    outputs = []
    for name in ("before", "after"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # before, that Keras differs
            export_litert(model, tmp_path / name, quantization="int8", sample=x[:64])
        outputs.append(load_litert(tmp_path / name).predict(x[:64]))
        round_biases(model)
    np.testing.assert_array_equal(*outputs)


def block_mlp():
    x = inputs = keras.Input((64,))
    x = L.Dense(64, activation="relu", name="hidden")(x)
    return keras.Model(inputs, L.Dense(6, name="head")(x))


def block_cnn():
    x = inputs = keras.Input((6, 6, 32))
    x = L.Conv2D(32, 3, use_bias=False, name="hidden")(x)
    x = L.GlobalAveragePooling2D()(L.ReLU()(L.BatchNormalization(name="norm")(x)))
    return keras.Model(inputs, L.Dense(6, name="head")(x))


@pytest.mark.parametrize(
    ("make", "weights"), [(block_mlp, "int4"), pytest.param(block_cnn, "int8", marks=SLOW_TEST)]
)
def test_files_of_blocks_hold_the_trained_integers(make, weights, tmp_path):
    options = {"storage": "blocks", "structure": kso.Block(8, 8), "exclude": ["head"]}
    options["density"] = 0.25
    model, x = trained(lambda: (make(), options), weights)
    report = export_litert(model, tmp_path / "m.tflite", mode="int8+blocks", sample=x[:64])
    assert report.error < 0.01
    (kernel,) = (one for one in trained_integers(model) if one.path == "hidden/kernel")
    integers = kernel.integers.reshape(-1, kernel.integers.shape[-1])
    mask = next(w.mask for w in kso.prunable_weights(model) if w.path == kernel.path)
    live = int(mask.reshape(integers.shape)[:, 0].sum())
    constants, _ = tensors_of(report.path)
    (held,) = (c for c, _ in constants if c.ndim == 4 and c.shape[0] == integers.shape[1])
    assert held.size == live * integers.shape[1]
    for channel in range(len(held)):  # the order of blocks is the file's
        values = np.sort(held[channel].ravel())
        dead = np.zeros(len(integers) - live, int)
        column = integers[:, channel]
        signed = (np.sort(column), np.sort(-column))
        assert any(np.array_equal(np.sort([*values, *dead]), one) for one in signed)


def test_a_file_with_other_integers_is_refused(tmp_path, monkeypatch):
    model, x = trained(mlp, "int4", rounded=False)
    monkeypatch.setattr(_export_litert, "_AS_TRAINED", 1e-5)  # a CNN is above 1%
    with pytest.warns(UserWarning, match=r"differs from Keras by 0.\d+%.*round_biases\(model\)"):
        report = export_litert(model, tmp_path / "m.tflite", quantization="int8", sample=x[:64])
    kernels = trained_integers(model)
    content = (tmp_path / "m.tflite").read_bytes()
    assert report.tolerance == 0.25
    kernels[0].integers[kernels[0].integers == 0] = 1
    with pytest.raises(IntegersError, match="'hidden/kernel' with the integers that were trained"):
        with_trained_integers(content, kernels)


def test_int8_without_ranges_or_data_is_refused(tmp_path):
    dense, _ = mlp()
    untrained = quantize_aware(dense)
    with pytest.raises(ValueError, match="ranges of activations are set in training"):
        export_litert(untrained, tmp_path / "m.tflite", quantization="int8")
    with pytest.raises(ValueError, match="`representative_data` is needed"):
        export_litert(quantize_aware(dense, "int8", None), tmp_path / "m", quantization="int8")
