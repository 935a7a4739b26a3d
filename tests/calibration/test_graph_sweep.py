"""A sweep over a graph gives what passes up to each layer give, in one pass."""

import tempfile

import keras
import numpy as np
import pytest

import keras_sparse_ortho as kso
from keras_sparse_ortho._interception import observe
from keras_sparse_ortho._keras_internals import VariableOverrides
from keras_sparse_ortho.calibration import _graph_sweep, _sweep, sweep
from tests.helpers import array
from tests.pruning.checks import assert_equal_kernels

L = keras.layers
pytestmark = pytest.mark.core


class Block(L.Layer):
    """A layer written as a class, with layers inside that depend on each other."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.first, self.second = (
            L.Dense(6, "relu", name="first"),
            L.Dense(4, name="second"),
        )
        self.dropout = L.Dropout(0.5)

    def build(self, shape):
        self.first.build(shape)
        self.second.build((*shape[:-1], 6))
        self.built = True

    def call(self, x):
        return x + self.second(self.dropout(self.first(x)))

    def compute_output_shape(self, shape):
        return shape


def residual():
    """Branches, and tensors that later calls read."""
    inputs = keras.Input((6, 4))
    x = L.Conv1D(4, 3, padding="same", name="conv")(inputs)
    y = L.SeparableConv1D(4, 3, padding="same", name="separable")(
        L.BatchNormalization()(x)
    )
    z = L.Add()([x, y, keras.ops.relu(inputs)])
    return keras.Model(inputs, L.Dense(3, name="head")(L.Dropout(0.5)(z)))


def nested():
    """A graph within a graph, called twice, whose dtype and structure of inputs are its own."""
    one, other = keras.Input((4,), name="one"), keras.Input((4,), name="other")
    x = L.Dense(4, name="inner")(L.Add()([one, keras.ops.tanh(other)]))
    inner = keras.Model(
        [one, other], [x, L.Dense(4, name="last")(x)], name="nested"
    )
    tail = keras.Sequential(
        [keras.Input((4,)), L.Dense(5, "relu", name="a"), L.Dense(2, name="b")]
    )
    inputs = keras.Input((4,))
    first = inner([inputs, L.Dense(4, name="before")(inputs)], training=True)
    second = inner([first[1], first[0]])
    return keras.Model(inputs, [tail(second[0]), second[1]])


def shared():
    """A layer that is called before and after one that is pruned behind it."""
    inputs, twice = keras.Input((4,)), L.Dense(4, "tanh", name="twice")
    x = twice(inputs)
    return keras.Model(inputs, twice(L.Dense(4, name="between")(x)))


def composite():
    """Layers with kernels inside, whose inputs depend on each other."""
    inputs = keras.Input((6, 4))
    x = L.MultiHeadAttention(2, 3, name="attention")(inputs, inputs)
    x = L.TimeDistributed(L.Dense(4, name="each"), name="steps")(
        Block(name="block")(x)
    )
    return keras.Model(inputs, L.Dense(3, name="head")(x))


def with_masks():
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(9, 4, mask_zero=True, name="words")(inputs)
    x = L.Dense(4, name="middle")(
        L.SimpleRNN(4, return_sequences=True, name="rnn")(x)
    )
    return keras.Model(
        inputs, L.Dense(3, name="head")(L.BatchNormalization()(x))
    )


def of_a_dictionary():
    inputs = {
        "b": keras.Input((4,), name="b"),
        "a": keras.Input((4,), name="a"),
    }
    x = L.Concatenate()([L.Dense(3, name="of_b")(inputs["b"]), inputs["a"]])
    return keras.Model(inputs, {"out": L.Dense(2, name="head")(x)})


def numbers(*shape):
    return np.random.default_rng(0).normal(size=(24, *shape)).astype("float32")


MODELS = {
    "residual": (residual, lambda: numbers(6, 4)),
    "nested": (nested, lambda: numbers(4)),
    "shared": (shared, lambda: numbers(4)),
    "composite": (composite, lambda: numbers(6, 4)),
    "masks": (
        with_masks,
        lambda: np.random.default_rng(0).integers(0, 9, (24, 6), "int32"),
    ),
    "dictionary": (
        of_a_dictionary,
        lambda: {"a": numbers(4), "b": 2 * numbers(4)},
    ),
}


class Halving:
    """A stop that notes what it gets, and halves a kernel when it is finished."""

    def __init__(self, weight, around, overrides):
        self.layer, self.path = around or weight.owner, weight.path
        self.seen = []
        self._variable, self._overrides = weight.variable, overrides

    def add(self, inputs, reference=None, **options):
        masks = [
            x for x in keras.tree.flatten(options) if keras.ops.is_tensor(x)
        ]
        references = [] if reference is None else [reference]
        self.seen.append([array(x) for x in (inputs, *references, *masks)])

    def finish(self):
        self._overrides.append((self._variable, 0.5 * self._variable.value))


def swept(model, x, by_calls, monkeypatch, with_reference=True):
    """What each stop gets in a sweep, in the order in which they finish."""
    keras.utils.set_random_seed(0)
    rows = keras.tree.map_structure(lambda a: [a[:16], a[16:]], x)
    batches = [
        {k: v[n] for k, v in rows.items()} if isinstance(x, dict) else rows[n]
        for n in (0, 1)
    ]
    batches = [
        keras.tree.map_structure(keras.ops.convert_to_tensor, batch)
        for batch in batches
    ]
    overrides = []
    weights = kso.prunable_weights(model)
    cells = {
        layer.cell: layer for layer in model.layers if isinstance(layer, L.RNN)
    }
    stops = [
        Halving(weight, cells.get(weight.owner), overrides)
        for weight in weights
    ]
    with monkeypatch.context() as patch:
        if by_calls:
            patch.setattr(_sweep, "computes_its_graph", lambda model: False)
        scope = lambda: VariableOverrides(overrides)  # noqa: E731
        missed = sweep(
            model, batches, stops, 0, scope, with_reference=with_reference
        )
    assert not missed
    order = [variable.path for variable, _ in overrides]
    return order, {stop.path: stop.seen for stop in stops}


@pytest.mark.parametrize(
    ("name", "on_disk"),
    [*((name, False) for name in MODELS), ("nested", True), ("masks", True)],
)
def test_stops_get_what_passes_up_to_each_layer_give(
    name, on_disk, monkeypatch
):
    make, data = MODELS[name]
    keras.utils.set_random_seed(0)
    model, x = make(), data()
    expected_order, expected = swept(model, x, True, monkeypatch)
    if on_disk:
        monkeypatch.setattr(_graph_sweep, "MOST_ENTRIES", 0)
    order, found = swept(model, x, False, monkeypatch)
    assert order == expected_order
    for path, calls in expected.items():
        assert len(found[path]) == len(calls)
        for one, other in zip(found[path], calls, strict=True):
            for tensor, wanted in zip(one, other, strict=True):
                np.testing.assert_allclose(
                    tensor, wanted, rtol=1e-5, atol=1e-6, err_msg=path
                )


def chain(depth):
    layers = [L.Dense(4, name=f"dense_{number}") for number in range(depth)]
    return keras.Sequential([keras.Input((4,)), *layers])


def test_each_layer_computes_each_batch_once(monkeypatch):
    model, computed = chain(5), []

    def count(layer, call, *args, **kwargs):
        result = call(*args, **kwargs)
        computed.append(layer.name)
        return result

    with observe(model.layers, count):
        swept(model, numbers(4), False, monkeypatch, with_reference=False)
    # Two batches, and one that finds the order; no batch goes on behind the last stop.
    assert {name: computed.count(name) for name in set(computed)} == {
        **{f"dense_{number}": 3 for number in range(4)},
        "dense_4": 1,
    }


def test_files_are_gone_and_nothing_stays_on_the_model(monkeypatch, tmp_path):
    model = residual()
    monkeypatch.setattr(_graph_sweep, "MOST_ENTRIES", 0)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    most = []
    finish = Halving.finish

    def noted(stop):
        most.append(len(list(tmp_path.rglob("*.npy"))))
        if len(most) == 4:
            raise KeyboardInterrupt
        finish(stop)

    monkeypatch.setattr(Halving, "finish", noted)
    with pytest.raises(KeyboardInterrupt):
        swept(model, numbers(6, 4), False, monkeypatch)
    # Two streams of two batches: three tensors each behind the first convolution, one at the end.
    assert most[0] >= 4
    assert most[3] == 4
    assert not list(tmp_path.iterdir())
    hooks = [
        name for name in ("call", "_run_through_graph") if name in vars(model)
    ]
    assert not hooks
    assert not any("call" in vars(layer) for layer in model.layers)


def test_pruned_models_are_those_of_passes_up_to_each_layer(monkeypatch):
    keras.utils.set_random_seed(0)
    model, x = residual(), numbers(6, 4)
    found = kso.prune(model, 0.4, score="obs", data=x)
    monkeypatch.setattr(_sweep, "computes_its_graph", lambda model: False)
    assert_equal_kernels(
        found, kso.prune(model, 0.4, score="obs", data=x), atol=1e-5
    )


def test_a_mixed_policy_casts_inputs_as_in_the_model(monkeypatch):
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        model = nested()
    finally:
        keras.config.set_dtype_policy("float32")
    x = numbers(4)
    expected = swept(model, x, True, monkeypatch)
    monkeypatch.setattr(_graph_sweep, "MOST_ENTRIES", 0)
    found = swept(model, x, False, monkeypatch)
    assert found[0] == expected[0]
    for path, calls in expected[1].items():
        for one, other in zip(found[1][path], calls, strict=True):
            np.testing.assert_array_equal(one[0], other[0])


def test_models_with_a_call_of_their_own_are_swept_by_calls(monkeypatch):
    @keras.saving.register_keras_serializable(package="test_graph_sweep")
    class Doubled(keras.Model):
        def call(self, x, training=None):
            return super().call(2.0 * x, training=training)

    inputs = keras.Input((4,))
    model = Doubled(inputs, L.Dense(3, name="head")(inputs))
    _, found = swept(
        model, numbers(4), False, monkeypatch, with_reference=False
    )
    np.testing.assert_allclose(
        found["head/kernel"][0][0], 2.0 * numbers(4)[:16], rtol=1e-6
    )
