"""Files of integers: which operations stay in floats, and ranges that move, are empty or tiny."""

import sys
import warnings

import keras
import numpy as np
import pytest

from keras_sparse_ortho.errors import (
    ExportConversionError,
    ExportVerificationError,
    FloatOperationsWarning,
)
from keras_sparse_ortho.export import export_litert
from keras_sparse_ortho.quantization import quantize_aware, round_biases
from tests.export.models import exported
from tests.models.networks import WithZeros

pytestmark = pytest.mark.core
L = keras.layers
ops = keras.ops


@pytest.fixture(autouse=True)
def _no_tensorflow(monkeypatch):
    if keras.backend.backend() != "tensorflow":
        monkeypatch.setitem(sys.modules, "tensorflow", None)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def trained(model, rows):
    """A model of quantize_aware that has seen rows, with rounded biases."""
    quantized = quantize_aware(model, momentum=0.5)
    for _ in range(3):
        quantized(rows, training=True)
    return round_biases(quantized)


def kinds_of(report):
    return {text.partition(" ")[0] for text in report.in_floats}


# --- every kind of layer and operation ------------------------------------------------------------

ROWS = np.random.default_rng(0).normal(size=(32, 8, 8, 4)).astype("float32")


def conv():
    return L.Conv2D(4, 3, padding="same")


def between(part):
    """A graph with convolutions in front of a part, and one behind it."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 4))
    x = conv()(part(conv()(inputs), conv()(inputs)))
    return keras.Model(inputs, L.Dense(3, name="head")(L.Flatten()(x)))


def sequence(part):
    """A graph with a part that takes sequences between Dense layers."""
    return between(
        lambda a, b: L.Reshape((8, 8, 4))(
            L.Dense(4)(part(L.Reshape((64, 4))(L.Dense(4)(a))))
        )
    )


# What computes integers alone.
INTEGERS = {
    "a + b": lambda: between(lambda a, b: a + b),
    "relu(a + b)": lambda: between(lambda a, b: ops.relu(a + b)),
    "a * b": lambda: between(lambda a, b: a * b),
    "a * 0.5": lambda: between(lambda a, b: a * 0.5),
    "slice": lambda: between(lambda a, b: a[:, 1:]),
    "ops.relu": lambda: between(lambda a, b: ops.relu(a)),
    "relu, then pooled": lambda: between(
        lambda a, b: L.MaxPooling2D()(ops.relu(a))
    ),
    "ops.concatenate": lambda: between(
        lambda a, b: ops.concatenate([a, b], axis=-1)
    ),
    "ops.split": lambda: between(
        lambda a, b: ops.concatenate(ops.split(a, [3], axis=-1)[::-1], axis=-1)
    ),
    "ops.transpose": lambda: between(
        lambda a, b: ops.transpose(a, (0, 2, 1, 3))
    ),
    "mean of a + b": lambda: between(
        lambda a, b: L.GlobalAveragePooling2D(keepdims=True)(a + b)
    ),
    "Conv2D": lambda: between(
        lambda a, b: L.Conv2D(4, 3, activation="relu")(a)
    ),
    "DepthwiseConv2D": lambda: between(lambda a, b: L.DepthwiseConv2D(3)(a)),
    "SeparableConv2D": lambda: between(
        lambda a, b: L.SeparableConv2D(4, 3, activation="relu")(a)
    ),
    "SeparableConv2D, normalized": lambda: between(
        lambda a, b: L.ReLU()(
            L.BatchNormalization()(L.SeparableConv2D(4, 3)(a))
        )
    ),
    "Conv1D": lambda: sequence(L.Conv1D(4, 3, padding="same")),
    "SeparableConv1D": lambda: sequence(
        L.SeparableConv1D(4, 3, padding="same")
    ),
    "Dense": lambda: between(lambda a, b: L.Dense(4, activation="relu6")(a)),
    "EinsumDense": lambda: sequence(
        L.EinsumDense("abc,cd->abd", (None, 4), bias_axes="d")
    ),
    "Add": lambda: between(lambda a, b: L.Add()([a, b])),
    "Subtract": lambda: between(lambda a, b: L.Subtract()([a, b])),
    "Multiply": lambda: between(lambda a, b: L.Multiply()([a, b])),
    "Concatenate": lambda: between(lambda a, b: L.Concatenate()([a, b])),
    "MaxPooling2D": lambda: between(lambda a, b: L.MaxPooling2D()(a)),
    "windows that overlap": lambda: between(
        lambda a, b: L.MaxPooling2D(3, 2, padding="same")(a)
    ),
    "AveragePooling2D": lambda: between(lambda a, b: L.AveragePooling2D(2)(a)),
    "ZeroPadding2D": lambda: between(lambda a, b: L.ZeroPadding2D()(a)),
    **{
        name: lambda name=name: between(lambda a, b: L.Activation(name)(a))
        for name in (
            "gelu",
            "hard_swish",
            "sigmoid",
            "softmax",
            "swish",
            "tanh",
        )
    },
    "BatchNormalization": lambda: between(
        lambda a, b: L.BatchNormalization()(a)
    ),
}
QUICK = ("relu(a + b)", "ops.split")


@pytest.mark.parametrize(
    "name", [one if one in QUICK else slow(one) for one in INTEGERS]
)
def test_a_trained_model_computes_integers_alone(name, tmp_path):
    model = trained(INTEGERS[name](), ROWS)
    report = exported(model, tmp_path / "m.tflite", sample=ROWS)
    assert not report.in_floats
    assert "in floats" not in str(report)
    assert report.error < 0.05


def attention(x):
    return L.MultiHeadAttention(2, 4)(x, x)


def conv_of_volumes(a):
    volumes = L.Reshape((8, 4, 2, 4))(a)
    return L.Reshape((8, 8, 4))(L.Conv3D(4, 3, padding="same")(volumes))


# What LiteRT has no integers for, or no range is trained for, and an operation that is in floats.
FLOATS = {
    "LayerNormalization": (
        lambda: between(lambda a, b: L.LayerNormalization()(a)),
        "MUL",
    ),
    "ops.exp": (lambda: between(lambda a, b: ops.exp(a)), "EXP"),
    "GlobalMaxPooling2D": (
        lambda: between(lambda a, b: L.GlobalMaxPooling2D(keepdims=True)(a)),
        "REDUCE_MAX",
    ),
    "Conv2DTranspose": (
        lambda: between(
            lambda a, b: L.Conv2DTranspose(4, 3, activation="relu")(a)
        ),
        "TRANSPOSE_CONV",
    ),
    "Conv3D": (lambda: between(lambda a, b: conv_of_volumes(a)), "CONV_3D"),
    "TimeDistributed": (
        lambda: sequence(L.TimeDistributed(L.Dense(4))),
        "FULLY_CONNECTED",
    ),
    "MultiHeadAttention": (lambda: sequence(attention), "BATCH_MATMUL"),
    "GRU": (
        lambda: sequence(L.GRU(4, return_sequences=True)),
        "FULLY_CONNECTED",
    ),
    "UpSampling2D": (lambda: between(lambda a, b: L.UpSampling2D()(a)), ""),
    "PReLU": (lambda: between(lambda a, b: L.PReLU()(a)), "PRELU"),
    "LeakyReLU": (lambda: between(lambda a, b: L.LeakyReLU()(a)), "LEAKY_RELU"),
}


@pytest.mark.parametrize(
    "name", [one if one == "ops.exp" else slow(one) for one in FLOATS]
)
def test_operations_in_floats_are_in_the_report_and_in_a_warning(
    name, tmp_path
):
    make, operation = FLOATS[name]
    model = trained(make(), ROWS)
    with pytest.warns(
        FloatOperationsWarning, match=r"report\.in_floats.*Received: \d+ [A-Z]+"
    ):
        report = export_litert(
            model, tmp_path / "m.tflite", mode="int8", sample=ROWS
        )
    kinds = kinds_of(report)
    assert any(kind.startswith(operation) for kind in kinds)
    if operation in ("EXP", "MUL"):
        assert not {"CONV_2D", "FULLY_CONNECTED"} & kinds
    assert "in floats" in str(report)
    assert report.error < 0.05
    assert report.to_dict()["in_floats"] == report.in_floats


# --- ranges stay with the values that they are of -------------------------------------------------

PIXELS = (
    np.random.default_rng(0).integers(0, 256, (64, 6, 6, 3)).astype("float32")
)


def behind(front):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 6, 3))
    x = L.Conv2D(8, 3, activation="relu", name="first")(front(inputs))
    return keras.Model(inputs, L.Dense(4, name="head")(L.Flatten()(x)))


FRONTS = {
    "Rescaling": lambda x: L.Rescaling(1 / 255)(x),
    "with an offset": lambda x: L.Rescaling(1 / 127.5, offset=-1)(x),
    "x / 255": lambda x: x / 255.0,
    "1 - x / 255": lambda x: 1.0 - x / 255.0,
    "of channels": lambda x: L.Rescaling([1 / 255, 1 / 2550, 1 / 25.5])(x),
    "before Flatten": lambda x: L.Reshape((6, 6, 3))(
        L.Rescaling(1 / 255)(L.Flatten()(x))
    ),
}


@pytest.mark.parametrize(
    "front",
    [
        "x / 255",
        "of channels",
        *map(slow, sorted({*FRONTS} - {"x / 255", "of channels"})),
    ],
)
def test_ranges_behind_a_scaling_are_of_what_it_gives(front, tmp_path):
    model = trained(behind(FRONTS[front]), PIXELS)
    report = exported(model, tmp_path / "m.tflite", sample=PIXELS)
    assert report.error < 0.1
    assert not {"CONV_2D", "FULLY_CONNECTED"} & kinds_of(report)


# --- constants, zeros and nearly zeros ------------------------------------------------------------


@pytest.mark.parametrize("way", ["calibrated", slow("trained")])
def test_a_concatenation_with_a_constant(way, tmp_path):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 5))
    filled = WithZeros()
    x = L.Conv2D(8, 3, activation="relu")(filled(inputs))
    model = keras.Model(inputs, L.GlobalAveragePooling2D()(x))
    rows = np.random.default_rng(0).normal(size=(64, 8, 8, 5)).astype("float32")
    data = {"representative_data": rows}
    if way == "trained":
        # The rows of a batch would not fit the constant, which has one.
        model, data = trained(model, rows[:1]), {"sample": rows[:1]}
    report = exported(model, tmp_path / "m.tflite", **data)
    assert not report.in_floats
    assert report.error < 0.05


def with_channel(factor, bias):
    """Two layers, in the first of which one channel has small weights and a bias."""
    keras.utils.set_random_seed(0)
    layers = [
        L.Dense(16, activation="relu", name="hidden"),
        L.Dense(4, name="head"),
    ]
    model = keras.Sequential([keras.Input((12,)), *layers])
    hidden = model.get_layer("hidden")
    scale = np.where(np.arange(16) == 3, factor, 1.0)
    hidden.kernel.assign(ops.convert_to_numpy(hidden.kernel) * scale)
    hidden.bias.assign(np.where(np.arange(16) == 3, bias, 0.0))
    return model


def where_nothing_fires():
    model = with_channel(1.0, 0.0)
    model.get_layer("hidden").bias.assign(np.full(16, -100.0))
    model.get_layer("head").bias.assign([0.3, -0.2, 0.1, 0.5])
    return model


def of_zeros(layer):
    model = with_channel(1.0, 0.0)
    kernel = model.get_layer(layer).kernel
    kernel.assign(np.zeros(kernel.shape))
    return model


DEGENERATE = {
    "a channel of zeros": lambda: with_channel(0.0, 0.5),
    "a channel of 1e-6": lambda: with_channel(1e-6, 0.5),
    "a channel of 1e-37": lambda: with_channel(1e-37, 0.5),
    "ReLUs that never fire": where_nothing_fires,
    "a layer of zeros": lambda: of_zeros("hidden"),
    "a head of zeros": lambda: of_zeros("head"),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *((name, "calibrated") for name in DEGENERATE),
        ("ReLUs that never fire", "trained"),
        *(
            pytest.param(name, "trained", marks=pytest.mark.slow)
            for name in DEGENERATE
            if name != "ReLUs that never fire"
        ),
    ],
)
def test_degenerate_values_give_a_right_file(name, way, tmp_path):
    model = DEGENERATE[name]()
    rows = np.random.default_rng(0).normal(size=(64, 12)).astype("float32")
    data = {"representative_data": rows}
    if way == "trained":
        model, data = trained(model, rows), {"sample": rows}
    with warnings.catch_warnings():
        # Of ranges that hold zeros alone, there is a warning already.
        warnings.filterwarnings(
            "ignore", "Trained ranges of activations must hold more"
        )
        report = export_litert(
            model, tmp_path / "m.tflite", mode="int8", **data
        )
    assert not report.in_floats
    assert report.max_abs_diff < 0.05


UNIFORM = np.random.default_rng(0).uniform(size=(64, 12))
NORMAL = np.random.default_rng(0).normal(size=(64, 12))
HOSTILE_ROWS = {
    "one-sided": 5.0 + UNIFORM,
    "negative": -5.0 - UNIFORM,
    "constant": np.full((64, 12), 0.5),
    "a constant column": np.where(np.arange(12) == 2, 3.0, NORMAL),
    "denormal": 1e-40 * NORMAL,
    "huge": 1e30 * NORMAL,
}


@pytest.mark.parametrize("name", HOSTILE_ROWS)
@pytest.mark.parametrize("ranges", ["measured", slow("fitted")])
def test_hostile_rows_give_a_right_file(name, ranges, tmp_path):
    model = with_channel(0.0, 0.5)
    rows = HOSTILE_ROWS[name].astype("float32")
    with warnings.catch_warnings():
        # Constant rows, and such large ones, are doubted already.
        warnings.filterwarnings("ignore", "An int8 file is right only within")
        report = export_litert(
            model,
            tmp_path / "m.tflite",
            mode="int8",
            ranges=ranges,
            representative_data=rows,
            tolerance=0.1,
        )
    assert report.error < 0.1
    assert not report.in_floats


def test_a_tensor_that_is_infinite_is_named(tmp_path):
    """A sigmoid that is written out: exp(x) is infinite, 1 / (1 + exp(x)) is 0."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((12,))
    x = L.Dense(16, name="hidden")(inputs)
    x = 1.0 / (1.0 + ops.exp(1e3 * x))
    model = keras.Model(inputs, L.Dense(4, name="head")(x))
    data = {"representative_data": NORMAL.astype("float32")}
    with pytest.raises(
        ExportConversionError, match=r"must be finite.*infinite tensors"
    ):
        export_litert(model, tmp_path / "m.tflite", mode="int8", **data)


def test_weights_beyond_float16(tmp_path):
    """Float16 ends at 65,504: a file of it is refused, one of int8 has them in its scale."""
    model = with_channel(1.0, 0.5)
    hidden = model.get_layer("hidden")
    kernel = ops.convert_to_numpy(hidden.kernel).copy()
    kernel[0, 0] = 1e5
    hidden.kernel.assign(kernel)
    rows = NORMAL.astype("float32")
    path = tmp_path / "m.tflite"
    with pytest.raises(
        ExportVerificationError, match=r"'hidden'.*float16 ends at 65504"
    ):
        export_litert(model, path, mode="float16", sample=rows)
    assert not path.exists()
    data = {"representative_data": rows}
    assert exported(model, path, **data).error < 0.05
    # Kernels of operations in floats are stored in float16 where they fit.
    with_floats = export_litert(
        model, path, mode="int8", floats=["hidden"], **data
    )
    assert with_floats.error < 0.05
