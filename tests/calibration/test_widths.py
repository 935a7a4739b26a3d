"""Tables of widths: errors that add up, exact costs, and a search."""

import dataclasses
import functools
import subprocess
import sys
import time

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho.calibration import (
    OutputErrors,
    ReaderMoments,
    WidthCurve,
)
from keras_sparse_ortho.errors import (
    BudgetError,
    NotPrunableError,
    UnknownWeightError,
)
from tests.helpers import array, assert_same, slow_on_jax

L = keras.layers
ROWS = 640


@functools.cache
def digits():
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype("float32"), labels


def fitted(model):
    """Random features, and a head of least squared error to the labels, on all backends the same.

    Training takes longer, for compilation alone.
    """
    rng = np.random.default_rng(0)
    for weight in kso.prunable_weights(model):
        scale = (2.0 / np.prod(weight.shape[:-1])) ** 0.5
        weight.variable.assign(scale * rng.normal(size=weight.shape))
    images, labels = digits()
    x = images[:1200].reshape(-1, *model.input_shape[1:])
    head = model.get_layer("head")
    features = array(keras.Model(model.inputs[0], head.input)(x)).astype(
        "float64"
    )
    features = np.concatenate([features, np.ones((1200, 1))], axis=1)
    normal = features.T @ features + 0.1 * np.eye(features.shape[1])
    weights = np.linalg.solve(
        normal, features.T @ (10.0 * np.eye(10)[labels[:1200]])
    )
    weights += 1e-3 * rng.normal(size=weights.shape)  # no row is 0
    head.set_weights([weights[:-1], weights[-1]])
    return model


@functools.cache
def mlp():
    hidden = [
        L.Dense(64, "relu", name="first"),
        L.Dense(48, "relu", name="second"),
    ]
    return fitted(
        keras.Sequential(
            [keras.Input((64,)), *hidden, L.Dense(10, name="head")]
        )
    )


@functools.cache
def cnn():
    """Convolutions around a residual stream."""
    inputs = keras.Input((8, 8, 1))
    stream = L.Conv2D(16, 3, 2, padding="same", name="stem")(inputs)
    x = L.Conv2D(24, 3, padding="same", activation="relu", name="inner")(
        L.ReLU()(stream)
    )
    x = L.Add()([stream, L.Conv2D(16, 3, padding="same", name="outer")(x)])
    x = L.Dense(32, "relu", name="hidden")(L.Flatten()(L.ReLU()(x)))
    return fitted(keras.Model(inputs, L.Dense(10, name="head")(x)))


NETWORKS = {"mlp": mlp, "cnn": cnn}


@functools.cache
def case(name):
    """A trained network, its rows for calibration and others, and its table."""
    model = NETWORKS[name]()
    x = digits()[0].reshape(-1, *model.input_shape[1:])
    return model, x[:ROWS], x[1200:], kso.widths(model, x[:ROWS])


def error(model, other, x):
    """The relative squared error of the outputs of one model beside another's."""
    first, outputs = array(model(x)), array(other(x))
    return float(
        np.sum((outputs - first) ** 2)
        / np.sum((first - first.mean(axis=0)) ** 2)
    )


@pytest.mark.core
def test_the_table_has_the_error_of_the_model_on_held_out_rows():
    model, x, _, table = case("mlp")
    before = model.get_weights()
    assert [*table.errors] == ["first", "second"]
    widths = [*table.errors["second"]]
    assert widths == sorted(widths, reverse=True) == [48, 40, 32, 24, 16, 8]
    errors = [*table.errors["second"].values()]
    assert errors == sorted(errors)
    assert errors[0] == 0.0 < errors[1]
    # The last hidden layer: its reader is the head, whose outputs are those of the model.
    inputs = array(
        keras.Model(model.inputs[0], model.get_layer("second").output)(x)
    ).astype("float64")
    stays = table.order["second"][-16:]
    kernel = before[-2].astype("float64")
    used = np.delete(inputs, np.s_[3::4], axis=0)
    gram = used.T @ used
    gram += 0.01 * np.mean(np.diag(gram)) * np.eye(48)
    refitted = np.linalg.solve(gram[np.ix_(stays, stays)], gram[stays] @ kernel)
    held_out = inputs[3::4]
    change = held_out[:, stays] @ refitted - held_out @ kernel
    outputs = held_out @ kernel
    spread = np.sum((outputs - outputs.mean(axis=0)) ** 2)
    assert table.errors["second"][16] == pytest.approx(
        np.sum(change**2) / spread, rel=1e-3
    )
    assert_same(before, model.get_weights())


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("mlp", (0.8, 0.7, 0.6)),
        pytest.param("cnn", (0.8, 0.6), marks=slow_on_jax),
    ],
)
def test_predicted_errors_are_those_of_narrow_networks(name, targets):
    model, x, others, table = case(name)
    compared = 0
    for target in targets:
        widths = table.search(target)
        small = kso.narrow(model, target, data=x, table=table)
        predicted, measured = (
            table.predicted(widths),
            error(model, small, others),
        )
        assert (
            small.count_params()
            == table.cost(widths)
            <= target * model.count_params()
        )
        if 1e-3 < predicted <= 0.1:
            compared += 1
            assert predicted / 1.5 < measured < 1.5 * predicted
    assert compared >= 2


def test_searched_widths_are_not_behind_uniform_ones():
    table = case("mlp")[3]
    for target in (0.7, 0.4, 0.2):
        uniform = table.uniform(target)
        assert table.cost(uniform) <= target * table.cost()
        assert table.predicted(table.search(target)) <= table.predicted(uniform)


def test_targets_and_costs():
    table = case("mlp")[3]
    full = {"first": 64, "second": 48}
    assert table.search(1.0) == full
    assert table.cost() == 64 * 64 + 64 + 64 * 48 + 48 + 48 * 10 + 10
    assert table.cost({"second": 16}, "flops") == 64 * 64 + 64 * 16 + 16 * 10
    # Outputs are computed 16 at a time, inputs one by one; the head has fewer.
    work = table.cost({"first": 40, "second": 8}, "work")
    assert work == 64 * 48 + 40 * 16 + 8 * 10
    # Kernels of 1,024 entries are integers with 12 bytes for an output, others are floats.
    expected = (
        (64 * 64 + 12 * 64) + (64 * 16 + 12 * 16) + 4 * (64 + 16 + 16 * 10 + 10)
    )
    assert table.cost({"second": 16}, "bytes") == expected
    assert table.cost(table.search(at_most=3000)) <= 3000 < table.cost()
    widths = table.search(error=0.02)
    assert table.predicted(widths) <= 0.02
    assert table.cost(widths) < 0.8 * table.cost()
    narrow_second = table.search(0.5, cost=lambda widths: widths["second"])
    assert narrow_second == full | {"second": 24}
    assert all(
        width % 16 == 0 for width in table.search(0.4, multiple_of=16).values()
    )
    unusual = table.search(0.4, multiple_of=5)
    assert all(width % 5 == 0 for width in unusual.values())
    assert table.cost(unusual) <= 0.4 * table.cost()


def test_errors_between_measured_widths():
    table = case("mlp")[3]
    errors = table.errors["first"]
    predicted = [table.predicted({"first": width}) for width in (56, 50, 48)]
    assert (
        predicted[0] == errors[56] < predicted[1] < predicted[2] == errors[48]
    )
    assert table.predicted({"first": 60}) == pytest.approx(0.5 * errors[56])
    assert table.predicted({"first": 4}) > errors[8]
    assert (
        table.predicted({"first": 48, "second": 40})
        == errors[48] + table.errors["second"][40]
    )


def test_errors_that_begin_between_measured_widths():
    """An MLP's error at 816 of 1,024 units was 50 times too small, between 0 and .00013."""
    curve = WidthCurve(1024, {1016: 0.0, 760: 1.3e-4, 560: 3.9e-4})
    assert 0.5 * 6.8e-5 < curve.at(816) < 2.0 * 6.8e-5  # measured: 6.8e-5
    assert curve.at(1016) == 0.0
    errors = [curve.at(width) for width in range(8, 1024)]
    assert errors == sorted(errors, reverse=True)
    # The errors of a power of the channels that are gone are followed.
    power = {width: ((100 - width) / 100) ** 3 for width in (90, 80, 70)}
    assert WidthCurve(100, power).at(85) == pytest.approx(0.15**3, rel=0.05)


def test_channels_that_are_dead_at_all_measured_widths_cost_nothing():
    curve = WidthCurve(64, {48: 0.0, 32: 0.0, 16: 0.1})
    assert curve.at(40) == 0.0
    assert 0.0 < curve.at(24) < 0.1
    assert WidthCurve(64, {48: 0.0, 32: 0.0}).at(8) == 0.0


def test_print_and_plot():
    table = case("mlp")[3]
    lines = str(table).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["first", "second"]
    assert "-" not in lines[2].split()
    coarse = {"first": {56: 0.01, 24: 0.1}, "second": table.errors["second"]}
    row = str(dataclasses.replace(table, errors=coarse)).splitlines()[2]
    assert row.split()[2:] == ["0.01", "0.022", "0.062", "-", "-"]
    assert max(map(len, lines)) <= 100
    axes = table.plot()
    assert [line.get_label() for line in axes.lines] == [
        "first (64)",
        "second (48)",
    ]


@pytest.mark.core
def test_probabilities_are_compared_as_logits():
    model, x, _, table = case("mlp")
    outputs = L.Softmax()(model.outputs[0])
    with_softmax = kso.widths(keras.Model(model.inputs[0], outputs), x)
    # Logits have a common part in each row that softmax does not show.
    errors, others = (t.errors["first"][16] for t in (table, with_softmax))
    assert others == pytest.approx(errors, rel=0.1)


def test_deep_networks_are_measured_at_few_widths(monkeypatch):
    monkeypatch.setattr("keras_sparse_ortho.calibration._widths._POINTS", 8)
    keras.utils.set_random_seed(0)
    hidden = [L.Dense(40, "tanh", name=f"hidden_{k}") for k in range(4)]
    model = keras.Sequential([keras.Input((6,)), *hidden, L.Dense(2)])
    x = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
    table = kso.widths(model, x)
    assert len(table.errors) == 4
    assert [*table.errors["hidden_3"]] == [40, 32, 16, 8]
    steps = table.search(0.5)
    assert table.cost(steps) <= 0.5 * table.cost()


class Time:
    """A clock that a test sets."""

    now = 0.0

    def monotonic(self):
        return self.now


@pytest.fixture
def passes(monkeypatch):
    """The times of passes of held-out rows, on a clock on which 64 rows take a second."""
    clock = Time()
    for module in ("_widths", "_width_clock", "_width_costs"):
        monkeypatch.setattr(
            f"keras_sparse_ortho.calibration.{module}.time", clock
        )
    ends = []
    compute = OutputErrors._outputs

    def slow_outputs(self):
        clock.now += self.rows / 64
        ends.append(clock.now)
        return compute(self)

    monkeypatch.setattr(OutputErrors, "_outputs", slow_outputs)
    return ends


def four_groups():
    keras.utils.set_random_seed(0)
    hidden = [
        L.Dense(units, "tanh", name=f"hidden_{units}")
        for units in (48, 56, 40, 64)
    ]
    model = keras.Sequential([keras.Input((6,)), *hidden, L.Dense(2)])
    rows = np.random.default_rng(0).normal(size=(256, 6)).astype("float32")
    return model, rows


@pytest.mark.core
@pytest.mark.parametrize(
    ("seconds", "counts"),
    [(60, [5, 6, 4, 7]), (16, [4, 3, 3, 4]), (14, [3, 3, 3, 3])],
)
def test_widths_are_fewer_where_the_time_is_short(seconds, counts, passes):
    model, x = four_groups()
    table = kso.widths(model, x, minutes=seconds / 60)
    errors = [*table.errors.values()]
    assert [len(of_group) - 1 for of_group in errors] == counts
    assert passes[-1] <= seconds
    # In the order of the layers, though the most weights were measured first.
    assert [*table.errors] == [group.name for group in table.groups]
    unlimited = kso.widths(model, x)
    for name, errors in table.errors.items():
        for width, measured in errors.items():
            expected = unlimited.errors[name][width]
            assert measured == pytest.approx(expected, rel=1e-3)


def test_groups_without_time_keep_their_width_and_are_named(passes):
    model, x = four_groups()
    with pytest.warns(
        UserWarning,
        match=r"Received: minutes=0.07, errors on 32 held-out rows; no widths of "
        r"hidden_64$",
    ):
        table = kso.widths(model, x, minutes=0.07)
    assert passes[-1] <= 4.2
    names = ["hidden_48", "hidden_56", "hidden_40"]
    assert [*table.errors] == names
    assert "64 stay in hidden_64: not measured" in str(table)
    assert set(table.search(0.8)) == set(names)
    with pytest.raises(
        ValueError,
        match=r"`minutes` is too short .*Received: minutes=0.02, .* 0.5 seconds",
    ):
        kso.widths(model, x, minutes=0.02)
    for minutes in (0, -1, np.nan, "1"):
        with pytest.raises(ValueError, match="`minutes` must be a"):
            kso.widths(model, x, minutes=minutes)


def test_rows_are_fewer_where_a_sweep_is_long(monkeypatch):
    model, x = four_groups()
    clock = Time()
    for module in ("_widths", "_width_clock"):
        monkeypatch.setattr(
            f"keras_sparse_ortho.calibration.{module}.time", clock
        )
    measured = ReaderMoments.measured.__func__

    def slow_sweep(cls, *args):
        clock.now += 10.0
        return measured(cls, *args)

    monkeypatch.setattr(ReaderMoments, "measured", classmethod(slow_sweep))
    full = kso.widths(model, x)
    clock.now = 0.0
    with pytest.warns(UserWarning, match="kernels fitted to 2 of 4 batches$"):
        table = kso.widths(model, x, minutes=1.25)
    assert clock.now == 20.0
    gram = full.grams["hidden_56/kernel"]
    assert np.trace(table.grams["hidden_56/kernel"]) < 0.6 * np.trace(gram)
    table = kso.widths(model, x, minutes=100)
    np.testing.assert_allclose(table.grams["hidden_56/kernel"], gram)


def test_a_table_says_which_channels_stay():
    inputs = keras.Input((6, 8))
    stream = L.Dense(16, name="up")(inputs)
    x = L.Dense(32, "relu", name="inner")(
        L.LayerNormalization(name="norm")(stream)
    )
    x = L.Add()([stream, L.Dense(16, name="outer")(x)])
    model = keras.Model(inputs, L.Dense(3, name="head")(x))
    x = np.random.default_rng(0).normal(size=(64, 6, 8)).astype("float32")
    table = kso.widths(model, x)
    assert [*table.errors] == ["inner"]
    text = " ".join(str(table).split())
    assert (
        "32 stay in norm (LayerNormalization): its statistics are those of all "
        "channels"
    ) in text
    assert "head" not in text


BUSY = """
import time, numpy
end = time.monotonic() + 300
while time.monotonic() < end:
    numpy.linalg.inv(numpy.random.normal(size=(600, 600)))
"""


@pytest.mark.slow
@pytest.mark.tensorflow_only
@pytest.mark.parametrize(("minutes", "busy"), [(1.0, 0), (2.0, 3)])
@pytest.mark.filterwarnings("ignore:The table of widths is coarser")
def test_a_deep_network_ends_in_time(minutes, busy):
    model = keras.applications.MobileNetV2((96, 96, 3), weights=None)
    x = np.random.default_rng(0).normal(size=(512, 96, 96, 3))
    others = [
        subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(busy)
    ]
    try:
        start = time.monotonic()
        table = kso.widths(model, x.astype("float32"), minutes=minutes)
        seconds = time.monotonic() - start
    finally:
        for process in others:
            process.kill()
            process.wait()
    print(f"{len(table.errors)} groups in {seconds:.0f} seconds")
    assert seconds < 1.2 * 60.0 * minutes
    widths = table.search(0.8)
    assert table.cost(widths) <= 0.8 * table.cost()


def test_refusals():
    model, x, _, table = case("mlp")
    for options, received in (
        ({}, "none"),
        ({"target": 0.5, "error": 0.1}, "target=0.5, error=0.1"),
        ({"target": 1.5}, "target=1.5"),
        ({"at_most": -1}, "at_most=-1"),
        ({"target": 1e-3}, "target=0.001"),
    ):
        with pytest.raises(BudgetError, match=f"Received: .*{received}"):
            table.search(**options)
    with pytest.raises(BudgetError, match="Take a larger target or `at_most`"):
        table.search(at_most=10)
    for few_rows in (x[:1], x[:4]):
        with (
            pytest.warns(UserWarning, match="16 different rows"),
            pytest.raises(
                ValueError, match=r"at least 8 rows.*Received: 1 row"
            ),
        ):
            kso.narrow(model, 0.5, data=few_rows)
    with pytest.raises(
        ValueError, match=r"`cost` must be one of .*Received: cost='time'"
    ):
        table.search(0.5, cost="time")
    with pytest.raises(
        ValueError, match="`multiple_of` must be a positive integer"
    ):
        table.search(0.5, multiple_of=0)
    with pytest.raises(
        UnknownWeightError, match=r"groups of `kso.channel_groups.*'third'"
    ):
        table.predicted({"third": 8})
    for width in (0, 65, 8.5, True):
        with pytest.raises(
            ValueError,
            match=r"'first' must be an integer from 1 to 64. Received",
        ):
            table.predicted({"first": width})
    shallow = keras.Sequential([keras.Input((4,)), L.Dense(3)])
    with pytest.raises(
        NotPrunableError, match="No group of channels can be narrowed"
    ):
        kso.widths(shallow, np.zeros((20, 4)) + np.arange(20)[:, None])
    with pytest.raises(ValueError, match="shape"):
        kso.widths(model, x[:, :5])
