"""`shrink`: the smallest file that keeps the limits, judged on rows that are held out."""

import dataclasses
import gzip
import math
import types
import zlib

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.errors import ExportConversionError, ShrinkError
from keras_sparse_ortho.export import load_litert
from keras_sparse_ortho.models import OutputKind
from keras_sparse_ortho.shrinking import (
    Examples,
    Judge,
    Narrowing,
    OutputScore,
    Score,
    Search,
    ShrinkReport,
    Terms,
    Trial,
    Trials,
    WidthShares,
    chosen,
    closeness,
    same_class,
    shortly,
    shrink,
    width_table,
)
from tests.helpers import assert_same, slow_on_jax
from tests.shrinking import networks

SOFTMAX = OutputKind("softmax", "classes")
SIGMOID = OutputKind("sigmoid", "bits")
LOGIT = OutputKind("linear", "bits")
LOGITS = OutputKind("linear", "classes")
VALUES = OutputKind("sigmoid", "values")
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
    judge = Judge([want], None, "agreement", [SOFTMAX])
    assert judge.name == "agreement"
    assert judge.dense.mean == 1.0
    assert judge.score([got]).mean == pytest.approx(2 / 3)
    labelled = Judge([want], np.array([0, 0, 1]), None, [SOFTMAX])
    assert labelled.name == "accuracy"
    assert labelled.dense.mean == pytest.approx(2 / 3)
    assert labelled.score([got]).mean == 1.0
    assert same_class(
        np.array([[0.2], [0.9]]), np.array([[0.6], [0.7]])
    ).tolist() == [0, 1]


def test_closeness_is_the_explained_variance():
    want = np.array([[3.0, 0.0], [-3.0, 0.0]])
    assert closeness(want, want).tolist() == [1.0, 1.0]
    np.testing.assert_allclose(
        closeness(want, want + np.array([[0.3, 0.0]])), 0.99
    )
    assert Judge([want], None, None).name == "closeness"


def test_each_output_is_scored_by_its_kind():
    classes, boxes = (
        np.array([[0.9, 0.1], [0.2, 0.8]]),
        np.array([[3.0], [-3.0]]),
    )
    kinds = [OutputKind("linear"), SOFTMAX]
    judge = Judge([boxes, classes], None, None, kinds)
    assert judge.name == "closeness and expected accuracy"
    answers = [boxes + 0.3, classes[::-1]]
    assert judge.score(answers).mean == pytest.approx(0.5 * (0.99 + 0.15))
    verdict = judge.verdict(answers)
    # Of the classes, which lose more than boxes.
    assert verdict.lost == pytest.approx(0.85 - 0.15)
    assert verdict.margin == pytest.approx(0.1 / np.sqrt(2))
    assert verdict.agreement == 0.0
    judge = Judge(
        [boxes, classes], [boxes[:, 0], np.array([0, 1])], None, kinds
    )
    assert judge.name == "accuracy and closeness"
    assert judge.dense.mean == 1.0
    with pytest.raises(
        ValueError, match=r"labels of 1 outputs, and a model with 2"
    ):
        Judge([boxes, classes], np.array([0, 1]), None)


@pytest.mark.parametrize(
    ("outputs", "labels", "kind", "name", "score"),
    [
        (
            [[2.0, -1.0], [0.0, 3.0]],
            [[0], [0]],
            LOGITS,
            "accuracy",
            0.5,
        ),  # numbers of classes
        ([[2.0, -1.0], [0.0, 3.0]], [[1, 0], [0, 1]], LOGITS, "accuracy", 1.0),
        (
            [[2.0], [0.3]],
            [1, 0],
            LOGIT,
            "accuracy",
            0.5,
        ),  # one logit: its half is 0
        (
            [[0.9], [0.3]],
            [1, 0],
            LOGIT,
            "accuracy",
            0.5,
        ),  # in [0, 1], and still a logit
        ([[0.9], [0.3]], [1, 0], SIGMOID, "accuracy", 1.0),
        ([[0.9], [0.3]], [1, 0], OutputKind("sigmoid"), "accuracy", 1.0),
        (
            [[0.9, 0.8], [0.3, 0.2]],
            [[1, 1], [0, 1]],
            SIGMOID,
            "accuracy",
            0.75,
        ),  # several at once
        ([[0.9, 0.2], [0.3, 0.8]], [[1, 0], [0, 1]], SIGMOID, "accuracy", 1.0),
        ([[2.5], [0.5]], [2.5, 0.5], OutputKind("linear"), "closeness", 1.0),
        ([[1.0], [0.0]], [1, 0], VALUES, "closeness", 1.0),
    ],
)
def test_labels_of_all_kinds(outputs, labels, kind, name, score):
    judge = Judge([np.array(outputs)], np.array(labels), None, [kind])
    assert (judge.name, judge.dense.mean) == (name, score)


@pytest.mark.parametrize(
    ("kind", "name", "half"),
    [
        (SIGMOID, "expected accuracy", 0.5),
        (LOGIT, "expected accuracy", 0.0),
        (VALUES, "closeness", None),
        (OutputKind("sigmoid"), "closeness", None),
        (OutputKind(), "closeness", None),
    ],
)
def test_one_output_between_0_and_1_is_a_class_if_graph_and_loss_say_so(
    kind, name, half
):
    want = np.linspace(0.1, 0.9, 20)[:, None]
    judge = Judge([want], None, None, [kind], least_loss=0.0)
    assert judge.name == name
    ruined = [np.full_like(want, 0.55)]
    if name == "closeness":
        assert judge.score(ruined).mean < 0.5
    else:  # always the second class
        second = want if half == 0.5 else 1.0 / (1.0 + np.exp(-want))
        assert judge.score(ruined).mean == pytest.approx(np.mean(second))
        assert judge.verdict(ruined).agreement == np.mean(want > half)


def test_two_classes_of_an_unknown_half_need_a_loss():
    want = np.linspace(0.1, 0.9, 20)[:, None]
    for labels, metric in ((None, "agreement"), (np.arange(20) % 2, None)):
        with pytest.raises(
            ValueError,
            match=r"Compile it with its loss.*Received: an output of",
        ):
            Judge([want], labels, metric, [OutputKind()])


def test_labels_that_do_not_fit_are_refused():
    for labels in ([1, 2], [[0, 1, 2], [0, 1, 2]]):
        with pytest.raises(
            ValueError,
            match=r"numbers of its classes. Received: labels of shape",
        ):
            Judge([np.eye(2)], np.array(labels), None, [SOFTMAX])


def test_a_metric_of_the_user():
    def first(want, got):
        return want[:, 0] == got[:, 0]

    want = np.array([[1.0, 2.0], [3.0, 4.0]])
    judge = Judge([want], None, first)
    assert judge.name == "first"
    assert judge.score([np.array([[1.0, 0.0], [0.0, 4.0]])]).mean == 0.5
    with pytest.raises(ValueError, match=r"Received: metric=.best"):
        Judge([want], None, "best")
    with pytest.raises(
        ValueError, match=r"Use no `metric`, and data=\(x, labels\).*'accuracy'"
    ):
        Judge([want], None, "accuracy")


def test_metrics_by_output():
    rng = np.random.default_rng(0)
    boxes = rng.normal(size=(40, 4))
    classes = np.eye(3)[rng.integers(0, 3, 40)]

    def overlap(want, got):
        return np.clip(1.0 - np.abs(want - got).mean(axis=-1), 0.0, 1.0)

    judge = Judge(
        [boxes, classes],
        None,
        {"box": overlap},
        [VALUES, SOFTMAX],
        ["box", "class"],
    )
    assert judge.name == "expected accuracy and overlap"
    verdict = judge.verdict([boxes + 0.1, classes])
    assert verdict.outputs["box"].lost == pytest.approx(0.1)
    assert verdict.outputs["class"].lost == 0.0
    with pytest.raises(
        ValueError, match=r"'box', 'class'. Received: the unknown 'boxes'"
    ):
        Judge(
            [boxes, classes],
            None,
            {"boxes": overlap},
            names=["box", "class"],
        )
    with pytest.raises(
        ValueError, match=r"`metric` must score each row.*<lambda>, which gives"
    ):
        Judge(
            [boxes, classes],
            None,
            {"box": lambda want, got: 1.0 - overlap(want, got)},
            [VALUES, SOFTMAX],
            ["box", "class"],
        )


@pytest.mark.parametrize(
    ("metric", "received"),
    [
        (
            lambda want, got: np.mean((want - got) ** 2, axis=-1),
            "from 0 to 0, 0 in the mean",
        ),
        (
            lambda want, got: np.minimum(np.abs(want - got).mean(axis=-1), 1.0),
            "from 0 to 0",
        ),
        (
            lambda want, got: 100.0 * (want == got).mean(axis=-1),
            "from 100 to 100",
        ),
        (
            lambda want, got: -np.abs(want - got).mean(axis=-1) - 1.0,
            "from -1 to -1",
        ),
        (lambda want, got: np.float64(1.0), "of shape \\(\\) for 40 rows"),
        (lambda want, got: np.full(len(got), np.nan), "40 not finite"),
    ],
    ids=["squares", "distances", "percent", "negative", "number", "nan"],
)
@pytest.mark.parametrize("with_labels", [False, True])
def test_a_metric_must_be_a_score(metric, received, with_labels):
    want = np.random.default_rng(0).normal(size=(40, 3))
    with pytest.raises(
        ValueError, match=f"`metric` must.*Received: .*{received}"
    ):
        Judge([want], want if with_labels else None, metric)


def test_rows_that_cannot_tell_files_apart_are_known():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 10, 300)
    outputs = np.eye(10)[labels] + 0.1 * rng.random((300, 10))
    outputs /= outputs.sum(axis=1, keepdims=True)
    assert not Judge([outputs], labels, None, [SOFTMAX]).is_by_chance
    assert Judge(
        [outputs], rng.permutation(labels), None, [SOFTMAX]
    ).is_by_chance
    assert not Judge([outputs], None, None, [SOFTMAX]).is_by_chance
    lucky = np.where(
        np.arange(300) < 45, labels, (labels + 1 + labels % 9) % 10
    )
    by_luck = Judge([outputs], lucky, None, [SOFTMAX])
    assert by_luck.dense.mean == pytest.approx(0.15)
    assert by_luck.is_by_chance
    # All right, on few rows.
    few = Judge([outputs[:8]], labels[:8], None, [SOFTMAX])
    assert not few.is_by_chance
    equal = np.repeat(outputs[:1], 300, axis=0)
    assert Judge([equal], None, None, [SOFTMAX]).is_by_chance
    assert Judge([equal], None, None, [VALUES]).is_by_chance


def rare_sites(share):
    """Probabilities of 3 classes for 50 positions; so many positions are not of class 0."""
    rng = np.random.default_rng(0)
    classes = np.where(
        rng.random((200, 50)) < share, rng.integers(1, 3, (200, 50)), 0
    )
    return 0.01 + 0.97 * np.eye(3)[classes]


@pytest.mark.parametrize(("share", "accepts"), [(0.005, True), (0.2, False)])
def test_rare_classes_let_one_answer_pass(share, accepts):
    outputs = rare_sites(share)
    judge = Judge([outputs], None, None, [SOFTMAX], ["sites"], 0.01)
    assert not judge.is_by_chance
    accepted = judge.accepted_constants()
    assert [*accepted] == (["sites"] if accepts else [])
    if accepts:
        assert 0.0 < accepted["sites"].lost < 0.01


def test_a_metric_of_rare_classes_refuses_one_answer():
    outputs = rare_sites(0.005)

    def sites_kept(want, got):
        is_site = want.argmax(-1) > 0
        is_kept = is_site & (want.argmax(-1) == got.argmax(-1))
        count = is_site.sum(axis=1)
        return np.where(count, is_kept.sum(axis=1) / np.maximum(count, 1), 1.0)

    judge = Judge([outputs], None, sites_kept, [SOFTMAX], ["sites"], 0.01)
    assert not judge.accepted_constants()


def test_rows_of_nearly_one_class_are_named(tmp_path):
    inputs = keras.Input((8,))
    logits = keras.layers.Dense(2, name="head")(inputs)
    model = keras.Model(inputs, keras.layers.Softmax()(logits))
    kernel = np.zeros((8, 2))
    kernel[0] = [-4.0, 4.0]
    model.get_layer("head").set_weights([kernel, np.array([20.0, -20.0])])
    rows = np.random.default_rng(0).normal(size=(400, 8))
    rows[:12, 0] = 9.0
    with pytest.warns(UserWarning, match="the same answer would be within"):
        shrink(model, rows, tmp_path / "rare.tflite", max_drop=0.05, minutes=0)


def test_labels_must_be_finite_numbers():
    for labels in (np.array(["cat", "dog"]), np.array([0.0, np.nan])):
        with pytest.raises(
            ValueError,
            match=r"Labels must be finite numbers.*Received: labels of",
        ):
            Judge([np.eye(2)], labels, None, [SOFTMAX])


def trial(name, size, ms, score=1.0, lost=0.0):
    return Trial(
        name, "int8", Score(score, score, score), size, size, ms, lost=lost
    )


def test_no_file_slower_than_dense_integers_is_chosen_unless_asked_for():
    dense, sparse = (
        trial("dense", 367_000, 0.0144),
        trial("sparse", 123_000, 0.0181),
    )
    int4 = trial("int4", 236_000, 0.0143)
    trials = [dense, sparse, int4]
    assert chosen(trials, trials, "both") is int4
    assert chosen([dense, sparse], trials, "both") is dense
    assert chosen(trials, trials, "both", is_slow_allowed=True) is sparse
    assert chosen(trials, trials, "bytes") is sparse
    assert chosen(trials, trials, "ms") is int4
    noisy = trial("sparse", 123_000, 0.0179)  # within the noise of the clock
    assert chosen([dense, noisy, int4], [dense, noisy, int4], "both") is noisy
    assert chosen([sparse], trials, "both") is sparse  # there is no other
    assert chosen([], trials, "both") is None


def test_a_loss_counts_with_its_standard_error():
    some = Trial(
        "dense", "int8", Score(0.99, 0.98, 1.0), lost=0.006, margin=0.005
    )
    assert not some.loses_at_most(0.01)
    assert some.loses_at_most(0.011)
    assert not Trial("dense", "int8", reason="refused").loses_at_most(1.0)


def test_an_answer_that_changes_loses_an_eighth_at_least():
    """By labels such answers of networks on text lost a tenth, where a hundredth was expected."""
    probabilities = np.array([[0.51, 0.49], [0.9, 0.1], [0.2, 0.8], [0.6, 0.4]])
    answers = np.array([[0.4, 0.6], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    judge = Judge([probabilities], None, None, [SOFTMAX])
    lost = judge.verdict([answers]).lost
    assert lost == pytest.approx((0.125 + 0.6) / 4)
    plain = Judge([probabilities], None, None, [SOFTMAX], least_loss=0.0)
    assert plain.verdict([answers]).lost == pytest.approx((0.02 + 0.6) / 4)
    assert judge.verdict([probabilities]).lost == 0.0
    bit = OutputKind("sigmoid", "bits")
    judge = Judge([probabilities[:, :1]], None, None, [bit])
    assert judge.verdict([answers[:, :1]]).lost == pytest.approx(lost)


def test_each_output_has_a_limit_of_its_own():
    rng = np.random.default_rng(0)
    boxes = rng.normal(size=(400, 4))
    classes = np.eye(2)[rng.integers(0, 2, 400)]
    answers = [boxes + 0.2 * rng.normal(size=boxes.shape), classes.copy()]
    answers[1][0] = answers[1][0, ::-1]
    kinds = [OutputKind("linear", "values"), SOFTMAX]
    limits = {"class": 0.01, "box": 0.1}
    names = ["box", "class"]
    judges = [
        Judge([boxes, classes], None, None, kinds, names, limit)
        for limit in (0.1, limits)
    ]
    verdicts = [judge.verdict(answers) for judge in judges]
    assert [*verdicts[0].outputs] == names
    box, label = verdicts[0].outputs.values()
    assert (box.measure, label.measure) == ("closeness", "expected accuracy")
    assert label.lost == pytest.approx(1 / 400)
    assert 0.02 < box.lost < 0.06
    # The output that comes nearest to its limit decides.
    assert [verdict.lost for verdict in verdicts] == [box.lost, label.lost]
    assert verdicts[1].measure == "expected accuracy"
    trial = Trial(
        "narrowed",
        "int8",
        verdicts[1].score,
        lost=label.lost,
        margin=label.margin,
        outputs=verdicts[1].outputs,
    )
    assert trial.loses_at_most(limits)
    assert not trial.loses_at_most({"class": 0.1, "box": 0.01})
    assert not trial.loses_at_most({"class": 0.003, "box": 0.1})
    share = trial.share_of_limit(limits)
    assert share == pytest.approx((label.lost + label.margin) / 0.01)
    assert trial.share_of_limit(0.1) == box.share_of(0.1)


def test_the_table_has_the_score_of_each_output():
    score = Score(0.9, 0.89, 0.91)
    outputs = {
        "class": OutputScore("expected accuracy", 0.95, 0.004, 0.002),
        "box": OutputScore("closeness", 0.85, 0.041, 0.003),
    }
    narrow = Trial(
        "narrowed", "int8", score, 100, 90, 2.0, lost=0.041, outputs=outputs
    )
    failed = Trial("narrowed further", "", reason="refused")
    report = ShrinkReport(
        "m.tflite",
        narrow,
        (narrow, failed),
        "closeness and expected accuracy",
        99,
        score,
        {"class": 0.01, "box": 0.05},
    )
    header, line = str(report).splitlines()[:2]
    for name, text in (("class", "0.9500"), ("box", "0.8500")):
        assert header.index(name) + len(name) == line.index(text) + 6
    assert "  box: 4.10 +- 0.30 of 5 points of closeness" in report.words
    assert (
        "  class: 0.40 +- 0.20 of 1 points of expected accuracy" in report.words
    )
    # One that loses less in one output, and more in another.
    others = outputs | {"box": OutputScore("closeness", 0.84, 0.051, 0.003)}
    better_class = OutputScore("expected accuracy", 0.96, 0.001, 0.002)
    one_better = dataclasses.replace(
        narrow, outputs=others | {"class": better_class}
    )
    assert not narrow.beats(one_better)
    assert narrow.beats(dataclasses.replace(narrow, outputs=others))


@pytest.mark.tensorflow_only
def test_limits_by_output_name_all_outputs(tmp_path):
    inputs = keras.Input((16,))
    hidden = keras.layers.Dense(8, "relu")(inputs)
    model = keras.Model(
        inputs,
        {
            "kind": keras.layers.Dense(3, "softmax", name="z")(hidden),
            "box": keras.layers.Dense(2, name="a")(hidden),
        },
    )
    path = tmp_path / "m.tflite"
    limits = {"kind": 0.02, "box": 0.05}
    report = shrink(model, ROWS, path, minutes=0, max_drop=limits)
    assert report.max_drop == limits
    assert report.taken.loses_at_most(limits)
    assert {
        name: output.measure for name, output in report.taken.outputs.items()
    } == {"kind": "expected accuracy", "box": "closeness"}
    for wrong, received in (
        ({"kind": 0.02}, "no limit for 'box'"),
        (limits | {"z": 1.0}, "the unknown 'z'"),
    ):
        message = f"output of the model: 'box', 'kind'. Received: {received}"
        with pytest.raises(ValueError, match=message):
            shrink(model, ROWS, path, minutes=0, max_drop=wrong)
    with pytest.raises(
        ValueError, match=r"`max_drop\['box'\]` must be a finite"
    ):
        shrink(model, ROWS, path, max_drop=limits | {"box": np.nan})
    with pytest.raises(
        ShrinkError, match=r"max_drop=\{'kind': 0.02, 'box': 0.05\}"
    ):
        shrink(model, ROWS, path, minutes=0, max_drop=limits, max_bytes=10)


def test_the_frontier_has_the_files_that_no_other_beats(tmp_path):
    small, fast = trial("small", 100, 2.0), trial("fast", 200, 1.0)
    right, beaten = (
        trial("right", 300, 3.0, lost=-0.1),
        trial("beaten", 200, 2.0, lost=0.1),
    )
    trials = small, fast, right, beaten
    contents = {0: zlib.compress(b"the small one")}
    figures = (
        "m.tflite",
        fast,
        trials,
        "agreement",
        99,
        Score(1, 1, 1),
        0.01,
        (),
        contents,
    )
    report = ShrinkReport(*figures)
    assert report.frontier == (right, fast, small)
    axes = report.plot()
    places = {text.get_text(): text.xy for text in axes.texts}
    assert places == {
        "right, int8": (300, 1.0),
        "fast, int8": (200, 1.0),
        "small, int8": (100, 1.0),
    }
    assert axes.get_ylabel() == "agreement on 99 examples held out"
    report.write(small, tmp_path / "other.tflite")
    assert (tmp_path / "other.tflite").read_bytes() == b"the small one"
    report.write(small, tmp_path / "other.tflite.gz")
    packed = (tmp_path / "other.tflite.gz").read_bytes()
    assert gzip.decompress(packed) == b"the small one"
    with pytest.raises(
        ValueError, match=r"can be written\. Received: beaten, int8; there are"
    ):
        report.write(beaten, tmp_path / "other.tflite")


def test_no_trial_begins_that_would_end_too_late(tmp_path):
    rows = object.__new__(Examples)
    rows.calibration = ROWS
    for seconds, is_late in ((57.0, True), (59.0, False)):
        say = lambda *_: 50.0  # noqa: E731  after 50 seconds
        trials = Trials(None, rows, tmp_path, Terms(say, seconds, 0.01, 0))
        trials.made = [
            Trial("dense", "int8", seconds=8.0),
            Trial("sparse", "int8", seconds=90.0),
        ]
        assert trials.is_late() == is_late
        narrowed = {"route": "int8", "seconds": 12.0, "widths": {"hidden": 8}}
        trained = narrowed | {"seconds": 90.0}
        trials.made.append(Trial("narrowed to 0.5, trained", **trained))
        assert trials.is_late() == is_late
        trials.made.append(Trial("narrowed to 0.5", **narrowed))
        assert trials.is_late()


def test_time_is_planned_by_the_route_that_is_taken(tmp_path):
    """Static int8 of SpliceAI took 203 seconds, dynamic int8 26."""
    rows = object.__new__(Examples)
    rows.calibration = ROWS
    trials = Trials(None, rows, tmp_path, Terms(lambda *_: 0.0, 600.0, 0.01, 0))
    trials.made = [
        Trial("dense", "dynamic_int8", seconds=26.0),
        Trial("dense", "int8", seconds=203.0),
    ]
    assert trials.dense_seconds() == 203.0
    trials.route = "dynamic_int8"
    assert trials.dense_seconds() == 26.0


def test_the_first_narrower_network_is_planned_by_dense_files(tmp_path):
    rows = object.__new__(Examples)
    rows.calibration = ROWS
    for left, is_late in ((29.0, True), (31.0, False)):
        terms = Terms(lambda *_: 50.0, 50.0 + left, 0.01, 0)
        trials = Trials(None, rows, tmp_path, terms)
        trials.made = [Trial("dense", "int8", seconds=10.0)]
        assert trials.is_late_to_narrow() == is_late
        narrowed = {"route": "int8", "seconds": 6.0, "widths": {"hidden": 8}}
        trials.made.append(Trial("narrowed to 0.5", **narrowed))
        assert not trials.is_late_to_narrow()


@pytest.fixture
def table_minutes(monkeypatch):
    """The minutes of each table of widths that is asked for; none is measured."""
    minutes_of_calls = []
    room = "keras_sparse_ortho.shrinking._narrowing"
    monkeypatch.setattr(
        f"{room}.widths",
        lambda model, data, *, minutes: minutes_of_calls.append(minutes),
    )
    monkeypatch.setattr(f"{room}.channel_groups", repr)
    return minutes_of_calls


def test_the_table_of_widths_has_half_of_the_time_that_is_left(
    tmp_path, table_minutes
):
    rows = object.__new__(Examples)
    rows.calibration = ROWS
    for spent in (20.0, 100.0):
        say = lambda *_, spent=spent: spent  # noqa: E731
        trials = Trials(None, rows, tmp_path, Terms(say, 80.0, 0.01, 0))
        width_table(trials)
    assert table_minutes == [0.5]
    assert trials.untried == ["a table of widths"]


def test_the_table_of_widths_leaves_the_time_of_a_narrower_network(
    tmp_path, table_minutes
):
    rows = object.__new__(Examples)
    rows.calibration = ROWS
    for dense_seconds in (10.0, 14.0, 16.0):
        trials = Trials(
            None, rows, tmp_path, Terms(lambda *_: 20.0, 80.0, 0.01, 0)
        )
        trials.made = [Trial("dense", "int8", seconds=dense_seconds)]
        width_table(trials)
    assert table_minutes == pytest.approx([0.5, 0.3])
    assert trials.untried == ["a table of widths"]


def test_without_time_a_subclassed_model_is_told_why_more_does_not_help(
    tmp_path,
):
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.head = keras.layers.Dense(3)

        def call(self, x):
            return self.head(x)

    model = Subclassed()
    model(ROWS[:1])
    rows = object.__new__(Examples)
    rows.calibration = ROWS
    terms = Terms(lambda *_: 100.0, 80.0, 0.01, 0)
    trials = Trials(model, rows, tmp_path, terms)
    assert width_table(trials) is None
    assert trials.untried == []
    assert "without a `call` of their own (received" in trials.made[0].reason


def examples_to_train(count):
    """Examples with so many rows to train on, each a millisecond of a forward pass."""
    examples = object.__new__(Examples)
    examples._inputs = ROWS
    examples._training = np.resize(np.arange(400), count)
    examples.logits = ["values"]
    examples.seconds_each = 0.001
    examples._step_cost = 4.0
    examples.forward_seconds = lambda model: 0.001
    return examples


@pytest.mark.parametrize(
    ("seconds_each", "count"), [(0.001, 256), (0.1, 120), (0.5, 32)]
)
def test_slow_networks_have_their_ranges_of_fewer_examples(
    tmp_path, seconds_each, count
):
    """SpliceAI's static int8 took 180 of the 600 seconds."""
    examples = examples_to_train(400)
    examples.seconds_each = seconds_each
    examples.held = examples.calibration = ROWS
    terms = Terms(lambda *_: 0.0, 600.0, 0.01, 0)
    trials = Trials(None, examples, tmp_path, terms)
    options = trials._options_of_export("int8")
    assert len(options["representative_data"]) == min(count, len(ROWS))


def rows_and_passes(training):
    (rows,) = training.options["data"]
    return len(rows), training.options["epochs"]


def test_a_training_says_how_many_rows_the_next_one_gets():
    """A row takes its answer, a millisecond, and a step, four forward passes of so long."""
    examples = examples_to_train(8000)
    training = examples.to_train(30.003, 3)
    assert rows_and_passes(training) == (6000, 1)
    examples.took(54.0, training)  # steps take twice as long: a busy machine
    assert rows_and_passes(examples.to_train(27.003, 3)) == (3000, 1)
    examples.took(1.0, training)  # at least 1.5 forward passes for a step
    assert rows_and_passes(examples.to_train(15.001, 3)) == (6000, 1)
    assert examples.to_train(-5.0, 3) is None
    assert examples.to_train(2.501, 3) is None  # 1000 rows are too few
    assert rows_and_passes(examples.to_train(2.501, 3, fewest=500)) == (1000, 1)


def test_all_examples_are_seen_before_some_are_seen_again():
    examples = examples_to_train(2000)
    assert rows_and_passes(examples.to_train(10.001, 3)) == (2000, 1)
    assert rows_and_passes(examples.to_train(18.001, 3)) == (2000, 2)
    assert rows_and_passes(examples.to_train(80.0, 3)) == (2000, 3)


def test_fast_networks_are_trained_longer_in_the_same_time():
    examples = examples_to_train(2000)
    training = examples.to_train(10.001, 3, forward_seconds=0.0005)
    assert rows_and_passes(training) == (2000, 2)
    examples.took(34.0, training)  # steps take four times as long as meant
    assert examples.seconds_each == 0.001
    slower = examples.to_train(34.001, 3, forward_seconds=0.0005)
    assert rows_and_passes(slower) == (2000, 2)


def test_training_ends_in_the_time_that_it_is_given():
    training = examples_to_train(2000).to_train(30.0, 3)
    assert training.options["minutes"] == 0.5


def test_the_forward_pass_of_a_network_is_measured():
    def network(units):
        inputs = keras.Input((32, 8))
        x = keras.layers.LSTM(units)(inputs)
        return keras.Model(inputs, keras.layers.Dense(4)(x))

    rows = np.random.default_rng(0).normal(size=(512, 32, 8))
    examples = object.__new__(Examples)
    examples._timed = rows.astype("float32")
    narrow, wide = (examples.forward_seconds(network(n)) for n in (8, 512))
    assert 0.0 < narrow < wide


@pytest.mark.parametrize("share", [0.0, 0.1])
def test_training_keeps_the_statistics_of_normalization(tmp_path, share):
    layers = [keras.layers.Dense(8), keras.layers.BatchNormalization()]
    head = [keras.layers.ReLU(), keras.layers.Dense(3)]
    model = keras.Sequential([keras.Input((16,)), *layers, *head])
    small = keras.models.clone_model(model)
    mean = np.arange(8.0, dtype="float32")
    small.layers[1].moving_mean.assign(mean)
    kernel = small.layers[0].kernel.numpy()
    examples = examples_to_train(400)
    terms = Terms(types.SimpleNamespace(loud=False), 9.0, 0.01, 0)
    trials = Trials(model, examples, tmp_path, terms)
    training = examples.to_train(9.0, 1, fewest=300)
    minutes = training.options["minutes"] if share else None
    trials._train(
        small, training.with_options(validation_split=share, minutes=minutes)
    )
    assert np.array_equal(small.layers[1].moving_mean.numpy(), mean)
    assert not np.array_equal(small.layers[0].kernel.numpy(), kernel)
    # The scale is trained where training that does harm is undone.
    is_trained = bool(np.any(small.layers[1].gamma.numpy() != 1.0))
    assert is_trained == (share > 0.0)


def narrowing_of_losses(loss_of_share, gain=0.0, seconds=math.inf):
    """A search whose networks lose so much at a share, and less after training.

    Returns it, the trials by name in their order, and the notes of what the time did not allow.
    """
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)])
    trials = {}

    def make(name, make_model, training, route, widths, was_tried=False):
        network = model
        loss = loss_of_share(widths["a"] / 1000)
        if training is not None:
            assert training.options["validation_split"] > 0.0
            assert was_tried
            network = make_model()
            assert network is not model
            assert_same(network.get_weights(), model.get_weights())
            loss -= gain
        made = dataclasses.replace(
            trial(name, 9, 1.0), lost=loss, widths=widths
        )
        score = OutputScore("closeness", 1.0, loss, 0.0)
        trials[name] = dataclasses.replace(made, outputs={"y": score})
        return trials[name], network

    narrowing = object.__new__(Narrowing)
    narrowing._trials = types.SimpleNamespace(
        max_drop=0.01,
        seed=0,
        make=make,
        untried=[],
        is_good=lambda trial: trial.loses_at_most(0.01),
        is_late=lambda: len(trials) >= seconds,
        is_late_to_narrow=lambda: len(trials) >= seconds,
        examples=examples_to_train(2000),
        seconds_to_train=lambda: 10.0,
        most_seconds_to_train=lambda: 15.0,
    )
    narrowing._choice = lambda share: {"a": round(1000 * share)}
    narrowing._choices = []
    narrowing._untrained = []
    narrowing._table = None
    narrowing._route = "int8"
    return narrowing, trials, narrowing._trials.untried


def shares_of(trials, is_trained):
    return [
        float(name.split()[2].rstrip(","))
        for name in trials
        if name.endswith("trained") == is_trained
    ]


def test_networks_are_bisected_untrained_before_any_is_trained():
    """magika trained a network of .75 for 285 seconds, and the time was over."""
    narrowing, trials, _ = narrowing_of_losses(lambda share: 0.1 * (1 - share))
    networks = narrowing.run()
    names = [*trials]
    assert shares_of(trials, False)[:4] == [0.5, 0.75, 0.88, 0.94]
    first_trained = names.index(
        next(name for name in names if name.endswith("trained"))
    )
    assert first_trained == 4
    # Training gains nothing: the good one is the smallest without it.
    assert [name for name, _ in networks] == ["narrowed to 0.94"]


def test_training_finds_smaller_networks_than_there_were():
    narrowing, trials, _ = narrowing_of_losses(
        lambda share: 0.09 * (1 - share), gain=0.02
    )
    networks = [name for name, _ in narrowing.run()]
    assert networks[0] == "narrowed to 0.94"
    smallest = networks[-1]
    assert smallest.endswith(", trained")
    # At .67 a network loses .03, and .01 after training.
    assert 0.66 <= float(smallest.split()[2].rstrip(",")) <= 0.73
    # The one in the middle was made before: it is trained first.
    assert shares_of(trials, True)[0] == 0.75


def test_networks_without_hope_are_not_trained():
    narrowing, trials, _ = narrowing_of_losses(
        lambda share: 0.2 * (1 - share), gain=0.001
    )
    narrowing.run()
    assert shares_of(trials, True)
    for name, made in trials.items():
        if name.endswith("trained"):
            assert made.lost + 0.001 <= 0.03
    assert trials["narrowed to 0.75"].lost > 0.03


def test_training_that_makes_a_network_worse_leaves_it():
    narrowing, trials, _ = narrowing_of_losses(
        lambda share: 0.02 * (1 - share), gain=-0.005
    )
    (*_, (smallest, _)) = narrowing.run()
    assert smallest == "narrowed to 0.5"
    assert f"{smallest}, trained" in trials


def test_the_smallest_good_network_is_trained_last():
    """It gains, and those before it got the time of no training."""

    def loss_of_share(share):
        return 0.006 if share >= 0.5 else 0.06

    narrowing, trials, _ = narrowing_of_losses(loss_of_share, gain=0.004)
    names = [name for name, _ in narrowing.run()]
    assert names == ["narrowed to 0.5, trained"]
    assert shares_of(trials, True) == [0.5]
    # One that loses next to nothing is not trained.
    narrowing, trials, _ = narrowing_of_losses(
        lambda share: loss_of_share(share) - 0.004 * (share >= 0.5)
    )
    assert [name for name, _ in narrowing.run()] == ["narrowed to 0.5"]
    assert shares_of(trials, True) == []


def test_slow_networks_are_trained_for_half_of_the_time():
    """A third of the time was too little for a second training of magika."""
    narrowing, trials, _ = narrowing_of_losses(
        lambda share: 0.09 * (1 - share), gain=0.02
    )
    narrowing._trials.seconds_to_train = lambda: 5.0  # 1,000 rows
    narrowing.run()
    assert shares_of(trials, True)
    narrowing._trials.most_seconds_to_train = lambda: 5.0
    trials.clear()
    narrowing._choices.clear()
    narrowing._untrained.clear()
    narrowing.run()
    assert shares_of(trials, False)
    assert not shares_of(trials, True)


def test_what_the_time_did_not_allow_is_named():
    narrowing, trials, untried = narrowing_of_losses(
        lambda share: 0.1 * (1 - share), seconds=3
    )
    assert narrowing.run() == []
    assert len(trials) == 3
    assert untried == [
        "a network of 0.94 of the cost",
        "narrowed to 0.75, trained",
    ]


def test_training_that_changes_nothing_has_no_file(tmp_path):
    """Its network was exported before; 4 bits, which were not, are exported as they are."""

    def say(*texts):
        return 0.0

    say.loud = False
    layers = [keras.layers.Dense(8), keras.layers.Dense(3)]
    dense = keras.Sequential([keras.Input((16,)), *layers])
    examples = examples_to_train(400)
    terms = Terms(say, 9.0, 0.01, 0)
    trials = Trials(dense, examples, tmp_path, terms)
    trials.export = lambda name, *others: trial(name, 9, 1.0)
    training = examples.to_train(9.0, 1, fewest=300)

    def copy():  # nothing can be better
        return kso.strip(dense)

    again, model = trials.make("a", copy, training, "int8", was_tried=True)
    assert model is None
    assert again.reason == "training lowered no loss on held-out rows"
    new, model = trials.make("b", copy, training, "int8")
    assert new.reason is None
    assert_same(model.get_weights(), dense.get_weights())


def test_the_search_lowers_what_is_preferred():
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(28, "relu"),
            keras.layers.Dense(4),
        ]
    )
    rows = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    table = kso.widths(model, rows, verbose=False)
    shares = WidthShares(table)
    (group,) = (group.name for group in kso.channel_groups(model))
    widths = {group: 16}
    work = (8 * 16 + 16 * 4) / (8 * 28 + 28 * 4)
    size = table.cost(widths, "bytes") / table.cost(cost="bytes")
    assert shares.preferred("ms")(widths) == work
    assert shares.preferred("bytes")(widths) == size
    assert shares.preferred("both")(widths) == 0.5 * (work + size)


def test_the_report_says_which_smaller_file_was_slower():
    trials = trial("dense", 367_000, 0.0144), trial("sparse", 223_000, 0.0720)
    report = ShrinkReport(
        "m.tflite", trials[0], trials, "agreement", 99, Score(1, 1, 1), 0.01
    )
    assert 'prefer="bytes"' in str(report)
    assert (
        "sparse, int8 is smaller (223,000 bytes), but takes 5 times as long"
        in str(report)
    )
    assert "smallest file within" not in str(report)


def test_the_report_says_what_the_next_larger_loss_gives():
    dense = trial("dense", 367_000, 0.0144)
    small, smaller = (
        dataclasses.replace(trial(name, size, 0.01), lost=lost, margin=0.004)
        for name, size, lost in (("a", 90_000, 0.0302), ("b", 40_000, 0.1))
    )
    report = ShrinkReport(
        "m.tflite",
        dense,
        (dense, smaller, small),
        "agreement",
        99,
        Score(1, 1, 1),
        0.01,
    )
    said = "With max_drop=0.035 it would have 90,000 bytes: a, int8."
    assert said in report.words
    assert small.loses_at_most(0.035)
    assert not small.loses_at_most(0.034)
    by_output = dataclasses.replace(report, max_drop={"y": 0.01})
    assert not any("max_drop=" in words for words in by_output.words)


def test_a_report_without_a_file_takes_none():
    trials = (
        trial("dense", 367_000, 0.0144, lost=0.1),
        trial("sparse", 223_000, 0.0720, lost=0.2),
    )
    report = ShrinkReport(
        "m.tflite", None, trials, "agreement", 99, Score(1, 1, 1), 0.01
    )
    assert "->" not in str(report)
    assert "Taken" not in str(report)
    assert (
        "The least loss is 10.0 points of agreement: dense, int8."
        in report.words
    )
    assert "The fewest bytes are 223,000: sparse, int8." in report.words
    failed = Trial("dense", "int8", reason="refused")
    report = ShrinkReport(
        "m.tflite", None, (failed,), "agreement", 99, Score(1, 1, 1), 0.01
    )
    assert report.words == ("No file could be made.",)


def test_an_interval_holds_the_mean_and_narrows_with_rows():
    rng = np.random.default_rng(0)
    widths = []
    for rows in (50, 5000):
        want = np.eye(2)[np.zeros(rows, int)]
        got = np.eye(2)[(rng.random(rows) < 0.2).astype(int)]
        score = Judge([want], None, "agreement", [SOFTMAX]).score([got])
        assert score.low < score.mean < score.high
        widths.append(score.high - score.low)
    assert widths[1] < widths[0] / 5


@pytest.mark.slow
@pytest.mark.tensorflow_only
def test_the_file_that_is_written_is_the_one_of_the_table(model, tmp_path):
    path = tmp_path / "small.tflite"
    report = shrink(model, ROWS, path, minutes=0.5, max_drop=0.1)
    taken = report.taken
    assert taken.bytes == path.stat().st_size
    assert taken.bound <= 0.1
    assert {one.route for one in report.trials} >= {
        "float16",
        "dynamic_int8",
        "int8",
    }
    assert any(one.name.startswith("narrowed to") for one in report.trials)
    good = [one for one in report.trials if one.loses_at_most(0.1)]
    assert taken is chosen(good, report.trials, "both")
    assert f"->{taken.name}" in str(report)
    assert load_litert(path).predict(ROWS[:4]).shape == (4, 3)


@pytest.mark.tensorflow_only
def test_outputs_in_their_order_inputs_by_name_and_frozen_layers(tmp_path):
    inputs = {name: keras.Input((8,), name=name) for name in ("b", "a")}
    y = keras.layers.Dense(64, "relu", trainable=False)(
        keras.layers.Concatenate()([*inputs.values()])
    )
    ends = [
        keras.layers.Dense(3, "softmax", name="z")(y),
        keras.layers.Dense(2, name="c")(y),
    ]
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
    with pytest.raises(ShrinkError, match=r"max_bytes=100.*\n") as refused:
        shrink(model, ROWS, path, minutes=0, max_bytes=100)
    assert "->" not in str(refused.value)
    assert "No file was written." in str(refused.value)
    assert path.read_bytes() == b"older"


class HeldRowsError(Exception):
    """Carries the outputs of the held rows, which a metric is asked to compare."""


def identity(units):
    """A model that returns its inputs."""
    layer = keras.layers.Dense(units, kernel_initializer="identity")
    return keras.Sequential([keras.Input((units,)), layer])


def trial_of(report, route):
    return next(one for one in report.trials if one.route == route)


@pytest.mark.tensorflow_only
def test_the_rows_that_judge_do_not_calibrate(tmp_path):
    """One held row is huge: a file that was calibrated on it cannot tell the others apart."""
    path, rows = (
        tmp_path / "m.tflite",
        np.random.default_rng(0).normal(size=(200, 4)),
    )

    def raise_outputs(want, got):
        raise HeldRowsError(want)

    with pytest.raises(HeldRowsError) as error:
        shrink(identity(4), rows, path, minutes=0, metric=raise_outputs)
    (held,) = error.value.args
    rows[np.abs(rows - held[0]).sum(axis=1).argmin()] *= 1000.0

    def is_close(want, got):
        return np.abs(want - got).max(axis=1) < 0.1

    report = shrink(identity(4), rows, path, minutes=0, metric=is_close)
    assert trial_of(report, "int8").score.mean > 0.9


@pytest.mark.tensorflow_only
def test_closeness_is_measured_around_the_mean_of_each_output(tmp_path):
    """Of outputs around 0 and 1000, one range of integers keeps which is which, and no more."""
    rows = np.random.default_rng(0).normal(size=(200, 2))
    model = identity(2)
    model.layers[0].bias.assign([0.0, 1000.0])
    report = shrink(
        model, rows, tmp_path / "m.tflite", minutes=0, metric="closeness"
    )
    assert trial_of(report, "int8").score.mean < 0.5
    assert trial_of(report, "float16").score.mean > 0.99


def test_the_words_say_how_much_larger_and_slower_a_dense_file_is():
    score = Score(0.9, 0.89, 0.91)
    made = {"route": "int8", "score": score, "lost": 0.0}
    sparse = Trial(
        "density 0.2, at once", **made, bytes=100, gzip_bytes=90, ms=2.0
    )
    dense = Trial("dense", **made, bytes=250, gzip_bytes=240, ms=7.0)
    options = {
        "measure": "accuracy",
        "rows": 100,
        "dense": score,
        "max_drop": 0.01,
    }
    report = ShrinkReport(
        "m.tflite", taken=sparse, trials=(dense, sparse), **options
    )
    said = "Dense int8 is 2.5 times as large and takes 3.5 times as long."
    assert said in report.words
    larger = dataclasses.replace(dense, bytes=4310, ms=0.5)
    report = dataclasses.replace(report, trials=(larger, sparse))
    said = "Dense int8 is 43 times as large and takes 0.25 times as long."
    assert said in report.words


@pytest.mark.tensorflow_only
def test_few_rows_are_refused(model, tmp_path):
    with pytest.raises(ValueError, match="at least 32 rows"):
        shrink(model, ROWS[:20], tmp_path / "small.tflite")


@pytest.mark.tensorflow_only
@pytest.mark.parametrize("minutes", [np.inf, np.nan, -1, "10", None, True])
def test_minutes_are_a_number_from_0_on(minutes, model, tmp_path):
    with pytest.raises(
        ValueError, match=r"`minutes` must be .*Received: minutes="
    ):
        shrink(model, ROWS, tmp_path / "small.tflite", minutes=minutes)


@pytest.mark.tensorflow_only
def test_rows_are_checked_before_any_file_is_made(model, tmp_path, monkeypatch):
    def none(*_, **__):
        raise AssertionError("a file is made")

    monkeypatch.setattr(Trials, "export", none)
    path = tmp_path / "small.tflite"
    wrong = ROWS.copy()
    wrong[77, 0] = np.nan
    for data, message in (
        (wrong, "must be finite.*in row 77"),
        (ROWS[:, :5], r"must have the shape \(rows, 16\)"),
        ((ROWS, np.full(400, "cat")), "labels of `data` must be numbers"),
        (np.full((40, 16), "a"), "inputs that are strings"),
    ):
        with pytest.raises(ValueError, match=message):
            shrink(model, data, path, minutes=0)
    shuffled = ROWS, np.random.default_rng(1).integers(0, 3, 400)
    for data, message in (
        (np.ones_like(ROWS), "All rows of `data` are equal"),
        (shuffled, "cannot tell a good file from a bad one.*accuracy"),
        ((ROWS, None, np.ones(400)), "Sample weights are not used"),
    ):
        with (
            pytest.warns(UserWarning, match=message),
            pytest.raises(AssertionError),
        ):
            shrink(model, data, path, minutes=0)


@pytest.mark.tensorflow_only
def test_a_failed_conversion_is_listed_with_its_cause():
    cause = "int4 needs a Dense kernel stored in fewer than 8 bits: the model has none"
    error = ExportConversionError(
        f"The LiteRT converter failed on model 'a' by route 'b'. Received: ValueError: {cause}"
    )
    assert shortly(error) == cause
    assert (
        shortly(ValueError("`x` is 1. Received: 2")) == "`x` is 1 (received 2)"
    )
    assert shortly(ValueError("`x` is 1.")) == "`x` is 1."


def test_a_dense_file_is_written_for_one_of_two_reasons():
    dense, narrow = trial("dense", 300, 0.01), trial("narrowed to 0.5", 90, 0.0)
    narrow = dataclasses.replace(narrow, lost=0.2)
    options = {"measure": "accuracy", "rows": 99, "dense": Score(1, 1, 1)}
    report = ShrinkReport("m", dense, (dense,), max_drop=0.01, **options)
    assert "No smaller network could be tried." in report.words
    report = dataclasses.replace(report, trials=(dense, narrow))
    assert "No smaller network within the limits was found." in report.words


def test_losses_below_zero_are_gains_and_ratios_near_one_have_figures():
    dense, small = trial("dense", 300, 0.0101), trial("narrowed", 90, 0.01)
    options = {"measure": "accuracy", "rows": 99, "dense": Score(1, 1, 1)}
    small = dataclasses.replace(small, lost=-0.003)
    report = ShrinkReport("m", small, (dense, small), max_drop=0.01, **options)
    assert (
        "On 99 examples held out it gains 0.30 points of accuracy."
        in report.words
    )
    assert any("takes 1.01 times as long" in words for words in report.words)


def test_no_remedy_begins_that_would_take_the_time_of_widths():
    search = object.__new__(Search)
    static = dataclasses.replace(trial("dense", 9, 1.0, lost=0.5), seconds=60.0)
    search._trials = types.SimpleNamespace(
        made=[static],
        untried=[],
        is_good=lambda trial: False,
        seconds_left=lambda: 600.0,
    )
    search._try_remedies()
    assert search._trials.untried == ["dense, fitted ranges"]


@pytest.mark.parametrize(
    ("prefer", "bytes_of_dynamic", "tries"),
    [
        ("both", 110, True),
        ("both", 90, False),
        ("ms", 110, True),
        ("bytes", 110, True),
        ("bytes", 90, False),
    ],
)
def test_remedies_wait_where_a_good_file_costs_less(
    monkeypatch, prefer, bytes_of_dynamic, tries
):
    dynamic = trial("dense", bytes_of_dynamic, 1.0)
    static = trial("dense", 100, 1.0, lost=0.5)
    dynamic = dataclasses.replace(dynamic, route="dynamic_int8")
    trials = types.SimpleNamespace(
        made=[dynamic, static],
        untried=[],
        remedy={},
        is_good=lambda trial: trial.lost < 0.1,
        latencies=lambda numbers: [(1.0, 0.99)[number] for number in numbers],
        seconds_left=lambda: 600.0,
    )
    remedied = []

    def export_dense(search, name, route):
        remedied.append(name)
        trials.made.append(dataclasses.replace(static, lost=0.0))

    monkeypatch.setattr(Search, "_export_dense", export_dense)
    Search(trials, prefer)._try_remedies()
    assert remedied == (["dense, fitted ranges"] if tries else [])


@pytest.mark.tensorflow_only
def test_lstms_are_tried_as_the_fused_operator(tmp_path):
    keras.utils.set_random_seed(0)
    model = keras.Sequential(
        [
            keras.Input((5, 8)),
            keras.layers.LSTM(12),
            keras.layers.Dense(3, "softmax"),
        ]
    )
    rows = np.random.default_rng(0).normal(size=(64, 5, 8)).astype("float32")
    report = shrink(model, rows, tmp_path / "a.tflite", minutes=0)
    sizes = {trial.route: trial.bytes for trial in report.trials}
    for route in ("float16", "dynamic_int8", "int8"):
        assert sizes[f"{route}+lstm"] < sizes[route]
    assert report.taken.route.endswith("+lstm")
    lines = str(report).splitlines()
    with_files = [line for line in lines[:8] if "no file" not in line]
    assert len({len(line) for line in with_files}) == 1


@slow_on_jax  # three exports
def test_int8_that_loses_too_much_gets_its_remedies(monkeypatch, tmp_path):
    model = networks.uneven()
    monkeypatch.setattr(Search, "_try_smaller", lambda *arguments: None)
    path = tmp_path / "a.tflite"
    # So many minutes that a slow machine tries all of them.
    report = shrink(model, ROWS, path, metric="closeness", minutes=100)
    by_name = {trial.name: trial for trial in report.trials}
    plain = next(trial for trial in report.trials if trial.route == "int8")
    assert not plain.loses_at_most(0.01)
    assert [*by_name] == [
        "dense",
        "dense, fitted ranges",
        "dense, fitted ranges, equalized channels",
    ]
    assert by_name["dense, fitted ranges, equalized channels"].loses_at_most(
        0.01
    )
    assert (
        plain.bytes == by_name["dense, fitted ranges, equalized channels"].bytes
    )


@pytest.mark.tensorflow_only
def test_files_for_other_processors_are_timed_without_amx(
    model, tmp_path, monkeypatch
):
    targets = []

    def latencies(trials, numbers):
        targets.append(trials.target)
        return [1.0 for _ in numbers]

    monkeypatch.setattr(Trials, "latencies", latencies)
    path = tmp_path / "m.tflite"
    report = shrink(model, ROWS, path, minutes=0, target="arm64")
    here = shrink(model, ROWS, path, minutes=0)
    assert targets == ["arm64", None]
    assert "Estimated for arm64: times are those" in str(report)
    assert "Estimated" not in str(here)


@pytest.mark.tensorflow_only
def test_the_first_files_are_dense_and_one_is_in_4_bits(tmp_path):
    """magika had no time for 4 bits, and a file that was larger than dense int4."""
    layers = [keras.layers.Dense(128, "relu"), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((16,)), *layers])
    report = shrink(model, ROWS, tmp_path / "a.tflite", minutes=0)
    assert [(trial.name, trial.route) for trial in report.trials] == [
        ("dense", "float16"),
        ("dense", "dynamic_int8"),
        ("dense", "int8"),
        ("dense", "dynamic_int4"),
    ]


@pytest.mark.parametrize("reason", [None, "the model has none"])
def test_no_network_is_tried_in_4_bits_if_the_dense_one_has_none(reason):
    search = object.__new__(Search)
    search._trials = types.SimpleNamespace(
        made=[Trial("dense", "dynamic_int4", reason=reason)],
        untried=[],
        model=keras.Sequential([keras.Input((2,)), keras.layers.Dense(2)]),
        packed=False,
        # No time for a table of widths.
        seconds_left=lambda: 0.0,
        narrowing_seconds=lambda: 0.0,
        dense_seconds=lambda: 1.0,
    )
    routes = []
    search._try_4_bits = lambda networks, route: routes.append(route)
    search._try_smaller("dynamic_int8")
    assert routes == ([] if reason else ["dynamic_int4"])


def test_one_refusal_in_4_bits_is_listed_twice_at_most():
    """ResNet-8 had the same line for each of its networks."""
    search = object.__new__(Search)
    made = []

    def make(name, make_model, training, route, widths):
        made.append(name)
        return Trial(name, "", reason="no Dense kernel"), None

    search._trials = types.SimpleNamespace(
        made=[trial(name, 9, 1.0) for name in "abcd"],
        seed=0,
        make=make,
        examples=examples_to_train(2000),
        is_good=lambda trial: trial.reason is None,
        is_late=lambda: False,
        seconds_to_train=lambda: 9.0,
    )
    search._try_4_bits([(name, None) for name in "abcd"], "dynamic_int4")
    assert made == ["d, int4", "c, int4"]


@pytest.mark.parametrize(
    ("max_drop", "words"),
    [
        (5, r"one point. For 5 points give 0.05. Received: max_drop=5"),
        (-0.1, r"from 0 to 1.*Received: max_drop=-0.1"),
        ({"y": 2.0}, r"max_drop\['y'\]` must be from 0 to 1"),
    ],
)
def test_a_limit_in_points_is_refused(tmp_path, max_drop, words):
    model = keras.Sequential([keras.Input((16,)), keras.layers.Dense(3)])
    with pytest.raises(ValueError, match=words):
        kso.shrink(model, ROWS, tmp_path / "m.tflite", max_drop=max_drop)
