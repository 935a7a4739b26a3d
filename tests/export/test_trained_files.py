"""Files of quantization-aware training: the integers, zeros and ranges are those of training.

TensorFlow converts on its own backend, on the others litert-converter as if it were missing.
"""

import sys
import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import ExportConversionError
from keras_sparse_ortho.export import export_litert, load_litert
from keras_sparse_ortho.kernels import walk
from keras_sparse_ortho.quantization import (
    FakeQuantize,
    integers_of,
    quantize_aware,
    round_biases,
)
from tests.export import models
from tests.export.models import (
    cnn,
    encoder,
    exported,
    interpreter_of,
    operations,
)
from tests.helpers import slow_case_on_jax

pytestmark = pytest.mark.core
L = keras.layers


@pytest.fixture(autouse=True)
def _no_tensorflow(monkeypatch):
    if keras.backend.backend() != "tensorflow":
        monkeypatch.setitem(sys.modules, "tensorflow", None)


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def mlp():
    return models.mlp(24, (48,), 6)


def block_mlp():
    return models.mlp(64, (64,), 6)


def block_cnn():
    x = inputs = keras.Input((6, 6, 32))
    x = L.Conv2D(32, 3, use_bias=False, name="hidden")(x)
    x = L.GlobalAveragePooling2D()(
        L.ReLU()(L.BatchNormalization(name="norm")(x))
    )
    return keras.Model(inputs, L.Dense(6, name="head")(x))


def trained(make, weights, rounded=True, **options):
    """A sparse network that has learnt something, and rows of its data."""
    keras.utils.set_random_seed(0)
    if make is cnn:
        options["exclude"] = "depthwise"
    model = kso.sparsify(make(), **{"density": 0.4, "seed": 0, **options})
    model = quantize_aware(model, weights, momentum=0.8)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(512, *model.input_shape[1:])).astype("float32")
    y = (x.reshape(512, -1) @ rng.normal(size=(x[0].size, 6))).argmax(1)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(3e-3), loss)
    model.fit(x, y, batch_size=32, epochs=4, verbose=0)
    if make is cnn:  # channels whose sign the folding changes
        norm = model.get_layer("first_norm")
        norm.gamma.assign(norm.gamma * np.where(np.arange(12) % 3, 1.0, -1.0))
    return round_biases(model) if rounded else model, x


# --- what a file holds ---------------------------------------------------------------------------


def tensors_of(path):
    """The int8 constants of a file, and the scales of its tensors."""
    run = interpreter_of(path, xnnpack=False)
    run.allocate_tensors()
    own = [
        about for about in run.get_tensor_details() if about["dtype"] == np.int8
    ]
    scales = [about["quantization_parameters"]["scales"] for about in own]
    constants = [
        run.get_tensor(about["index"])
        for about, s in zip(own, scales, strict=True)
        if s.size
    ]
    return constants, np.concatenate(scales).astype(float)


def as_in_file(weight, integers):
    """The integers of a kernel of Keras in LiteRT's order."""
    kind = type(weight.owner)
    if kind is L.DepthwiseConv2D:
        return integers.reshape(1, *integers.shape[:2], -1)
    if kind is L.Conv2D:
        return integers.transpose(3, 0, 1, 2)
    # Heads and their units are inputs.
    if weight.path.startswith("attention/attention_output"):
        return integers.reshape(-1, integers.shape[-1]).T
    return integers.reshape(len(integers), -1).T


def reduced(integers, axis=0):
    """A row for each channel, without the divisor that its integers have in common."""
    rows = (
        np.moveaxis(integers, axis, 0)
        .reshape(integers.shape[axis], -1)
        .astype(int)
    )
    return rows // np.maximum(np.gcd.reduce(rows, axis=1, keepdims=True), 1)


def check_integers(model, path):
    """Each channel of a kernel holds the integers that were trained, times a number."""
    constants, _ = tensors_of(path)
    for weight in kso.prunable_weights(model):
        integers = as_in_file(weight, integers_of(weight)[0])
        axis = 3 if type(weight.owner) is L.DepthwiseConv2D else 0
        rows = reduced(integers, axis)
        assert any(
            np.all((rows == own).all(1) | (rows == -own).all(1))
            for constant in constants
            if constant.shape == integers.shape
            for own in [reduced(constant, axis)]
        ), weight.path
        assert not integers[as_in_file(weight, ~weight.mask)].any()


def check_steps(path, *steps):
    _, scales = tensors_of(path)
    for step in steps:
        assert np.min(np.abs(scales - step)) < 1e-5 * step


def check_ranges(model, path):
    """Each range that was trained is one of the file, with its step."""
    layers = [
        layer for layer, _ in walk(model, "") if isinstance(layer, FakeQuantize)
    ]
    assert layers
    check_steps(path, *(layer.step() for layer in layers))


def assert_few_roundings_differ(report, model, rows):
    """One output in twenty may be a step off: a sum near the middle of two goes either way.

    Which ones do depends on the last bits of training, and so on the processor.
    """
    got, want = (
        load_litert(report.path).predict(rows),
        keras.ops.convert_to_numpy(model(rows)),
    )
    assert np.mean(np.abs(got - want) > 0.003 * want.std()) < 0.05
    assert report.error < 0.01


# --- tests ---------------------------------------------------------------------------------------

CASES = [(mlp, "int4"), slow(cnn, "int4")]
CASES += [
    slow(make, weights)
    for make in (mlp, cnn)
    for weights in ("int8", "ternary")
]
CASES += [slow(encoder, weights) for weights in ("int8", "int4")]


@pytest.mark.parametrize(("make", "weights"), CASES)
def test_integers_and_ranges_of_the_file_are_those_of_training(
    make, weights, tmp_path
):
    model, x = trained(make, weights)
    report = exported(model, tmp_path / "m.tflite", sample=x[:64])
    assert bool(report.in_floats) == (make is encoder)
    assert_few_roundings_differ(report, model, x[:64])
    assert ("tensorflow" in report.versions) == (
        keras.backend.backend() == "tensorflow"
    )
    check_integers(model, report.path)
    check_ranges(model, report.path)
    kernels = kso.prunable_weights(model)
    sizes = {weight.value.size for weight in kernels}
    held = [one for one in report.weights if one.size in sizes]
    assert {one.dtype for one in held} == {"int8"}
    assert len(held) == len(kernels)
    if make is not encoder:  # whose normalizations are in floats
        assert {kind for _, kind in operations(report.path)[:-1]} == {np.int8}


@pytest.mark.parametrize(
    ("weights", "mode", "stored"),
    [
        ("int4", "int4", "int4"),
        slow("ternary", "dynamic_int4", "int2"),
    ],
)
def test_kernels_of_dense_layers_take_the_bits_of_their_training(
    weights, mode, stored, tmp_path
):
    model, x = trained(mlp, weights)
    modes = mode.replace("int4", "int8"), mode
    wide, narrow = (
        export_litert(model, tmp_path / m, mode=m, sample=x[:64]) for m in modes
    )
    first, second = (
        load_litert(one.path).predict(x[:64]) for one in (wide, narrow)
    )
    assert np.mean(np.abs(first - second) > 0.003 * first.std()) < 0.05
    kinds = {one.size: one.dtype for one in narrow.weights}
    assert kinds[24 * 48] == stored
    assert narrow.total_zeros == wide.total_zeros
    bits = {"int4": 4, "int2": 2}[stored]
    assert wide.bytes - narrow.bytes > 0.9 * 24 * 48 * (8 - bits) / 8


def test_eight_bits_of_their_training_do_not_become_four(tmp_path):
    model, x = trained(mlp, "int8")
    with pytest.raises(
        ExportConversionError, match="stored in fewer than 8 bits"
    ):
        export_litert(model, tmp_path / "m", mode="int4", sample=x[:64])


@pytest.mark.parametrize(
    ("layers", "obstacle"),
    [
        ([L.Flatten(), L.Dense(10)], "all have fewer than 1,024 entries"),
        ([L.Conv2D(16, 3)], "the model has none"),
    ],
)
def test_without_a_large_dense_kernel_no_file_has_four_bits(
    layers, obstacle, tmp_path
):
    model = keras.Sequential([keras.Input((4, 4, 3)), *layers])
    with pytest.raises(ExportConversionError, match=obstacle):
        export_litert(model, tmp_path / "m", mode="dynamic_int4")


@pytest.mark.parametrize(
    ("make", "weights"),
    [slow_case_on_jax(block_mlp, "int4"), slow(block_cnn, "int8")],
)
def test_files_of_blocks_hold_the_trained_integers(make, weights, tmp_path):
    options = {
        "storage": "blocks",
        "structure": kso.Block(8, 8),
        "exclude": ["head"],
    }
    model, x = trained(make, weights, density=0.25, **options)
    report = export_litert(
        model, tmp_path / "m.tflite", mode="int8+blocks", sample=x[:64]
    )
    assert_few_roundings_differ(report, model, x[:64])
    check_ranges(model, report.path)
    assert {kind for _, kind in operations(report.path)[:-1]} == {np.int8}
    (weight,) = (
        one
        for one in kso.prunable_weights(model)
        if one.path == "hidden/kernel"
    )
    integers = integers_of(weight)[0].reshape(-1, weight.shape[-1]).astype(int)
    live = int(weight.mask.reshape(integers.shape)[:, 0].sum())
    constants, _ = tensors_of(report.path)
    (held,) = (
        c for c in constants if c.ndim == 4 and c.shape[0] == integers.shape[1]
    )
    assert held.size == live * integers.shape[1]
    # The order of blocks is the file's.
    for channel, column in zip(held, integers.T, strict=True):
        values = np.sort(
            [*channel.ravel().astype(int), *[0] * (len(column) - live)]
        )
        values, column = (one // np.gcd.reduce(one) for one in (values, column))
        assert any(
            np.array_equal(values, np.sort(sign * column)) for sign in (1, -1)
        )


@pytest.mark.tensorflow_only
def test_groups_of_uneven_blocks_compute_in_the_range_of_their_layer(tmp_path):
    # One to four blocks a column.
    mask = np.kron(np.tri(4, dtype=bool), np.ones((16, 16), bool))
    masked = kso.apply_masks(block_mlp(), {"hidden": mask})
    model = quantize_aware(masked, "int4", momentum=0.8)
    x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    model(x, training=True)
    report = export_litert(
        round_biases(model), tmp_path / "m.tflite", mode="int8+blocks", sample=x
    )
    assert_few_roundings_differ(report, model, x)
    kinds = operations(report.path)[:-1]
    assert [name for name, _ in kinds].count("CONV_2D") > 1
    assert {kind for _, kind in kinds} == {np.int8}
    assert not any("hidden" in path for path in report.kept)


def gated():
    """Squeeze and excite of MobileNetV3, whose hard sigmoid is made of operations."""
    x = inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(8, 3, activation="relu", name="hidden")(x)
    gate = L.GlobalAveragePooling2D(keepdims=True)(x)
    gate = L.Conv2D(8, 1)(gate)
    gate = L.ReLU(6.0)(gate + 3.0) * (1.0 / 6.0)
    x = L.GlobalAveragePooling2D()(L.Multiply()([x, gate]))
    return keras.Model(inputs, L.Dense(6, name="head")(x))


def test_gates_of_operations_compute_in_integers(tmp_path):
    model, x = trained(gated, "int8")
    report = exported(model, tmp_path / "m.tflite", sample=x[:64])
    assert not report.in_floats
    assert_few_roundings_differ(report, model, x[:64])
    assert {kind for _, kind in operations(report.path)[:-1]} == {np.int8}


@pytest.mark.slow
def test_files_of_floats_round_as_keras_does(tmp_path):
    model, x = trained(mlp, "int8")
    report = export_litert(
        model, tmp_path / "m.tflite", mode="float32", sample=x[:64]
    )
    assert report.error < 1e-5


@pytest.mark.slow
def test_the_file_has_rounded_biases_whether_keras_has_them_or_not(tmp_path):
    model, x = trained(cnn, "int8", rounded=False)
    outputs = []
    for name in ("before", "after"):
        # Before, that Keras differs.
        with warnings.catch_warnings(action="ignore"):
            export_litert(model, tmp_path / name, mode="int8", sample=x[:64])
        outputs.append(load_litert(tmp_path / name).predict(x[:64]))
        round_biases(model)
    np.testing.assert_array_equal(*outputs)


def test_int8_without_ranges_or_data_is_refused(tmp_path):
    untrained = quantize_aware(mlp())
    with pytest.raises(
        ValueError, match="ranges of activations are set in training"
    ):
        export_litert(untrained, tmp_path / "m.tflite", mode="int8")
    with pytest.raises(ValueError, match="`representative_data` is needed"):
        export_litert(
            quantize_aware(mlp(), "int8", None), tmp_path / "m", mode="int8"
        )


def ranged(low, high, name):
    layer = FakeQuantize(name=name)
    layer.build()
    for variable, value in (
        (layer.low, low),
        (layer.high, high),
        (layer.seen, 1.0),
    ):
        variable.assign(value)
    return layer


def test_ranges_that_differ_and_layers_in_floats_between_them(tmp_path):
    inputs = keras.Input((8, 8))
    x = ranged(-1.0, 2.0, "wide")(inputs)
    x = ranged(-0.5, 0.6, "narrow")(x)  # again, in steps of its own
    x = L.LayerNormalization()(x)  # in floats
    x = ranged(-1.5, 1.5, "between")(L.Softmax()(x[:, ::2]))
    model = keras.Model(
        inputs, ranged(0.0, 0.5, "end")(keras.ops.cumsum(x, axis=1))
    )
    sample = np.random.default_rng(0).normal(size=(16, 8, 8)).astype("float32")
    report = exported(model, tmp_path / "m.tflite", sample=sample)
    assert report.error < 0.001
    assert report.in_floats
    check_steps(report.path, 3.0 / 255, 1.1 / 255, 0.5 / 255)
