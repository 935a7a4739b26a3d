"""`shrink`: the smallest file that keeps the limits, judged on rows that are held out."""

import re

import keras
import numpy as np
import pytest

from keras_sparse_ortho.errors import ShrinkError
from keras_sparse_ortho.export import ShrinkReport, Trial, load_litert, shrink
from keras_sparse_ortho.export._judge import Judge, Score, closeness, same_class

ROWS = np.random.default_rng(0).normal(size=(400, 16)).astype("float32")


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Dense(256, "relu"), keras.layers.Dense(64, "relu")]
    head = keras.layers.Dense(3, "softmax")
    return keras.Sequential([keras.Input((16,)), *layers, head])


def test_scores():
    want = np.array([[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])
    got = np.array([[0.6, 0.4], [0.7, 0.3], [0.0, 1.0]])
    judge = Judge([want], None, None)
    assert judge.name == "agreement"
    assert judge.dense.mean == 1.0
    assert judge.score([got]).mean == pytest.approx(2 / 3)
    labelled = Judge([want], np.array([0, 0, 1]), None)
    assert labelled.name == "accuracy"
    assert labelled.dense.mean == pytest.approx(2 / 3)
    assert labelled.score([got]).mean == 1.0
    assert same_class(np.array([[0.2], [0.9]]), np.array([[0.6], [0.7]])).tolist() == [0, 1]


def test_closeness_is_the_explained_variance():
    want = np.array([[3.0, 0.0], [-3.0, 0.0]])
    assert closeness(want, want).tolist() == [1.0, 1.0]
    np.testing.assert_allclose(closeness(want, want + np.array([[0.3, 0.0]])), 0.99)
    assert Judge([want], None, None).name == "closeness"


def test_each_output_is_scored_by_its_kind():
    classes, boxes = np.array([[0.9, 0.1], [0.2, 0.8]]), np.array([[3.0], [-3.0]])
    judge = Judge([boxes, classes], None, None)
    assert judge.name == "agreement and closeness"
    assert judge.score([boxes + 0.3, classes[::-1]]).mean == pytest.approx(0.5 * (0.99 + 0.0))
    judge = Judge([boxes, classes], [boxes[:, 0], np.array([0, 1])], None)
    assert judge.name == "accuracy and closeness"
    assert judge.dense.mean == 1.0
    with pytest.raises(ValueError, match=r"labels of 1 outputs, and a model with 2"):
        Judge([boxes, classes], np.array([0, 1]), None)


@pytest.mark.parametrize(
    ("outputs", "labels", "name", "score"),
    [
        ([[2.0, -1.0], [0.0, 3.0]], [[0], [0]], "accuracy", 0.5),  # logits and numbers
        ([[2.0, -1.0], [0.0, 3.0]], [[1, 0], [0, 1]], "accuracy", 1.0),
        ([[2.0], [0.3]], [1, 0], "accuracy", 0.5),  # one logit: its half is 0
        ([[0.9], [0.3]], [1, 0], "accuracy", 1.0),
        ([[0.9, 0.8], [0.3, 0.2]], [[1, 1], [0, 1]], "accuracy", 0.75),  # several at once
        ([[2.5], [0.5]], [2.5, 0.5], "closeness", 1.0),
    ],
)
def test_labels_of_all_kinds(outputs, labels, name, score):
    judge = Judge([np.array(outputs)], np.array(labels), None)
    assert (judge.name, judge.dense.mean) == (name, score)


def test_labels_that_do_not_fit_are_refused():
    for labels in ([1, 2], [[0, 1, 2], [0, 1, 2]]):
        with pytest.raises(ValueError, match=r"numbers of its classes. Received: labels of shape"):
            Judge([np.eye(2)], np.array(labels), None)


def test_a_metric_of_the_user():
    def first(want, got):
        return want[:, 0] == got[:, 0]

    want = np.array([[1.0, 2.0], [3.0, 4.0]])
    judge = Judge([want], None, first)
    assert judge.name == "first"
    assert judge.score([np.array([[1.0, 0.0], [0.0, 4.0]])]).mean == 0.5
    with pytest.raises(ValueError, match=r"Received: metric=.best"):
        Judge([want], None, "best")


def test_an_interval_holds_the_mean_and_narrows_with_rows():
    rng = np.random.default_rng(0)
    widths = []
    for rows in (50, 5000):
        want = np.eye(2)[np.zeros(rows, int)]
        got = np.eye(2)[(rng.random(rows) < 0.2).astype(int)]
        score = Judge([want], None, None).score([got])
        assert score.low < score.mean < score.high
        widths.append(score.high - score.low)
    assert widths[1] < widths[0] / 5


@pytest.mark.slow
@pytest.mark.tensorflow_only
def test_the_file_that_is_written_is_the_one_of_the_table(model, tmp_path):
    path = tmp_path / "small.tflite"
    report = shrink(model, ROWS, path, minutes=0.01, max_drop=0.1)
    taken = report.taken
    assert taken.bytes == path.stat().st_size
    assert taken.score.mean >= report.dense.mean - 0.1
    assert {one.route for one in report.trials} >= {"float16", "dynamic_int8", "int8"}
    assert any(one.name.startswith("density 0.2") for one in report.trials)
    assert report.untried[0] == 0.1  # the model keeps its score at 0.2, and the time is over
    assert "density 0.1" in report.words[-1]
    good = [one for one in report.trials if report.dense.mean - one.score.mean <= 0.1]
    assert taken.bytes == min(one.bytes for one in good)
    assert f"->{taken.name}" in str(report)
    assert load_litert(path).predict(ROWS[:4]).shape == (4, 3)


@pytest.mark.tensorflow_only
def test_outputs_in_their_order_inputs_by_name_and_frozen_layers(tmp_path):
    inputs = {name: keras.Input((8,), name=name) for name in ("b", "a")}
    y = keras.layers.Dense(64, "relu", trainable=False)(
        keras.layers.Concatenate()([*inputs.values()])
    )
    ends = [keras.layers.Dense(3, "softmax", name="z")(y), keras.layers.Dense(2, name="c")(y)]
    model = keras.Model(inputs, ends)
    rows = {"a": ROWS[:, :8].astype("float64"), "b": ROWS[:, 8:]}
    labels = dict(zip(("z", "c"), model.predict(rows, verbose=0), strict=True))
    path = tmp_path / "small.tflite.gz"
    report = shrink(model, (rows, labels), path, minutes=0, max_drop=0.02)
    assert report.measure == "accuracy and closeness"
    assert report.taken.bytes == path.stat().st_size
    assert report.taken.score.mean > 0.98


@pytest.mark.tensorflow_only
def test_nothing_is_written_when_no_file_is_within_the_limits(model, tmp_path):
    path = tmp_path / "small.tflite"
    path.write_bytes(b"older")
    with pytest.raises(ShrinkError, match=r"max_bytes=100.*\n"):
        shrink(model, ROWS, path, minutes=0, max_bytes=100)
    assert path.read_bytes() == b"older"


class HeldRowsError(Exception):
    """Carries the outputs of the held rows, which a metric is asked to compare."""


def identity(units):
    """A model that returns its inputs."""
    layer = keras.layers.Dense(units, kernel_initializer="identity")
    return keras.Sequential([keras.Input((units,)), layer])


def trial(report, route):
    return next(one for one in report.trials if one.route == route)


@pytest.mark.tensorflow_only
def test_the_rows_that_judge_do_not_calibrate(tmp_path):
    """One held row is huge: a file that was calibrated on it cannot tell the others apart."""
    path, rows = tmp_path / "m.tflite", np.random.default_rng(0).normal(size=(200, 4))

    def raise_outputs(want, got):
        raise HeldRowsError(want)

    with pytest.raises(HeldRowsError) as error:
        shrink(identity(4), rows, path, minutes=0, metric=raise_outputs)
    (held,) = error.value.args
    rows[np.abs(rows - held[0]).sum(axis=1).argmin()] *= 1000.0

    def is_close(want, got):
        return np.abs(want - got).max(axis=1) < 0.1

    report = shrink(identity(4), rows, path, minutes=0, metric=is_close)
    assert trial(report, "int8").score.mean > 0.9


@pytest.mark.tensorflow_only
def test_closeness_is_measured_around_the_mean_of_each_output(tmp_path):
    """Of outputs around 0 and 1000, one range of integers keeps which is which, and no more."""
    rows = np.random.default_rng(0).normal(size=(200, 2))
    model = identity(2)
    model.layers[0].bias.assign([0.0, 1000.0])
    report = shrink(model, rows, tmp_path / "m.tflite", minutes=0, metric="closeness")
    assert trial(report, "int8").score.mean < 0.5
    assert trial(report, "float16").score.mean > 0.99


def test_the_words_say_how_much_larger_and_slower_a_dense_file_is():
    score = Score(0.9, 0.89, 0.91)
    sparse = Trial("density 0.2, at once", "int8", score, bytes=100, gzip_bytes=90, ms=2.0)
    dense = Trial("dense", "int8", score, bytes=250, gzip_bytes=240, ms=7.0)
    options = {"measure": "accuracy", "rows": 100, "dense": score, "max_drop": 0.01}
    report = ShrinkReport("m.tflite", taken=sparse, trials=(dense, sparse), **options)
    (sentence,) = [words for words in report.words if "dense int8" in words]
    assert [float(number) for number in re.findall(r"\d+\.\d+", sentence)] == [2.5, 3.5]


@pytest.mark.tensorflow_only
def test_few_rows_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match="at least 32 rows"):
        shrink(model, ROWS[:20], tmp_path / "small.tflite")
