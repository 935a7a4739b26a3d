"""Files in LiteRT Micro's own interpreter, for which tflite-micro must be installed.

Its interpreter can crash the process where the arena is too small, so here it is far too large.
"""

import functools
import re
import warnings

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import ExportVerificationError
from keras_sparse_ortho.export import (
    arena_of,
    c_array,
    export_litert,
    is_decode,
    kind_of,
    load_litert,
    read_model,
    write_model,
)
from keras_sparse_ortho.shrinking import shrink
from tests.export.filters import TYPES, dense_layers, sparse, transposed_layer
from tests.export.models import X, dense

pytestmark = [pytest.mark.tensorflow_only, pytest.mark.filterwarnings("ignore")]

L = keras.layers
ARENA = 1 << 22


def interpreter_of(content):
    from tflite_micro.python.tflite_micro import runtime

    return runtime.Interpreter.from_bytes(content, arena_size=ARENA)


def answers(content, rows):
    """The outputs of a file on rows, in the type of its output."""
    interpreter = interpreter_of(content)
    outputs = []
    for row in rows:
        interpreter.set_input(row[None], 0)
        interpreter.invoke()
        outputs.append(interpreter.get_output(0)[0].copy())
    return np.stack(outputs)


def array_of(path, **options):
    """The array of a file, and the number of its packed filters."""
    header = path.with_suffix(".h")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        c_array(path, header, **options)
    body = header.read_text(encoding="utf-8").partition("[] = {")[2]
    content = bytes(map(int, re.findall(r"\d+", body.partition("}")[0])))
    model = read_model(content)
    packed = [is_decode(model, op) for op in model.subgraphs[0].operators]
    return content, sum(packed)


@pytest.mark.parametrize("route", ["float32+blocks", "int8+blocks"])
def test_blocks_run_on_microcontrollers(route, tmp_path):
    keras.utils.set_random_seed(0)
    blocks = kso.Block(8, 8, regular=True)
    model = kso.convert(
        kso.sparsify(dense(), 0.5, structure=blocks, seed=0), "blocks"
    )
    path = tmp_path / "blocks.tflite"
    data = {"representative_data": X} if route == "int8+blocks" else {}
    export_litert(model, path, mode=route, sample=X, **data)
    assert "Conv2D" in c_array(path, tmp_path / "blocks.h")
    expected = keras.ops.convert_to_numpy(model(X))
    found = answers(path.read_bytes(), X)
    error = np.abs(found - expected).max() / np.abs(expected).max()
    assert error < (0.1 if route == "int8+blocks" else 1e-5)


# --- packed zeros ------------------------------------------------------------------------------


def fully_connected():
    made = [L.Dense(64, activation="relu") for _ in range(2)]
    return keras.Sequential([keras.Input((64,)), *made, L.Dense(10)])


def convolutions():
    made = [
        L.Conv2D(16, 3, activation="relu"),
        L.Conv2D(32, 3, 2, activation="relu"),
        L.GlobalAveragePooling2D(),
    ]
    return keras.Sequential([keras.Input((10, 10, 8)), *made, L.Dense(10)])


def depthwise():
    made = [
        L.DepthwiseConv2D(3, depth_multiplier=4, activation="relu"),
        L.DepthwiseConv2D(5, activation="relu"),
        L.GlobalAveragePooling2D(),
    ]
    return keras.Sequential([keras.Input((10, 10, 16)), *made, L.Dense(10)])


def transposed():
    made = [
        L.Conv2DTranspose(16, 3, 2, padding="same", activation="relu"),
        L.Conv2DTranspose(16, 3, padding="same"),
    ]
    return keras.Sequential([keras.Input((5, 5, 16)), *made])


def used_twice():
    inputs = keras.Input((8, 8, 16))
    shared = L.Conv2D(16, 3, padding="same", activation="relu")
    x = L.GlobalAveragePooling2D()(shared(shared(inputs)))
    return keras.Model(inputs, L.Dense(10)(x))


def one_dimension():
    made = [
        L.Conv1D(32, 5, 2, activation="relu"),
        L.Conv1D(32, 5, 2, activation="relu"),
        L.GlobalAveragePooling1D(),
    ]
    return keras.Sequential([keras.Input((40, 8)), *made, L.Dense(10)])


def ds_cnn():
    """A keyword spotter: depthwise and pointwise convolutions (Zhang et al., 2017), smaller."""
    inputs = keras.Input((25, 10, 1))
    x = L.Conv2D(32, (10, 4), 2, padding="same", use_bias=False)(inputs)
    x = L.ReLU()(L.BatchNormalization()(x))
    for _ in range(2):
        x = L.DepthwiseConv2D(3, padding="same", use_bias=False)(x)
        x = L.ReLU()(L.BatchNormalization()(x))
        x = L.Conv2D(32, 1, use_bias=False)(x)
        x = L.ReLU()(L.BatchNormalization()(x))
    x = L.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, L.Dense(12)(x))


NETWORKS = {
    # A network, and how many filters are packed, at density 0.35 and at 0.1.
    fully_connected: (3, 3),
    convolutions: (2, 3),
    depthwise: (3, 3),
    transposed: (2, 2),
    used_twice: (2, 2),
    one_dimension: (2, 3),
    ds_cnn: (4, 6),
}


@functools.cache
def exported(network, density, folder):
    """The file of a network of random weights, and rows in the type of its input."""
    keras.utils.set_random_seed(0)
    model = network()
    rng = np.random.default_rng(0)
    for variable in model.trainable_weights:
        if "kernel" not in variable.path:  # biases and scales
            noise = 0.1 * rng.standard_normal(variable.shape)
            variable.assign_add(noise.astype("float32"))
    pruned = kso.strip(kso.prune(model, density, budget="uniform"))
    path = folder / f"{network.__name__}-{density}.tflite"
    rows = rng.normal(size=(20, *model.input_shape[1:])).astype("float32")
    if network is transposed:  # whose integers become floats in the file
        export_litert(pruned, path, mode="float32", sample=rows)
    else:
        export_litert(pruned, path, mode="int8", representative_data=rows)
    return path, rows


@pytest.mark.parametrize("density", [0.35, 0.1])
@pytest.mark.parametrize("network", NETWORKS, ids=lambda one: one.__name__)
def test_packed_files_answer_as_plain_ones(
    network, density, tmp_path_factory, tmp_path
):
    path, rows = exported(network, density, tmp_path_factory.getbasetemp())
    content = path.read_bytes()
    lean, none = array_of(path)
    packed, count = array_of(path, packed=True)
    assert none == 0
    assert count == NETWORKS[network][density == 0.1]
    assert len(packed) < len(lean) < len(content)
    expected = answers(content, rows)
    assert len(np.unique(expected)) > 10
    np.testing.assert_array_equal(answers(lean, rows), expected)
    np.testing.assert_array_equal(answers(packed, rows), expected)


def test_filters_above_ram_stay_dense_and_answers_the_same(tmp_path_factory):
    path, rows = exported(convolutions, 0.1, tmp_path_factory.getbasetemp())
    packed, count = array_of(path, packed=True, ram=2000)
    assert count == 2
    expected = answers(path.read_bytes(), rows)
    np.testing.assert_array_equal(answers(packed, rows), expected)


def by_hand():
    """Files with zero points per channel, of floats, and with activations of 16 bits."""
    points = np.arange(64) - 32
    values = sparse(64, 64, zeros=points[:, None])
    yield "zero points", dense_layers(values, points=tuple(points))
    floats = sparse(64, 64, dtype="float32") / 100
    yield "float32", dense_layers(floats, TYPES.FLOAT32, ends=TYPES.FLOAT32)
    yield "16x8", dense_layers(sparse(64, 64), ends=TYPES.INT16)
    yield "shared", dense_layers(sparse(64, 64), scales=[0.002], layers=3)
    yield "transposed", transposed_layer(sparse(16, 3, 3, 16))
    yield "int4", dense_layers(sparse(64, 32), TYPES.INT4)


@pytest.mark.parametrize("which", [name for name, _ in by_hand()])
def test_packed_files_made_by_hand(which, tmp_path):
    content = dict(by_hand())[which]
    path = tmp_path / "model.tflite"
    path.write_bytes(content)
    packed, count = array_of(path, packed=True)
    assert count == {"shared": 3, "int4": 0}.get(which, 1)
    rng = np.random.default_rng(0)
    kinds = {"float32": np.float32, "16x8": np.int16}
    shape = (20, 5, 5, 16) if which == "transposed" else (20, 64)
    rows = rng.integers(-100, 100, shape).astype(kinds.get(which, np.int8))
    expected = answers(content, rows)
    assert len(np.unique(expected)) > 1
    np.testing.assert_array_equal(answers(packed, rows), expected)


# --- filters of four bits -----------------------------------------------------------------------


def rounded_filters(content, four):
    """A file whose filters of convolutions are -7 to 7, two in a byte or one."""
    model = read_model(content)
    model.metadata = None
    graph = model.subgraphs[0]
    for operator in graph.operators:
        if kind_of(model, operator) not in ("CONV_2D", "DEPTHWISE_CONV_2D"):
            continue
        tensor = graph.tensors[operator.inputs[1]]
        buffer = model.buffers[tensor.buffer]
        values = np.asarray(buffer.data, np.uint8).view(np.int8)
        values = np.rint(values * (7 / 127)).astype(np.int8)
        buffer.data = values.view(np.uint8)
        scales = np.asarray(tensor.quantization.scale)
        tensor.quantization.scale = scales * (127 / 7)
        if four:
            low, high = values[0::2] & 15, values[1::2] & 15
            buffer.data = (low | high << 4).view(np.uint8)
            tensor.type = TYPES.INT4
    return write_model(model)


@pytest.mark.parametrize("network", [convolutions, depthwise, one_dimension])
def test_convolutions_compute_filters_of_four_bits(network, tmp_path_factory):
    """As docs/devices.md says; this package does not write such files."""
    path, rows = exported(network, 0.35, tmp_path_factory.getbasetemp())
    content = path.read_bytes()
    in_8_bits = rounded_filters(content, four=False)
    in_4_bits = rounded_filters(content, four=True)
    assert len(in_4_bits) < len(in_8_bits)
    expected = answers(in_8_bits, rows)
    assert len(np.unique(expected)) > 10
    np.testing.assert_array_equal(answers(in_4_bits, rows), expected)


# --- streaming ----------------------------------------------------------------------------------


@keras.saving.register_keras_serializable("test_micro")
class Ring(L.Layer):
    """The last frames, in a variable that each call assigns."""

    def build(self, shape):
        self.frames = self.add_weight(
            shape=(1, 6, shape[-1]), trainable=False, initializer="zeros"
        )

    def call(self, frame):
        frames = keras.ops.concatenate([self.frames[:, 1:], frame], axis=1)
        self.frames.assign(frames)
        return frames


@pytest.mark.parametrize("route", ["float32", "int8"])
def test_streaming_files_keep_their_state_from_call_to_call(route, tmp_path):
    keras.utils.set_random_seed(0)
    inputs = keras.Input((1, 8), batch_size=1)
    x = L.Conv1D(16, 3, activation="relu")(Ring()(inputs))
    model = keras.Model(inputs, L.Dense(4)(L.GlobalAveragePooling1D()(x)))
    rows = np.random.default_rng(0).standard_normal((64, 1, 8))
    rows = rows.astype("float32")
    path = tmp_path / "ring.tflite"
    data = {"representative_data": rows} if route == "int8" else {}
    export_litert(model, path, mode=route, sample=rows[:20], **data)
    operators = c_array(path, tmp_path / "ring.h")
    assert {"AssignVariable", "ReadVariable", "VarHandle"} <= {*operators}
    outputs = [model(row[None]) for row in rows]
    expected = keras.ops.convert_to_numpy(keras.ops.concatenate(outputs))
    found = answers(path.read_bytes(), rows)
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    frozen = np.sqrt(
        np.mean((found[::-1] - expected) ** 2) / np.mean(np.square(expected))
    )
    assert error < (1e-5 if route == "float32" else 0.15)
    assert frozen > 0.5  # rows in another order have other answers


# --- shrink -------------------------------------------------------------------------------------


def arena_in_this_process(content, capfd):
    interpreter_of(content).print_allocations()
    text = capfd.readouterr().err
    return int(re.search(r"Arena allocation total (\d+)", text)[1])


def test_the_arena_is_the_one_that_the_interpreter_prints(
    tmp_path_factory, capfd
):
    path, _ = exported(convolutions, 0.1, tmp_path_factory.getbasetemp())
    for options in ({}, {"packed": True}):
        content, _ = array_of(path, **options)
        expected = arena_in_this_process(content, capfd)
        assert arena_of(content) == expected > 1000
    with pytest.raises(ExportVerificationError, match="must run the array"):
        arena_of(b"TFL3" * 100)


def test_shrink_ends_within_flash_and_arena(tmp_path, capfd):
    keras.utils.set_random_seed(0)
    model = ds_cnn()
    rows = np.random.default_rng(0).standard_normal((120, 25, 10, 1))
    rows = rows.astype("float32")
    path = tmp_path / "model.h"
    dense = shrink(
        model,
        rows,
        path,
        target="micro",
        max_flash=65_536,
        max_ram=65_536,
        minutes=0,
    )
    figures = dense.taken.micro
    limits = {
        "max_flash": int(0.85 * figures.flash),
        "max_ram": int(0.9 * figures.arena),
    }
    report = shrink(model, rows, path, target="micro", minutes=1.5, **limits)
    figures = report.taken.micro
    assert figures.flash <= limits["max_flash"]
    assert figures.arena <= limits["max_ram"]
    body = path.read_text().partition("[] = {")[2].partition("}")[0]
    content = bytes(map(int, body.split(",")[:-1]))
    assert len(content) == figures.flash
    assert arena_in_this_process(content, capfd) == figures.arena
    report.write(report.taken, tmp_path / "model.tflite")
    row = rows[:1]
    interpreter = interpreter_of(content)
    details = interpreter.get_input_details(0)
    assert details["dtype"] == np.int8
    settings = details["quantization_parameters"]
    integers = np.rint(row / settings["scales"]) + settings["zero_points"]
    interpreter.set_input(np.clip(integers, -128, 127).astype(np.int8), 0)
    interpreter.invoke()
    settings = interpreter.get_output_details(0)["quantization_parameters"]
    found = interpreter.get_output(0).astype(float) - settings["zero_points"]
    expected = load_litert(tmp_path / "model.tflite").predict(row)
    steps = np.abs(found - expected / settings["scales"])
    assert steps.max() < 2  # the kernels of LiteRT round otherwise


# --- LSTMs as one operator --------------------------------------------------------------------


@pytest.mark.parametrize("steps", [20, 50, 100])
@pytest.mark.parametrize("route", ["float32+lstm", "int8+lstm"])
def test_lstms_answer_on_microcontrollers_as_keras(route, steps, tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((steps, 8), name="x"),
            keras.layers.LSTM(16, return_sequences=True),
            keras.layers.LSTM(12),
            keras.layers.Dense(4),
        ]
    )
    rows = np.random.default_rng(0).standard_normal((80, steps, 8))
    rows = rows.astype("float32")
    x = rows[:8]
    path = tmp_path / "lstm.tflite"
    data = {"representative_data": rows} if route == "int8+lstm" else {}
    export_litert(model, path, mode=route, sample=x, **data)
    operators = c_array(path, tmp_path / "lstm.h")
    assert "UnidirectionalSequenceLSTM" in operators
    found = answers(path.read_bytes(), x)
    expected = keras.ops.convert_to_numpy(model(x))
    if route == "float32+lstm":
        np.testing.assert_allclose(found, expected, atol=1e-5)
        return
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert error < 0.08
    # The kernels of LiteRT and of LiteRT Micro round a few steps apart.
    litert = load_litert(path).predict(x)
    assert np.abs(found - litert).max() < 0.05 * np.abs(expected).max()


def test_unrolled_grus_answer_on_microcontrollers_as_keras(tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((20, 8), name="x"),
            keras.layers.GRU(8, return_sequences=True, unroll=True),
            keras.layers.GRU(8, unroll=True),
        ]
    )
    rows = np.random.default_rng(0).standard_normal((80, 20, 8))
    rows = rows.astype("float32")
    path = tmp_path / "gru.tflite"
    export_litert(
        model,
        path,
        mode="int8",
        sample=rows[:8],
        representative_data=rows,
    )
    assert "While" not in c_array(path, tmp_path / "gru.h")
    expected = keras.ops.convert_to_numpy(model(rows[:8]))
    found = answers(path.read_bytes(), rows[:8])
    error = np.sqrt(np.mean((found - expected) ** 2) / np.mean(expected**2))
    assert error < 0.08
