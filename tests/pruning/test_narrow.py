"""`narrow`: smaller layers that answer as the refitted network with zeros does."""

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho import calibration
from keras_sparse_ortho.errors import (
    BudgetError,
    NotPrunableError,
    UnknownWeightError,
)
from tests.helpers import array, assert_same, slow_on_jax

L = keras.layers


def rows(*shape, count=64):
    return (
        np.random.default_rng(0).normal(size=(count, *shape)).astype("float32")
    )


def sequential():
    layers = [
        L.Dense(24, "relu", name="up"),
        L.Dense(16, "tanh", name="middle"),
        L.Dense(3, name="head"),
    ]
    return keras.Sequential([keras.Input((6,)), *layers])


def residual():
    """Two branches on one stream, batch normalization, and Flatten in front of the head."""
    inputs = keras.Input((6, 6, 2))
    stream = L.Conv2D(8, 3, padding="same", name="stem")(inputs)
    x = L.Conv2D(16, 3, padding="same", name="inner")(L.ReLU()(stream))
    x = L.ReLU()(L.BatchNormalization(name="norm")(x))
    x = L.Add()([stream, L.Conv2D(8, 1, name="outer")(x)])
    x = L.DepthwiseConv2D(3, name="depthwise")(x)
    model = keras.Model(inputs, L.Dense(3, name="head")(L.Flatten()(x)))
    fit_statistics(model)
    return model


def fit_statistics(model):
    """Statistics of batch normalization as training leaves them."""
    rng = np.random.default_rng(1)
    norm = model.get_layer("norm")
    size = norm.moving_mean.shape
    values = [rng.normal(size=size) * 0.3, np.exp(rng.normal(size=size))]
    norm.set_weights([*norm.get_weights()[:2], *values])


def shapes(model):
    return [tuple(weight.shape) for weight in model.weights]


@pytest.mark.core
def test_half_of_the_parameters_of_a_sequential_model():
    model, x = sequential(), rows(6)
    before = model.get_weights()
    small = kso.narrow(model, 0.5, data=x)
    assert isinstance(small, keras.Sequential)
    assert small.count_params() <= 0.5 * model.count_params()
    assert [layer.name for layer in small.layers] == [
        layer.name for layer in model.layers
    ]
    assert_same(before, model.get_weights())
    assert array(small(x)).shape == (64, 3)


@pytest.mark.core
def test_channels_of_a_residual_network_go_together():
    model, x = residual(), rows(6, 6, 2)
    groups = {group.name: group.width for group in kso.channel_groups(model)}
    assert groups == {"stem+outer": 8, "inner": 16}
    small = kso.narrow(model, {"inner": 8, "stem+outer": 6}, data=x)
    widths = {
        name: small.get_layer(name).kernel.shape
        for name in ("stem", "inner", "outer")
    }
    assert widths == {
        "stem": (3, 3, 2, 6),
        "inner": (3, 3, 6, 8),
        "outer": (1, 1, 8, 6),
    }
    assert small.get_layer("depthwise").kernel.shape == (3, 3, 6, 1)
    assert small.get_layer("head").kernel.shape == (4 * 4 * 6, 3)


def test_the_kernel_that_reads_is_refitted_exactly():
    model, x = sequential(), rows(6)
    small = kso.narrow(model, {"middle": 10}, data=x)
    inputs = keras.Model(model.inputs[0], model.get_layer("middle").output)
    hidden = array(inputs(x)).astype("float64")
    names = [layer.name for layer in model.layers]
    biases, kernels = (
        [
            array(
                getattr(m.get_layer(names[k]), "bias" if k == 1 else "kernel")
            )
            for m in (model, small)
        ]
        for k in (1, 2)
    )
    # Channels of the small layer, by their columns in the given one.
    columns = array(model.get_layer("middle").kernel)
    stays = [
        int(np.argmin(np.abs(columns - column[:, None]).sum(axis=0)))
        for column in array(small.get_layer("middle").kernel).T
    ]
    assert len(set(stays)) == 10
    np.testing.assert_array_equal(biases[0][stays], biases[1])
    gram = hidden.T @ hidden
    gram += 0.01 * np.mean(np.diag(gram)) * np.eye(16)
    expected = np.linalg.solve(
        gram[np.ix_(stays, stays)], gram[stays] @ kernels[0]
    )
    np.testing.assert_allclose(kernels[1], expected, atol=1e-4)


@pytest.mark.core
def test_a_table_and_its_widths_give_the_same_network():
    model, x = sequential(), rows(6)
    table = kso.widths(model, x, multiple_of=4)
    by_share = kso.narrow(model, 0.6, data=x, multiple_of=4)
    by_table = kso.narrow(model, 0.6, data=x, table=table, multiple_of=4)
    by_widths = kso.narrow(model, table.search(0.6, multiple_of=4), data=x)
    assert_same(by_share.get_weights(), by_table.get_weights())
    assert_same(by_share.get_weights(), by_widths.get_weights())
    by_bytes = kso.narrow(
        model, 0.8, data=x, table=table, cost="bytes", multiple_of=4
    )
    assert table.cost(
        {k: by_bytes.get_layer(k).units for k in ("up", "middle")}, "bytes"
    ) <= (0.8 * table.cost(cost="bytes"))


@pytest.mark.core
def test_a_table_refits_without_a_pass(monkeypatch):
    model, x = sequential(), rows(6)
    table = kso.widths(model, x, multiple_of=4)
    for path, size in (("middle/kernel", 24), ("head/kernel", 16)):
        assert table.grams[path].shape == (size, size)
    refitted = kso.narrow(model, {"up": 12, "middle": 8}, data=x)
    passes = []
    measured = calibration.ReaderMoments.measured

    def counted(*args):
        passes.append(args)
        return measured(*args)

    monkeypatch.setattr(calibration.ReaderMoments, "measured", counted)
    widths = {"up": 12, "middle": 8}
    small = kso.narrow(model, widths, data=x, table=table)
    assert passes == []
    for before, after in zip(
        refitted.get_weights(), small.get_weights(), strict=True
    ):
        np.testing.assert_allclose(before, after, atol=1e-6)
    # On other weights the table's moments are wrong.
    first = model.get_layer("up")
    first.kernel.assign(2.0 * array(first.kernel))
    small = kso.narrow(model, widths, data=x, table=table)
    assert len(passes) == 1
    order = {
        name: steps[: -widths[name]] for name, steps in table.order.items()
    }
    stays = np.setdiff1d(np.arange(24), order["up"])
    inputs = array(first(x)).astype("float64")
    gram = inputs.T @ inputs
    gram += 0.01 * np.mean(np.diag(gram)) * np.eye(24)
    columns = np.setdiff1d(np.arange(16), order["middle"])
    kernel = array(model.get_layer("middle").kernel)[:, columns]
    expected = np.linalg.solve(gram[np.ix_(stays, stays)], gram[stays] @ kernel)
    np.testing.assert_allclose(
        array(small.get_layer("middle").kernel), expected, atol=1e-4
    )


def test_statistics_are_restored_relative_to_the_given_model(monkeypatch):
    model, x = residual(), rows(6, 6, 2)
    calls = []

    def restored(zeroed, data, *, reference):
        """Sets other statistics, as where held-out rows prefer these."""
        calls.append(
            (reference, zeroed.get_layer("inner").kernel.shape, len(data))
        )
        norm = zeroed.get_layer("norm")
        norm.set_weights(
            [*norm.get_weights()[:2], np.full(16, 2.0), np.full(16, 3.0)]
        )

    monkeypatch.setattr(
        "keras_sparse_ortho.pruning._narrow.restore_statistics", restored
    )
    small = kso.narrow(model, {"inner": 6}, data=x)
    assert calls == [(model, (3, 3, 8, 16), 1)]  # before channels are removed
    np.testing.assert_array_equal(
        array(small.get_layer("norm").moving_variance), np.full(6, 3.0)
    )
    model.get_layer("norm").trainable = False
    kso.narrow(model, {"inner": 6}, data=x)
    assert len(calls) == 1


def test_wrapped_models_and_data_in_batches():
    x = rows(6)
    model = kso.prune(sequential(), 0.5, budget="uniform")
    batches = ((x[k : k + 32], None) for k in range(0, 64, 32))
    small = kso.narrow(model, {"up": 12}, data=batches)
    assert small.get_layer("up").kernel.shape == (6, 12)
    assert all(weight.storage is None for weight in kso.prunable_weights(small))


def test_full_widths_change_nothing():
    model, x = sequential(), rows(6)
    for widths in (1.0, {}, {"up": 24}):
        same = kso.narrow(model, widths, data=x)
        assert_same(model.get_weights(), same.get_weights())


@slow_on_jax
def test_embeddings_and_units_of_recurrent_layers():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((5,), dtype="int32")
    x = L.GRU(8, name="gru")(L.Embedding(20, 12, name="words")(inputs))
    model = keras.Model(inputs, L.Dense(3, name="head")(x))
    tokens = np.random.default_rng(0).integers(0, 20, (64, 5))
    table = kso.widths(model, tokens, multiple_of=2)
    small = kso.narrow(model, {"words": 6, "gru": 4}, data=tokens, table=table)
    assert small.get_layer("words").embeddings.shape == (20, 6)
    assert small.get_layer("gru").cell.kernel.shape == (6, 12)
    # The kernel that reads states is refitted, too: units read each other.
    assert "gru/gru_cell/recurrent_kernel" in table.groups["gru"].rows
    assert table.cost({"words": 6, "gru": 4}) == small.count_params()


@slow_on_jax
def test_heads_of_attention():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((6, 8))
    x = L.MultiHeadAttention(4, 4, name="attention")(inputs, inputs)
    model = keras.Model(inputs, L.Dense(2, name="head")(x))
    x = rows(6, 8)
    table = kso.widths(model, x)
    small = kso.narrow(model, {"attention/heads": 3}, data=x, table=table)
    assert small.get_layer("attention").num_heads == 3
    assert table.cost({"attention/heads": 3}) == small.count_params()
    assert table.errors["attention/heads"].keys() == {4, 3, 2, 1}


def separable():
    """Separable layers in a row: a depthwise and a pointwise kernel in each."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 3))
    x = L.Conv2D(8, 3, activation="relu", name="stem")(inputs)
    x = L.SeparableConv2D(16, 3, depth_multiplier=2, name="first")(x)
    x = L.ReLU()(L.BatchNormalization(name="norm")(x))
    x = L.SeparableConv2D(12, 3, activation="relu", name="second")(x)
    x = L.GlobalAveragePooling2D()(x)
    model = keras.Model(inputs, L.Dense(3, name="head")(x))
    fit_statistics(model)
    return model


@slow_on_jax
def test_both_kernels_of_separable_layers_get_narrower(monkeypatch):
    model, x = separable(), rows(8, 8, 3)
    zeroed_models = []

    def kept(zeroed):
        zeroed_models.append(zeroed)
        return kso.remove_channels(zeroed)

    monkeypatch.setattr(
        "keras_sparse_ortho.pruning._narrow.remove_channels", kept
    )
    table = kso.widths(model, x, multiple_of=2)
    widths = {"stem": 6, "first": 10, "second": 8}
    assert widths.keys() == table.errors.keys()
    small = kso.narrow(model, widths, data=x, table=table)
    kernels = {
        name: [
            tuple(small.get_layer(name).depthwise_kernel.shape),
            tuple(small.get_layer(name).pointwise_kernel.shape),
        ]
        for name in ("first", "second")
    }
    assert kernels == {
        "first": [(3, 3, 6, 2), (1, 1, 12, 10)],
        "second": [(3, 3, 10, 1), (1, 1, 10, 8)],
    }
    outputs = [array(network(x)) for network in (zeroed_models[0], small)]
    np.testing.assert_allclose(*outputs, atol=1e-5)
    # Kernels are refitted: half of the inputs of the first layer go at less error than by chance.
    pruned = kso.narrow(model, {"stem": 4}, data=x, table=table)
    before, after = array(model(x)), array(pruned(x))
    spread = np.sum((before - before.mean(axis=0)) ** 2)
    measured = np.sum((after - before) ** 2) / spread
    predicted = table.predicted({"stem": 4})
    assert predicted / 2 < measured < 2 * predicted


def test_groups_that_cannot_be_measured_are_refused_by_name(monkeypatch):
    model, x = sequential(), rows(6)
    name = "keras_sparse_ortho.calibration._readers.stop_of"
    original = calibration._readers.stop_of

    def stop_of(model, weight, *arguments):
        if weight.path == "middle/kernel":
            return None
        return original(model, weight, *arguments)

    monkeypatch.setattr(name, stop_of)
    with pytest.raises(
        NotPrunableError, match="'middle/kernel', which reads 'up'"
    ):
        kso.narrow(model, {"up": 8}, data=x)
    with pytest.warns(UserWarning, match="'middle/kernel', which reads 'up'"):
        table = kso.widths(model, x)
    assert [*table.errors] == ["middle"]
    assert set(table.search(0.8)) == {"middle"}


def test_a_failure_leaves_the_model_as_it_was(monkeypatch):
    model, x = residual(), rows(6, 6, 2)
    before = model.get_weights()

    def fail(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(
        "keras_sparse_ortho.pruning._narrow.remove_channels", fail
    )
    with pytest.raises(RuntimeError, match="no memory"):
        kso.narrow(model, {"inner": 8}, data=x)
    assert_same(before, model.get_weights())


def test_refusals():
    model, x = sequential(), rows(6)
    with pytest.raises(ValueError, match=r"`cost` must be .*cost='params'"):
        kso.narrow(model, 0.5, data=None, cost="params")  # before data is read
    with pytest.raises(
        BudgetError, match=r"`widths` must be in \(0, 1\].*Received: widths=1.5"
    ):
        kso.narrow(model, 1.5, data=x)
    with pytest.raises(
        BudgetError, match=r"No widths of the table cost .*multiple_of"
    ):
        kso.narrow(model, 0.01, data=x)
    other = keras.Sequential(
        [keras.Input((6,)), L.Dense(32, name="up"), L.Dense(3)]
    )
    with pytest.raises(
        ValueError,
        match=r"`table` must be that of this model.*32 steps of .*'up'",
    ):
        kso.narrow(model, {"up": 8}, data=x, table=kso.widths(other, x))
    with pytest.raises(
        UnknownWeightError, match=r"up, middle. Received: 'down'"
    ):
        kso.narrow(model, {"down": 8}, data=x)
    with pytest.raises(
        ValueError, match=r"'up' must be an integer from 1 to 24. Received: 0"
    ):
        kso.narrow(model, {"up": 0}, data=x)
    with pytest.raises(
        ValueError, match="`multiple_of` must be a positive integer"
    ):
        kso.narrow(model, 0.5, data=x, multiple_of=-8)
    with pytest.raises(TypeError, match="data"):
        kso.narrow(model, 0.5)

    class Own(keras.Model):
        def call(self, inputs):
            return inputs

    with pytest.raises(NotPrunableError):
        kso.narrow(Own(), 0.5, data=x)
