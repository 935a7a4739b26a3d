"""Arguments that are refused before any time is spent."""

import os
import sys

import keras
import numpy as np
import pytest

from keras_sparse_ortho.export import (
    Worker,
    c_array,
    export_litert,
    load_litert,
)
from tests.export.models import layers, tiny

pytestmark = pytest.mark.tensorflow_only


@pytest.fixture(autouse=True)
def _no_process(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a worker was started")

    monkeypatch.setattr(Worker, "run", refuse)


def refused(message, model, path, **arguments):
    with pytest.raises(ValueError, match=message) as caught:
        export_litert(model, path, **arguments)
    assert "Received: " in str(caught.value)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.tflite"


def sequential(layer, *shape, **options):
    return keras.Sequential([keras.Input(shape, **options), layer])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: keras.Sequential([layers.Dense(2)]), "unbuilt model"),
        (lambda: layers.Dense(2), "must be a model of Keras 3"),
        (
            lambda: None,
            "must be a model of Keras 3. Received: model of type builtins.NoneType",
        ),
        (
            lambda: sequential(layers.GRU(2), None, 8, name="sound"),
            r"input `sound` with shape=\(None, None, 8\)",
        ),
        (
            lambda: sequential(layers.Dense(2), 3, batch_size=4, name="x"),
            r"`x` is fixed at 4 .* batch_size=1",
        ),
        (
            lambda: sequential(
                layers.Embedding(5, 2), 3, dtype="int32", name="ids"
            ),
            "input `ids`, whose dtype is int32",
        ),
    ],
)
def test_model(make, message, path):
    refused(message, make(), path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "int2"}, "mode='int2'"),
        (
            {"mode": "fast", "target": "arm"},
            r"one of \['arm64'\].*target='arm'",
        ),
        ({"target": "arm64"}, "with mode='fast'.*mode=None"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"batch_size": 2.0}, r"batch_size=2\.0"),
        ({"tolerance": -1.0}, r"tolerance=-1\.0"),
        ({"tolerance": float("nan")}, "tolerance=nan"),
        ({"mode": "int8"}, "`representative_data` is needed"),
        ({"mode": "float32+csr"}, "name of a route"),
        (
            {"representative_data": np.ones((2, 4))},
            "`representative_data` is unused",
        ),
        (
            {"sample": np.ones((2, 5))},
            r"\(rows, 4\)\. Received: shape=\(2, 5\)",
        ),
        ({"sample": np.ones((2, 4), complex)}, "an input of dtype complex128"),
        ({"sample": np.ones((0, 4))}, r"rows=\[0\]"),
        (
            {"sample": {"y": np.ones((2, 4)), "z": np.ones((2, 4))}},
            r"keys \['y', 'z'\]",
        ),
        ({"sample": np.full((1, 4), np.nan)}, "NaN or infinity in row 0"),
        (
            {
                "mode": "int8",
                "representative_data": np.ones((2, 4)),
                "batch_size": 3,
            },
            "2 rows with batch_size=3",
        ),
    ],
)
def test_argument(path, arguments, message):
    refused(message, tiny(), path, **arguments)


def test_names_of_several_inputs(path):
    a, b = keras.Input((2,), name="a"), keras.Input((2,), name="b")
    model = keras.Model([a, b], layers.Add()([a, b]))
    x = np.ones((2, 2))
    refused(
        r"\['a', 'b'\].*keys \['a', 'c'\]", model, path, sample={"a": x, "c": x}
    )
    refused(r"\['a', 'b'\].*a list of 3 arrays", model, path, sample=[x, x, x])
    refused(r"rows=\[2, 1\]", model, path, sample=[x, x[:1]])


def test_path(tmp_path):
    refused("`path` must be a path, .*path=None", tiny(), None)
    for call, argument in (
        (lambda: load_litert(None), "path"),
        (lambda: c_array(None, "m.h"), "file"),
        (lambda: c_array("m.tflite", None), "path"),
    ):
        with pytest.raises(
            ValueError, match=f"`{argument}` must be a path.*{argument}=None"
        ):
            call()


@pytest.mark.parametrize("name", ["tensorflow", "ai_edge_litert"])
def test_missing_package_names_the_extra(monkeypatch, path, name):
    model = tiny()
    # `None` is how Python marks a blocked import. Without litert-converter TensorFlow is needed.
    for blocked in (name, "litert_converter"):
        monkeypatch.setitem(sys.modules, blocked, None)
    with pytest.raises(
        ImportError, match=r'pip install "keras-sparse-ortho\[litert\]"'
    ) as caught:
        export_litert(model, path)
    assert caught.value.name == name


def test_where_no_file_can_be_written(tmp_path):
    refused("make the folder first", tiny(), tmp_path / "none" / "m.tflite")
    refused("make the folder first", tiny(), "")
    refused("but a folder has that name", tiny(), tmp_path)
    os.mkfifo(tmp_path / "pipe.tflite")
    refused(
        "but a device, pipe or socket has that name",
        tiny(),
        tmp_path / "pipe.tflite",
    )
    refused("usually ends in `.tflite`", tiny(), tmp_path / "m.h5")
