"""`int8_errors`, and the remedies of `export_litert` for static integers."""

import sys

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import (
    TensorError,
    export_litert,
    int8_errors,
    shortest_stretch,
)
from tests.export.models import exported

pytestmark = pytest.mark.core
L = keras.layers
IMAGES = np.random.default_rng(0).normal(size=(320, 8, 8, 3)).astype("float32")


@pytest.fixture(autouse=True)
def _no_tensorflow(monkeypatch):
    if keras.backend.backend() != "tensorflow":
        monkeypatch.setitem(sys.modules, "tensorflow", None)


def uneven(spread):
    """Channels of very different ranges in front of a depthwise convolution, behind "first"."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3), name="image")
    x = L.Conv2D(16, 3, padding="same", use_bias=False, name="first")(inputs)
    x = L.ReLU(name="relu")(L.BatchNormalization(name="norm")(x))
    x = L.DepthwiseConv2D(3, name="depthwise")(x)
    x = L.Conv2D(8, 1, activation="relu", name="pointwise")(x)
    x = L.Flatten(name="flat")(L.MaxPooling2D(name="pool")(x))
    model = keras.Model(inputs, L.Dense(4, name="head")(x))
    scales = spread ** np.linspace(-1, 0, 16)
    norm, depthwise = model.get_layer("norm"), model.get_layer("depthwise")
    norm.gamma.assign(scales)
    kernel, bias = depthwise.get_weights()
    depthwise.set_weights([kernel / scales[:, None], bias])
    return model


@pytest.fixture(scope="module")
def model():
    return uneven(50.0)


@pytest.fixture(scope="module")
def errors(model):
    with pytest.MonkeyPatch.context() as patch:
        if keras.backend.backend() != "tensorflow":
            patch.setitem(sys.modules, "tensorflow", None)
        return int8_errors(model, IMAGES)


def test_the_table_names_layers_and_adds_up(errors):
    kernels = {
        tensor.label for tensor in errors.tensors if tensor.kind == "kernel"
    }
    assert kernels == {
        f"{name}/kernel" for name in ("first", "depthwise", "pointwise", "head")
    }
    layers = [
        tensor.layer
        for tensor in errors.tensors
        if tensor.kind == "activations"
    ]
    # What is fused, or only moved, counts once.
    assert layers == ["image", "relu", "depthwise", "pointwise", "head"]
    worst = max(errors.tensors, key=lambda tensor: tensor.error)
    assert (worst.kind, worst.layer) == ("activations", "relu")
    assert 0.5 < errors.total / errors.file_error < 2
    assert errors.rows == 32
    assert errors.by_layer["relu"] > 0.8 * errors.total
    text = str(errors)
    assert text.splitlines()[1].startswith("activations relu")
    assert text.splitlines()[-1].endswith(f" {errors.file_error:.2g}")


def test_variances_that_round_to_zero_lose_a_finite_part():
    """`1 / sqrt(0)` is infinite in floats, and the end of the range in integers."""
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((16,)),
            L.LayerNormalization(epsilon=1e-9, name="norm"),
            L.Dense(4, name="head"),
        ]
    )
    rows = np.random.default_rng(0).normal(size=(64, 16)).astype("float32")
    rows[::2] *= 0.01
    errors = int8_errors(model, rows)
    assert all(np.isfinite(tensor.error) for tensor in errors.tensors)
    worst = max(errors.tensors, key=lambda tensor: tensor.error)
    assert worst.layer == "norm"


def test_the_plot_has_a_bar_for_each_layer(errors):
    pytest.importorskip("matplotlib")
    axes = errors.plot()
    assert len(axes.patches) == len(errors.by_layer)


@pytest.fixture(scope="module")
def plain(model, tmp_path_factory):
    """The report of the file without a remedy."""
    with pytest.MonkeyPatch.context() as patch:
        if keras.backend.backend() != "tensorflow":
            patch.setitem(sys.modules, "tensorflow", None)
        path = tmp_path_factory.mktemp("plain") / "plain.tflite"
        return exported(model, path, representative_data=IMAGES)


def test_equalized_files_lose_less(model, errors, plain, tmp_path):
    listed = keras.Model(model.inputs, model.outputs)  # a list of one input
    equal = exported(
        listed, tmp_path / "b.tflite", representative_data=IMAGES, equalize=True
    )
    assert plain.error**2 == pytest.approx(errors.file_error, rel=0.3)
    assert equal.error < 0.5 * plain.error
    assert equal.bytes <= plain.bytes + 64


def test_layers_in_floats_by_name_and_by_themselves(model, plain, tmp_path):
    data = {"mode": "int8", "representative_data": IMAGES}
    named = export_litert(
        model, tmp_path / "b.tflite", floats=["norm", "depthwise"], **data
    )
    kinds = [text.partition(" ")[0] for text in named.in_floats]
    assert kinds == ["CONV_2D", "DEPTHWISE_CONV_2D"]  # "norm" is in "first"
    # Nine tenths of the squared error are in these two.
    assert named.error < 0.1**0.5 * plain.error
    auto = export_litert(model, tmp_path / "c.tflite", floats="auto", **data)
    assert auto.in_floats[-2:] == named.in_floats
    assert auto.error < 0.1**0.5 * plain.error
    assert auto.bytes > plain.bytes
    # A file that is good enough needs no floats.
    # The limit is met on the rows that choose; the file is compared on others.
    limit = {"floats": "auto", "tolerance": 1.5 * plain.error}
    enough = export_litert(model, tmp_path / "d.tflite", **limit, **data)
    assert enough.in_floats == ()
    limit["tolerance"] = 1.5 * auto.error
    better = export_litert(model, tmp_path / "e.tflite", **limit, **data)
    assert better.error <= 1.5 * auto.error
    assert better.in_floats


def test_fitted_ranges_clip_an_outlier(tmp_path):
    """Two values of 20 in 96 rows: most of the measured range of the input is for them alone."""
    keras.utils.set_random_seed(0)
    layers = [L.Conv2D(4, 3, 3), L.Flatten(), L.Dense(4)]
    model = keras.Sequential([keras.Input((32, 32, 3)), *layers])
    rows = np.random.default_rng(0).normal(size=(128, 32, 32, 3))
    rows[40, 3, 3, 0] = 20.0
    rows[50, 5, 5, 1] = -20.0
    data = {"representative_data": rows[:96], "sample": rows[96:]}
    measured = exported(model, tmp_path / "a.tflite", **data)
    fitted = exported(model, tmp_path / "b.tflite", ranges="fitted", **data)
    assert fitted.error < 0.8 * measured.error
    assert fitted.bytes <= measured.bytes + 64  # alignment
    assert (measured.remedy, fitted.remedy) == ("", "fitted ranges")
    assert "remedies              fitted ranges" in str(fitted)


def test_max_loss_takes_the_first_remedy_that_is_enough(model, plain, tmp_path):
    path = tmp_path / "a.tflite"
    data = {"mode": "int8", "representative_data": IMAGES}
    first = export_litert(model, path, max_loss=2 * plain.error, **data)
    assert first.remedy == "measured ranges"
    assert [outcome.bytes for outcome in first.routes] == [first.bytes]
    second = export_litert(model, path, max_loss=0.3 * plain.error, **data)
    names = [outcome.remedy for outcome in second.routes]
    assert names[-1] == second.remedy == "fitted ranges, equalized channels"
    assert names[:-1] == ["measured ranges", "fitted ranges"]
    assert second.error <= 0.3 * plain.error == second.tolerance
    assert f"int8, {names[0]}: no file" in str(second)
    last = export_litert(model, path, max_loss=0.1 * plain.error, **data)
    assert last.remedy.endswith("a stretch in floats")
    assert last.error <= 0.1 * plain.error
    content = path.read_bytes()
    refusal = pytest.raises(
        kso.export.ExportVerificationError,
        match=r"Raise `max_loss`.*measured ranges: error.*in floats: error",
    )
    with refusal:
        export_litert(model, path, max_loss=1e-9, **data)
    ends = {"inference_input_type": "int8", "inference_output_type": "int8"}
    with pytest.raises(
        kso.export.ExportVerificationError, match=r"equalized channels: [^;]*$"
    ):
        export_litert(model, path, max_loss=1e-9, **data, **ends)
    assert path.read_bytes() == content  # an older file stays


def test_the_shortest_stretch():
    def item(error, *operations, size=0):
        return TensorError("activations", "", operations, size, error)

    parts = [item(1.0, 0, 1), item(5.0, 1, 2), item(4.0, 2), item(0.5, 3, 4)]
    assert shortest_stretch(parts, 5, 0.8) == range(1, 3)
    assert shortest_stretch(parts, 5, 0.9) == range(3)
    assert shortest_stretch(parts, 5, 1.0) == range(5)
    assert shortest_stretch(parts, 5, 0.0) == range(0)
    equal = [item(1.0, 0, size=9), item(1.0, 1, size=3)]
    assert shortest_stretch(equal, 2, 0.5) == range(1, 2)


def test_two_ends_and_a_layer_of_two_operations(tmp_path):
    """Separable convolutions are two operations of one name; a nested model is one layer."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3), name="image")
    x = L.SeparableConv2D(6, 3, activation="relu", name="separable")(inputs)
    y = L.Add(name="sum")([x, L.Conv2D(6, 1, name="beside")(x)])
    ends = [L.GlobalAveragePooling2D(name="mean")(y), L.Flatten(name="flat")(x)]
    model = keras.Model(inputs, ends)
    errors = int8_errors(model, IMAGES[:32])
    tensors = [
        tensor.layer
        for tensor in errors.tensors
        if tensor.kind == "activations"
    ]
    assert tensors.count("separable") == 2
    assert "sum" in tensors
    report = export_litert(
        model,
        tmp_path / "a.tflite",
        mode="int8",
        representative_data=IMAGES[:32],
        floats=["separable"],
    )
    kinds = [text.partition(" ")[0] for text in report.in_floats]
    assert kinds[:2] == ["DEPTHWISE_CONV_2D", "CONV_2D"]


def test_refusals(model, tmp_path):
    path, data = tmp_path / "a.tflite", {"representative_data": IMAGES}
    with pytest.raises(ValueError, match="mode='int8'"):
        export_litert(model, path, equalize=True)
    with pytest.raises(ValueError, match="mode='int8'"):
        export_litert(model, path, mode="small", floats="auto", **data)
    with pytest.raises(ValueError, match=r"names of layers.*'hed'"):
        export_litert(model, path, mode="int8", floats=["hed"], **data)
    with pytest.raises(ValueError, match="a list of names"):
        export_litert(model, path, mode="int8", floats="head", **data)
    with pytest.raises(ValueError, match="'measured', 'fitted'"):
        export_litert(model, path, mode="int8", ranges="all", **data)
    with pytest.raises(ValueError, match="leave these four out"):
        export_litert(
            model, path, mode="int8", max_loss=0.1, equalize=True, **data
        )
    with pytest.raises(ValueError, match="`max_loss`"):
        export_litert(model, path, mode="int8", max_loss=-0.1, **data)
    with pytest.raises(ValueError, match="mode='int8'"):
        export_litert(model, path, mode="float16", max_loss=0.1)
    trained = kso.quantize_aware(model)
    trained(IMAGES, training=True)
    with pytest.raises(ValueError, match="`exclude`"):
        export_litert(trained, path, mode="int8", floats=["head"])
    with pytest.raises(ValueError, match="without trained ranges"):
        int8_errors(trained, IMAGES)
    assert not path.exists()
