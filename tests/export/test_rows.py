"""Which rows a file is compared on, and calibration rows that the model was not trained on."""

import re

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.export import (
    doubts,
    export_litert,
    rows_of,
    signature_of,
    task_of,
    warn_of_rows,
)
from tests.export import models
from tests.helpers import Chain, array

pytestmark = pytest.mark.core

L = keras.layers
RNG = np.random.default_rng(0)
X = RNG.normal(size=(256, 32)).astype("float32")
IMAGES = RNG.uniform(size=(64, 8, 8, 1)).astype("float32")


def mlp(head="linear"):
    """With biases and outputs as large as training leaves them."""
    rng, model = np.random.default_rng(1), models.mlp(32, (64,), 4)
    model.layers[-1].activation = keras.activations.get(head)
    for variable in model.weights:
        scale = 5.0 if variable.path == "head/kernel" else 1.0
        shift = (
            0.1 * rng.normal(size=variable.shape)
            if "bias" in variable.path
            else 0.0
        )
        variable.assign(scale * array(variable) + shift)
    return model


def cnn():
    layers = [
        L.Conv2D(8, 3, activation="relu"),
        L.Flatten(),
        L.Dense(4, activation="softmax"),
    ]
    return keras.Sequential([keras.Input((8, 8, 1)), *layers])


def normalized(x=IMAGES):
    """A batch normalization with the statistics of `x` behind a convolution."""
    conv, norm = L.Conv2D(8, 3), L.BatchNormalization(momentum=0.0, name="norm")
    layers = [conv, norm, L.ReLU(), L.Flatten(), L.Dense(4)]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers])
    norm(conv(x), training=True)
    return model


def doubts_of(model, rows):
    return doubts(model, signature_of(model, 1, rows), [rows])


@pytest.mark.parametrize(
    ("make", "rows"),
    [
        (mlp, X),
        (lambda: mlp("softmax"), X),
        (cnn, IMAGES),
        (normalized, 2 * IMAGES - 1),
        (lambda: normalized(255 * IMAGES), 255 * IMAGES),
        (
            lambda: keras.Sequential(
                [keras.Input((8,)), L.Dense(4, use_bias=False)]
            ),
            300 * X[:, :8],
        ),
    ],
)
def test_rows_like_those_of_training_are_not_doubted(make, rows):
    model = make()
    # What was trained on large values gives small ones.
    if len(model.layers) == 1:
        model.layers[0].kernel.assign(array(model.layers[0].kernel) / 300)
    assert doubts_of(model, rows) == []


@pytest.mark.parametrize(
    ("make", "rows", "doubt"),
    [
        (mlp, X / 255, "at most 0.0.*, and the outputs hardly vary"),
        (mlp, X * 255, "up to .*, and the outputs extreme"),
        (lambda: mlp("softmax"), X * 255, "and the outputs extreme"),
        (mlp, 0 * X, "all rows are equal"),
        (mlp, X[:15], "15 rows are few"),
        (mlp, X[:1], "1 row is few"),
        (normalized, IMAGES / 255, "and the outputs hardly vary"),
        (normalized, IMAGES * 255, "and the outputs extreme"),
    ],
)
def test_rows_that_are_few_equal_or_scaled_otherwise(make, rows, doubt):
    (found,) = doubts_of(make(), rows)
    assert re.search(doubt, found), found


def test_rows_to_compare_on_are_held_out():
    signature = signature_of(mlp(), 1)
    rows = rows_of(signature, None, [X[:100]], trained=False)
    assert rows.origin == "rows held out of representative_data"
    (kept,), (apart,) = rows.calibrating, rows.compared
    assert (len(kept), len(apart)) == (75, 25)
    both = np.concatenate([kept, apart])
    np.testing.assert_array_equal(
        np.unique(both, axis=0), np.unique(X[:100], axis=0)
    )
    assert len(rows_of(signature, None, [X], trained=False).compared[0]) == 32


@pytest.mark.parametrize(
    ("sample", "data", "batch", "trained", "origin", "calibrating"),
    [
        (
            None,
            X[:15],
            1,
            False,
            "representative_data, rows that calibrated the file",
            15,
        ),
        (
            None,
            X[:20],
            16,
            False,
            "representative_data, rows that calibrated the file",
            20,
        ),
        (None, X[:40], 1, True, "representative_data", 40),
        (X[:9], X[:40], 1, False, "sample, rows that calibrated the file", 40),
        (X[30:50], X[:40], 1, False, "sample", 40),
        (None, None, 1, False, "standard normal rows", None),
    ],
)
def test_where_rows_come_from(
    sample, data, batch, trained, origin, calibrating
):
    signature = signature_of(mlp(), batch)
    given = [None if one is None else [one] for one in (sample, data)]
    rows = rows_of(signature, *given, trained=trained)
    assert rows.origin == origin
    assert (rows.calibrating and len(rows.calibrating[0])) == calibrating


@pytest.mark.parametrize("sample", [None, X[200:]])
def test_rows_that_choose_do_nothing_else(sample):
    signature = signature_of(mlp(), 1)
    compared = None if sample is None else [sample]
    rows = rows_of(signature, compared, [X[:200]], False, chooses=True)
    uses = [rows.calibrating[0], rows.choosing[0], rows.compared[0]]
    assert [len(part) for part in uses[:2]] == [
        136 if sample is None else 168,
        32,
    ]
    every = np.concatenate(uses)
    assert len(np.unique(every, axis=0)) == len(every)
    few = rows_of(signature, compared, [X[:12]], False, chooses=True)
    assert few.origin == ("sample" if sample is not None else origin_of_few())
    assert len(few.calibrating[0]) == 12 >= len(few.choosing[0])


def origin_of_few():
    return "representative_data, rows that calibrated the file"


def test_trained_ranges_of_zeros_are_told():
    model = kso.quantize_aware(mlp())
    model(0 * X, training=True)
    with pytest.warns(UserWarning, match="must hold more than zero.*hidden"):
        warn_of_rows(task_of(model, 1, X[:32], None, None, 60.0))


@pytest.mark.parametrize(
    "data", [X, (X, X[:, 0]), [(X[:32], X[:32, 0])] * 4, X.astype("float64")]
)
def test_representative_data_give_the_shapes_of_a_subclassed_model(data):
    model = Chain(L.Dense(4))
    model(X[:1])
    rows = iter(data) if isinstance(data, list) else data
    task = task_of(model, 1, None, rows, None, 60.0)
    assert task.signature.inputs[0].shape == (1, 32)
    assert task.signature.inputs[0].dtype == "float32"


@pytest.mark.tensorflow_only
def test_an_int8_file_of_wrongly_scaled_rows_is_doubted(tmp_path):
    with pytest.warns(
        UserWarning, match="these rows are doubtful.*hardly vary"
    ):
        export_litert(
            mlp(),
            tmp_path / "m.tflite",
            mode="int8",
            representative_data=X / 255,
        )
    report = export_litert(
        mlp(), tmp_path / "m.tflite", mode="int8", representative_data=X
    )
    assert (report.compared_on, report.sample_rows) == (
        "rows held out of representative_data",
        32,
    )
    assert "32 rows (rows held out of representative_data)" in str(report)
