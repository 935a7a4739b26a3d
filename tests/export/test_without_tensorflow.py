"""LiteRT files made by JAX, litert-converter and ai-edge-quantizer, where TensorFlow is missing."""

import sys

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import ExportRouteError
from keras_sparse_ortho.export import export_litert, load_litert
from tests.export import models
from tests.export.models import cnn, operations
from tests.export.test_blocks import KINDS, network
from tests.helpers import array, slow_case_on_jax, slow_on_jax

# On TensorFlow it cannot be missing.
pytestmark = [pytest.mark.core, pytest.mark.not_tensorflow]

L = keras.layers


@pytest.fixture(autouse=True)
def _no_tensorflow(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorflow", None)


def mlp():
    return models.mlp(32, (64,), 4, "gelu")


def encoder():
    """With an output for each row of its attention as well."""
    model = models.encoder()
    attention = model.get_layer("attention").output
    return keras.Model(
        model.input, {"first": model.output, "second": attention[:, 0]}
    )


def lstm():
    return keras.Sequential(
        [keras.Input((5, 16)), L.LSTM(16, name="rnn"), L.Dense(4)]
    )


def sparse(make, blocks=False):
    keras.utils.set_random_seed(0)
    dense = make()
    x = (
        np.random.default_rng(0)
        .normal(size=(24, *dense.input_shape[1:]))
        .astype("float32")
    )
    if not blocks:
        return kso.sparsify(dense, 0.3, seed=0), x
    options = {
        "storage": "blocks",
        "structure": kso.Block(8, 8),
        "exclude": ["head"],
    }
    return kso.sparsify(dense, 0.25, seed=0, **options), x


def exported(model, path, mode, x):
    data = x if mode.startswith("int8") else None
    return models.exported(
        model, path, mode, sample=x, representative_data=data
    )


# On both backends the same process makes the file: the quick run has most of them on torch alone.
CASES = [(mlp, "float16"), (mlp, "dynamic_int8"), (encoder, "float32")]
CASES = [
    (cnn, "int8"),
    *(slow_case_on_jax(*case) for case in [*CASES, (lstm, "int8")]),
]


@pytest.mark.parametrize(("make", "mode"), CASES)
def test_files_agree_with_keras(make, mode, tmp_path):
    model, x = sparse(make)
    report = exported(model, tmp_path / "m.tflite", mode, x)
    assert report.mode == mode
    assert report.error < 0.1
    assert "tensorflow" not in report.versions
    assert report.versions["litert-converter"] != "unknown"
    want = keras.tree.flatten(model(x[:2]))
    got = keras.tree.flatten(load_litert(tmp_path / "m.tflite").predict(x[:2]))
    for one, other in zip(map(array, want), got, strict=True):
        assert np.sqrt(np.mean((one - other) ** 2)) <= report.tolerance * max(
            one.std(), 1.0
        )


@pytest.mark.parametrize(
    "mode",
    ["float32+blocks", pytest.param("int8+blocks", marks=pytest.mark.slow)],
)
def test_files_of_blocks(mode, tmp_path):
    model, x = sparse(mlp, blocks=True)
    report = exported(model, tmp_path / "m.tflite", mode, x)
    (kept,) = report.kept
    assert kept.endswith("head/kernel")
    dense = exported(model, tmp_path / "d.tflite", mode.split("+")[0], x)
    stored, every = (
        sum(one.size for one in each.weights) for each in (report, dense)
    )
    assert stored < 0.5 * every  # files of so few weights are not smaller
    for each in (report, dense):
        # Behind that of the model.
        names = {one.name.partition("/")[2] for one in each.weights}
        assert names == {"hidden/kernel", "head/kernel"}


@slow_on_jax
def test_blocks_side_by_side_and_sides_with_padding(tmp_path):
    """Gathers of these are slices, and some gathers share their indices."""
    model, shape = network("dense"), KINDS["dense"][0]
    kernel = model.layers[-1].kernel
    value = np.array(array(kernel))
    value[:, :16] = 0.0
    # The fewest come first.
    value[16:32, :16] = np.random.default_rng(0).normal(size=(16, 16))
    value[:, 16:32] = np.roll(value[:, 32:48], 16, axis=0)
    kernel.assign(value)
    x = np.random.default_rng(1).normal(size=(24, *shape)).astype("float32")
    report = exported(model, tmp_path / "m.tflite", "int8+blocks", x)
    names = [one.name for one in report.weights]
    assert len(names) == len({*names}) == 2 * len(model.layers)
    paths = {layer.kernel.path for layer in model.layers}
    assert {name.partition(" (")[0] for name in names} == paths
    assert not report.in_floats


@pytest.mark.slow
def test_every_route_of_a_large_model(tmp_path):
    """In int8, too, the second kernel takes 1.3 MB, and a quarter of it 320 KiB."""
    large = models.mlp(64, (1024, 1280), 8)
    options = {
        "structure": kso.Block(32, 32, regular=True),
        "storage": "blocks",
    }
    model = kso.sparsify(
        large, 0.25, exclude=["hidden", "head"], seed=0, **options
    )
    x = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    report = export_litert(
        model, tmp_path / "m.tflite", mode="fast", representative_data=x
    )
    assert len(report.routes) == 10
    refused = {one.route: one.reason for one in report.routes if one.reason}
    # 15 values are too few for random weights.
    assert sorted(refused) == [
        "dynamic_int4",
        "int4",
    ]
    assert all("must agree with Keras" in reason for reason in refused.values())
    assert (
        min(one.bytes for one in report.routes if not one.reason) > 300 * 1024
    )
    trained = kso.quantize_aware(model)
    trained(x, training=True)
    report = export_litert(
        trained, tmp_path / "q.tflite", mode="int8", sample=x
    )
    assert report.error < 3e-3


@pytest.mark.parametrize(
    "mode",
    [
        "int8",
        *(
            pytest.param(mode, marks=pytest.mark.slow)
            for mode in ("float16", "dynamic_int8")
        ),
    ],
)
def test_weights_behind_the_flatbuffer(mode, tmp_path):
    """ai-edge-quantizer puts them there in files of more than 256 KiB."""
    model = kso.sparsify(models.mlp(512, (640,), 4, "linear"), 0.3, seed=0)
    x = np.random.default_rng(0).normal(size=(32, 512)).astype("float32")
    report = exported(model, tmp_path / "m.tflite", mode, x)
    assert report.bytes > 300 * 1024
    live = sum(weight.live for weight in kso.prunable_weights(model))
    assert report.total_zeros >= report.total_weights - live
    assert report.error < 0.05


def test_dead_channels_keep_their_biases(tmp_path):
    model = models.mlp(32, (16,), 4, "linear")
    for layer in model.layers:
        layer.kernel.assign(array(layer.kernel) * (np.arange(layer.units) % 2))
        layer.bias.assign(np.linspace(1, 2, layer.units))
    x = np.random.default_rng(0).normal(size=(32, 32)).astype("float32")
    path = tmp_path / "m.tflite"
    report = export_litert(
        model, path, mode="int8", representative_data=x, tolerance=0.03
    )
    assert report.error < 0.03


@slow_on_jax
def test_gelu_is_one_operation(tmp_path):
    model, x = sparse(mlp)
    export_litert(model, tmp_path / "m.tflite", mode="float32", sample=x)
    names = [name for name, _ in operations(tmp_path / "m.tflite")]
    assert names == ["FULLY_CONNECTED", "GELU", "FULLY_CONNECTED"]


@slow_on_jax
def test_the_smallest_file_is_taken_and_what_needs_tensorflow_is_left_out(
    tmp_path,
):
    model, x = sparse(mlp)
    report = export_litert(model, tmp_path / "m.tflite", sample=x)
    assert report.error <= 1e-5
    assert not any(one.route.endswith("+sp") for one in report.routes)


def test_what_needs_tensorflow_is_refused_by_name(tmp_path):
    model, _ = sparse(mlp)
    with pytest.raises(
        ExportRouteError,
        match=r"'float32\+sp' is one of TensorFlow's converter",
    ):
        export_litert(model, tmp_path / "m.tflite", mode="float32+sp")
    assert not list(tmp_path.iterdir())
